"""How long operators wait for lists and figures over many jobs."""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import psycopg
from psycopg import sql

from benchmarks.database import SCHEMA, fresh_store
from benchmarks.report import Report, percentile
from headgate_sync.inspection import Inspect
from headgate_sync.search import JobFilter

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
Look = Callable[[Inspect, str], object]
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
}
WHOLE = ("list_all", "list_state", "list_running", "list_tag", "counts", "get_job")


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
    for name, values in samples.items():
        report.figure(name, values)
    return report


def _timed_ms(look: Look, inspect: Inspect, queue: str) -> float:
    started = time.perf_counter()
    look(inspect, queue)
    return (time.perf_counter() - started) * 1000


def _load(url: str, sizes: dict[str, int]) -> None:
    schema = sql.Identifier(SCHEMA)
    with psycopg.connect(url, autocommit=True) as connection:
        values = {**sizes, "now_ms": time.time_ns() // 1_000_000}
        connection.execute(sql.SQL(_JOBS).format(schema=schema), values)
        connection.execute(sql.SQL(_COUNTERS).format(schema=schema))
