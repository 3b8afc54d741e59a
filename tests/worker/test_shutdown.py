"""How a worker ends: in order, in time, and with the right status."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.policy import Poll
from headgate_sync.registry import Registry
from headgate_sync.worker import ExitStatus, bell
from headgate_sync.worker.bell import Bell
from headgate_sync.worker.shutdown import Drain, exit_status
from tests.builders import (
    enqueue,
    envelope,
    job,
    set_rate_limit,
    state_of,
    steer,
)
from tests.scenarios.gate import tokens
from tests.worker.rig import PATIENCE_S, Bench, Gate, Tap, wait_for, working


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def stopping(worker: Any) -> threading.Thread:
    """Stop the worker on a thread of its own, which ends with it."""
    thread = threading.Thread(target=lambda: worker.stop(wait=True))
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("released", "abandoned", "died", "code"),
    [(0, 0, False, 0), (1, 0, False, 10), (1, 1, False, 11), (0, 1, False, 11),
     (1, 1, True, 13), (0, 0, True, 13)],
)  # fmt: skip
def test_the_highest_exit_code_that_applies_wins(
    released: int, abandoned: int, died: bool, code: int
) -> None:
    status = exit_status(released=released, abandoned=abandoned, loop_died=died)
    assert status == ExitStatus(code, released, abandoned)


def test_an_idle_worker_stops_clean(store: Any) -> None:
    before = set(threading.enumerate())
    with working(store, Registry()) as worker:
        assert len(set(threading.enumerate()) - before) >= 7
    assert worker.exit_status == ExitStatus(0, 0, 0)
    assert set(threading.enumerate()) <= before


def test_a_running_handler_may_finish_and_nothing_more_is_taken(store: Any) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(tap, registry) as worker:
        gate.wait()
        thread = stopping(worker)
        wait_for(lambda: worker.health().status == "terminating", "it drains")
        asked = tap.count("admit")
        put(store, "b")
        gate.open()
        thread.join(PATIENCE_S)
    assert worker.exit_status == ExitStatus(0, 0, 0)
    assert state_of(store, "a") is State.COMPLETED
    assert state_of(store, "b") is State.AVAILABLE
    assert tap.count("admit") == asked


def test_a_handler_that_reacts_to_the_end_hands_its_job_back_uncounted(
    store: Any,
) -> None:
    started, registry = threading.Event(), Registry()

    @registry.task("k")
    def loops(ctx: JobContext) -> None:
        started.set()
        while not ctx.wait(1_000):
            pass
        ctx.check()

    put(store, "a")
    with working(store, registry, shutdown_timeout="50ms") as worker:
        assert started.wait(PATIENCE_S)
    assert worker.exit_status == ExitStatus(10, 1, 0)
    row = job(store, "a")
    assert (row.state, row.attempt, row.crash_attempt) == ("available", 0, 0)
    assert row.errors == ()


def test_a_handler_that_ends_in_its_last_moment_keeps_its_outcome(store: Any) -> None:
    started, registry = threading.Event(), Registry()

    @registry.task("k")
    def reacts(ctx: JobContext) -> None:
        started.set()
        ctx.wait(1_000)

    put(store, "a")
    with working(store, registry, shutdown_timeout="50ms") as worker:
        assert started.wait(PATIENCE_S)
    assert worker.exit_status == ExitStatus(0, 0, 0)
    assert state_of(store, "a") is State.COMPLETED


def test_a_handler_that_ignores_the_end_loses_its_job_and_its_late_result(
    store: Any, caplog: Any
) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    before = set(threading.enumerate())
    began_s = time.monotonic()
    with working(tap, registry, shutdown_timeout="50ms", cancel_grace="50ms") as worker:
        gate.wait()
    assert worker.exit_status == ExitStatus(11, 1, 1)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    row = job(store, "a")
    assert (row.state, row.attempt, row.crash_attempt) == ("available", 0, 0)
    sent = tap.count("ack_batch")
    assert "job a (queue q): its handler did not return" in caplog.text
    gate.open()
    wait_for(lambda: set(threading.enumerate()) <= before, "the thread ends")
    assert tap.count("ack_batch") == sent
    assert state_of(store, "a") is State.AVAILABLE


def test_what_is_being_committed_at_the_end_is_not_handed_back(store: Any) -> None:
    """Its row is locked by that, which would hold up all the others."""
    bench, ringing = Bench(Tap(store)), Bell()
    enqueue(store, "commits", "runs")
    attempts = {attempt.lease.job_id: attempt for attempt in bench.admit()}
    attempts["commits"].completing = True
    drain = Drain(
        bench.store,
        bench.inflight,
        bench.acks,
        ringing,
        now_s=bench.now_s,
        hurried=lambda: True,
    )
    released, left = drain.run(timeout_ms=0, grace_ms=0)
    assert (released, len(left)) == (1, 2)
    assert state_of(store, "runs") is State.AVAILABLE
    assert state_of(store, "commits") is State.RUNNING


def test_a_drain_limit_of_zero_hands_everything_back_in_one_call(store: Any) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, *"abcd")
    with working(tap, registry, shutdown_timeout="0s", cancel_grace="0s") as worker:
        gate.wait(4)
    assert worker.exit_status == ExitStatus(11, 4, 4)
    assert [len(acks) for acks in tap.given("ack_batch")] == [4]
    assert {state_of(store, id) for id in "abcd"} == {State.AVAILABLE}
    gate.open()


def test_leases_are_renewed_until_the_last_handler_has_ended(
    store: Any, clock: Any
) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(tap, registry, lease="900ms", run_duties=False) as worker:
        gate.wait()
        thread = stopping(worker)
        wait_for(lambda: worker.health().status == "terminating", "it drains")
        for _ in range(8):
            beats = tap.count("renew")
            wait_for(lambda beats=beats: tap.count("renew") > beats, "a further beat")
            # Twice that is below the lease, and eight times that above: the counted
            # beat may still be on its way.
            clock.advance_ms(15)
            assert store.reclaim_expired(10) == []
        gate.open()
        thread.join(PATIENCE_S)
    row = job(store, "a")
    assert (row.state, row.attempt, row.crash_attempt, row.fence) == (
        "completed",
        0,
        0,
        1,
    )


def test_an_operators_cancel_reaches_a_handler_of_a_draining_worker(
    store: Any,
) -> None:
    started, registry = threading.Event(), Registry()
    reasons: list[str | None] = []

    @registry.task("k")
    def waits(ctx: JobContext) -> None:
        started.set()
        ctx.wait(PATIENCE_S)
        reasons.append(ctx.cancel_reason)

    put(store, "a")
    with working(store, registry, lease="600ms", shutdown_timeout="20s") as worker:
        assert started.wait(PATIENCE_S)
        thread = stopping(worker)
        wait_for(lambda: worker.health().status == "terminating", "it drains")
        steer(store).operator_cancel("a")
        thread.join(PATIENCE_S)
    assert reasons == ["lease_lost"]
    assert state_of(store, "a") is State.CANCELLED


def test_everything_ends_in_order(store: Any) -> None:
    """Duties go to others at once; leases are renewed as long as a handler runs."""
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(tap, registry, lease="900ms", duty_interval="30ms") as worker:
        gate.wait()
        wait_for(lambda: bool(worker.health().duties), "duties are held")
        held = len(worker.health().duties)
        thread = stopping(worker)
        wait_for(lambda: tap.count("release_duty") == held, "duties are given up")
        asked = tap.count("admit")
        renewed, ticked = tap.count("renew"), tap.count("duty_tick")
        wait_for(lambda: tap.count("renew") > renewed + 2, "leases are renewed")
        (row,) = steer(store).list_workers()
        assert (row.status, row.duties_active) == ("terminating", False)
        gate.open()
        thread.join(PATIENCE_S)
    last = {name: at for at, name in enumerate(tap.calls)}
    assert last["admit"] < last["release_duty"] < last["ack_batch"]
    assert (tap.count("admit"), tap.count("duty_tick")) == (asked, ticked)
    assert tap.count("release_duty") == held
    assert steer(store).list_workers() == []


def test_a_release_is_tried_until_its_window_ends(store: Any, caplog: Any) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    tap.fail("ack_batch", StoreUnavailable("away"), StoreUnavailable("away"))
    with working(tap, registry, shutdown_timeout="600ms", cancel_grace="0s") as worker:
        gate.wait()
    assert tap.count("ack_batch") == 3
    assert worker.exit_status == ExitStatus(11, 1, 1)
    assert state_of(store, "a") is State.AVAILABLE
    gate.open()


def test_a_store_that_stays_away_cannot_hold_the_end_up(
    store: Any, caplog: Any
) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a", "b")

    def away(real: Any, *args: Any, **keywords: Any) -> Any:
        raise StoreUnavailable("away")

    began_s = time.monotonic()
    with working(tap, registry, shutdown_timeout="300ms", cancel_grace="0s") as worker:
        gate.wait(2)
        for name in ("ack_batch", "renew", "duty_tick", "release_duty", "admit"):
            tap.around[name] = away
    assert worker.exit_status == ExitStatus(11, 0, 2)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert "2 running jobs could not be handed back" in caplog.text
    assert state_of(store, "a") is State.RUNNING
    gate.open()


def test_an_ack_on_its_way_gets_the_window_too(store: Any) -> None:
    registry, tap, failed = Registry(), Tap(store), threading.Event()
    registry.task("k")(lambda: None)
    left = [True] * 4

    def away(real: Any, acks: Any) -> Any:
        failed.set()
        if left:
            left.pop()
            raise StoreUnavailable("away")
        return real(acks)

    tap.around["ack_batch"] = away
    put(store, "a")
    with working(tap, registry, shutdown_timeout="3s", cancel_grace="0s") as worker:
        assert failed.wait(PATIENCE_S)
    assert worker.exit_status == ExitStatus(0, 0, 0)
    assert state_of(store, "a") is State.COMPLETED


def test_a_lost_job_is_not_handed_back(store: Any) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    started, told = threading.Event(), threading.Event()

    @registry.task("k")
    def ignores(ctx: JobContext) -> None:
        started.set()
        ctx.wait(PATIENCE_S)
        told.set()
        gate.hold()

    put(store, "a")
    config = {"shutdown_timeout": "0s", "cancel_grace": "0s", "lease": "600ms"}
    with working(tap, registry, **config) as worker:
        assert started.wait(PATIENCE_S)
        steer(store).operator_cancel("a")
        assert told.wait(PATIENCE_S)
    assert worker.exit_status == ExitStatus(11, 0, 1)
    assert tap.count("ack_batch") == 0
    assert state_of(store, "a") is State.CANCELLED
    gate.open()


def test_a_claim_that_crosses_the_stop_is_handed_back_unrun(store: Any) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)

    def answer_late(real: Any, request: Any) -> Any:
        answer = real(request)
        if answer.claims:
            gate.hold()
        return answer

    set_rate_limit(store, "mail", 10, 3_600_000, burst=10)
    tap.around["admit"] = answer_late  # also in a question that is under way
    with working(tap, registry, poll=Poll(floor_ms=10, ceiling_ms=10)) as worker:
        put(store, "a", rate_class="mail")
        gate.wait()
        thread = stopping(worker)
        wait_for(lambda: worker.health().status == "terminating", "it drains")
        tap.fail("ack_batch", StoreUnavailable("a connection was cut"))
        gate.open()
        thread.join(PATIENCE_S)
    assert worker.exit_status == ExitStatus(0, 0, 0)
    assert ran == []
    row = job(store, "a")
    assert (row.state, row.attempt, row.crash_attempt) == ("available", 0, 0)
    assert tokens(store, "mail") == 10


def test_a_stop_does_not_wait_for_a_poll_or_a_duty(store: Any) -> None:
    seldom = Poll(floor_ms=60_000, ceiling_ms=60_000)
    with working(store, Registry(), poll=seldom, duty_interval="60s"):
        began_s = time.monotonic()
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_whoever_waits_for_a_signal_looks_again_without_one(monkeypatch: Any) -> None:
    """One that arrives just before the system call of the wait does not end it."""
    monkeypatch.setattr(bell, "LONGEST_S", 0.01)
    waiter = threading.Thread(target=bell.Bell().wait, args=(1_000,), daemon=True)
    waiter.start()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_enqueueing_for_a_stopped_worker_still_works(store: Any) -> None:
    with working(store, Registry()):
        pass
    enqueue(store, "a")
    assert state_of(store, "a") is State.AVAILABLE
