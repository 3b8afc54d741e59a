"""Worker processes under measurement, and what the kernel says they cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.database import SCHEMA

_TICKS = os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """One `python -m headgate_sync.worker` over `benchmarks.jobs`."""

    def __init__(self, url: str, *arguments: str) -> None:
        environment = {
            **os.environ,
            "HEADGATE_DATABASE_URL": url,
            "HEADGATE_SCHEMA": SCHEMA,
        }
        command = [sys.executable, "-m", "headgate_sync.worker", "benchmarks.jobs:hg"]
        self._process = subprocess.Popen(
            [*command, "--queues", "bench", "--log-level", "warning", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._process.pid

    def cpu_s(self) -> float:
        """User and system time so far."""
        return process_cpu_s(self.pid)

    def rss_mb(self) -> float:
        """Resident memory now."""
        return _status_mb(self.pid, "VmRSS")

    def peak_mb(self) -> float:
        """Largest resident memory so far."""
        return _status_mb(self.pid, "VmHWM")

    def threads(self) -> int:
        """Threads now."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)


@contextmanager
def worker_process(url: str, *arguments: str) -> Iterator[WorkerProcess]:
    """A worker for the length of the block; a bad exit code is an error."""
    worker = WorkerProcess(url, *arguments)
    try:
        yield worker
    finally:
        code = worker.stop()
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"worker ended with exit code {code}")


def process_cpu_s(pid: int) -> float:
    """User and system time of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def server_cpu_s(postmaster: int) -> float:
    """User and system time of a PostgreSQL server: live processes and ended ones."""
    own = Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()
    total = sum(int(field) for field in own[11:15]) / _TICKS
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
    for pid in children.split():
        try:
            total += process_cpu_s(int(pid))
        except FileNotFoundError:
            continue  # it ended meanwhile and is counted with the postmaster
    return total


def _status_mb(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {name} for process {pid}")


def wait_for_lines(path: str, count: int, *, timeout_s: float) -> None:
    """Wait until a file has at least that many lines."""
    wait_until(
        lambda: Path(path).read_bytes().count(b"\n") >= count, timeout_s=timeout_s
    )


def wait_for_empty(left: Callable[[], int], *, timeout_s: float) -> tuple[int, float]:
    """Wait until nothing is left; how much there was at the start, and the seconds.

    It looks again when about half of the time that is left has passed: every look takes
    processor time from what is measured.
    """
    started, first = time.perf_counter(), left()
    now_left = first
    while now_left > 0:
        passed_s = time.perf_counter() - started
        if passed_s > timeout_s:
            raise TimeoutError(f"{now_left} of {first} are left after {timeout_s} s")
        gone = first - now_left
        half_s = passed_s * now_left / gone / 2 if gone else 0.05
        time.sleep(min(max(half_s, 0.005), 1.0))
        now_left = left()
    return first, time.perf_counter() - started


def wait_until(
    done: Callable[[], bool], *, timeout_s: float, interval_s: float = 0.005
) -> None:
    """Poll until it is true; a benchmark that never ends is an error."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened within {timeout_s} s")
        time.sleep(interval_s)
