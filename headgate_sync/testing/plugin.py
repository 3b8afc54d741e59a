"""The pytest plugin: fixtures `headgate_mem`, `headgate_pg` and `headgate_store`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headgate_sync.memory.store import MemStore
    from headgate_sync.testing.database import PgTestStore


@pytest.fixture
def headgate_mem() -> MemStore:
    """An empty store in memory."""
    from headgate_sync.memory.store import MemStore

    return MemStore()


@pytest.fixture
def headgate_pg() -> Iterator[PgTestStore]:
    """An empty store in a schema of its own, in the database of `HEADGATE_TEST_PG`.

    Without that variable the test is skipped, or fails with
    `HEADGATE_TEST_PG_REQUIRED=1`.
    """
    from headgate_sync.testing.database import (
        TEST_PG,
        TEST_PG_REQUIRED,
        PostgresTestDatabase,
        is_required,
    )

    if not os.environ.get(TEST_PG):
        if is_required():
            pytest.fail(f"{TEST_PG_REQUIRED}=1, and {TEST_PG} names no database")
        pytest.skip(f"{TEST_PG} names no database")
    with PostgresTestDatabase() as database:
        yield database.store()


@pytest.fixture(params=["memory", "postgres"])
def headgate_store(request: pytest.FixtureRequest) -> Any:
    """Either store in turn: a test that asks for it runs on both."""
    return request.getfixturevalue(
        "headgate_mem" if request.param == "memory" else "headgate_pg"
    )
