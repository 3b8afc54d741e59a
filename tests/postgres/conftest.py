"""What most tests of the database need: a store, and a session of somebody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.backends import SCHEMA, PostgresBackend


@pytest.fixture
def store(postgres: PostgresBackend) -> Any:
    return postgres.make_store()


@pytest.fixture
def other(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of somebody else, in a transaction that ends with the test."""
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def analyse(admin: psycopg.Connection[Any]) -> Iterator[Callable[[], object]]:
    """Let the server's statistics tell of what is there; they end with the test.

    The database stays, and the plans of the next test are to be its own.
    """
    yield lambda: admin.execute("VACUUM ANALYZE")
    admin.execute(
        "DELETE FROM pg_statistic WHERE starelid IN"
        " (SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace(%s))",
        [SCHEMA],
    )
