"""Deadlines that hold whatever the store and the handlers do."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from headgate_sync.attempt import LiveAttempt
from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext
from headgate_sync.errors import StoreUnavailable
from headgate_sync.events import StuckHandler
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.registry import Registry
from headgate_sync.worker.loops import ServiceLoop
from headgate_sync.worker.watchdog import Watchdog
from tests.builders import START_MS, enqueue, envelope, job, state_of
from tests.worker.rig import PATIENCE_S, Bench, Gate, Steps, Tap, wait_for


class Watching:
    """A watchdog on stepped time over a tapped store."""

    def __init__(
        self, store: Any, registry: Registry | None = None, **config: Any
    ) -> None:
        self.steps = Steps()
        self.tap = Tap(store)
        self.bench = Bench(self.tap, registry, now_s=self.steps, **config)
        self.died: list[str] = []
        self.watchdog = Watchdog(
            self.bench.config,
            self.bench.inflight,
            self.bench.acks,
            now_s=self.steps,
            died=self.died.append,
        )

    def look(self, after_s: float = 0.0) -> float:
        """Let time pass and look; returns the seconds until the next look."""
        self.steps.advance(after_s)
        return self.watchdog.step() - self.steps()

    def start(self, attempt: LiveAttempt) -> threading.Thread:
        """Run an attempt on a thread of its own."""
        thread = threading.Thread(
            target=self.bench.run, args=(attempt,), name="handler"
        )
        thread.start()
        return thread


def test_a_time_out_sets_the_token_at_its_instant(store: Any) -> None:
    enqueue(store, "a", timeout_ms=100)
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    assert watching.look() == pytest.approx(0.1)
    watching.look(0.099)
    assert attempt.token.reason is None
    watching.look(0.001)
    assert attempt.token.reason == "timeout"


def test_the_deadline_of_a_job_ends_its_attempt_too(store: Any) -> None:
    enqueue(store, "a", deadline_ms=START_MS + 70)
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    watching.look(0.07)
    assert attempt.token.reason == "timeout"
    assert attempt.deadline_cut


def test_only_what_comes_before_the_next_look_wakes_the_watchdog(store: Any) -> None:
    enqueue(store, "a", "b", timeout_ms=60_000)
    enqueue(store, "c", timeout_ms=1_000)
    watching = Watching(store)
    attempts = {a.lease.job_id: a for a in watching.bench.admit()}
    assert watching.look() == pytest.approx(1.0)
    assert not watching.watchdog.must_wake([attempts["a"], attempts["b"]])
    assert not watching.watchdog.must_wake([attempts["c"]])
    attempts["b"].timeout_due_s = watching.steps() + 0.5
    assert watching.watchdog.must_wake([attempts["a"], attempts["b"]])


def test_a_lease_that_is_not_confirmed_in_time_stops_its_handler(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a")
    watching = Watching(store)
    watching.tap.fail("renew", *[StoreUnavailable("dropped packets")] * 99)
    (attempt,) = watching.bench.admit()
    watching.look(29.999)
    assert (attempt.token.reason, attempt.doubtful) == (None, False)
    watching.look(0.001)
    assert (attempt.token.reason, attempt.doubtful) == ("lease_expired", True)
    watching.look(1)
    assert caplog.text.count("job a (queue q): its lease was not confirmed") == 1
    assert watching.tap.count("ack_batch") == 0


def test_a_good_beat_clears_the_doubt_and_never_the_token(store: Any) -> None:
    enqueue(store, "a")
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    watching.look(30)
    watching.bench.inflight.confirm([attempt], watching.steps() + 30)
    assert not attempt.doubtful
    assert attempt.token.reason == "lease_expired"


def test_a_handler_may_go_on_after_its_lease_where_that_is_asked_for(
    store: Any,
) -> None:
    registry = Registry()
    seen: list[tuple[bool, bool]] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        watching.look(30)
        seen.append((ctx.lease_doubtful, ctx.cancelled))

    enqueue(store, "a", kind="k", payload=b"{}")
    watching = Watching(store, registry, lease_expiry="continue")
    watching.bench.run_next()
    assert seen == [(True, False)]
    assert state_of(store, "a") is State.COMPLETED


def test_what_has_not_begun_when_its_lease_is_in_doubt_is_handed_back(
    store: Any,
) -> None:
    registry = Registry()
    began: list[str] = []
    registry.task("k")(lambda: began.append("a"))
    enqueue(store, "a", kind="k", payload=b"{}")
    watching = Watching(store, registry, lease_expiry="continue")
    (attempt,) = watching.bench.admit()
    watching.look(30)
    watching.bench.run(attempt)
    assert began == []
    assert state_of(store, "a") is State.AVAILABLE


def test_a_lease_that_is_cut_short_runs_out_then(store: Any) -> None:
    enqueue(store, "a")
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    JobContext(attempt).extend_lease("1s")
    watching.look(0.999)
    assert attempt.token.reason is None
    watching.look(0.001)
    assert attempt.token.reason == "lease_expired"
    JobContext(attempt).extend_lease("1s")
    assert not attempt.doubtful


@pytest.mark.parametrize("returns", [True, False])
def test_after_a_doubtful_lease_the_store_has_the_last_word(
    store: Any, returns: bool
) -> None:
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        watching.look(30)
        assert ctx.wait(1_000)
        assert ctx.cancel_reason == "lease_expired"
        if not returns:
            ctx.check()

    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    watching = Watching(store, registry)
    watching.bench.run_next()
    row = job(store, "a")
    expected = "completed" if returns else "available"
    assert (row.state, row.attempt, row.crash_attempt) == (expected, 0, 0)


def stuck_handler(gate: Gate) -> Registry:
    registry = Registry()

    @registry.task("k")
    def blocks_for_ever() -> None:
        gate.hold()

    return registry


@pytest.mark.parametrize("deadline_ms", [0, START_MS + 100])
def test_a_job_whose_handler_ignores_its_time_out_is_given_up_but_not_its_slot(
    store: Any, caplog: Any, deadline_ms: int
) -> None:
    gate = Gate()
    fields = {"deadline_ms": deadline_ms} if deadline_ms else {"timeout_ms": 100}
    store.enqueue([envelope("a", kind="k", payload=b"{}", **fields)])
    watching = Watching(store, stuck_handler(gate), capacity=2, stuck_threshold="200ms")
    (attempt,) = watching.bench.admit()
    thread = watching.start(attempt)
    gate.wait()
    watching.look(0.1)
    assert watching.look(0.1) == pytest.approx(0.1)
    assert "stuck" not in caplog.text
    watching.look(0.1)
    expected = State.ARCHIVED if deadline_ms else State.RETRYABLE
    wait_for(lambda: state_of(store, "a") is expected, "the job is given up")
    assert "job a (queue q): stuck" in caplog.text
    assert "in blocks_for_ever" in caplog.text
    (entry,) = job(store, "a").errors
    assert entry.error == "attempt timed out after 100ms; handler still running"
    wait_for(lambda: not attempt.renewing, "the lease is dropped")
    assert watching.bench.inflight.free == 1
    watching.look(60)
    gate.open()
    thread.join(PATIENCE_S)
    assert watching.bench.inflight.free == 2
    assert watching.tap.count("ack_batch") == 1  # the late result was dropped
    assert caplog.text.count("stuck") == 1


def test_a_handler_is_struck_when_its_grace_is_over_and_no_sooner(store: Any) -> None:
    gate, registry = Gate(), Registry()

    @registry.task("k", async_cancel=True)
    def loops_for_ever() -> None:
        gate.open()
        gate.hold()
        until_s = time.monotonic() + PATIENCE_S  # only so that a failing test ends
        while time.monotonic() < until_s:
            pass

    enqueue(store, "a", kind="k", payload=b"{}", timeout_ms=100)
    watching = Watching(store, registry, cancel_grace="1s")
    (attempt,) = watching.bench.admit()
    thread = watching.start(attempt)
    gate.wait()
    assert attempt.interrupt is not None
    watching.look(0.1)
    watching.look(0.999)
    assert not attempt.interrupt.struck
    watching.look(0.001)
    thread.join(PATIENCE_S)
    assert state_of(store, "a") is State.RETRYABLE


def test_a_stuck_job_waits_as_long_as_its_own_handler_asks_for(store: Any) -> None:
    gate, registry = Gate(), Registry()

    @registry.task("k", retry=lambda info: timedelta(milliseconds=7_000))
    def blocks_for_ever() -> None:
        gate.hold()

    store.enqueue([envelope("a", kind="k", payload=b"{}", timeout_ms=100)])
    watching = Watching(store, registry, stuck_threshold="200ms", retry=lambda i: "1h")
    (attempt,) = watching.bench.admit()
    thread = watching.start(attempt)
    gate.wait()
    watching.look(0.1)
    watching.look(0.2)
    wait_for(lambda: state_of(store, "a") is State.RETRYABLE, "the job is given up")
    assert job(store, "a").scheduled_at_ms == START_MS + 7_000
    gate.open()
    thread.join(PATIENCE_S)


def test_a_stuck_job_that_is_being_committed_is_left_to_its_commit(store: Any) -> None:
    """Its row is locked by that; an ack would hold up those that share its call."""
    enqueue(store, "a", timeout_ms=100)
    watching = Watching(store, stuck_threshold="200ms")
    (attempt,) = watching.bench.admit()
    attempt.completing = True
    watching.look(0.1)
    watching.look(0.2)
    assert attempt.stuck_reported
    assert not attempt.settled
    assert watching.tap.count("ack_batch") == 0


def test_a_stuck_job_is_held_where_that_is_asked_for(store: Any, caplog: Any) -> None:
    gate = Gate()
    store.enqueue([envelope("a", kind="k", payload=b"{}", timeout_ms=100)])
    watching = Watching(
        store, stuck_handler(gate), on_stuck="hold", stuck_threshold="200ms"
    )
    (attempt,) = watching.bench.admit()
    thread = watching.start(attempt)
    gate.wait()
    watching.look(0.1)
    watching.look(0.2)
    assert "stuck" in caplog.text
    assert attempt.renewing
    gate.open()
    thread.join(PATIENCE_S)
    assert state_of(store, "a") is State.COMPLETED


def test_a_handler_that_reacts_in_time_is_not_stuck(store: Any, caplog: Any) -> None:
    enqueue(store, "a", timeout_ms=100)
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    watching.look(0.1)
    watching.look(5)
    watching.bench.inflight.finish(attempt, acks=False)
    watching.look(30)
    assert "stuck" not in caplog.text


def test_a_handler_that_ignores_a_lost_lease_is_reported(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a")
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    watching.bench.inflight.lose([attempt])
    watching.look(9.9)
    assert "stuck" not in caplog.text
    watching.look(0.1)
    assert "stuck, its handler ignores lease_lost" in caplog.text
    assert watching.tap.count("ack_batch") == 0
    assert watching.bench.inflight.free == watching.bench.config.capacity - 1


@pytest.mark.parametrize(
    ("reason", "told_as"),
    [(CancelReason.TIMEOUT, "timeout"), (CancelReason.LEASE_LOST, "cancellation")],
)
def test_a_stuck_handler_is_told_once_with_its_stack_on_a_thread_of_its_own(
    store: Any, reason: CancelReason, told_as: str
) -> None:
    gate, registry = Gate(), Registry()
    told: list[tuple[StuckHandler, str]] = []

    def hangs_here() -> None:
        gate.hold()

    registry.task("k")(hangs_here)

    def stuck(event: StuckHandler) -> None:
        told.append((event, threading.current_thread().name))

    store.enqueue([envelope("a", kind="k", payload=b"{}", headers={"h": "v"})])
    watching = Watching(store, registry, stuck_handler=stuck)
    (attempt,) = watching.bench.admit()
    thread = watching.start(attempt)
    gate.wait()
    attempt.cancel(reason)
    watching.look(9.999)
    assert told == []
    watching.look(0.001)
    wait_for(lambda: bool(told), "it is told")
    watching.look(60)
    gate.open()
    thread.join(PATIENCE_S)
    watching.look(60)
    ((event, thread_name),) = told
    assert thread_name == "headgate-stuck"
    assert (event.reason, event.threshold_ms) == (told_as, 10_000)
    assert (event.envelope.id, event.envelope.headers) == ("a", {"h": "v"})
    assert "hangs_here" in event.stack


def test_a_stuck_job_is_given_up_although_no_thread_can_be_started(
    store: Any, monkeypatch: Any, caplog: Any
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[StuckHandler] = []
    enqueue(store, "a", "b", timeout_ms=100)
    watching = Watching(store, stuck_handler=told.append, capacity=2)
    stuck, later = watching.bench.admit()
    watching.look(0.1)
    watching.bench.inflight.finish(later, acks=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        watching.look(10)
    assert state_of(store, stuck.lease.job_id) is State.RETRYABLE
    assert told == []
    assert "the stuck handler is left out: can't start new thread" in caplog.text
    # The acks of others do not wait for a flight that never takes off.
    assert watching.bench.acks.submit(
        later, Ack(lease=later.lease, outcome=Outcome.SUCCESS)
    )
    watching.bench.acks.fly()
    assert state_of(store, later.lease.job_id) is State.COMPLETED


def test_a_handler_that_reacts_or_was_never_told_is_not_stuck(store: Any) -> None:
    told: list[StuckHandler] = []
    enqueue(store, "obeys", "works")
    watching = Watching(store, stuck_handler=told.append)
    obeys, _works = watching.bench.admit()
    obeys.cancel(CancelReason.TIMEOUT)
    watching.look(5)
    watching.bench.inflight.finish(obeys, acks=False)
    watching.look(7_200)
    assert told == []


def test_a_stuck_handler_of_the_users_that_fails_is_logged(
    store: Any, caplog: Any
) -> None:
    called = threading.Event()

    def fails(event: StuckHandler) -> None:
        called.set()
        raise LookupError("broken")

    enqueue(store, "a")
    watching = Watching(store, stuck_handler=fails)
    (attempt,) = watching.bench.admit()
    attempt.cancel(CancelReason.LEASE_LOST)
    watching.look(10)
    assert called.wait(PATIENCE_S)
    wait_for(lambda: "LookupError: broken" in caplog.text, "it is logged")
    assert "job a (queue q): stuck handler" in caplog.text


def test_a_healthy_job_may_run_for_hours(store: Any, caplog: Any) -> None:
    enqueue(store, "a")
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    for _ in range(720):
        watching.look(10)
        watching.bench.inflight.confirm([attempt], watching.steps() + 30)
    assert attempt.token.reason is None
    assert caplog.text == ""


def test_a_slow_ack_is_not_a_stuck_handler(store: Any, caplog: Any) -> None:
    enqueue(store, "a", timeout_ms=100)
    watching = Watching(store)
    (attempt,) = watching.bench.admit()
    watching.bench.inflight.finish(attempt, acks=True)
    watching.look(300)
    assert attempt.token.reason is None
    assert caplog.text == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_whose_thread_has_ended_is_reported(
    store: Any, monkeypatch: Any
) -> None:
    watching = Watching(store)

    def fail(*_: object) -> float:
        raise SystemExit

    loop = ServiceLoop("duties", fail, died=lambda name: None)
    monkeypatch.setattr(
        loop.guard, "failed", fail
    )  # the last thing that could catch it
    watching.watchdog.watch([loop])
    watching.look()
    assert watching.died == []  # not started yet
    loop.start()
    assert loop.join(PATIENCE_S)
    watching.look()
    assert watching.died == ["duties"]


def test_a_loop_that_was_stopped_is_not_missed(store: Any) -> None:
    watching = Watching(store)
    loop = ServiceLoop("duties", lambda: 0.0, died=lambda name: None)
    watching.watchdog.watch([loop])
    loop.start()
    loop.stop()
    assert loop.join(PATIENCE_S)
    watching.look()
    assert watching.died == []
