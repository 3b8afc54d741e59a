"""What a worker says at its start of what it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headgate_sync.errors import StoreUnavailable
from headgate_sync.registry import Registry
from headgate_sync.worker.presence import host_name
from headgate_sync.worker.startup import warn_of_a_namesake
from tests.builders import beat, steer
from tests.worker.rig import Tap, working

BEAT_MS = 10_000


@pytest.fixture
def other_pid() -> Iterator[int]:
    """A process that is alive and is not this one."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process.pid


def told(store: Any, caplog: Any) -> bool:
    caplog.clear()
    warn_of_a_namesake(store, "w")
    return "give each its own worker_id" in caplog.text


def test_a_live_worker_of_the_same_name_is_told(
    store: Any, clock: Any, caplog: Any, other_pid: int
) -> None:
    assert not told(store, caplog)
    beat(store, "another")
    assert not told(store, caplog)
    beat(store, host="elsewhere", pid=7)
    clock.advance_ms(3 * BEAT_MS)
    assert told(store, caplog)
    assert (
        "worker w has beaten 30000 ms ago in process 7 of host elsewhere" in caplog.text
    )
    beat(store, host=host_name(), pid=other_pid, status="quiet")
    assert told(store, caplog)


@pytest.mark.parametrize("status", ["restarting", "terminating"])
def test_a_predecessor_on_its_way_out_is_no_namesake(
    store: Any, caplog: Any, status: str
) -> None:
    beat(store, host="elsewhere", status=status)
    assert not told(store, caplog)


def test_a_worker_that_was_silent_for_three_beats_is_no_namesake(
    store: Any, clock: Any, caplog: Any
) -> None:
    beat(store, host="elsewhere")
    clock.advance_ms(3 * BEAT_MS + 1)
    assert not told(store, caplog)


def test_a_worker_that_was_killed_on_this_machine_is_no_namesake(
    store: Any, caplog: Any
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):  # a new one may have its number
        beat(store, host=host_name(), pid=pid)
        assert not told(store, caplog)


def test_only_a_worker_that_was_given_its_name_looks_for_others(
    store: Any, caplog: Any
) -> None:
    inspect = Tap(store.inspect)
    tap = Tap(store)
    tap.__dict__["inspect"] = inspect
    with working(tap, Registry(), worker_id=None):
        pass
    assert inspect.count("get_worker") == 0
    beat(store, host="elsewhere")
    with working(tap, Registry(), worker_id="w"):
        pass
    assert "process 7 of host elsewhere" in caplog.text
    inspect.fail("get_worker", StoreUnavailable("away"))
    with working(tap, Registry(), worker_id="w") as worker:
        assert worker.ready.is_set()
    assert "workers of the same name not looked at: away" in caplog.text
    assert steer(store).get_worker("w") is None
