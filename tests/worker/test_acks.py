"""Acks on their way: shared calls, lost replies, refusals, and an end for each slot."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from headgate_sync.errors import (
    BackendError,
    StoreConflict,
    StoreUnavailable,
)
from headgate_sync.lease import Ack, JobResult
from headgate_sync.lifecycle import Outcome, State
from tests.builders import DAY_MS, enqueue, job, state_of, steer
from tests.worker.rig import Bench, Gate, Steps, Tap, wait_for


def success(attempt: Any, **fields: Any) -> Ack:
    return Ack(lease=attempt.lease, outcome=Outcome.SUCCESS, **fields)


def end_together(bench: Bench, attempts: Sequence[Any]) -> None:
    """Let each attempt end on a thread of its own while the first call is held."""
    gate = Gate()
    real = bench.store.around.get("ack_batch")

    def hold_first(call: Any, acks: Any) -> Any:
        if bench.store.count("ack_batch") == 1:
            gate.hold()
        return real(call, acks) if real else call(acks)

    bench.store.around["ack_batch"] = hold_first

    def end(attempt: Any) -> None:
        bench.inflight.finish(attempt, acks=True)
        if bench.acks.submit(attempt, success(attempt)):
            bench.acks.fly()

    pilot = threading.Thread(target=end, args=(attempts[0],))
    pilot.start()
    gate.wait()
    for attempt in attempts[1:]:
        end(attempt)  # returns at once: a call is under way
    gate.open()
    pilot.join()


def test_sixteen_acks_that_get_ready_together_take_two_calls(store: Any) -> None:
    ids = [f"j{n}" for n in range(16)]
    enqueue(store, *ids)
    bench = Bench(Tap(store), capacity=16)
    end_together(bench, bench.admit())
    assert [len(acks) for acks in bench.store.given("ack_batch")] == [1, 15]
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}
    assert len(bench.inflight) == 0


def test_one_ack_alone_is_sent_at_once(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    bench.inflight.finish(attempt, acks=True)
    assert bench.acks.submit(attempt, success(attempt))
    assert bench.store.count("ack_batch") == 0
    bench.acks.fly()
    assert [len(acks) for acks in bench.store.given("ack_batch")] == [1]
    assert state_of(store, "a") is State.COMPLETED


def test_a_slot_is_free_once_its_ack_is_on_its_way(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store), capacity=1)
    (attempt,) = bench.admit()
    bench.inflight.hungry = True
    bench.inflight.finish(attempt, acks=True)
    seen = []
    bench.store.around["ack_batch"] = lambda real, acks: (
        seen.append((bench.inflight.free, bench.freed, attempt.renewing)),
        real(acks),
    )[1]
    bench.acks.submit(attempt, success(attempt))
    assert bench.inflight.free == 0
    bench.acks.fly()
    assert seen == [(1, 1, True)]
    assert bench.inflight.free == 1
    assert len(bench.inflight) == 0


def test_no_more_leases_are_held_than_twice_the_slots(store: Any) -> None:
    """A store that takes no acks while it admits does not pile them up."""
    enqueue(store, *"abcdefgh")
    bench = Bench(Tap(store), capacity=2)
    for _ in range(2):
        for attempt in bench.admit():
            bench.inflight.finish(attempt, acks=True)
            bench.inflight.take_off([attempt])
    assert len(bench.inflight) == 4
    assert bench.inflight.free == 0
    bench.inflight.conclude(bench.inflight.attempts()[:1])
    assert bench.inflight.free == 1


def test_a_slot_whose_thread_still_runs_is_not_freed_by_its_ack(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store), capacity=1)
    (attempt,) = bench.admit()
    bench.inflight.settle(attempt)
    bench.inflight.take_off([attempt])
    bench.inflight.conclude([attempt])
    assert bench.inflight.free == 0
    bench.inflight.finish(attempt, acks=False)
    assert bench.inflight.free == 1


def test_a_lost_lease_and_a_refused_text_harm_no_neighbour(store: Any) -> None:
    ids = [f"j{n:02}" for n in range(16)]
    enqueue(store, *ids)
    bench = Bench(Tap(store), capacity=16)
    attempts = bench.admit()
    steer(store).operator_cancel("j03")

    def refuse_one(real: Any, acks: Sequence[Ack]) -> list[Any]:
        bad = [a for a in acks if a.lease.job_id == "j07"]
        answers = iter(real([a for a in acks if a not in bad]))
        return [
            BackendError("no such text") if a in bad else next(answers) for a in acks
        ]

    bench.store.around["ack_batch"] = refuse_one
    end_together(bench, attempts)
    done = [id for id in ids if state_of(store, id) is State.COMPLETED]
    assert done == [id for id in ids if id not in {"j03", "j07"}]
    assert state_of(store, "j03") is State.CANCELLED
    assert state_of(store, "j07") is State.RUNNING  # left to the reclaimer
    assert len(bench.inflight) == 0


@pytest.mark.parametrize("retention_ms", [0, DAY_MS], ids=["deleted", "kept"])
@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.REVOKE])
def test_an_ack_whose_reply_was_lost_is_booked_as_done(
    store: Any, outcome: Outcome, retention_ms: int, caplog: Any
) -> None:
    enqueue(store, "a", retention_ms=retention_ms)
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    lost = iter([True])

    def lose_reply(real: Any, acks: Any) -> Any:
        answers = real(acks)
        if next(lost, False):
            raise StoreUnavailable("connection cut after the commit")
        return answers

    bench.store.around["ack_batch"] = lose_reply
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(attempt, Ack(lease=attempt.lease, outcome=outcome))
    bench.acks.fly()
    assert bench.store.count("ack_batch") == 2
    assert [ack.outcome for ack in bench.accepted] == [outcome]
    assert len(bench.inflight) == 0
    assert "dropped" not in caplog.text


def test_a_first_try_that_is_rejected_is_a_lost_lease(store: Any, caplog: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    steer(store).operator_cancel("a")
    steer(store).delete_job("a")
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(attempt, success(attempt))
    bench.acks.fly()
    assert bench.accepted == []
    assert len(bench.inflight) == 0
    assert "job a (queue q): outcome success dropped" in caplog.text


def test_a_repeated_ack_that_meets_another_holder_is_a_lost_lease(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    bench.store.around["ack_batch"] = lambda real, acks: _first_lost(bench, store, acks)
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(attempt, success(attempt))
    bench.acks.fly()
    assert bench.accepted == []
    assert "dropped" in caplog.text


def _first_lost(bench: Bench, store: Any, acks: Any) -> Any:
    if bench.store.count("ack_batch") == 1:
        steer(store).operator_cancel("a")
        raise StoreUnavailable("cut before the commit")
    return store.ack_batch(acks)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreConflict("collided")])
def test_an_ack_is_sent_again_until_the_store_answers(
    store: Any, error: StoreUnavailable
) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    bench.store.fail("ack_batch", error, error)
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(attempt, success(attempt))
    bench.acks.fly()
    assert bench.store.count("ack_batch") == 3
    assert state_of(store, "a") is State.COMPLETED


def test_outages_long_ago_do_not_lengthen_the_pause_after_the_next(
    store: Any, monkeypatch: Any
) -> None:
    """A flight of a busy worker may last for hours."""
    ids = [f"j{n}" for n in range(12)]
    enqueue(store, *ids)
    bench = Bench(Tap(store), capacity=12)
    attempts = bench.admit()
    pauses: list[float] = []
    monkeypatch.setattr(
        bench.acks._given_up, "wait", lambda timeout: pauses.append(timeout)
    )

    def end() -> None:
        attempt = attempts.pop()
        bench.inflight.finish(attempt, acks=True)
        bench.acks.submit(attempt, success(attempt))

    def fail_every_other(real: Any, acks: Any) -> Any:
        if bench.store.count("ack_batch") % 2:
            raise StoreUnavailable("away")
        if attempts:
            end()  # so that the flight goes on
        return real(acks)

    bench.store.around["ack_batch"] = fail_every_other
    end()
    bench.acks.fly()
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}
    assert set(pauses) == {0.1}


def test_an_ack_is_given_up_when_its_lease_has_run_out_but_tried_twice(
    store: Any, caplog: Any
) -> None:
    steps = Steps()
    enqueue(store, "a", "b")
    bench = Bench(Tap(store), now_s=steps)
    attempts = bench.admit()
    steps.advance(31)
    bench.inflight.confirm([attempts[1]], steps() + 30)  # a beat went through for b
    bench.store.fail("ack_batch", *[StoreUnavailable("away")] * 3)
    for attempt in attempts:
        bench.inflight.finish(attempt, acks=True)
    must_fly = [bench.acks.submit(attempt, success(attempt)) for attempt in attempts]
    assert must_fly == [True, False]
    bench.acks.fly()
    assert [len(acks) for acks in bench.store.given("ack_batch")] == [2, 2, 1, 1]
    assert state_of(store, "a") is State.RUNNING
    assert not attempts[0].renewing
    assert state_of(store, "b") is State.COMPLETED
    assert "job a (queue q): outcome success could not be stored" in caplog.text
    assert len(bench.inflight) == 0


def test_a_refused_error_text_is_sent_once_more_in_short(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()

    def refuse_long(real: Any, acks: Sequence[Ack]) -> Any:
        if acks[0].logs or "\n" in (acks[0].error or ""):
            return [BackendError("the text is refused")]
        return real(acks)

    bench.store.around["ack_batch"] = refuse_long
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(
        attempt,
        Ack(
            lease=attempt.lease,
            outcome=Outcome.RETRY,
            error="first\nsecond",
            logs=("line",),
        ),
    )
    bench.acks.fly()
    (entry,) = job(store, "a").errors
    assert (entry.error, entry.logs) == ("first", ())
    assert state_of(store, "a") is State.RETRYABLE


def test_a_refused_result_fails_the_attempt(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    bench.store.around["ack_batch"] = lambda real, acks: (
        [BackendError("too large for this database")] if acks[0].result else real(acks)
    )
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(attempt, success(attempt, result=JobResult(1, b"x")))
    bench.acks.fly()
    (entry,) = job(store, "a").errors
    assert entry.error == "result could not be stored"
    assert job(store, "a").attempt == 1


def test_a_call_that_fails_in_an_unknown_way_wedges_no_slot(
    store: Any, caplog: Any
) -> None:
    enqueue(store, "a", "b")
    bench = Bench(Tap(store))
    attempts = bench.admit()
    bench.store.fail("ack_batch", RuntimeError("bug"), RuntimeError("bug"))
    for attempt in attempts:
        bench.inflight.finish(attempt, acks=True)
        bench.acks.submit(attempt, success(attempt))
    bench.acks.fly()
    assert len(bench.inflight) == 0
    assert "could not be stored" in caplog.text
    (later,) = [bench.hold(evolve(attempts[0].claim))]
    bench.inflight.finish(later, acks=True)
    assert bench.acks.submit(later, success(later)), "the next ack has to find a pilot"


def test_giving_up_ends_the_retries_of_a_store_that_is_away(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()

    def away(real: Any, acks: Any) -> Any:
        bench.acks.give_up()
        raise StoreUnavailable("away")

    bench.store.around["ack_batch"] = away
    bench.inflight.finish(attempt, acks=True)
    bench.acks.submit(attempt, success(attempt))
    bench.acks.fly()
    assert len(bench.inflight) == 0
    assert state_of(store, "a") is State.RUNNING


def test_a_call_carries_at_most_sixteen_megabytes(store: Any) -> None:
    enqueue(store, "a", "b", "c")
    bench = Bench(Tap(store))
    attempts = bench.admit()
    for attempt in attempts:
        bench.inflight.finish(attempt, acks=True)
        result = JobResult(1, bytes(9 * 1024 * 1024))
        bench.acks.submit(attempt, success(attempt, result=result))
    bench.acks.fly()
    assert [len(acks) for acks in bench.store.given("ack_batch")] == [1, 1, 1]
    assert len(bench.inflight) == 0


def end_in_doubt(bench: Bench, attempt: Any) -> None:
    """Let a handler fail after the reply to its commit was lost."""
    attempt.in_doubt = True
    bench.inflight.finish(attempt, acks=True)
    raised = Ack(lease=attempt.lease, outcome=Outcome.RETRY, error="x", latency_ms=7)
    bench.acks.submit(attempt, raised)
    bench.acks.fly()


@pytest.mark.parametrize("retention_ms", [0, DAY_MS])
def test_a_rejected_ack_after_a_commit_in_doubt_is_the_commit(
    store: Any, caplog: Any, retention_ms: int
) -> None:
    enqueue(store, "a", retention_ms=retention_ms)
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    store.ack(attempt.lease, Outcome.SUCCESS)  # what the lost reply stood for
    end_in_doubt(bench, attempt)
    # Nobody is told of a failure, or of a death where it would have been the last.
    assert bench.accepted == [success(attempt, latency_ms=7)]
    assert "dropped" not in caplog.text


def test_a_rejected_ack_after_a_commit_that_was_none_is_a_lost_lease(
    store: Any, clock: Any, caplog: Any
) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store))
    (attempt,) = bench.admit()
    clock.advance_ms(DAY_MS)
    store.reclaim_expired(1)
    end_in_doubt(bench, attempt)
    assert bench.accepted == []
    assert "outcome retry dropped" in caplog.text


def test_a_slot_is_freed_once(store: Any) -> None:
    enqueue(store, "a")
    bench = Bench(Tap(store), capacity=1)
    (attempt,) = bench.admit()
    bench.inflight.finish(attempt, acks=True)
    for _ in range(2):
        bench.inflight.take_off([attempt])
        assert bench.inflight.free == 1
    for _ in range(2):
        bench.inflight.conclude([attempt])
        assert bench.inflight.free == 1


def test_an_ack_whose_row_is_locked_is_sent_again_and_its_neighbours_are_done(
    store: Any,
) -> None:
    enqueue(store, "a", "b")
    tap = Tap(store)
    bench = Bench(tap)
    one, two = bench.admit()
    locked = ["b"]

    def lock_one(real: Any, acks: Any) -> Any:
        free = [ack for ack in acks if ack.lease.job_id not in locked]
        said = dict(zip((a.lease.job_id for a in free), real(free), strict=True))
        answers = [said.get(ack.lease.job_id, StoreConflict("locked")) for ack in acks]
        locked.clear()
        return answers

    tap.around["ack_batch"] = lock_one
    for attempt in (one, two):
        bench.inflight.finish(attempt, acks=True)
        bench.acks.submit(attempt, Ack(lease=attempt.lease, outcome=Outcome.SUCCESS))
    bench.acks.fly()
    assert state_of(store, "a") is State.COMPLETED
    wait_for(lambda: len(bench.inflight) == 0, "the other one is settled")
    assert [len(acks) for acks in tap.given("ack_batch")] == [2, 1]
    assert {state_of(store, "a"), state_of(store, "b")} == {State.COMPLETED}
    assert len(bench.inflight) == 0
