"""How many rows the statements of schedules touch, whatever was analysed and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg_pool import ConnectionPool

from headgate_sync.postgres.database import Database
from headgate_sync.postgres.migrate import migrate_up
from tests.backends import SCHEMA
from tests.builders import START_MS
from tests.servers import new_database

TABLES = ["headgate_schedule", "headgate_schedule_event"]
FEW, MANY = 3, 10_000
WITH_EVENTS = 1_000  # schedules that have all the events they may have
EVENTS_EACH = 100
_FILL = """
INSERT INTO {schema}.headgate_schedule
SELECT 'n' || n, 'k', '@every:1000', '', 1, 'q', '', '', 1, 0, 25, 0, 0, '{{}}',
  '{{}}', '', 'skip', 0, CASE WHEN n < 100 THEN 1 ELSE %(later_ms)s END, NULL,
  mod(n, 2) = 0
FROM generate_series(0, %(schedules)s - 1) AS n
"""
_EVENTS = """
INSERT INTO {schema}.headgate_schedule_event
  (schedule_id, tick_ms, job_id, outcome, reason, recorded_at_ms)
SELECT 'n' || n, tick, '', 'failed', 'r', 1
FROM generate_series(1, %(each)s) AS tick, generate_series(0, %(ran)s - 1) AS n
ORDER BY tick, n
"""
_TOUCHED = """
SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)
FROM pg_stat_xact_user_tables WHERE schemaname = %s AND relname = ANY (%s)
"""
CALLS = {
    "due_schedules": ({"max_schedules": 10, "after_ms": None, "after_id": None}, 60),
    "duty_tick": ({"names": ["scheduler"], "holder": "w", "lease_ms": 1}, 60),
    "get_schedule": ({"schedule_id": "n77"}, 3),
    "list_schedules": ({"cursor": "n5", "max_schedules": 10}, 30),
    "list_schedules_payload": ({"cursor": "n5", "max_schedules": 10}, 30),
    "advance_schedule": ({"schedule_id": "n77", "from_ms": 1, "to_ms": 2}, 5),
    "lock_due_schedule": ({"schedule_id": "n77", "from_ms": 1}, 5),
    "append_schedule_event": (
        {"schedule_id": "n1", "tick_ms": 1, "job_id": "", "outcome": "failed",
         "reason": "r", "max_events": EVENTS_EACH}, 110,
    ),
    "list_schedule_events": (
        {"schedule_id": "n1", "before_event_id": None, "max_events": 10}, 12,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["never", "when few", "now"])
def database(request, server_url) -> Iterator[Database]:
    """Many schedules and events, analysed at that time."""
    with (
        new_database(server_url) as url,
        ConnectionPool(url, min_size=1, max_size=1, open=True) as pool,
        psycopg.connect(url, autocommit=True) as admin,
    ):
        migrate_up(url, SCHEMA)
        for table in TABLES:
            admin.execute(
                sql.SQL("ALTER TABLE {}.{} SET (autovacuum_enabled = false)").format(
                    sql.Identifier(SCHEMA), sql.Identifier(table)
                )
            )
        if request.param == "when few":
            fill(admin, FEW)
            admin.execute("ANALYZE")
            for table in TABLES:
                admin.execute(f"DELETE FROM {SCHEMA}.{table}")
        fill(admin, MANY)
        if request.param == "now":
            admin.execute("ANALYZE")
        yield Database(pool, SCHEMA)


def fill(admin: psycopg.Connection[Any], schedules: int) -> None:
    given = {
        "schedules": schedules,
        "ran": min(schedules, WITH_EVENTS),
        "each": EVENTS_EACH,
        "later_ms": START_MS**2,
    }
    for text in (_FILL, _EVENTS):
        admin.execute(sql.SQL(text).format(schema=sql.Identifier(SCHEMA)), given)


class Undone(Exception):
    """Ends a transaction that was only to be looked at."""


def touched(session: Any) -> int:
    """Rows read so far; the server adds up over the transactions of a session."""
    [(read,)] = session.connection.execute(_TOUCHED, [SCHEMA, TABLES]).fetchall()
    return int(read)


@pytest.mark.parametrize("name", CALLS)
def test_a_statement_touches_no_more_rows_than_it_must(database, name):
    """Nor once the server has kept a plan for all arguments, as it may after five."""
    arguments, most = CALLS[name]
    for _ in range(8):
        with suppress(Undone), database.transaction() as session:
            before = touched(session)
            session.rows(name, **arguments)
            read = touched(session) - before
            raise Undone
        assert read <= most
