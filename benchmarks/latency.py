"""From the enqueue's commit to the start of the handler, on an idle worker."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.bare import bare
from benchmarks.database import fresh_store
from benchmarks.jobs import STAMPS
from benchmarks.load import envelopes
from benchmarks.processes import wait_for_lines, worker_process
from benchmarks.report import Report, percentile

SHARES = (("p50", 0.50), ("p95", 0.95), ("p99", 0.99))


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--gap-ms", type=int, default=30, help="pause between enqueues")


def run(url: str, options: Namespace) -> Report:
    """Measure pick-up latency beside a bare listener that claims one row."""
    report = Report("latency", {"jobs": options.jobs, "gap_ms": options.gap_ms})
    samples: dict[str, list[float]] = {}
    for _ in range(options.runs):
        for label, times in (
            ("bare_", _bare(url, options)),
            ("", pick_up(url, options)),
        ):
            for name, share in SHARES:
                key = f"{label}{name}_ms"
                samples.setdefault(key, []).append(percentile(times, share))
    for name, values in samples.items():
        report.figure(name, values)
    for name, _share in SHARES:
        key = f"{name}_ms"
        report.ratio(f"{name}/bare", samples[key], samples[f"bare_{key}"])
    return report


def pick_up(url: str, options: Namespace) -> list[float]:
    """Milliseconds from commit to handler start, one job at a time."""
    with tempfile.NamedTemporaryFile() as stamps, fresh_store(url) as store:
        os.environ[STAMPS] = stamps.name
        sent: dict[int, int] = {}
        with worker_process(url, "--threads", "16"):
            for number in range(-5, options.jobs):  # the first ones wake everything up
                payload = b'{"number":%d}' % number
                job = envelopes(1, kind="bench:stamp", payload=payload)
                store.enqueue(job)
                sent[number] = time.monotonic_ns()
                if number < 0:
                    wait_for_lines(stamps.name, number + 6, timeout_s=30)
                # Whoever sends sleeps meanwhile, as a peer's sender does: to look for
                # the line would take processor time from what is measured.
                time.sleep(options.gap_ms / 1e3)
            wait_for_lines(stamps.name, options.jobs + 5, timeout_s=30)
        times = []
        for line in Path(stamps.name).read_text().splitlines():
            number, started = (int(part) for part in line.split())
            if number >= 0:
                times.append((started - sent[number]) / 1e6)
        return times


def _bare(url: str, options: Namespace) -> list[float]:
    """A thread that listens and claims one row of the plain table per notification."""
    started: queue.SimpleQueue[int] = queue.SimpleQueue()
    times: list[float] = []
    with bare(url) as plain, psycopg.connect(url, autocommit=True) as listener:
        plain.reset()
        listener.execute("LISTEN bare_wakeup")
        thread = threading.Thread(
            target=_claim_on_notice, args=(url, listener, options.jobs, started)
        )
        thread.start()
        for _ in range(options.jobs):
            with plain.connection.transaction():
                plain.insert_one()
                plain.connection.execute("NOTIFY bare_wakeup")
            sent = time.monotonic_ns()
            times.append((started.get(timeout=30) - sent) / 1e6)
            time.sleep(options.gap_ms / 1e3)
        thread.join()
    return times


def _claim_on_notice(
    url: str,
    listener: psycopg.Connection[Any],
    jobs: int,
    started: queue.SimpleQueue[int],
) -> None:
    with bare(url) as claimer:
        claimed = 0
        while claimed < jobs:
            for _notice in listener.notifies(timeout=5, stop_after=1):
                if claimer.claim(1):
                    started.put(time.monotonic_ns())
                    claimed += 1
