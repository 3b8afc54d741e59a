"""What the gate costs where it must hold: deep and blocked queues, crowds, old rows."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
from attrs import evolve, frozen
from psycopg import sql

from benchmarks.admit import bare_claims, settle_news
from benchmarks.bare import bare
from benchmarks.database import SCHEMA, fresh_store
from benchmarks.load import at_rest, backlog, enqueue_all, envelopes, multiply
from benchmarks.report import Report, percentile
from benchmarks.twin import twin
from headgate_sync.envelope import Envelope
from headgate_sync.lease import Ack, AdmissionBatch, AdmitRequest
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import GATE_CONSTANTS, Ceiling, RateClassConfig
from headgate_sync.postgres.store import PgStore

KINDS = ("class", "ceiling", "quarantine", "sticky", "pause", "future")
CROWDS = (1, 4, 16)
FULL = 64
DEEPEST = 1_000_000
FAR_MS = 32_503_680_000_000  # the year 3000
_LONG_MS = 600_000

_EXPLAIN = """
EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON)
SELECT * FROM {schema}.headgate_admit('bench', 'look', ARRAY['bench'], %(capacity)s,
  600000, 0, %(window_max)s, %(window_spare)s, %(window_draws)s, %(deficit_cap)s,
  %(ledger_lag)s, %(fold_max)s, %(hold_max)s, %(lock_wait_ms)s, %(busy_ms)s)
"""
_QUARANTINE = """
INSERT INTO {schema}.headgate_quarantine VALUES ('bomb', 'bench:noop', 3, 1, '', '')
"""
_DEAD = """
SELECT relname, n_dead_tup FROM pg_catalog.pg_stat_user_tables
WHERE schemaname = %s AND n_dead_tup > 0 ORDER BY relname
"""
_DEADLOCKS = """
SELECT deadlocks FROM pg_catalog.pg_stat_database WHERE datname = current_database()
"""
_RUNNING = """
SELECT count(*) FROM {schema}.headgate_job WHERE state = 'running' AND queue = 'bench'
"""


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--blocked", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--percent", type=int, nargs="+", default=[99])
    parser.add_argument("--capacity", type=int, default=16)
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each crowd")
    parser.add_argument("--claims", type=int, default=8_000, help="without a vacuum")
    parser.add_argument(
        "--held", type=int, default=8_000, help="claims under an open snapshot"
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument(
        "--all",
        action="store_true",
        help="every size and kind: a quarter of an hour with --runs 1",
    )


def run(url: str, options: Namespace) -> Report:
    """Run the parts asked for; each figure has the bare claim of the same run."""
    if options.all:
        options.rows = [10_000, 100_000, DEEPEST]
        options.partitions = [1, 100, 10_000]
        options.percent = [50, 99]
        options.claims, options.held = DEEPEST, 50_000
    names = ("capacity", "calls", "claims", "held")
    report = Report("gate", {name: getattr(options, name) for name in names})
    before = _one(url, _DEADLOCKS)
    for part in options.parts:
        _PARTS[part](url, options, report)
    report.figure("deadlocks", [_one(url, _DEADLOCKS) - before])
    return report


# Scenes: one admitter at several depths, widths and shares of blocked work.


@frozen
class Scene:
    """One queue and what is in it."""

    rows: int
    partitions: int
    kind: str = ""
    percent: int = 0

    def __str__(self) -> str:
        blocked = f"_{self.kind}_{self.percent}%" if self.kind else ""
        return f"{self.rows}x{self.partitions}{blocked}"


def scenes(url: str, options: Namespace, report: Report) -> None:
    """Time admits in every scene, in turn with the bare claim."""
    medians = []
    for number, rows in enumerate(options.rows):
        with bare(url) as plain:
            spent = options.runs * options.calls * options.capacity
            depth, left = max(rows, 2 * spent), 0
            for scene in _scenes_of(number, options):
                # As deep as the scene, and never claimed empty.
                if left - spent < depth // 2:
                    plain.fill(depth)
                    at_rest(url)
                    left = depth
                left -= spent
                with fresh_store(url) as store:
                    _fill(url, store, scene)
                    settle_news(store)
                    same = [] if scene.kind else _same(url, options)
                    at_rest(url)
                    Admitter(store, options.capacity).calls(20)
                    runs, bares = [], []
                    for _ in range(options.runs):
                        bares.append(percentile(bare_claims(plain, options), 0.5))
                        runs.append(
                            Admitter(store, options.capacity).calls(options.calls)
                        )
                    p50 = [percentile(times, 0.5) for times in runs]
                    p95 = [percentile(times, 0.95) for times in runs]
                    medians.append(report.figure(f"p50_ms_{scene}", p50))
                    report.figure(f"p95_ms_{scene}", p95)
                    report.figure(f"buffers_{scene}", _buffers(url, options))
                    report.ratio(f"admit/bare_{scene}", p50, bares)
                    if same:
                        report.ratio(f"admit/same_{scene}", p50, same)
    report.ratios["slowest/fastest_scene"] = round(max(medians) / min(medians), 3)


def _same(url: str, options: Namespace) -> list[float]:
    """The claim from a copy of the scene's rows: one figure a run."""
    with twin(url) as copy:
        at_rest(url)
        copy.claims(20, options.capacity)
        taken = [
            copy.claims(options.calls, options.capacity) for _ in range(options.runs)
        ]
    return [percentile(times, 0.5) for times in taken]


def _scenes_of(number: int, options: Namespace) -> Iterator[Scene]:
    """The scenes of a depth, which is the one of that number.

    Not the whole product, most of which would be filling tables: every depth has every
    width and every kind, and each kind meets every width at some depth.
    """
    rows = options.rows[number]
    widths = [width for width in options.partitions if width <= rows // 10]
    for partitions in widths:
        yield Scene(rows, partitions)
    # What is blocked stands beside lanes that are free.
    blocked = itertools.product(enumerate(options.blocked), enumerate(options.percent))
    for (place, kind), (turn, percent) in blocked:
        if not options.all:
            if options.partitions[-1] in widths:
                yield Scene(rows, options.partitions[-1], kind, percent)
        elif rows < DEEPEST or percent == options.percent[-1]:
            width = widths[(place + turn + number) % len(widths)]
            yield Scene(rows, width, kind, percent)


def _fill(url: str, store: PgStore, scene: Scene) -> None:
    blocked = scene.rows * scene.percent // 100
    # Enough is left to claim while the scene is measured.
    free = max(scene.rows - blocked, 16_000)
    if blocked:
        jobs = [_blocked(scene.kind, job) for job in envelopes(1)]
        _block(url, store, scene.kind, jobs)
        multiply(url, jobs, blocked)
    backlog(url, store, free, partitions=scene.partitions)


def _blocked(kind: str, job: Envelope) -> Envelope:
    changes: dict[str, dict[str, Any]] = {
        "class": {"rate_class": "dry"},
        "pause": {"rate_class": "dry"},
        "ceiling": {"partition_key": "full"},
        "quarantine": {"fingerprint": "bomb"},
        "sticky": {"sticky_worker": "elsewhere"},
        "future": {"scheduled_at_ms": FAR_MS},
    }
    return evolve(job, **changes[kind])


def _block(url: str, store: PgStore, kind: str, jobs: list[Envelope]) -> None:
    """Put the policy in force and let the gate meet the jobs once."""
    if kind == "class":
        dry = RateClassConfig(name="dry", limit=0, window_ms=1000, burst=1)
        store.inspect.upsert_rate_class(dry)
        enqueue_all(store, [_blocked(kind, job) for job in envelopes(1)])
    elif kind == "pause":
        paused = RateClassConfig(
            name="dry", limit=9, window_ms=1000, burst=9, paused=True
        )
        store.inspect.upsert_rate_class(paused)
    elif kind == "ceiling":
        ceiling = Ceiling(name="full", queue="bench", max_concurrent=FULL)
        store.inspect.upsert_concurrency_limit(ceiling)
        enqueue_all(store, [_blocked(kind, job) for job in envelopes(FULL)])
    held = Admitter(store, 2 * FULL)
    held.admit()
    enqueue_all(store, jobs)
    if kind == "quarantine":
        _execute(url, _QUARANTINE)
    if kind != "sticky" and len(held.admit()) > 0:
        raise RuntimeError(f"{kind} does not block")


def _buffers(url: str, options: Namespace) -> list[float]:
    """Blocks touched by one admit that is rolled back, once plans are made."""
    counts = []
    with psycopg.connect(url) as connection:
        statement = sql.SQL(_EXPLAIN).format(schema=sql.Identifier(SCHEMA))
        for _ in range(4):
            params = {**GATE_CONSTANTS, "capacity": options.capacity}
            row = connection.execute(statement, params).fetchone()
            assert row is not None
            plan = row[0][0]["Plan"]
            counts.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
            connection.rollback()
    return counts[1:]


class Admitter:
    """Admits and acks, and remembers every claim."""

    def __init__(
        self,
        store: PgStore,
        capacity: int,
        *,
        worker: str = "bench",
        queue: str = "bench",
    ) -> None:
        self._store = store
        self._capacity = capacity
        self._worker = worker
        self._queue = queue
        self._number = 0
        self.times: list[float] = []
        self.claimed: list[tuple[str, int]] = []

    def admit(self) -> AdmissionBatch:
        """One timed admit."""
        self._number += 1
        request = AdmitRequest(
            worker=self._worker,
            lease_id=f"{self._worker}:{self._number}",
            queues=(self._queue,),
            capacity=self._capacity,
            lease_ms=_LONG_MS,
        )
        started = time.perf_counter()
        batch = self._store.admit(request)
        self.times.append((time.perf_counter() - started) * 1e3)
        self.claimed += [(claim.envelope.id, claim.fence) for claim in batch.claims]
        return batch

    def turn(self) -> bool:
        """Admit and ack, or wait as told; False when nothing was claimed."""
        batch = self.admit()
        acks = [
            Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS)
            for claim in batch.claims
        ]
        if acks:
            self._store.ack_batch(acks)
        elif batch.retry_after_ms is not None:
            time.sleep(batch.retry_after_ms / 1e3)
        return bool(acks)

    def calls(self, count: int) -> list[float]:
        """Milliseconds of so many admits, each of which must find work."""
        for _ in range(count):
            if not self.turn():
                raise RuntimeError("the gate answered nothing although work waits")
        return self.times


# Crowds: several admitters at once, in threads and in processes.


def crowds(url: str, options: Namespace, report: Report) -> None:
    """Claims per second of 1, 4 and 16 admitters, on one queue and on four."""
    for pool, queues, limited in (
        ("threads", 1, False),
        ("threads", 4, False),
        ("threads", 1, True),
        ("processes", 1, False),
        ("processes", 4, False),
    ):
        alone: list[float] = []
        for admitters in CROWDS:
            name = f"{pool}_{admitters}on{queues}{'_limited' if limited else ''}"
            rates = [
                _crowd(url, options, report, name, pool, admitters, queues, limited)
                for _ in range(options.runs)
            ]
            report.figure(f"claims/s_{name}", rates)
            alone = alone or rates
            report.ratio(f"claims/alone_{name}", rates, alone)


def _crowd(
    url: str,
    options: Namespace,
    report: Report,
    name: str,
    pool: str,
    admitters: int,
    queues: int,
    limited: bool,
) -> float:
    names = [f"bench{number or ''}" for number in range(queues)]
    limit = 2 * options.capacity
    with fresh_store(url) as store:
        for queue in names:
            jobs = [evolve(job, queue=queue) for job in envelopes(100, partitions=100)]
            enqueue_all(store, jobs)
            multiply(url, jobs, 60_000 // queues)
        settle_news(store)
        if limited:
            ceiling = Ceiling(
                name="all", queue="bench", scope="queue", max_concurrent=limit
            )
            store.inspect.upsert_concurrency_limit(ceiling)
        executor: Callable[..., Executor] = ThreadPoolExecutor
        extra: dict[str, Any] = {}
        if pool == "processes":
            executor = ProcessPoolExecutor
            extra = {"mp_context": multiprocessing.get_context("spawn")}
        with _watch(url, limit if limited else None) as seen:
            # Each process has to start an interpreter first.
            wait_s = 0.5 if pool == "threads" else 2 + 0.4 * admitters
            start_at = time.time() + wait_s
            with executor(admitters, **extra) as workers:
                shares = [
                    workers.submit(
                        _work,
                        url,
                        f"w{number}",
                        names[number % queues],
                        options.capacity,
                        start_at,
                        options.seconds,
                    )
                    for number in range(admitters)
                ]
                done = [share.result() for share in shares]
    times = [took for share in done for took in share[0]]
    counts = Counter(claim for share in done for claim in share[1])
    report.figure(f"p50_ms_{name}", [percentile(times, 0.5)])
    report.figure(f"p95_ms_{name}", [percentile(times, 0.95)])
    over = sum(counts.values()) - len(counts) + len(seen)
    report.figure(f"over_admitted_{name}", [over])
    return sum(counts.values()) / options.seconds


def _work(
    url: str, worker: str, queue: str, capacity: int, start_at: float, seconds: float
) -> tuple[list[float], list[tuple[str, int]]]:
    store = PgStore.connect(url, schema=SCHEMA, pool_size=1, heartbeat_connection=False)
    try:
        admitter = Admitter(store, capacity, worker=worker, queue=queue)
        time.sleep(max(0.0, start_at - time.time()))
        while time.time() < start_at + seconds:
            admitter.turn()
        return admitter.times, admitter.claimed
    finally:
        store.close()


@contextmanager
def _watch(url: str, limit: int | None) -> Iterator[list[int]]:
    """Look inside the database for more running jobs than the limit allows."""
    over: list[int] = []
    stop = threading.Event()

    def look() -> None:
        statement = sql.SQL(_RUNNING).format(schema=sql.Identifier(SCHEMA))
        with psycopg.connect(url, autocommit=True) as connection:
            while not stop.wait(0.01):
                row = connection.execute(statement).fetchone()
                assert row is not None
                if limit is not None and row[0] > limit:
                    over.append(row[0])

    watcher = threading.Thread(target=look)
    if limit is not None:
        watcher.start()
    try:
        yield over
    finally:
        stop.set()
        if limit is not None:
            watcher.join()


# Old rows: what claims leave behind, with and without somebody who still sees it.


def ageing(url: str, options: Namespace, report: Report) -> None:
    """Admits after many claims without a manual vacuum, and under an open snapshot."""
    for name, claims in (("aged", options.claims), ("held", options.held)):
        calls = max(1, claims // options.capacity)
        with fresh_store(url) as store, psycopg.connect(url) as reader:
            backlog(url, store, 2 * claims + 20_000, partitions=100)
            settle_news(store)
            admitter = Admitter(store, options.capacity)
            admitter.calls(20)
            if name == "held":
                reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                reader.execute("SELECT txid_current_snapshot()")
            times = Admitter(store, options.capacity).calls(calls)
            tenth = max(1, calls // 10)
            first, last = times[:tenth], times[-tenth:]
            report.figure(f"p50_ms_{name}_first", [percentile(first, 0.5)])
            report.figure(f"p50_ms_{name}_last", [percentile(last, 0.5)])
            report.figure(f"p95_ms_{name}_last", [percentile(last, 0.95)])
            report.ratio(
                f"{name}_last/first", [percentile(last, 0.5)], [percentile(first, 0.5)]
            )
            report.figure(f"buffers_{name}", _buffers(url, options))
            reader.rollback()
        # Sessions publish what they did at the latest when they end.
        for table, dead in _dead(url):
            report.figure(f"dead_{name}_{table.removeprefix('headgate_')}", [dead])


def _dead(url: str) -> list[tuple[str, int]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(_DEAD, [SCHEMA]).fetchall()


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(schema=sql.Identifier(SCHEMA)))


def _one(url: str, statement: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(statement).fetchone()
        assert row is not None
        return int(row[0])


_PARTS: dict[str, Callable[[str, Namespace, Report], None]] = {
    "scenes": scenes,
    "crowds": crowds,
    "ageing": ageing,
}
