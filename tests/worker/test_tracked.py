"""Threads of an attempt: they end with it, and fail it."""

from __future__ import annotations

import contextvars
import decimal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext, current_job
from headgate_sync.errors import (
    AttemptCancelled,
    InvalidRequest,
    LeaseLost,
    TrackedClosed,
)
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.tracked import MAX_TRACKED
from tests.builders import envelope, job, state_of, steer
from tests.worker.rig import PATIENCE_S, Bench, Gate, Tap, wait_for

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who")


def put(store: Any, id: str = "a", **fields: Any) -> None:
    store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def running(store: Any, handler: Callable[..., Any], **config: Any) -> Bench:
    registry = Registry()
    registry.task("k")(handler)
    return Bench(store, registry, **{"now_s": time.monotonic, **config})


def first_line(store: Any, id: str = "a") -> str:
    return (job(store, id).errors[-1].error or "").partition("\n")[0]


def test_the_ack_waits_for_a_thread_that_outlives_the_handler(store: Any) -> None:
    gate = Gate()
    tap = Tap(store)

    def handler(ctx: JobContext) -> None:
        ctx.spawn(gate.hold)

    put(store)
    bench = running(tap, handler)
    thread = threading.Thread(target=bench.run_next)
    thread.start()
    gate.wait()
    assert tap.count("ack_batch") == 0
    assert len(bench.inflight) == 1
    gate.open()
    thread.join(PATIENCE_S)
    assert state_of(store, "a") is State.COMPLETED


def test_a_thread_gets_arguments_and_gives_its_value(store: Any) -> None:
    values: list[Any] = []

    def handler(ctx: JobContext) -> None:
        values.append(ctx.spawn(divmod, 7, 2).result(10))
        values.append(ctx.spawn(int, "z", base=36).result(10))

    put(store)
    running(store, handler).run_next()
    assert values == [(3, 1), 35]


def test_a_thread_that_raises_fails_the_attempt_and_stops_the_others(
    store: Any,
) -> None:
    stopped: list[str] = []

    def handler(ctx: JobContext) -> None:
        def sibling() -> None:
            if ctx.wait(PATIENCE_S):
                stopped.append("sibling")

        def bad() -> None:
            raise ValueError("the first")

        ctx.spawn(sibling)
        ctx.spawn(bad)
        if ctx.wait(PATIENCE_S):
            stopped.append("handler")
        assert ctx.cancelled
        assert ctx.cancel_reason is None
        with pytest.raises(AttemptCancelled, match="a tracked thread failed"):
            ctx.check()

    put(store)
    running(store, handler).run_next()
    assert sorted(stopped) == ["handler", "sibling"]
    assert state_of(store, "a") is State.RETRYABLE
    assert first_line(store) == "ValueError: the first"


def test_a_thread_whose_function_has_not_run_fails_the_attempt(store: Any) -> None:
    async def asynchronous() -> None:
        raise AssertionError

    def handler(ctx: JobContext) -> None:
        ctx.spawn(asynchronous)

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert "spawn: the function gave a coroutine" in first_line(store)


def test_a_thread_that_exits_is_a_panic_of_the_attempt(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.spawn(exit, 3)

    put(store)
    running(store, handler).run_next()
    assert first_line(store) == "panic in tracked task: SystemExit: 3"
    assert job(store, "a").attempt == 1


@pytest.mark.parametrize("reason", list(CancelReason))
def test_threads_see_that_their_attempt_is_cancelled(
    store: Any, reason: CancelReason
) -> None:
    seen: list[str | None] = []

    def handler(ctx: JobContext) -> None:
        def child() -> None:
            assert ctx.wait(PATIENCE_S)
            seen.append(ctx.cancel_reason)
            ctx.check()

        ctx.spawn(child)
        attempt.cancel(reason)
        ctx.check()

    tap = Tap(store)
    put(store, timeout_ms=60_000)
    bench = running(tap, handler)
    (attempt,) = bench.admit()
    bench.run(attempt)
    assert seen == [reason.value]
    assert tap.count("ack_batch") == (0 if reason is CancelReason.LEASE_LOST else 1)


def test_a_handler_that_fails_stops_its_threads_and_its_error_counts(
    store: Any,
) -> None:
    def handler(ctx: JobContext) -> None:
        def child() -> None:
            assert ctx.wait(PATIENCE_S)
            raise KeyError("later")

        ctx.spawn(child)
        raise ValueError("handler")

    put(store)
    running(store, handler).run_next()
    assert first_line(store) == "ValueError: handler"


def test_no_thread_is_started_after_the_handler_returned(store: Any) -> None:
    kept: list[JobContext] = []
    refusals: list[BaseException] = []
    gate = Gate()

    def handler(ctx: JobContext) -> None:
        def late() -> None:
            gate.hold()
            try:
                ctx.spawn(print)
            except TrackedClosed as error:
                refusals.append(error)

        kept.append(ctx)
        ctx.spawn(late)

    put(store)
    bench = running(store, handler)
    thread = threading.Thread(target=bench.run_next)
    thread.start()
    gate.wait()
    wait_for(lambda: kept[0]._returned, "the handler has returned")
    gate.open()
    thread.join(PATIENCE_S)
    assert len(refusals) == 1
    with pytest.raises(TrackedClosed, match="job a: its handler has returned"):
        kept[0].spawn(print)


def test_a_handler_that_never_spawned_cannot_begin_afterwards(store: Any) -> None:
    kept: list[JobContext] = []

    def handler(ctx: JobContext) -> None:
        kept.append(ctx)

    put(store)
    running(store, handler).run_next()
    with pytest.raises(TrackedClosed):
        kept[0].spawn(print)


def test_so_many_threads_run_at_a_time(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        gate = Gate()
        held = [ctx.spawn(gate.hold) for _ in range(MAX_TRACKED)]
        gate.wait(MAX_TRACKED)
        with pytest.raises(InvalidRequest, match="32 threads"):
            ctx.spawn(print)
        gate.open()
        assert [each.result(10) for each in held] == [None] * MAX_TRACKED
        for number in range(2 * MAX_TRACKED):
            assert ctx.spawn(int, number).result(10) == number

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.COMPLETED


def test_a_thread_that_does_not_stop_is_left_behind_after_the_threshold(
    store: Any, caplog: Any
) -> None:
    gate = Gate()

    def handler(ctx: JobContext) -> None:
        ctx.spawn(gate.hold)
        gate.wait()
        raise ValueError("no")

    put(store)
    running(store, handler, stuck_threshold="50ms").run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert "tracked threads do not stop" in caplog.text
    gate.open()


def test_a_threshold_longer_than_a_system_can_wait_waits_for_the_thread(
    store: Any,
) -> None:
    started = threading.Event()

    def ends(token: Any) -> None:
        started.set()
        wait_for(lambda: token.stopped, "the handler has failed")
        threading.Event().wait(0.1)  # somebody waits for this thread by now

    def handler(ctx: JobContext) -> None:
        ctx.spawn(ends, ctx._attempt.token)
        assert started.wait(PATIENCE_S)
        raise ValueError("its own")

    put(store)
    running(store, handler, stuck_threshold="365000d").run_next()
    assert first_line(store) == "ValueError: its own"


def test_what_a_thread_sets_stays_in_it(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        WHO.set("handler")

        def child() -> str:
            assert current_job() is ctx
            before = WHO.get()
            WHO.set("child")
            decimal.getcontext().prec = 3
            return before

        prec = decimal.getcontext().prec
        assert ctx.spawn(child).result(10) == "handler"
        assert WHO.get() == "handler"
        assert decimal.getcontext().prec == prec

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.COMPLETED


def test_a_thread_of_a_lost_attempt_writes_nothing(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        steer(store).operator_cancel("a")

        def child() -> None:
            with pytest.raises(LeaseLost):
                ctx.report_progress(1, 2)

        ctx.spawn(child).result(10)

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.CANCELLED


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (CancelReason.TIMEOUT, State.RETRYABLE),
        (CancelReason.SHUTDOWN, State.AVAILABLE),
        (CancelReason.LEASE_EXPIRED, State.AVAILABLE),
        (CancelReason.LEASE_LOST, State.RUNNING),
    ],
)
@pytest.mark.parametrize("obeys", [True, False])
def test_work_that_a_thread_did_not_finish_is_not_done_though_its_handler_returned(
    store: Any, reason: CancelReason, state: State, obeys: bool
) -> None:
    gate = Gate()

    def handler(ctx: JobContext) -> None:
        def child() -> None:
            ctx._attempt.cancel(reason)
            if obeys:
                ctx.check()
            gate.hold()

        ctx.spawn(child)

    put(store, timeout_ms=60_000)
    running(store, handler, stuck_threshold="50ms").run_next()
    assert state_of(store, "a") is state
    gate.open()
