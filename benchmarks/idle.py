"""What a worker costs that has nothing to do, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace

import psycopg

from benchmarks.database import fresh_store
from benchmarks.processes import worker_process
from benchmarks.report import Report

_COUNT = """
SELECT xact_commit + xact_rollback FROM pg_stat_database
WHERE datname = current_database()
"""


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seconds", type=int, default=20, help="length of one run")


def run(url: str, options: Namespace) -> Report:
    """Processor share and transactions per second of an idle worker; import time."""
    report = Report("idle", {"seconds": options.seconds, "threads": 16})
    shares, rates, peaks = [], [], []
    with fresh_store(url):
        for _ in range(options.runs):
            with worker_process(url, "--threads", "16") as worker:
                time.sleep(5)  # past its start and the first backoffs
                (before, began_s), cpu = _transactions(url), worker.cpu_s()
                time.sleep(options.seconds)
                shares.append((worker.cpu_s() - cpu) / options.seconds * 100)
                after, ended_s = _transactions(url)
                # one transaction is the reading of the counter itself
                rates.append((after - before - 1) / (ended_s - began_s))
                peaks.append(worker.peak_mb())
    report.figure("worker_cpu_percent", shares)
    report.figure("transactions_per_s", rates)
    report.figure("worker_peak_mb", peaks)
    bare_ms = [_start_ms("pass") for _ in range(5 * options.runs)]
    ours_ms = [_start_ms("import headgate_sync") for _ in range(5 * options.runs)]
    report.figure("bare_python_ms", bare_ms)
    report.figure("import_ms", ours_ms)
    report.figures["import_added_ms"] = (
        report.figures["import_ms"] - report.figures["bare_python_ms"]
    )
    return report


def _transactions(url: str) -> tuple[int, float]:
    """The counter, and the instant of its reading."""
    with psycopg.connect(url, autocommit=True) as connection:
        time.sleep(1.1)  # backends report their counters at most once a second
        row = connection.execute(_COUNT).fetchone()
        assert row is not None
        return int(row[0]), time.monotonic()


def _start_ms(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - started) * 1e3
