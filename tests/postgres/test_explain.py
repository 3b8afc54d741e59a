"""Explaining a job in the database: it reads only, and a bounded number of rows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from headgate_sync.explanation import MAX_AHEAD
from headgate_sync.policy import FOLD_MAX, WINDOW_MAX
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.backends import SCHEMA
from tests.builders import admit, enqueue, steer
from tests.scenarios.gate import ceiling, fill, rate_class
from tests.servers import new_database

EXPLAIN = "SELECT headgate.headgate_explain(%s, %s, %s, %s)"
BOUNDS = [MAX_AHEAD, FOLD_MAX, WINDOW_MAX]
# One queue, many lanes: partitions, three classes, jobs of somebody else's.
FILL = """
INSERT INTO {schema}.headgate_job (id, kind, schema_version, payload, queue,
  partition_key, rate_class, sticky_worker, lane_key, weight, fingerprint, priority,
  state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
  retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers)
SELECT %(prefix)s || n, 'k', 1, 'p', 'q', 'p' || mod(n, %(partitions)s),
  'c' || mod(n, 3), CASE WHEN mod(n, 5) = 0 THEN 'v' ELSE '' END,
  mod(n, %(partitions)s) * 15 + mod(n, 15), 1, 'f' || mod(n, 100), mod(n, 2),
  'available', 25, 1, n, 0, 0, 1, 0, '', 0, '{{}}'
FROM generate_series(1, %(rows)s) AS n
"""
LANES = """
INSERT INTO {schema}.headgate_lane (queue, partition_key, rate_class, sticky_worker,
  lane_key, active, last_round)
SELECT DISTINCT job.queue, job.partition_key, job.rate_class, job.sticky_worker,
  job.lane_key, true, 0
FROM {schema}.headgate_job AS job
ON CONFLICT DO NOTHING
"""
PARTITIONS = """
INSERT INTO {schema}.headgate_partition (queue, partition_key)
SELECT DISTINCT lane.queue, lane.partition_key FROM {schema}.headgate_lane AS lane
ON CONFLICT DO NOTHING
"""
TOUCHED = """
SELECT coalesce(sum(seq_scan), 0), coalesce(sum(seq_tup_read), 0),
  coalesce(sum(idx_tup_fetch), 0)
FROM pg_stat_xact_user_tables WHERE schemaname = %s
"""


def test_it_works_in_a_read_only_transaction(store, database_url):
    rate_class(store, "c", "1/1000", 1)
    ceiling(store, 3, "queue")
    fill(store, "A", 3, rate_class="c")
    admit(store)
    with psycopg.connect(database_url) as connection:
        connection.read_only = True
        [told] = connection.execute(EXPLAIN, ["A-2", *BOUNDS]).fetchone()
        assert told["rate_class_facts"]["budgets"][0]["units"] == 0


@pytest.fixture
def reader(database_url: str, admin: Any) -> Iterator[str]:
    """The address of a role that may look at everything and change nothing."""
    name = f"reader_{uuid.uuid4().hex}"
    role = sql.Identifier(name)
    for text in (
        "CREATE ROLE {role} LOGIN PASSWORD 'reader'",
        "GRANT USAGE ON SCHEMA headgate TO {role}",
        "GRANT SELECT ON ALL TABLES IN SCHEMA headgate TO {role}",
    ):
        admin.execute(sql.SQL(text).format(role=role))
    yield make_conninfo(database_url, user=name, password="reader")
    admin.execute(sql.SQL("DROP OWNED BY {role}").format(role=role))
    admin.execute(sql.SQL("DROP ROLE {role}").format(role=role))


def test_a_role_that_may_only_look_can_explain(store, reader):
    rate_class(store, "c", "1/1000", 1)
    fill(store, "A", 2, rate_class="c")
    admit(store)
    with ConnectionPool(reader, min_size=1, max_size=1, open=True) as pool:
        other = PgStore(pool)
        found = other.inspect.explain_admission("A-2")
        other.close()
    assert (found.blocked_by, found.estimated_admission_ms) == ("rate_class", 1_000)


def test_announcements_that_nobody_folded_are_seen(store):
    """The lanes do not exist before the first admission."""
    rate_class(store, "c", "0/1000", 2)
    fill(store, "A", 2, rate_class="c", partition_key="")
    enqueue(store, "a", rate_class="c")
    found = steer(store).explain_admission("a")
    assert found.detail["tokens_ahead_in_class"] == "2"
    assert found.blocked_by == "rate_class"


def test_drift_of_a_counter_is_visible(store, postgres):
    """It tells what the gate sees, not what would be right."""
    ceiling(store, 5, "queue")
    fill(store, "A", 2)
    admit(store, capacity=1)
    postgres.connection.execute("UPDATE headgate.headgate_partition SET inflight = 7")
    found = steer(store).explain_admission("A-2")
    assert (found.blocked_by, found.detail["inflight"]) == ("concurrency_limit", "7")
    assert len(admit(store)) == 0
    for _ in range(4):
        store.maintenance.gate_reconcile(100)
    assert steer(store).explain_admission("A-2").admissible


@pytest.fixture(scope="module", params=["never analysed", "analysed"])
def crowded(request, server_url) -> Iterator[psycopg.Connection[Any]]:
    """A connection whose plans were made while the tables were empty."""
    with new_database(server_url) as url:
        migrate_up(url, SCHEMA)
        with psycopg.connect(url, autocommit=True) as connection:
            for _ in range(6):
                connection.execute(EXPLAIN, ["nobody", *BOUNDS])
            put(connection, "first-", 300, 5)
            for _ in range(6):
                connection.execute(EXPLAIN, ["first-7", *BOUNDS])
            store = PgStore(url_pool := ConnectionPool(url, min_size=1, open=True))
            for name in ("c0", "c1", "c2"):
                rate_class(store, name, "0/1000", 1_000_000)
            store.close()
            url_pool.close()
            put(connection, "", 30_000, 2_000)
            if request.param == "analysed":
                connection.execute("ANALYZE")
            yield connection


def put(connection, prefix: str, rows: int, partitions: int) -> None:
    schema = sql.Identifier(SCHEMA)
    given = {"prefix": prefix, "rows": rows, "partitions": partitions}
    connection.execute(sql.SQL(FILL).format(schema=schema), given)
    for text in (LANES, PARTITIONS):
        connection.execute(sql.SQL(text).format(schema=schema))
    connection.execute(f"DELETE FROM {SCHEMA}.headgate_inbox")


@pytest.mark.parametrize("job", ["1", "29999", "15000", "30000", "first-7"])
def test_no_table_is_read_whole_whatever_the_backlog(crowded, job):
    def counted() -> tuple[int, ...]:
        found = crowded.execute(TOUCHED, [SCHEMA]).fetchone()
        return tuple(int(number) for number in found)

    with crowded.transaction():
        before = counted()
        [told] = crowded.execute(EXPLAIN, [job, *BOUNDS]).fetchone()
        after = counted()
    scans, scanned, fetched = (b - a for a, b in zip(before, after, strict=True))
    assert told["rate_class_facts"]["budgets"]
    assert (scans, scanned) == (0, 0)
    # Rows ahead by class and in the partition, lanes with their partitions, peers.
    assert fetched <= 6 * MAX_AHEAD + 4 * WINDOW_MAX
