"""What one admission reads, as the server counts it: rows, index entries, blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from attrs import frozen
from psycopg.rows import dict_row

from headgate_sync.policy import GATE_CONSTANTS
from tests.postgres.watching import until

ADMIT = """
SELECT * FROM headgate.headgate_admit(%(worker)s, 'lease', %(queues)s, %(capacity)s,
  30000, %(quantum)s, %(window_max)s, %(window_spare)s, %(window_draws)s,
  %(deficit_cap)s, %(ledger_lag)s, %(fold_max)s, %(hold_max)s, %(lock_wait_ms)s,
  %(busy_ms)s)
"""
_READ = """
SELECT relname,
  pg_stat_get_xact_tuples_returned(oid) + pg_stat_get_xact_tuples_fetched(oid),
  pg_stat_get_xact_numscans(oid)
FROM pg_class WHERE relnamespace = 'headgate'::regnamespace
"""
_IS_ALONE = """
SELECT pg_snapshot_xmin(pg_current_snapshot()) > %s AND NOT EXISTS (
  SELECT FROM pg_stat_activity
  WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL))
"""
# What other tests write at the same time may take a while: a million rows, say.
_ALONE_WITHIN_S = 120


def request(**asked: Any) -> dict[str, Any]:
    """The arguments of `ADMIT`: worker w, queue q, capacity 10, unless said."""
    values = {"worker": "w", "queues": ["q"], "capacity": 10, "quantum": 1000}
    return {**GATE_CONSTANTS, **values, **asked}


def admit_rows(
    connection: psycopg.Connection[Any], **asked: Any
) -> list[dict[str, Any]]:
    """The rows of one admission: its claims, then the facts of the call."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(ADMIT, request(**asked)).fetchall()


@frozen
class Visit:
    """One admission, undone.

    Attributes:
        claims: ids, in the order of the decisions.
        rows: rows and index entries read, by table and index.
        scans: how often each table was read as a whole, and each index was used.
        blocks: of 8 KiB, found in memory or not.
    """

    claims: list[str]
    rows: Counter[str]
    scans: Counter[str]
    blocks: int


@contextmanager
def undone(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction that leaves nothing but the plans that were made in it."""
    with connection.transaction(force_rollback=True):
        yield


def read(connection: psycopg.Connection[Any]) -> tuple[Counter[str], Counter[str]]:
    """Rows read and scans so far, by table and index; they only grow."""
    found = connection.execute(_READ).fetchall()
    return (
        Counter({name: rows for name, rows, _ in found}),
        Counter({name: scans for name, _, scans in found}),
    )


def visit(connection: psycopg.Connection[Any], **asked: Any) -> Visit:
    """Admit once and undo it: what it claimed, and what it had to read for that.

    Entries of rows that were deleted are passed over in silence once nobody can see the
    rows any more and somebody has come by, which is done first and makes the plans.
    """
    with undone(connection):
        admit_rows(connection, **asked)
    with undone(connection):
        rows, scans = read(connection)
        found = admit_rows(connection, **asked)
        rows_then, scans_then = read(connection)
    with undone(connection):
        explained = connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {ADMIT}",
            request(**asked),
        ).fetchone()
    assert explained is not None
    plan = explained[0][0]["Plan"]
    return Visit(
        [row["id"] for row in found[:-1]],
        rows_then - rows,
        scans_then - scans,
        plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
    )


def wait_until_alone(connection: psycopg.Connection[Any]) -> None:
    """Wait until no other session sees rows of the past, such as an analysis.

    A snapshot reaches back to the oldest transaction that writes in any database of the
    server, so all that write now must end, too.
    """
    with undone(connection):
        now = connection.execute("SELECT pg_current_xact_id()").fetchone()

    def is_alone() -> bool:
        with undone(connection):
            return bool(connection.execute(_IS_ALONE, now).fetchone() == (True,))

    until(is_alone, "the end of other snapshots", _ALONE_WITHIN_S)


def quiet_visit(connection: psycopg.Connection[Any], **asked: Any) -> Visit:
    """The least of five visits, each begun while nobody sees rows of the past.

    What others see or have just deleted only adds to what a visit reads.
    """
    found = []
    for _ in range(5):
        wait_until_alone(connection)
        found.append(visit(connection, **asked))
    return min(found, key=lambda each: (each.rows.total(), each.blocks))
