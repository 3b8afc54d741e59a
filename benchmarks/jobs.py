"""The application whose jobs the benchmarks run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from headgate_sync.app import Headgate

QUEUE = "bench"
STAMPS = "HEADGATE_BENCH_STAMPS"

hg = Headgate.from_env()


@hg.task("bench:noop", queue=QUEUE)
def noop(number: int = 0) -> None:
    """Do nothing: what remains is the queue's own cost."""


@hg.task("bench:stamp", queue=QUEUE)
def stamp(number: int) -> None:
    """Leave the instant of the start, on the machine's monotonic clock."""
    started = time.monotonic_ns()
    with Path(os.environ[STAMPS]).open("a") as stamps:
        stamps.write(f"{number} {started}\n")


@hg.task("bench:hold", queue=QUEUE, max_attempts=5)
def hold(number: int) -> None:
    """Leave a stamp; the first run then stays until the process is killed."""
    stamp.fn(number)
    if len(Path(os.environ[STAMPS]).read_text().splitlines()) == 1:
        time.sleep(3600)


@hg.task("bench:fail", queue=QUEUE)
def fail(number: int = 0) -> None:
    """Fail, with an exception that keeps its cause."""
    try:
        raise LookupError("the inner one")
    except LookupError as error:
        raise ValueError("the outer one") from error
