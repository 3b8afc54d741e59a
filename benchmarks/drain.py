"""How fast one worker process empties a preloaded queue, and what it costs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import psycopg

from benchmarks.bare import bare
from benchmarks.database import fresh_store
from benchmarks.load import preload
from benchmarks.processes import (
    server_cpu_s,
    wait_for_empty,
    wait_until,
    worker_process,
)
from benchmarks.report import Report
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.postgres.store import PgStore

MANY = 1_000_000


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument(
        "--behind",
        type=int,
        default=0,
        help="further rows of the same queue, never analysed, that stay waiting",
    )
    parser.add_argument(
        "--policies",
        action="store_true",
        help="also with a rate class, a ceiling and 100 partitions, in turn",
    )


def run(url: str, options: Namespace) -> Report:
    """Drain with a real worker process, service threads on, beside the bare loop."""
    names = ("jobs", "threads", "prefetch", "behind")
    sizes = {name: getattr(options, name) for name in names}
    report = Report("drain", sizes)
    samples: dict[str, list[float]] = {}
    for _ in range(options.runs):
        with bare(url) as plain:
            plain.fill(options.jobs)
            seconds = plain.drain(threads=options.threads, batch=100)
            samples.setdefault("bare_jobs_per_s", []).append(options.jobs / seconds)
        for policies in (False, True)[: 1 + options.policies]:
            with fresh_store(url) as store:
                figures = drain(url, store, options, policies=policies)
            for name, value in figures.items():
                key = f"policies_{name}" if policies else name
                samples.setdefault(key, []).append(value)
    for name, values in samples.items():
        report.figure(name, values)
    report.ratio("drain/bare", samples["jobs_per_s"], samples["bare_jobs_per_s"])
    if options.policies:
        with_policies = samples["policies_jobs_per_s"]
        report.ratio("with policies/without", with_policies, samples["jobs_per_s"])
    return report


def drain(
    url: str, store: PgStore, options: Namespace, *, policies: bool = False
) -> dict[str, float]:
    """Preload, start a worker, measure from its first acks until `jobs` are gone."""
    behind = options.behind
    inspect = store.inspect
    assert inspect is not None
    if policies:  # none of them binds: what they cost is the deciding
        inspect.upsert_rate_class(
            RateClassConfig(name="wide", limit=MANY, window_ms=1000, burst=MANY)
        )
        inspect.upsert_concurrency_limit(
            Ceiling(name="wide", queue="bench", max_concurrent=MANY)
        )
        preload(store, options.jobs + behind, partitions=100, rate_class="wide")
    else:
        preload(store, options.jobs + behind)
    server_pid = postmaster(url)
    server_before = server_cpu_s(server_pid)
    settings = ("--threads", str(options.threads), "--prefetch", str(options.prefetch))
    with worker_process(url, *settings) as worker:
        wait_until(
            lambda: inspect.unfinished("bench") < options.jobs + behind,
            timeout_s=60,
            interval_s=0.02,
        )
        cpu_before, rss_before = worker.cpu_s(), worker.rss_mb()
        first, seconds = wait_for_empty(
            lambda: inspect.unfinished("bench") - behind, timeout_s=600
        )
        cpu, rss, peak = worker.cpu_s() - cpu_before, worker.rss_mb(), worker.peak_mb()
    server = server_cpu_s(server_pid) - server_before
    return {
        "jobs_per_s": first / seconds,
        "worker_cpu_us_per_job": cpu / first * 1e6,
        "server_cpu_us_per_job": server / options.jobs * 1e6,
        "worker_peak_mb": peak,
        "worker_grown_mb": rss - rss_before,
    }


def postmaster(url: str) -> int:
    """The server's own process, for its processor time; the server must be local."""
    with psycopg.connect(url) as connection:
        backend = connection.info.backend_pid
        stat = Path(f"/proc/{backend}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
