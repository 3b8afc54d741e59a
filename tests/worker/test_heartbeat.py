"""Renewing what is held, and what the answer means."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import BackendError, StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.worker.heartbeat import Heartbeat
from tests.builders import admit, enqueue, envelope, state_of, steer
from tests.worker.rig import PATIENCE_S, Bench, Steps, Tap


class Beating:
    """A heartbeat on stepped time over a tapped store."""

    def __init__(self, store: Any, **config: Any) -> None:
        self.steps = Steps()
        self.tap = Tap(store)
        self.bench = Bench(self.tap, now_s=self.steps, **{"capacity": 16, **config})
        self.heartbeat = Heartbeat(
            self.tap,
            self.bench.inflight,
            lease_ms=self.bench.config.lease_ms,
            now_s=self.steps,
        )

    def beat(self) -> float:
        """Beat; returns the seconds until the next one."""
        return self.heartbeat.step() - self.steps()


def test_one_call_renews_all_leases(store: Any) -> None:
    enqueue(store, *[f"j{n}" for n in range(16)])
    beating = Beating(store)
    attempts = beating.bench.admit()
    assert beating.beat() == 10.0
    (leases,) = beating.tap.given("renew")
    assert set(leases) == {attempt.lease for attempt in attempts}
    assert len(leases) == 16


def test_a_worker_that_holds_nothing_asks_nothing(store: Any) -> None:
    beating = Beating(store)
    assert beating.beat() == 10.0
    assert beating.tap.calls == []


def test_a_beat_is_a_third_of_the_lease_and_never_below_ten_milliseconds(
    store: Any,
) -> None:
    assert Beating(store, lease="900ms").beat() == pytest.approx(0.3)
    assert Beating(store, lease="9ms").beat() == pytest.approx(0.01)


def test_a_good_beat_moves_the_local_end_of_each_lease(store: Any, clock: Any) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()
    beating.steps.advance(10)
    clock.advance_ms(10_000)
    beating.beat()
    assert attempt.lease_due_s == beating.steps() + 30
    clock.advance_ms(29_999)
    assert store.reclaim_expired(10) == []


def test_the_local_end_counts_from_the_sending(store: Any) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()

    def slow(real: Any, *args: Any, **keywords: Any) -> Any:
        lost = real(*args, **keywords)
        beating.steps.advance(5)
        return lost

    beating.tap.around["renew"] = slow
    sent_s = beating.steps()
    beating.beat()
    assert attempt.lease_due_s == sent_s + 30


def test_a_slow_answer_does_not_put_off_the_next_beat(store: Any) -> None:
    """Between two renewals lies a third of a lease, counted from sending to sending."""
    enqueue(store, *[f"j{n:02}" for n in range(64)])
    beating = Beating(store, capacity=64, lease="900ms")
    beating.bench.admit()
    confirmed_s: list[float] = []

    def slow(real: Any, *args: Any, **keywords: Any) -> Any:
        beating.steps.advance(0.2)
        confirmed_s.append(beating.steps())
        return real(*args, **keywords)

    beating.tap.around["renew"] = slow
    for _ in range(5):
        beating.steps.at_s = beating.heartbeat.step()
    gaps_s = [later - earlier for earlier, later in pairwise(confirmed_s)]
    assert gaps_s == [pytest.approx(0.3)] * 4
    assert {len(leases) for leases in beating.tap.given("renew")} == {64}


def test_an_operators_cancel_stops_the_handler_at_the_next_beat(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a", "b")
    beating = Beating(store)
    first, second = beating.bench.admit()
    steer(store).operator_cancel("a")
    beating.beat()
    assert first.token.reason == "lease_lost"
    assert second.token.reason is None
    assert "job a (queue q): lease lost, or cancelled by an operator" in caplog.text
    beating.beat()
    assert [len(leases) for leases in beating.tap.given("renew")] == [2, 1]
    assert len(beating.bench.inflight) == 2  # its thread has not returned
    assert beating.tap.count("ack_batch") == 0


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), BackendError("odd")], ids=["away", "refused"]
)
def test_a_beat_that_fails_loses_nothing_and_is_repeated_soon(
    store: Any, error: Exception, caplog: Any
) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()
    beating.tap.fail("renew", error, error)
    waits = [beating.beat() for _ in range(3)]
    assert waits == [pytest.approx(10 / 3), pytest.approx(10 / 3), 10.0]
    assert attempt.token.reason is None
    assert "renewing 1 leases failed" in caplog.text
    assert state_of(store, "a") is State.RUNNING


def test_an_old_and_a_new_lease_of_one_job_are_told_apart(
    store: Any, clock: Any
) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (old,) = beating.bench.admit()
    clock.advance_ms(30_000)
    store.reclaim_expired(10)
    clock.advance_ms(60_000)
    store.promote_due(10)
    (new,) = beating.bench.admit()
    assert len(beating.bench.inflight) == 2
    beating.beat()
    assert (old.token.reason, new.token.reason) == ("lease_lost", None)


def test_a_beat_keeps_an_extended_lease_long(store: Any, clock: Any) -> None:
    enqueue(store, "a", "b")
    beating = Beating(store)
    attempts = {a.lease.job_id: a for a in beating.bench.admit()}
    JobContext(attempts["a"]).extend_lease("2m")
    beating.tap.calls.clear()
    beating.beat()
    assert beating.tap.calls == ["renew", "renew"]
    clock.advance_ms(30_000)
    assert [lost.job_id for lost in store.reclaim_expired(10)] == ["b"]
    beating.steps.advance(100)
    beating.tap.calls.clear()
    beating.beat()
    assert beating.tap.calls == ["renew"]  # the usual length is the longer one again


def test_a_beat_that_was_under_way_does_not_shorten_an_extension(store: Any) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()

    def extend_meanwhile(renew: Any, *args: Any, **keywords: Any) -> Any:
        answer = renew(*args, **keywords)
        beating.tap.around.clear()
        JobContext(attempt).extend_lease("2m")
        return answer

    beating.tap.around["renew"] = extend_meanwhile
    beating.beat()
    assert attempt.lease_due_s == beating.steps() + 120


def test_a_lease_that_was_given_back_is_not_renewed_and_not_lost(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()
    JobContext(attempt).release()
    beating.beat()
    assert beating.tap.count("renew") == 0
    assert attempt.token.reason is None
    assert caplog.text == ""


def test_an_extension_without_an_answer_is_none(store: Any) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()
    beating.tap.fail("renew", StoreUnavailable("away"))
    with pytest.raises(StoreUnavailable):
        JobContext(attempt).extend_lease("2m")
    assert attempt.lease_due_s == beating.steps() + 30
    beating.steps.advance(10)
    beating.beat()
    assert attempt.lease_due_s == beating.steps() + 30


def test_a_report_of_loss_does_not_touch_an_attempt_that_has_ended(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()
    beating.bench.inflight.finish(attempt, acks=True)
    steer(store).operator_cancel("a")
    beating.beat()
    assert attempt.token.reason is None
    assert attempt.renewing  # its ack is still to be answered
    assert "lease lost" not in caplog.text


def test_a_report_of_loss_does_not_interrupt_a_commit_that_completes_the_job(
    store: Any,
) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    (attempt,) = beating.bench.admit()
    attempt.completing = True
    steer(store).operator_cancel("a")
    beating.beat()
    assert attempt.token.reason is None
    attempt.completing = False
    beating.beat()
    assert attempt.token.reason == "lease_lost"


def test_held_back_progress_follows_with_a_beat_and_not_on_its_thread(
    store: Any,
) -> None:
    writers = []
    written = threading.Event()
    registry = Registry()
    beating = Beating(store)
    progress = Tap(store.progress)

    def write(real: Any, *args: Any) -> Any:
        writers.append(threading.current_thread().name)
        try:
            return real(*args)
        finally:
            if len(writers) == 2:
                written.set()

    progress.around["write_job_progress"] = write
    beating.tap.__dict__["progress"] = progress

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ctx.report_progress(1, 9)
        ctx.report_progress(2, 9)
        beating.beat()
        assert written.wait(PATIENCE_S)

    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    bench = Bench(beating.tap, registry, now_s=beating.steps)
    beating.heartbeat = Heartbeat(
        beating.tap, bench.inflight, lease_ms=30_000, now_s=beating.steps
    )
    bench.run_next()
    assert store.progress.read_progress("a").current == 2
    assert writers == [threading.current_thread().name, "headgate-progress"]


def test_a_lease_is_renewed_while_user_transactions_hold_the_whole_pool(
    postgres: Any,
) -> None:
    """Also for a beat that comes when no connection of the pool is free."""
    store = postgres.make_store()
    enqueue(store, "a")
    (claim,) = admit(store, lease_ms=900).claims
    held = [postgres.pool.getconn() for _ in range(postgres.pool.max_size)]
    try:
        assert store.renew([claim.lease_ref], lease_ms=60_000) == []
    finally:
        for connection in held:
            postgres.pool.putconn(connection)
    postgres.clock.advance_ms(59_999)
    assert store.reclaim_expired(10) == []


def test_leases_are_renewed_before_the_worker_shows_itself(store: Any) -> None:
    enqueue(store, "a")
    beating = Beating(store)
    beating.bench.admit()
    seen: list[int] = []

    def show() -> bool:
        seen.append(beating.tap.count("renew"))
        return False

    heartbeat = Heartbeat(
        beating.tap,
        beating.bench.inflight,
        lease_ms=30_000,
        now_s=beating.steps,
        show=show,
    )
    # Where the store did not answer the next try comes sooner.
    assert heartbeat.step() == pytest.approx(beating.steps() + 10 / 3)
    assert seen == [1]
    beating.tap.fail("renew", StoreUnavailable("away"))
    heartbeat.step()
    assert seen == [1, 2]
