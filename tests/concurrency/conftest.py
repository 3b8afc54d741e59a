"""A check that no test of this folder made the server resolve a deadlock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from tests.backends import Backend, MemoryBackend, PostgresBackend

_NAME = "headgate-crowd"
_LEFT = """
SELECT count(*) FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND application_name = %s
"""
_DEADLOCKS = """
SELECT deadlocks FROM pg_catalog.pg_stat_database
WHERE datname = pg_catalog.current_database()
"""


@pytest.fixture
def crowd(
    database_url: str, admin: psycopg.Connection[Any]
) -> Iterator[PostgresBackend]:
    """A PostgreSQL store with a pool of its own; the test fails on any deadlock.

    Servers publish a connection's counters at the latest when it ends, so all of them
    have to be gone before the counters are read.
    """
    before = admin.execute(_DEADLOCKS).fetchone()
    with ConnectionPool(
        database_url,
        kwargs={"application_name": _NAME},
        min_size=4,
        max_size=12,
        timeout=60,
        open=True,
    ) as pool:
        backend = PostgresBackend(pool, admin)
        backend.reset()
        yield backend
        backend.close()
    backend.audit()
    give_up_at = time.monotonic() + 30
    while admin.execute(_LEFT, [_NAME]).fetchone() != (0,):
        assert time.monotonic() < give_up_at, "a connection of the pool did not end"
    assert admin.execute(_DEADLOCKS).fetchone() == before, "the server saw a deadlock"


@pytest.fixture(params=["memory", "postgres"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each kind of store in turn."""
    if request.param == "memory":
        memory: MemoryBackend = request.getfixturevalue("memory")
        return memory
    crowded: PostgresBackend = request.getfixturevalue("crowd")
    return crowded
