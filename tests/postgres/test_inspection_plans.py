"""What looking reads: no more than it shows, whatever was analysed."""

from __future__ import annotations

import re
from itertools import count

import psycopg
import pytest
from psycopg import sql
from psycopg_pool import ConnectionPool

from headgate_sync.backlog import SAMPLE_ORDER
from headgate_sync.errors import InvalidRequest, StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.operations import BulkRequest
from headgate_sync.postgres import database as database_module
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from headgate_sync.search import JobFilter
from tests.backends import SCHEMA
from tests.servers import new_database

JOBS_PER_STATE = 2_000
QUEUES = 100
LIVE = ("pending", "scheduled", "available", "running", "retryable")

_FILL = """
INSERT INTO {schema}.headgate_job (id, kind, schema_version, payload, queue,
  partition_key, rate_class, sticky_worker, lane_key, weight, fingerprint, priority,
  state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
  retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers, fence,
  lease_id, lease_expires_at_ms, claimed_by, claimed_at_ms, finalized_at_ms)
SELECT state || '-' || n, 'k' || mod(n, 7), 1, 'p', 'q' || mod(n, %(queues)s),
  mod(n, 10)::text, CASE WHEN mod(n, 2) = 0 THEN 'c' ELSE '' END, '', mod(n, 10), 1,
  'f' || mod(n, 100), 0, state, 25, 1, 1, 0, 0, 1, 0, '', 0, '{{}}', 1,
  CASE WHEN state = 'running' THEN 'lease' END, CASE WHEN state = 'running' THEN 1 END,
  CASE WHEN state = 'running' THEN 'w' END, CASE WHEN state = 'running' THEN 1 END,
  CASE WHEN state <> ALL (%(live)s) THEN 1 END
FROM generate_series(0, %(rows)s - 1) AS n, unnest(%(states)s::text[]) AS state
WHERE state <> 'running' OR n < 100
ORDER BY n, state
"""
_REST = """
INSERT INTO {schema}.headgate_job_tag SELECT seq, 'all' FROM {schema}.headgate_job;
INSERT INTO {schema}.headgate_job_tag
  SELECT seq, 'few' FROM {schema}.headgate_job WHERE mod(seq, 1000) = 0;
INSERT INTO {schema}.headgate_minute_counter
  SELECT 'q' || mod(n, 100), mod(n, 10)::text, n * 60000, 1, 1
  FROM generate_series(1, 20000) AS n;
INSERT INTO {schema}.headgate_queue_minute
  SELECT 'q' || mod(n, 100), n * 60000, 1, 1, 0, 0, 0, 0, 0
  FROM generate_series(1, 20000) AS n;
INSERT INTO {schema}.headgate_unfinished
  SELECT 'q' || n, 1 FROM generate_series(0, 99) AS n;
INSERT INTO {schema}.headgate_rate_class (name) VALUES ('c');
INSERT INTO {schema}.headgate_quarantine
  SELECT 'f' || n, 'k', 1, n, '', '' FROM generate_series(1, 5000) AS n;
"""
# One queue has most of the jobs, all in one state: whoever expects the others of its
# states among the newest jobs walks over all of them.
_FLOOD = """
INSERT INTO {schema}.headgate_job (id, kind, schema_version, payload, queue,
  partition_key, rate_class, sticky_worker, lane_key, weight, fingerprint, priority,
  state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
  retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers)
SELECT 'flood-' || n, 'k', 1, 'p', 'big', 'p', '', '', 0, 1, '', 0, 'available', 25, 1,
  1, 0, 0, 1, 0, '', 0, '{{}}'
FROM generate_series(1, 40000) AS n
"""
_TOUCHED = """
SELECT coalesce(sum(seq_scan), 0),
  coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)
FROM pg_stat_xact_user_tables WHERE schemaname = %s AND relname LIKE 'headgate%%'
  AND relname NOT IN ('headgate_rate_class', 'headgate_budget', 'headgate_ceiling')
"""


@pytest.fixture(scope="module", params=["never analysed", "analysed"])
def store(request, server_url):
    """A store over many rows, with one connection."""
    with (
        new_database(server_url) as url,
        ConnectionPool(url, min_size=1, max_size=1, open=True) as pool,
        psycopg.connect(url, autocommit=True) as admin,
    ):
        migrate_up(url, SCHEMA)
        tables = admin.execute(
            "SELECT relname FROM pg_class"
            " WHERE relname LIKE 'headgate%' AND relkind = 'r'"
        ).fetchall()
        for (table,) in tables:
            admin.execute(
                sql.SQL("ALTER TABLE {}.{} SET (autovacuum_enabled = false)").format(
                    sql.Identifier(SCHEMA), sql.Identifier(table)
                )
            )
        schema = sql.Identifier(SCHEMA)
        states = [state.value for state in State if state is not State.DELETED]
        admin.execute(
            sql.SQL(_FILL).format(schema=schema),
            {
                "live": list(LIVE),
                "rows": JOBS_PER_STATE,
                "queues": QUEUES,
                "states": states,
            },
        )
        admin.execute(sql.SQL(_FLOOD).format(schema=schema))
        admin.execute(sql.SQL(_REST).format(schema=schema))
        if request.param == "analysed":
            admin.execute("ANALYZE")
        opened = PgStore(pool, SCHEMA)
        yield opened
        opened.close()


def listing(**wanted):
    return lambda inspect: inspect.list_jobs(JobFilter(**wanted)).jobs


# What is asked, how many rows it may read, and how many it must show.
CALLS = {
    "all jobs": (listing(), 250, 50),
    "one queue": (listing(queue="q7"), 1_200, 50),
    "one queue and state": (listing(queue="q7", state="completed"), 150, 20),
    "a big queue": (listing(queue="big"), 300, 50),
    "a big queue and an absent state": (listing(queue="big", state="archived"), 5, 0),
    "a big queue's partitions": (lambda i: i.partitions("big"), 45_000, 1),
    "one state": (listing(state="archived"), 1_500, 50),
    "running": (listing(state="running"), 350, 50),
    "running in a queue": (listing(queue="q7", state="running"), 10, 1),
    "one id": (listing(id="archived-7"), 10, 1),
    "a common tag": (listing(tags_all=("all",)), 1_400, 50),
    "a rare tag": (listing(tags_any=("few",)), 300, 50),
    "tags together": (listing(tags_all=("few", "all")), 1_500, 50),
    "a rare tag and a state": (listing(tags_all=("few",), queue="q7"), 250, 0),
    "counts": (lambda i: i.counts().counts, 75_000, 10),
    "counts of a queue": (lambda i: i.counts("q7").counts, 250, 10),
    "a page of queues": (lambda i: i.queue_stats(), 40_000, 100),
    "one queue's figures": (lambda i: i.queue_stats(queues=["q7"]), 250, 1),
    "history": (lambda i: i.history("q7", 19_000 * 60_000), 20, 10),
    "partitions": (lambda i: i.partitions("q7"), 40, 1),
    "rate classes": (lambda i: i.rate_classes(), 1_100, 1),
    "quarantine": (lambda i: i.quarantine_list(50), 120, 50),
    "kinds": (lambda i: i.distinct_kinds(100), 120, None),
    "one job": (lambda i: i.get_job("archived-7"), 5, None),
}


def read_by(store, look):
    """Sequential scans and rows read by the statements of a call, and its answer."""
    seen = []
    db = store._db
    plain = db.looking

    def watched(work):
        def measured(session):
            before = session.connection.execute(_TOUCHED, [SCHEMA]).fetchone()
            answer = work(session)
            after = session.connection.execute(_TOUCHED, [SCHEMA]).fetchone()
            seen.append((after[0] - before[0], after[1] - before[1]))
            return answer

        return plain(measured)

    db.looking = watched
    try:
        answer = look(store.inspect)
    finally:
        db.looking = plain
    assert len(seen) == 1, "a look is one transaction"
    return (*seen[0], answer)


@pytest.mark.parametrize("call", CALLS)
def test_a_look_reads_little_more_than_it_shows(store, call):
    look, most, shown = CALLS[call]
    scans, rows, answer = read_by(store, look)
    assert scans == 0, "a table was scanned"
    assert rows <= most
    assert shown is None or len(answer) == shown


@pytest.mark.parametrize(
    "path", ["id", "tags_all", "tags_any", "queue", "state", "running", "seq"]
)
def test_the_filter_of_a_list_is_put_in_line(store, path):
    """A call per row would copy the row with its payload."""
    params = {
        **dict.fromkeys(("kind", "kind_prefix", "partition_key", "rate_class")),
        "path": path,
        "id": "archived-7",
        "queue": "q7",
        "state": "archived",
        "fingerprint": "f7",
        "priority": 0,
        "tags_all": ["all"],
        "tags_any": ["few"],
        "states": list(SAMPLE_ORDER),
        "before": 2**62,
        "max_jobs": 50,
        "plain": False,
    }
    text = store._db.statements["list_jobs"]

    def explain(session):
        rows = session.connection.execute(b"EXPLAIN VERBOSE " + text, params)
        return "\n".join(line for (line,) in rows)

    plan = store._db.looking(explain)
    assert "headgate_job_matches" not in plan
    assert "Seq Scan" not in plan


def test_a_page_is_a_fixed_number_of_statements(store):
    names = [f"q{n}" for n in range(100)] + [f"new{n}" for n in range(100)]
    run = []
    plain = database_module.Session.rows

    def counted(session, name, /, **params):
        run.append(name)
        return plain(session, name, **params)

    database_module.Session.rows = counted
    try:
        store.inspect.queue_stats(queues=names)
        assert len(run) <= 3
        run.clear()
        store.inspect.list_jobs()
        assert len(run) == 2
        run.clear()
        store.inspect.get_jobs([str(number) for number in range(1_000)])
        assert len(run) == 1
    finally:
        database_module.Session.rows = plain


def many_times(call):
    """A millisecond may just do, once."""
    for _ in range(100):
        call()


def test_a_filter_that_takes_too_long_says_what_to_add(store, monkeypatch):
    monkeypatch.setattr(database_module, "LOOK_TIMEOUT_MS", 1)
    wanted = JobFilter(kind="nothing", fingerprint="nobody")
    with pytest.raises(InvalidRequest) as raised:
        many_times(lambda: store.inspect.list_jobs(wanted))
    assert raised.value.message == (
        "filter is not selective enough; add queue or state"
    )
    with pytest.raises(StoreUnavailable):
        many_times(store.inspect.counts)


def test_an_operation_starts_also_where_nobody_can_say_how_many_jobs_it_is(
    store, monkeypatch
):
    monkeypatch.setattr(database_module, "LOOK_TIMEOUT_MS", 1)
    ids = (f"rare-{number}" for number in count())

    def noted(dry_run):
        name = next(ids)
        store.inspect.create_operation(
            BulkRequest(id=name, action="delete", kind="nothing", dry_run=dry_run)
        )
        return name

    with pytest.raises(InvalidRequest, match="add queue or state"):
        many_times(lambda: noted(dry_run=True))
    name = noted(dry_run=False)
    monkeypatch.undo()
    assert store.inspect.get_operation(name).total_estimated == 0
    while store.inspect.get_operation(name).status != "completed":
        store.inspect.run_pending_operations(10_000)


def test_looking_writes_nothing_and_leaves_the_connection_as_it_was(store):
    def settings():
        with store._db.checkout() as session:
            shown = session.connection.execute("SHOW ALL").fetchall()
        # A module brings settings of its own when a session first uses it.
        return {name: value for name, value, _ in shown if "." not in name}

    before = settings()
    store.inspect.queue_stats()
    assert settings() == before

    def write(session):
        session.connection.execute(
            sql.SQL("DELETE FROM {}.headgate_job").format(sql.Identifier(SCHEMA))
        )

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        store._db.looking(write)


def test_looking_waits_for_no_writer(store):
    """Rows that somebody changes, and a queue that somebody holds, are shown as is."""
    with psycopg.connect(store._db.pool.conninfo, autocommit=False) as writer:
        writer.execute(
            sql.SQL(
                "UPDATE {}.headgate_job SET priority = 1 WHERE queue = 'q7'"
            ).format(sql.Identifier(SCHEMA))
        )
        writer.execute(
            sql.SQL("SELECT {}.headgate_lock_queues('{{q7}}')").format(
                sql.Identifier(SCHEMA)
            )
        )
        for look, _, _ in CALLS.values():
            look(store.inspect)
        writer.rollback()


def test_partitions_are_compared_with_what_was_added_up_once(admin):
    """Whatever the planner expects of a window: it is no loop within a loop."""
    plans: list[str] = []
    with admin.transaction(force_rollback=True):
        try:
            admin.execute("LOAD 'auto_explain'")
        except psycopg.errors.UndefinedFile:
            pytest.skip("this server comes without auto_explain")
        admin.execute(
            sql.SQL(
                "INSERT INTO {}.headgate_minute_counter "
                "SELECT 'crowd', n::text, 60000, 1 + mod(n, 3), 1 "
                "FROM generate_series(1, 500) AS n"
            ).format(sql.Identifier(SCHEMA))
        )
        admin.execute(
            "SET LOCAL auto_explain.log_min_duration = 0;"
            "SET LOCAL auto_explain.log_nested_statements = on;"
            "SET LOCAL auto_explain.log_analyze = on;"
            "SET LOCAL client_min_messages = log"
        )
        admin.add_notice_handler(
            handler := lambda told: plans.append(told.message_primary or "")
        )
        found = admin.execute(
            sql.SQL(
                "SELECT noisy, has_more"
                " FROM {}.headgate_quiet_groups('{{crowd}}', 60000, 1000, 1)"
            ).format(sql.Identifier(SCHEMA))
        ).fetchone()
        admin.remove_notice_handler(handler)
    assert found == ([], False)
    told = "\n".join(plans)
    assert "CTE Scan on traffic" in told
    made = re.findall(r"Aggregate  \(cost[^\n]* loops=(\d+)\)", told)
    assert set(made) == {"1"}
