"""Service threads that go on, or end the worker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headgate_sync.errors import StoreClosed, StoreConflict, StoreUnavailable
from headgate_sync.worker import loops
from headgate_sync.worker.loops import LoopGuard, ServiceLoop
from tests.worker.rig import PATIENCE_S, Gate


def test_pauses_after_failures_double_up_to_five_seconds() -> None:
    guard = LoopGuard("heartbeat")
    pauses = [guard.failed(ValueError("x"), 0.0) for _ in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    guard.good()
    assert guard.failed(ValueError("x"), 0.0) == 0.1


def test_a_loop_is_dead_after_twenty_failures_in_a_row() -> None:
    guard = LoopGuard("heartbeat")
    for _ in range(19):
        guard.failed(ValueError("x"), 0.0)
    guard.good()
    for _ in range(19):
        guard.failed(ValueError("x"), 0.0)
    assert not guard.dead
    guard.failed(ValueError("y"), 0.0)
    assert guard.dead
    health = guard.health(running=True)
    assert (health.alive, health.rounds, health.failures) == (False, 1, 39)
    assert (health.consecutive_failures, health.last_error) == (20, "ValueError: y")


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreConflict("busy")])
def test_an_outage_is_no_failure_however_long_it_takes(error: Exception) -> None:
    guard = LoopGuard("heartbeat")
    pauses = [guard.failed(error, 0.0) for _ in range(1_000)]
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses[-1] == 5.0
    assert not guard.dead
    assert guard.health(running=True).failures == 0


def test_a_store_that_the_program_has_closed_is_waited_for_by_nobody() -> None:
    guard = LoopGuard("heartbeat")
    guard.failed(StoreClosed("closed"), 0.0)
    assert guard.dead
    assert guard.health(running=True).failures == 1


def test_a_failure_is_logged_with_its_traceback_and_then_once_a_minute(
    caplog: Any,
) -> None:
    guard = LoopGuard("duties")
    for second in range(10):
        guard.failed(ValueError("first"), float(second))
        guard.good()
    assert caplog.text.count("duties failed") == 1
    assert "ValueError: first" in caplog.text
    guard.failed(ValueError("later"), 60.0)
    assert "duties failed (10 times since the last report)" in caplog.text


def test_a_step_is_due_again_when_it_says_or_when_it_is_nudged() -> None:
    gate = [Gate(), Gate(), Gate()]
    reached: list[int] = []

    def step() -> float:
        reached.append(len(reached))
        if len(reached) <= len(gate):
            gate[len(reached) - 1].hold()
        return float("inf")

    loop = ServiceLoop("watchdog", step, died=lambda name: None)
    loop.start()
    gate[0].wait()
    loop.nudge()  # while the step runs: not lost
    gate[0].open()
    gate[1].wait()
    gate[1].open()
    loop.nudge()
    gate[2].wait()
    loop.stop()
    gate[2].open()
    assert loop.join(PATIENCE_S)
    assert reached == [0, 1, 2]


def test_a_loop_survives_whatever_a_step_raises(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)
    errors: list[BaseException] = [
        ValueError("x"),
        SystemExit(1),
        StoreUnavailable("y"),
    ]
    went_on = threading.Event()

    def step() -> float:
        if errors:
            raise errors.pop(0)
        went_on.set()
        return float("inf")

    loop = ServiceLoop("heartbeat", step, died=lambda name: None)
    loop.start()
    assert went_on.wait(PATIENCE_S)
    health = loop.health()
    assert (health.alive, health.failures) == (True, 2)
    loop.stop()
    assert loop.join(PATIENCE_S)


def test_a_loop_that_cannot_be_revived_says_so_and_ends(
    monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(loops, "LONGEST_PAUSE_S", 0.0001)
    died: list[str] = []

    def step() -> float:
        raise RuntimeError("for ever")

    loop = ServiceLoop("duties", step, died=died.append)
    loop.start()
    assert loop.join(PATIENCE_S)
    assert died == ["duties"]
    assert not loop.health().alive


def test_a_thread_that_begins_or_is_stopped_just_now_is_not_lost() -> None:
    """Whoever looks may be interrupted between one question and the next."""

    class Thread:
        ident = 1

        def start(self) -> None:
            looks.append(loop.ended)

        def is_alive(self) -> bool:
            loop.stop()
            return False

    looks: list[bool] = []
    loop = ServiceLoop("duties", lambda: 0.0, died=lambda name: None)
    loop._thread = Thread()  # type: ignore[assignment]
    loop.start()
    looks.append(loop.ended)
    assert looks == [False, False]


def test_a_stop_does_not_wait_for_the_pause_after_a_failure(monkeypatch: Any) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 1_000.0)
    monkeypatch.setattr(loops, "LONGEST_PAUSE_S", 1_000.0)
    failed = threading.Event()

    def step() -> float:
        failed.set()
        raise StoreUnavailable("away")

    loop = ServiceLoop("notify", step, died=lambda name: None)
    loop.start()
    assert failed.wait(PATIENCE_S)
    loop.nudge()
    loop.stop()
    assert loop.join(PATIENCE_S)
