"""How many rows the statements touch: no more than they have to, whatever was analysed.

The functions keep the plans of their first call. Here that call comes while the tables
are empty, as on the day of the installation or behind a load that was done; then the
rows come, and nobody tells the planner. The server's own counters say what was read.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress

import psycopg
import pytest
from psycopg import sql
from psycopg.types.numeric import Int8
from psycopg_pool import ConnectionPool

from headgate_sync.lifecycle import State
from headgate_sync.postgres.acks import RetryOptions
from headgate_sync.postgres.database import Database
from headgate_sync.postgres.maintenance import (
    COUNTER_RETENTION_MS,
    PARTITION_RETENTION_MS,
)
from headgate_sync.postgres.migrate import migrate_up
from tests.backends import SCHEMA
from tests.servers import new_database

ROWS_PER_STATE = 3_000
MILLION = 126_000  # of each of eight states; what runs is never that many
ROWS_PER_FINGERPRINT = 30
LIVE = ("pending", "scheduled", "available", "running", "retryable")
BACKOFF = RetryOptions().backoff
NO_ACK_COLUMNS = dict.fromkeys(
    ("firsts", "delays_ms", "jitters_ms", "pauses_ms", "details", "latencies_ms",
     "error_codes", "reason_codes", "actual_weights", "result_versions", "results")
) | {"lock_wait_ms": 0}  # fmt: skip

_FILL = """
INSERT INTO {schema}.headgate_job (id, kind, schema_version, payload, queue,
  partition_key, rate_class, sticky_worker, lane_key, weight, fingerprint, priority,
  state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
  retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers, fence,
  lease_id,
  lease_expires_at_ms, claimed_by, claimed_at_ms, finalized_at_ms)
SELECT state || '-' || n, 'k', 1, 'p', 'q', mod(n, 10)::text, '', '', mod(n, 10), 1,
  'f' || mod(n, %(prints)s), 0, state, 25, 1, 1, 0, 0, 1, 0, '', 0, '{{}}', 1,
  CASE WHEN state = 'running' THEN 'lease' END, CASE WHEN state = 'running' THEN 1 END,
  CASE WHEN state = 'running' THEN 'w' END, CASE WHEN state = 'running' THEN 1 END,
  CASE WHEN state <> ALL (%(live)s) THEN 1 END
FROM generate_series(0, %(rows)s - 1) AS n, unnest(%(states)s::text[]) AS state
WHERE n < %(running)s OR state <> 'running'
ORDER BY n, state
"""
_TOUCHED = """
SELECT relname, seq_scan, seq_tup_read + coalesce(idx_tup_fetch, 0)
FROM pg_stat_xact_user_tables WHERE schemaname = %s AND relname = ANY (%s)
"""
TABLES = ["headgate_job", "headgate_job_tag", "headgate_tally", "headgate_duty"]


def jobs(state, number, start=0):
    return [f"{state}-{n}" for n in range(start, start + number)]


def leases(names):
    return {
        "job_ids": names,
        "lease_ids": ["lease"] * len(names),
        "fences": [1] * len(names),
    }


def one(state):
    return {"job_id": f"{state}-7"}


def load(names):
    """A batch that is alike in all but its ids."""
    return {
        "ids": names, "kinds": ["k"], "payloads": [b""], "queues": ["q"],
        "partition_keys": [""], "lane_keys": [Int8(1)], "fingerprints": [""],
        "rate_class": "", "sticky_worker": "", "headers": "{}", "own": True,
        "schema_version": "1", "weight": "1", "max_attempts": "1",
        **dict.fromkeys(("priority", "scheduled_at_ms", "delay_ms", "timeout_ms",
                         "deadline_ms", "deadline_in_ms", "retention_ms"), "0"),
    }  # fmt: skip


HELD = {**one("running"), "lease_id": "lease", "fence": 1}
# Name of the statement, its arguments, and how many rows it may touch.
CALLS = {
    "enqueue of 100": ("enqueue_alike", load([f"new-{n}" for n in range(100, 200)]),
                       20),
    "enqueue of 100 among others": ("enqueue_alike", load(
        [f"running-{n}-new" for n in range(100, 200)]), 30),
    "enqueue again": ("enqueue_alike", load([f"running-{n}" for n in range(100, 109)]),
                      60),
    "ack of 1": ("ack", {**leases(jobs("running", 1)), **NO_ACK_COLUMNS,
                 "outcomes": ["success"], **BACKOFF}, 10),
    "ack of 100": ("ack", {**leases(jobs("running", 100)), **NO_ACK_COLUMNS,
                   "outcomes": ["success"] * 100, **BACKOFF}, 600),
    "ack of 100 strangers": ("ack", {**leases(jobs("completed", 100)), **NO_ACK_COLUMNS,
                             "outcomes": ["retry"] * 100, **BACKOFF}, 600),
    "renew of 1000": ("renew", {**leases(jobs("running", 1_000)), "lease_ms": 1},
                      4_000),
    "reclaim of 100": ("reclaim_expired", {"max_jobs": 100, "crash_limit": 3,
                       "error": "e", "code": "c", "reason": "r", "apart_ms": 2000,
                       **BACKOFF},
                      400 + ROWS_PER_STATE),
    "promote of 100": ("promote_due", {"max_jobs": 100}, 400),
    "evict of 100": ("evict_retained", {"max_jobs": 100}, 400),
    "sweep of 100": ("quarantine_sweep", {"max_jobs": 100}, 800),
    "release": ("quarantine_release", {"fingerprint": "f7"}, 400),
    "fold of 100": ("tally_fold", {"max_rows": 100, "keep_ms": COUNTER_RETENTION_MS,
                    "keep_partitions_ms": PARTITION_RETENTION_MS}, 400),
    "duties": ("duty_tick", {"names": ["promoter", "quarantine", "reclaimer",
               "retention"], "holder": "w", "lease_ms": 1}, 20 + ROWS_PER_STATE),
    "checkpoint": ("checkpoint", {**HELD, "checkpoint": "{}", "cursor_data": None,
                   "charge_weight": None}, 5),
    "output": ("write_output", {**HELD, "schema_version": 1, "data": b""}, 5),
    "progress": ("write_progress", {**HELD, "current": 1, "total": 1, "message": None},
                 5),
    "job": ("get_job_payload", one("completed"), 3),
    "jobs": ("get_jobs", {"job_ids": jobs("completed", 1_000)}, 2_500),
    "unfinished": ("unfinished", {"queue": "other"}, 5),
    "cancel": ("operator_cancel", one("available"), 10),
    "retry": ("operator_retry", one("archived"), 10),
    "delete": ("delete_job", one("completed"), 10),
    "promote one": ("promote_job", one("pending"), 10),
    "reschedule": ("reschedule_job", {**one("scheduled"), "at_ms": 1}, 10),
    "schedule": ("schedule_pending", {**one("pending"), "at_ms": 1}, 10),
    "edit": ("edit_payload", {**one("completed"), "payload": b"", "schema_version": 1,
             "fingerprint": ""}, 10),
    "result": ("read_result", one("completed"), 3),
    "cursor": ("read_checkpoint", one("completed"), 3),
}  # fmt: skip


# States and rows of each that the table held when it was analysed, before the plans.
THEN = {
    "never analysed": ([], 0),
    "analysed": ([], 0),
    "analysed with one job": (["available"], 1),
    "analysed with few jobs": (list(LIVE), 5),
    "analysed when all was done": (["completed"], ROWS_PER_STATE),
    "analysed when all ran": (["running"], 16),
}
SCENES = [
    *[pytest.param((name, ROWS_PER_STATE), id=name) for name in THEN],
    *[
        pytest.param(
            (name, MILLION),
            id=f"a million, {name}",
            # On one process: it takes a minute to fill.
            marks=[pytest.mark.crash, pytest.mark.xdist_group(f"a million, {name}")],
        )
        for name in ("never analysed", "analysed")
    ],
]


@pytest.fixture(scope="module", params=SCENES)
def database(request, server_url):
    """A database with many rows, and a pool of one connection with plans of old."""
    then, rows_now = request.param
    with (
        new_database(server_url) as url,
        ConnectionPool(url, min_size=1, max_size=1, open=True) as pool,
        psycopg.connect(url, autocommit=True) as admin,
    ):
        migrate_up(url, SCHEMA)
        for table in ("headgate_job", "headgate_tally", "headgate_duty"):
            admin.execute(
                sql.SQL("ALTER TABLE {}.{} SET (autovacuum_enabled = false)").format(
                    sql.Identifier(SCHEMA), sql.Identifier(table)
                )
            )
        states, rows = THEN[then]
        if rows:
            insert(admin, states, rows)
            admin.execute("VACUUM ANALYZE")
            admin.execute(f"DELETE FROM {SCHEMA}.headgate_job")
        db = Database(pool, SCHEMA)
        for name, params, _ in CALLS.values():
            for _ in range(6):
                touched_by(db, name, params)
        fill(admin, rows_now)
        if then == "analysed":
            admin.execute("ANALYZE")
        yield db


def insert(admin, states, rows):
    admin.execute(
        sql.SQL(_FILL).format(schema=sql.Identifier(SCHEMA)),
        {
            "live": list(LIVE),
            "rows": rows,
            "states": states,
            "running": ROWS_PER_STATE,
            "prints": max(1, rows // ROWS_PER_FINGERPRINT),
        },
    )


def fill(admin, rows):
    schema = sql.Identifier(SCHEMA)
    states = [state.value for state in State if state is not State.DELETED]
    insert(admin, states, rows)
    admin.execute(
        sql.SQL(
            "INSERT INTO {}.headgate_tally (queue, partition_key, minute_at_ms,"
            " unfinished, arrived, completed)"
            " SELECT 'q', '', 0, 1, 1, 0 FROM generate_series(1, 3000)"
        ).format(schema)
    )
    admin.execute(
        sql.SQL(
            "INSERT INTO {}.headgate_quarantine VALUES"
            " ('f7', 'k', 3, 1, '', ''), ('unknown', 'k', 3, 1, '', '')"
        ).format(schema)
    )


class Undone(Exception):
    """Ends a transaction that was only to be looked at."""


@contextmanager
def undone(db):
    """A transaction that changes nothing."""
    with suppress(Undone), db.transaction() as session:
        yield session
        raise Undone


def counters(session):
    """Sequential scans and rows read by table; the server adds up over transactions."""
    rows = session.connection.execute(_TOUCHED, [SCHEMA, TABLES]).fetchall()
    return {table: (scans, read) for table, scans, read in rows}


def touched_by(db, name, params):
    """Scans of the job table, and rows read in all tables, of a call."""
    with undone(db) as session:
        before = counters(session)
        session.rows(name, **params)
        after = counters(session)
    scans = after["headgate_job"][0] - before["headgate_job"][0]
    rows = sum(read for _, read in after.values())
    return scans, rows - sum(read for _, read in before.values())


@pytest.mark.parametrize("call", CALLS)
def test_a_call_touches_no_more_rows_than_its_work_needs(database, call):
    name, params, most = CALLS[call]
    scans, rows = touched_by(database, name, params)
    assert scans == 0, "the job table was scanned"
    assert rows <= most


def test_no_index_knows_what_a_renewal_changes(database):
    """So that the row stays on its page, and no index has to be told."""
    with undone(database) as session:
        indexes = session.connection.execute(
            "SELECT indexdef FROM pg_indexes WHERE schemaname = %s"
            " AND tablename = 'headgate_job'",
            [SCHEMA],
        ).fetchall()
    assert len(indexes) > 5
    assert not [text for (text,) in indexes if "lease_expires_at_ms" in text]


def test_the_calls_do_the_work_whose_rows_are_counted(database):
    """Nothing above passes because there was nothing to do."""
    expected = {
        "ack of 100": [],
        "ack of 100 strangers": 100,
        "renew of 1000": [],
        "reclaim of 100": 100,
        "promote of 100": [(100,)],
        "evict of 100": [(100,)],
        "sweep of 100": [(100,)],
        "release": [(ROWS_PER_FINGERPRINT,)],
        "fold of 100": [(100,)],
    }
    for call, wanted in expected.items():
        name, params, _ = CALLS[call]
        with undone(database) as session:
            rows = session.rows(name, **params)
        assert (len(rows) if isinstance(wanted, int) else rows) == wanted, call


def test_the_probe_for_due_work_sees_every_kind_of_it(database):
    names = ["promoter", "quarantine", "reclaimer", "retention"]
    with undone(database) as session:
        rows = session.rows("duty_tick", names=names, holder="w", lease_ms=1)
    assert {name: due for name, due, _ in rows} == dict.fromkeys(names, True)
