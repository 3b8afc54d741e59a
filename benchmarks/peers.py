"""The fastest queue on PostgreSQL that we know, side by side in the same run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import drain, latency
from benchmarks.database import fresh_store
from benchmarks.jobs import STAMPS
from benchmarks.pgqueuer_peer import URL
from benchmarks.processes import (
    process_cpu_s,
    server_cpu_s,
    wait_for_empty,
    wait_for_lines,
    wait_until,
)
from benchmarks.report import Report, percentile


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument(
        "--prefetch", type=int, default=48, help="of a drain beside the usual one"
    )
    parser.add_argument("--idle-jobs", type=int, default=200)
    parser.add_argument("--gap-ms", type=int, default=30)


def run(url: str, options: Namespace) -> Report:
    """Drain and idle pick-up of pgqueuer and of this package, in turn."""
    sizes = {
        "jobs": options.jobs,
        "slots": options.threads,
        "prefetch": options.prefetch,
    }
    report = Report("peers", {**sizes, "idle_jobs": options.idle_jobs})
    print(f"pgqueuer {version('pgqueuer')}", file=sys.stderr)
    os.environ[URL] = url
    ours: dict[str, list[float]] = {}
    peer: dict[str, list[float]] = {}
    settings = {**vars(options), "behind": 0}
    drained = Namespace(**{**settings, "prefetch": 0})
    ahead = Namespace(**settings)
    prefetched: dict[str, list[float]] = {}
    picked = Namespace(jobs=options.idle_jobs, gap_ms=options.gap_ms)
    for _ in range(options.runs):
        _add(peer, _peer_drain(url, options.jobs))
        with fresh_store(url) as store:
            _add(ours, drain.drain(url, store, drained))
        with fresh_store(url) as store:
            _add(prefetched, drain.drain(url, store, ahead))
        _add(peer, _shares(_peer_latency(picked)))
        _add(ours, _shares(latency.pick_up(url, picked)))
    for name, values in peer.items():
        report.figure(f"pgqueuer_{name}", values)
    for name, values in ours.items():
        report.figure(f"headgate_{name}", values)
    for name, values in prefetched.items():
        report.figure(f"headgate_prefetching_{name}", values)
    for name in peer:
        report.ratio(f"{name}: headgate/pgqueuer", ours[name], peer[name])
    name = "jobs_per_s"
    report.ratio(f"{name}: prefetching/pgqueuer", prefetched[name], peer[name])
    return report


def _add(samples: dict[str, list[float]], figures: dict[str, float]) -> None:
    for name, value in figures.items():
        samples.setdefault(name, []).append(value)


def _shares(times: list[float]) -> dict[str, float]:
    return {f"{name}_ms": percentile(times, share) for name, share in latency.SHARES}


def _part(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.pgqueuer_peer", *arguments]


@contextmanager
def _peer_worker() -> Iterator[int]:
    worker = subprocess.Popen(_part("work"), stdin=subprocess.DEVNULL)
    try:
        yield worker.pid
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(timeout=60)


def _waiting(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT count(*) FROM pgqueuer").fetchone()
    assert row is not None
    return int(row[0])


def _peer_drain(url: str, jobs: int) -> dict[str, float]:
    subprocess.run(_part("install"), check=True)
    subprocess.run(_part("load", str(jobs)), check=True)
    with psycopg.connect(url, autocommit=True) as connection:
        # It collapses on a table that was not analysed; measured at its best here.
        connection.execute("ANALYZE pgqueuer")
        postmaster = drain.postmaster(url)
        server_before = server_cpu_s(postmaster)
        with _peer_worker() as pid:
            wait_until(
                lambda: _waiting(connection) < jobs, timeout_s=60, interval_s=0.02
            )
            cpu_before = process_cpu_s(pid)
            first, seconds = wait_for_empty(lambda: _waiting(connection), timeout_s=600)
            cpu = process_cpu_s(pid) - cpu_before
        server = server_cpu_s(postmaster) - server_before
    return {
        "jobs_per_s": first / seconds,
        "worker_cpu_us_per_job": cpu / first * 1e6,
        "server_cpu_us_per_job": server / jobs * 1e6,
    }


def _peer_latency(options: Namespace) -> list[float]:
    subprocess.run(_part("install"), check=True)
    with tempfile.NamedTemporaryFile() as stamps:
        os.environ[STAMPS] = stamps.name
        with _peer_worker():
            time.sleep(2)  # it has no way to say that it is ready
            command = _part("send", str(options.jobs), str(options.gap_ms))
            sent = subprocess.run(command, check=True, capture_output=True, text=True)
            wait_for_lines(stamps.name, options.jobs, timeout_s=60)
        begun = dict(line.split() for line in sent.stdout.splitlines())
        lines = Path(stamps.name).read_text().splitlines()
    return [
        (int(started) - int(begun[number])) / 1e6
        for number, started in (line.split() for line in lines)
    ]
