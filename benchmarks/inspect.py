"""How long operators wait for lists and figures over many jobs."""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import count

import psycopg
from psycopg import sql
from werkzeug.test import Client

from benchmarks.database import SCHEMA, fresh_store
from benchmarks.report import Report, percentile
from headgate_sync.api import ApiConfig
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.console.pages import PAGES
from headgate_sync.inspection import Inspect
from headgate_sync.operations import BulkRequest
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.schedule import Schedule, ScheduleEvent
from headgate_sync.search import JobFilter
from headgate_sync.store import Store
from headgate_sync.workers import WorkerMeta

CLASSES, CEILINGS, SCHEDULES, EVENTS, WORKERS = 100, 20, 1_000, 100, 200

# Half of the jobs are in one queue of many partitions. In sixty of a hundred the job is
# available, as after an outage; a few hundred run.
_JOBS = """
INSERT INTO {schema}.headgate_job (id, kind, schema_version, payload, queue,
  partition_key, rate_class, sticky_worker, lane_key, weight, fingerprint, priority,
  state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
  retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers, fence,
  lease_id, lease_expires_at_ms, claimed_by, claimed_at_ms, finalized_at_ms)
SELECT 'job-' || n, 'kind' || mod(n, 20), 1, '{{}}',
  CASE WHEN mod(n, 2) = 0 THEN 'big' ELSE 'q' || mod(n / 2, %(queues)s) END,
  'p' || mod(n / 2, %(partitions)s), CASE WHEN mod(n, 10) = 0 THEN 'class' ELSE '' END,
  '', mod(n / 2, %(partitions)s), 1, md5((mod(n, 5000))::text), 0, state, 25,
  %(now_ms)s - n, %(now_ms)s - n, 0, 0, 86400000, 0, '', 0, '{{}}', 1,
  CASE WHEN state = 'running' THEN 'lease' END,
  CASE WHEN state = 'running' THEN %(now_ms)s END,
  CASE WHEN state = 'running' THEN 'w' END,
  CASE WHEN state = 'running' THEN %(now_ms)s END,
  CASE WHEN state IN ('completed', 'archived', 'cancelled') THEN %(now_ms)s END
FROM generate_series(1, %(jobs)s) AS n
CROSS JOIN LATERAL (
  SELECT CASE
    WHEN mod(n * 7919::bigint, 2000) = 0 THEN 'running'
    WHEN mod(n * 7919::bigint, 100) < 60 THEN 'available'
    WHEN mod(n * 7919::bigint, 100) < 85 THEN 'completed'
    WHEN mod(n * 7919::bigint, 100) < 92 THEN 'scheduled'
    WHEN mod(n * 7919::bigint, 100) < 97 THEN 'retryable'
    WHEN mod(n * 7919::bigint, 100) < 99 THEN 'archived'
    ELSE 'cancelled' END AS state
) AS drawn
"""
_COUNTERS = """
INSERT INTO {schema}.headgate_job_tag
  SELECT seq, 't' || mod(seq, 100) FROM {schema}.headgate_job;
INSERT INTO {schema}.headgate_unfinished
  SELECT queue, count(*) FROM {schema}.headgate_job
  WHERE state NOT IN ('completed', 'archived', 'cancelled') GROUP BY queue;
INSERT INTO {schema}.headgate_queue (queue)
  SELECT queue FROM {schema}.headgate_unfinished;
INSERT INTO {schema}.headgate_partition (queue, partition_key, inflight)
  SELECT queue, partition_key, count(*) FILTER (WHERE state = 'running')
  FROM {schema}.headgate_job WHERE state IN ('available', 'running') GROUP BY 1, 2;
INSERT INTO {schema}.headgate_minute_counter
  SELECT part.queue, part.partition_key,
    clock.now_ms - mod(clock.now_ms, 60000) - minute * 60000, 1 + mod(minute, 3), 1
  FROM {schema}.headgate_partition AS part, generate_series(0, 2) AS minute,
    (SELECT {schema}.headgate_now_ms() AS now_ms) AS clock;
INSERT INTO {schema}.headgate_queue_minute
  SELECT depth.queue, clock.now_ms - mod(clock.now_ms, 60000) - minute * 60000,
    9, 8, 1, 1, 0, 500, 9
  FROM {schema}.headgate_unfinished AS depth, generate_series(0, 240) AS minute,
    (SELECT {schema}.headgate_now_ms() AS now_ms) AS clock;
"""
_QUARANTINE = """
INSERT INTO {schema}.headgate_quarantine
SELECT md5('q' || n), 'kind' || mod(n, 20), 3, %(now_ms)s - n, '', 'crash limit reached'
FROM generate_series(1, 1000) AS n
"""
Look = Callable[[Inspect, str], object]
_numbers = count()
LOOKS: dict[str, Look] = {
    "list_all": lambda i, q: i.list_jobs(),
    "list_queue": lambda i, q: i.list_jobs(JobFilter(queue=q)),
    "list_queue_state": lambda i, q: i.list_jobs(JobFilter(queue=q, state="archived")),
    "list_state": lambda i, q: i.list_jobs(JobFilter(state="archived")),
    "list_running": lambda i, q: i.list_jobs(JobFilter(state="running")),
    "list_tag": lambda i, q: i.list_jobs(JobFilter(tags_all=("t7",))),
    "counts": lambda i, q: i.counts(),
    "counts_queue": lambda i, q: i.counts(q),
    "queue_stats_one": lambda i, q: i.queue_stats(queues=[q]),
    "queue_stats_200": lambda i, q: i.queue_stats(cursor=q),
    "history": lambda i, q: i.history(q, 0),
    "partitions": lambda i, q: i.partitions(q),
    "get_job": lambda i, q: i.get_job(f"job-{1 + hash(q) % 1000}"),
    "get_jobs_1000": lambda i, q: i.get_jobs([f"job-{n}" for n in range(1_000)]),
    "explain": lambda i, q: i.explain_admission(_available(i, q)),
    "estimate": lambda i, q: _estimate(i, queue=q),
    "estimate_kind": lambda i, q: _estimate(i, kind="kind7"),
    "estimate_no_kind": lambda i, q: _estimate(i, kind="nobody"),
    "rate_classes": lambda i, q: i.rate_classes(),
    "concurrency_limits": lambda i, q: i.concurrency_limits(),
    "quarantine_list": lambda i, q: i.quarantine_list(),
    "list_schedules": lambda i, q: i.list_schedules(200, include_payload=False),
    "schedule_events": lambda i, q: i.list_schedule_events("s0", limit=100),
    "list_workers": lambda i, q: i.list_workers(),
    "cluster": lambda i, q: i.cluster(),
    "distinct_kinds": lambda i, q: i.distinct_kinds(1_000),
}
WHOLE = (
    "list_all", "list_state", "list_running", "list_tag", "counts", "get_job",
    "get_jobs_1000", "estimate_kind", "estimate_no_kind", "rate_classes",
    "concurrency_limits", "quarantine_list", "list_schedules", "schedule_events",
    "list_workers", "cluster", "distinct_kinds",
)  # fmt: skip


def _available(inspect: Inspect, queue: str) -> str:
    found = inspect.list_jobs(JobFilter(queue=queue, state="available"), limit=1)
    return found.jobs[0].id if found.jobs else "job-1"


def _estimate(inspect: Inspect, **selector: str) -> None:
    inspect.create_operation(
        BulkRequest(
            id=f"try-{next(_numbers)}", action="cancel", dry_run=True, **selector
        )
    )


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--queues", type=int, default=1_000)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument(
        "--vacuum", action="store_true", help="first, as the server does in time"
    )
    parser.add_argument("--calls", type=int, default=30, help="of each kind in a run")


def run(url: str, options: Namespace) -> Report:
    """Measure each call, over tables that nobody ever analysed unless asked to."""
    sizes = {name: getattr(options, name) for name in ("jobs", "queues", "partitions")}
    report = Report("inspect", sizes)
    samples: dict[str, list[float]] = {}
    with fresh_store(url) as store:
        _load(url, sizes)
        _furnish(store.inspect)
        if options.vacuum:
            store.maintenance.vacuum()
        for number in range(options.runs):
            pick = random.Random(number)
            small = [f"q{pick.randrange(options.queues)}" for _ in range(options.calls)]
            for name, look in LOOKS.items():
                targets = {"": small}
                if name not in WHOLE:
                    targets["_big"] = ["big"] * options.calls
                for label, queues in targets.items():
                    took = [_timed_ms(look, store.inspect, queue) for queue in queues]
                    key = f"{name}{label}_p95_ms"
                    samples.setdefault(key, []).append(percentile(took, 0.95))
            for name, took in _pages(store, small).items():
                samples.setdefault(name, []).append(percentile(took, 0.95))
    for name, values in samples.items():
        report.figure(name, values)
    return report


def _timed_ms(look: Look, inspect: Inspect, queue: str) -> float:
    started = time.perf_counter()
    look(inspect, queue)
    return (time.perf_counter() - started) * 1000


def _pages(store: Store, queues: list[str]) -> dict[str, list[float]]:
    """The server's time for each page, of whoever looks alone and shares nothing."""
    api = ApiConfig(rate_limit=None, share_ms=0)
    console = create_app(store, ConsoleConfig(api=api))
    browser, found = Client(console), dict[str, list[float]]()
    for page in PAGES:
        for queue in queues:
            path = {
                "queue": f"queue?name={queue}",
                "job": f"job?id=job-{1 + hash(queue) % 1000}",
                "partitions": "partitions?queue=big",
                "periodic": "periodic?events=s0",
            }.get(page.path, page.path)
            started = time.perf_counter()
            answer = browser.get(f"/{path}")
            took_ms = (time.perf_counter() - started) * 1000
            assert answer.status_code == 200, answer.text
            name = f"page_{page.path or 'overview'}_p95_ms"
            found.setdefault(name, []).append(took_ms)
    console.close()
    return found


def _furnish(inspect: Inspect) -> None:
    for n in range(CLASSES):
        name = "class" if n == 0 else f"class{n}"
        inspect.upsert_rate_class(
            RateClassConfig(name=name, limit=10, window_ms=1_000, burst=10)
        )
    for n in range(CEILINGS):
        inspect.upsert_concurrency_limit(
            Ceiling(name=f"c{n}", queue=f"q{n}", max_concurrent=9)
        )
    now_ms = inspect.store_now_ms()
    for n in range(SCHEDULES):
        inspect.upsert_schedule(
            Schedule(
                id=f"s{n}", kind="kind1", spec="@daily", next_run_ms=now_ms + 86_400_000
            )
        )
    for n in range(EVENTS):
        inspect.record_schedule_event(
            ScheduleEvent(
                schedule_id="s0", tick_ms=1 + n, job_id=f"sched-s0-{n}",
                outcome="enqueued", reason="accepted",
            )
        )  # fmt: skip
    for n in range(WORKERS):
        inspect.heartbeat_worker(
            WorkerMeta(
                worker_id=f"w{n}", host="h", pid=n, concurrency=16,
                started_at_ms=now_ms, queues=tuple(f"q{m}" for m in range(n, n + 10)),
            )
        )  # fmt: skip


def _load(url: str, sizes: dict[str, int]) -> None:
    schema = sql.Identifier(SCHEMA)
    with psycopg.connect(url, autocommit=True) as connection:
        values = {**sizes, "now_ms": time.time_ns() // 1_000_000}
        connection.execute(sql.SQL(_JOBS).format(schema=schema), values)
        connection.execute(sql.SQL(_COUNTERS).format(schema=schema))
        connection.execute(sql.SQL(_QUARANTINE).format(schema=schema), values)
