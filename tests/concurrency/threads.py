"""Running calls at the same moment, and bringing home what they raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
DEADLINE_S = 120


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at once, each on its own thread; returns the answers in order.

    Whatever one raises is raised here.
    """
    gate = threading.Barrier(len(calls))

    def start(call: Callable[[], T]) -> T:
        gate.wait(DEADLINE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(start, call) for call in calls]
        return [future.result(DEADLINE_S) for future in futures]


def outcome_of(call: Callable[[], Any], *expected: type[Exception]) -> Any:
    """What a call returned, or the error of an expected class that it raised."""
    try:
        return call()
    except expected as error:
        return error
