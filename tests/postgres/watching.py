"""Looking at the server: who waits for whom, and how many deadlocks it resolved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

PATIENCE_S = 20


def until(
    condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S
) -> Any:
    """Look again and again until the condition holds; returns what it returned."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)
    return found


def wait_until_blocked(
    admin: psycopg.Connection[Any], blocker: psycopg.Connection[Any]
) -> None:
    """Wait until some session waits for a lock of another."""
    until(
        lambda: admin.execute(
            "SELECT true FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND %s = ANY (pg_blocking_pids(pid))",
            [blocker.info.backend_pid],
        ).fetchone(),
        f"a wait for session {blocker.info.backend_pid}",
    )


def end_sessions(admin: psycopg.Connection[Any], *pids: int) -> None:
    """End sessions by force, and wait until they are gone."""
    given = [list(pids)]
    admin.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s) AS pid", given)
    left = "SELECT FROM pg_stat_activity WHERE pid = ANY (%s)"
    until(lambda: not admin.execute(left, given).fetchall(), f"the end of {pids}")


def deadlocks(admin: psycopg.Connection[Any]) -> int:
    """How many deadlocks the server has resolved in the database.

    A session publishes its counters at the latest when it ends.
    """
    row = admin.execute(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])
