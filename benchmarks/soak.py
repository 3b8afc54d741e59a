"""Whether a worker's memory stays where it is while many jobs go through it."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from attrs import evolve, frozen

from benchmarks.database import fresh_store
from benchmarks.load import enqueue_all, envelopes
from benchmarks.processes import WorkerProcess, wait_until, worker_process
from benchmarks.report import Report
from headgate_sync.envelope import Envelope
from headgate_sync.inspection import Inspect
from headgate_sync.postgres.store import PgStore

BATCH = 1_000
STALLED_S = 120


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument(
        "--jobs", type=int, default=20_000, help="1000000 is a soak worth the name"
    )
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="readings of the memory")
    parser.add_argument(
        "--backlog", type=int, default=5_000, help="waiting jobs are kept below this"
    )
    parser.add_argument(
        "--failing", action="store_true", help="every job fails and is archived"
    )


@frozen(kw_only=True)
class Reading:
    """The worker after so many jobs."""

    jobs: int
    rss_mb: float
    at_s: float


def run(url: str, options: Namespace) -> Report:
    """Feed one worker process and read its memory after each step.

    The first tenth warms it up; the growth is that from the end of the first step to
    the end of the last one.
    """
    if not 2 <= options.steps <= options.jobs:
        raise SystemExit("--steps must be 2 or more, and at most --jobs")
    if options.backlog < BATCH:
        raise SystemExit(f"--backlog must be {BATCH} or more")
    sizes = {"jobs": options.jobs, "threads": options.threads, "steps": options.steps}
    report = Report("soak", sizes | {"failing": int(options.failing)})
    samples: dict[str, list[float]] = {}
    for _ in range(options.runs):
        with fresh_store(url) as store:
            for name, value in soak(url, store, options).items():
                samples.setdefault(name, []).append(value)
    for name, values in samples.items():
        report.figure(name, values)
    return report


def soak(url: str, store: PgStore, options: Namespace) -> dict[str, float]:
    """One run: the figures by name."""
    inspect = store.inspect
    assert inspect is not None
    # Every failure is a warning, and writing so many is not what is measured.
    level = ("--log-level", "error") if options.failing else ()
    with worker_process(url, "--threads", str(options.threads), *level) as worker:
        readings = list(_readings(worker, store, inspect, options))
        peak_mb, threads = worker.peak_mb(), worker.threads()
    figures = {f"rss_mb_after_{each.jobs}": each.rss_mb for each in readings}
    first, last = readings[0], readings[-1]
    passed = last.jobs - first.jobs
    grown_mb = last.rss_mb - first.rss_mb
    return {
        **figures,
        "peak_mb": peak_mb,
        "grown_mb": grown_mb,
        "grown_bytes_per_job": grown_mb * 2**20 / passed,
        "threads": threads,
        "jobs_per_s": passed / (last.at_s - first.at_s),
    }


def _readings(
    worker: WorkerProcess, store: PgStore, inspect: Inspect, options: Namespace
) -> Iterator[Reading]:
    sent = 0
    for step in range(1, options.steps + 1):
        until = options.jobs * step // options.steps
        while sent < until:
            count = min(BATCH, until - sent)
            room = options.backlog - count
            wait_until(
                lambda room=room: inspect.unfinished("bench") <= room,
                timeout_s=STALLED_S,
                interval_s=0.02,
            )
            enqueue_all(store, _jobs(count, failing=options.failing))
            sent += count
        wait_until(
            lambda: inspect.unfinished("bench") == 0,
            timeout_s=STALLED_S,
            interval_s=0.02,
        )
        yield Reading(jobs=sent, rss_mb=worker.rss_mb(), at_s=time.perf_counter())


def _jobs(count: int, *, failing: bool) -> list[Envelope]:
    if not failing:
        return envelopes(count)
    return [evolve(job, max_attempts=1) for job in envelopes(count, kind="bench:fail")]
