"""Asking one attempt to stop."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headgate_sync import cancel
from headgate_sync.cancel import CancelReason, CancelToken
from headgate_sync.errors import InvalidRequest
from tests.worker.rig import PATIENCE_S, Gate, wait_for


def test_the_first_reason_stands() -> None:
    token = CancelToken()
    assert token.set(CancelReason.TIMEOUT)
    assert not token.set(CancelReason.SHUTDOWN)
    assert token.reason is CancelReason.TIMEOUT


def test_a_waiter_wakes_when_the_token_is_set() -> None:
    token = CancelToken()
    woke: list[bool] = []
    thread = threading.Thread(target=lambda: woke.append(token.wait(PATIENCE_S)))
    thread.start()
    token.set(CancelReason.SHUTDOWN)
    thread.join(PATIENCE_S)
    assert woke == [True]
    assert token.wait(PATIENCE_S)
    assert not CancelToken().wait(0)


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_a_wait_longer_than_a_system_can_wait_ends_with_the_token(
    seconds: float,
) -> None:
    token = CancelToken()

    def end() -> None:
        wait_for(lambda: token._event is not None, "somebody waits")
        token.set(CancelReason.SHUTDOWN)

    threading.Thread(target=end).start()
    assert token.wait(seconds)


@pytest.mark.parametrize("seconds", ["5s", None, float("nan")])
def test_what_is_no_number_of_seconds_is_no_wait(seconds: Any) -> None:
    token = CancelToken()
    with pytest.raises(InvalidRequest, match="seconds must be a number"):
        token.wait(seconds)
    token.set(CancelReason.SHUTDOWN)
    with pytest.raises(InvalidRequest, match="seconds must be a number"):
        token.wait(seconds)


@pytest.mark.parametrize("failing", [1, 2])
def test_an_attempt_ends_even_where_no_thread_can_call_its_callbacks(
    monkeypatch: Any, caplog: Any, failing: int
) -> None:
    token, started, ran = CancelToken(), [0], threading.Event()
    token.on_cancel(ran.set)
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "headgate-cancel":
            started[0] += 1
            if started[0] == failing:
                raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert token.set(CancelReason.TIMEOUT)
        closing = threading.Thread(target=token.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    # Without its first thread the callbacks are left out, and that is said.
    assert ran.is_set() is (failing == 2)
    assert ("left out" in caplog.text) is (failing == 1)


class Nasty:
    """A callback of which nothing works, its name included."""

    def __call__(self) -> None:
        raise SystemExit

    def __repr__(self) -> str:
        raise KeyboardInterrupt


def test_a_callback_of_which_nothing_works_stops_no_other(caplog: Any) -> None:
    token, ran = CancelToken(), threading.Event()
    token.on_cancel(ran.set)
    token.on_cancel(Nasty())
    token.set(CancelReason.SHUTDOWN)
    token.close()
    assert ran.is_set()
    assert "cancel callback Nasty failed" in caplog.text


def test_callbacks_run_newest_first_and_off_the_thread_that_sets() -> None:
    token = CancelToken()
    ran: list[tuple[str, str]] = []
    for name in ("old", "new"):
        token.on_cancel(
            lambda name=name: ran.append((name, threading.current_thread().name))
        )
    token.set(CancelReason.LEASE_LOST)
    token.close()
    assert ran == [("new", "headgate-cancel"), ("old", "headgate-cancel")]


def test_a_callback_that_comes_late_runs_at_once() -> None:
    token = CancelToken()
    token.set(CancelReason.TIMEOUT)
    ran: list[str] = []
    token.on_cancel(lambda: ran.append(threading.current_thread().name))
    assert ran == [threading.current_thread().name]


def test_a_callback_that_fails_does_not_stop_the_others(caplog: Any) -> None:
    token = CancelToken()
    ran: list[str] = []
    token.on_cancel(lambda: ran.append("second"))
    token.on_cancel(lambda: 1 / 0)
    token.set(CancelReason.TIMEOUT)
    token.close()
    assert ran == ["second"]
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_that_blocks_is_named_and_left_behind(
    monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(cancel, "CALLBACK_PATIENCE_S", 0.01)
    gate = Gate()
    token = CancelToken()
    ran: list[str] = []

    def blocks() -> None:
        gate.hold()

    token.on_cancel(lambda: ran.append("second"))
    token.on_cancel(blocks)
    token.set(CancelReason.TIMEOUT)
    token.close()
    assert ran == ["second"]
    assert "blocks" in caplog.text
    gate.open()


def test_nothing_reaches_an_attempt_that_has_ended() -> None:
    token = CancelToken()
    ran: list[str] = []
    token.on_cancel(lambda: ran.append("late"))
    assert token.close() is None
    assert not token.set(CancelReason.TIMEOUT)
    assert token.reason is None
    assert ran == []


def test_an_end_waits_for_a_callback_that_is_under_way() -> None:
    """Else it could interrupt the next job that uses the same connection."""
    gate, token = Gate(), CancelToken()
    token.on_cancel(gate.hold)
    token.set(CancelReason.TIMEOUT)
    gate.wait()
    closed = threading.Event()
    thread = threading.Thread(target=lambda: (token.close(), closed.set()))
    thread.start()
    assert not closed.wait(0.05)
    gate.open()
    thread.join(PATIENCE_S)
    assert closed.is_set()


@pytest.mark.parametrize("round_number", range(3))
def test_a_cancellation_at_the_moment_of_the_return_hits_this_attempt_or_none(
    round_number: int,
) -> None:
    for _ in range(300):
        token = CancelToken()
        ran: list[int] = []
        token.on_cancel(lambda ran=ran: ran.append(1))
        setter = threading.Thread(target=token.set, args=(CancelReason.TIMEOUT,))
        setter.start()
        reason = token.close()
        after_close = len(ran)
        setter.join(PATIENCE_S)
        assert token.reason is reason
        assert len(ran) == after_close == (reason is not None)
