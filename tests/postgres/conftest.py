"""What most tests of the database need: a store, and a session of somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.backends import PostgresBackend


@pytest.fixture
def store(postgres: PostgresBackend) -> Any:
    return postgres.make_store()


@pytest.fixture
def other(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of somebody else, in a transaction that ends with the test."""
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()
