"""From SIGKILL of a worker to the rerun of its job by another one."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import ArgumentParser, Namespace

from benchmarks.database import fresh_store
from benchmarks.jobs import STAMPS
from benchmarks.load import envelopes
from benchmarks.processes import WorkerProcess, wait_for_lines
from benchmarks.report import Report


def add_options(parser: ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--lease-s", type=int, default=3, help="length of the lease")


def run(url: str, options: Namespace) -> Report:
    """Kill the holder of a job and time its next start."""
    report = Report("recover", {"lease_s": options.lease_s})
    report.figure("rerun_s", [_once(url, options.lease_s) for _ in range(options.runs)])
    return report


def _once(url: str, lease_s: int) -> float:
    with tempfile.NamedTemporaryFile() as stamps, fresh_store(url) as store:
        os.environ[STAMPS] = stamps.name
        arguments = ("--threads", "2", "--lease", f"{lease_s}s")
        holder = WorkerProcess(url, *arguments)
        store.enqueue(envelopes(1, kind="bench:hold", payload=b'{"number":1}'))
        wait_for_lines(stamps.name, 1, timeout_s=30)
        other = WorkerProcess(url, *arguments)
        time.sleep(lease_s / 2)  # so that the lease has been renewed at least once
        holder.kill()
        killed = time.monotonic()
        wait_for_lines(stamps.name, 2, timeout_s=lease_s + 60)
        seconds = time.monotonic() - killed
        other.stop()
        return seconds
