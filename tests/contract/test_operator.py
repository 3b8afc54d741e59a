"""Verbs on single jobs: where they lead, and where the table has no such edge."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT64, MAX_PAYLOAD_BYTES
from headgate_sync.errors import DuplicateJob, InvalidRequest, LeaseRejected, NotFound
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import (
    EVICTABLE,
    STORED,
    UNFINISHED,
    Event,
    Outcome,
    State,
    refused,
    sources_of,
)
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    bring_to,
    claim_one,
    crash,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)

VERBS = {
    Event.OPERATOR_PROMOTE: lambda inspect, id: inspect.promote_job(id),
    Event.OPERATOR_RETRY: lambda inspect, id: inspect.operator_retry(id),
    Event.OPERATOR_CANCEL: lambda inspect, id: inspect.operator_cancel(id),
    Event.OPERATOR_DELETE: lambda inspect, id: inspect.delete_job(id),
    Event.OPERATOR_RESCHEDULE: lambda inspect, id: inspect.reschedule_job(
        id, 5_000_000
    ),
    Event.SCHEDULE_PENDING: lambda inspect, id: inspect.schedule_pending(id, 5_000_000),
    Event.EDIT_PAYLOAD: lambda inspect, id: inspect.edit_payload(
        id, b"new", schema_version=3, fingerprint="new"
    ),
}
REFUSED = [
    pytest.param(event, state, id=f"{event.value} of {state.value}")
    for event in VERBS
    for state in sorted(STORED - set(sources_of(event)))
]


@pytest.mark.parametrize("event", VERBS)
def test_a_verb_on_a_missing_job_is_not_found(backend, store, event):
    raised = unchanged_by(backend, lambda: VERBS[event](steer(store), "nobody"))
    assert isinstance(raised, NotFound)
    assert "nobody" in str(raised)


@pytest.mark.parametrize(("event", "state"), REFUSED)
def test_a_verb_is_refused_where_the_table_has_no_edge(
    backend, store, clock, event, state
):
    bring_to(store, clock, "a", state)
    raised = unchanged_by(backend, lambda: VERBS[event](steer(store), "a"))
    assert isinstance(raised, InvalidRequest)
    assert str(raised) == str(refused(event, state))


def test_cancelling_a_running_job_takes_it_from_its_holder(store, clock):
    claim = run_one(store, "a")
    clock.advance_ms(5)
    steer(store).operator_cancel("a")
    ref = claim.lease_ref
    with pytest.raises(LeaseRejected):
        store.ack(ref, Outcome.SUCCESS)
    assert store.renew([ref], lease_ms=1000) == [ref]
    with pytest.raises(LeaseRejected):
        store.checkpoint(ref, Checkpoint(completed_steps=("s",)))
    found = job(store, "a")
    assert found.state == State.CANCELLED
    assert found.finalized_at_ms == START_MS + 5
    assert (found.fence, found.claimed_by) == (1, None)
    assert found.reason_code == "cancelled"


@pytest.mark.parametrize("state", sorted(UNFINISHED))
def test_cancelling_ends_every_unfinished_job(store, clock, state):
    bring_to(store, clock, "a", state, unique_key=b"k")
    steer(store).operator_cancel("a")
    found = job(store, "a")
    assert found.state == State.CANCELLED
    assert found.finalized_at_ms == clock.now_ms()
    assert steer(store).unfinished("q") == 0
    enqueue(store, "b", unique_key=b"k")


@pytest.mark.parametrize("state", sorted(EVICTABLE - {State.COMPLETED}))
def test_an_operators_retry_runs_the_job_once_more_now(store, clock, state):
    bring_to(store, clock, "a", state)
    clock.advance_ms(100)
    steer(store).operator_retry("a")
    found = job(store, "a")
    assert found.state == State.AVAILABLE
    assert found.scheduled_at_ms == clock.now_ms()
    assert (found.finalized_at_ms, found.reason_code) == (None, "")
    assert claim_one(store).fence == 2
    assert steer(store).unfinished("q") == 1


def test_an_exhausted_job_gets_exactly_one_more_run(store):
    claim = run_one(store, "a", max_attempts=1)
    store.ack(claim.lease_ref, Outcome.RETRY)
    for attempt in (2, 3):
        steer(store).operator_retry("a")
        store.ack(claim_one(store).lease_ref, Outcome.RETRY)
        found = job(store, "a")
        assert (found.state, found.attempt) == (State.ARCHIVED, attempt)


def test_a_retry_is_refused_while_another_job_holds_the_key(backend, store, clock):
    bring_to(store, clock, "a", State.ARCHIVED, unique_key=b"k")
    enqueue(store, "b", unique_key=b"k")
    raised = unchanged_by(backend, lambda: steer(store).operator_retry("a"))
    assert isinstance(raised, DuplicateJob)
    assert (raised.existing_id, raised.replaced) == ("b", False)
    steer(store).operator_cancel("b")
    steer(store).operator_retry("a")
    assert state_of(store, "a") is State.AVAILABLE


def test_a_retried_job_holds_its_key_again(store, clock):
    bring_to(store, clock, "a", State.CANCELLED, unique_key=b"k")
    steer(store).operator_retry("a")
    with pytest.raises(DuplicateJob, match="job a"):
        enqueue(store, "b", unique_key=b"k")


def test_a_retry_gives_up_a_remaining_weight_and_keeps_the_steps(store):
    claim = run_one(store, "a", weight=9)
    kept = Checkpoint(completed_steps=("s",), remaining_weight=2)
    store.checkpoint(claim.lease_ref, kept)
    store.ack(claim.lease_ref, Outcome.SKIP)
    steer(store).operator_retry("a")
    found = claim_one(store).checkpoint
    assert found.completed_steps == ("s",)
    assert found.remaining_weight is None


def test_promoting_a_pending_job_makes_it_available_now(store, clock):
    store.enqueue([envelope("a", pending=True)])
    clock.advance_ms(50)
    steer(store).promote_job("a")
    found = job(store, "a")
    assert (found.state, found.scheduled_at_ms) == (State.AVAILABLE, START_MS + 50)
    assert claim_one(store).envelope.id == "a"


def test_a_pending_job_may_be_given_an_instant(store, clock):
    store.enqueue([envelope("a", pending=True)])
    steer(store).schedule_pending("a", START_MS + 10)
    assert state_of(store, "a") is State.SCHEDULED
    clock.advance_ms(10)
    assert store.promote_due(10) == 1


def test_a_pending_job_may_be_given_a_past_instant(store):
    store.enqueue([envelope("a", pending=True)])
    steer(store).schedule_pending("a", 0)
    assert state_of(store, "a") is State.SCHEDULED
    assert store.promote_due(10) == 1


@pytest.mark.parametrize("state", [State.SCHEDULED, State.RETRYABLE])
def test_a_waiting_job_may_be_moved_in_time(store, clock, state):
    bring_to(store, clock, "a", state)
    steered = steer(store)
    steered.reschedule_job("a", MAX_INT64)
    assert (job(store, "a").state, job(store, "a").scheduled_at_ms) == (
        state,
        MAX_INT64,
    )
    steered.reschedule_job("a", START_MS)
    assert state_of(store, "a") is state
    assert store.promote_due(10) == 1


@pytest.mark.parametrize("state", sorted(STORED - {State.RUNNING}))
def test_deleting_removes_a_job_with_all_that_belongs_to_it(store, clock, state):
    bring_to(store, clock, "a", state, tags=("t",), unique_key=b"k")
    steer(store).delete_job("a")
    assert state_of(store, "a") is State.DELETED
    assert steer(store).unfinished("q") == 0
    store.enqueue([envelope("a", payload=b"other", unique_key=b"k")])
    assert job(store, "a").tags == ()


@pytest.mark.parametrize("state", sorted(STORED - {State.RUNNING}))
def test_a_payload_may_be_replaced_while_nobody_works_on_it(store, clock, state):
    bring_to(store, clock, "a", state)
    before = job(store, "a")
    clock.advance_ms(7)
    steer(store).edit_payload("a", b"\x00new", schema_version=3, fingerprint="new")
    found = job(store, "a")
    assert (found.payload, found.schema_version) == (b"\x00new", 3)
    assert (found.fingerprint, found.state) == ("new", state)
    for name in ("scheduled_at_ms", "finalized_at_ms", "reason_code", "errors"):
        assert getattr(found, name) == getattr(before, name)


def test_a_payload_edit_gives_up_a_remaining_weight(store):
    claim = run_one(store, "a")
    store.checkpoint(
        claim.lease_ref, Checkpoint(completed_steps=("s",), remaining_weight=0)
    )
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    steer(store).edit_payload("a", b"new", schema_version=1, fingerprint="")
    found = claim_one(store).checkpoint
    assert (found.completed_steps, found.remaining_weight) == (("s",), None)


@pytest.mark.parametrize(
    "edit",
    [
        {"payload": b"x" * (MAX_PAYLOAD_BYTES + 1)},
        {"payload": "text"},
        {"schema_version": -1},
        {"schema_version": 2**31},
        {"fingerprint": "x" * 256},
        {"fingerprint": "nul\0"},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_a_malformed_payload_edit_changes_nothing(backend, store, edit):
    enqueue(store, "a")
    values = {"payload": b"x", "schema_version": 1, "fingerprint": "f", **edit}
    raised = unchanged_by(
        backend, lambda: steer(store).edit_payload("a", values.pop("payload"), **values)
    )
    assert isinstance(raised, InvalidRequest)


@pytest.mark.parametrize("at_ms", [-1, MAX_INT64 + 1, True, 1.5])
def test_an_impossible_instant_is_refused(backend, store, clock, at_ms):
    bring_to(store, clock, "a", State.SCHEDULED)
    store.enqueue([envelope("p", pending=True)])
    steered = steer(store)
    for call in (
        lambda: steered.reschedule_job("a", at_ms),
        lambda: steered.schedule_pending("p", at_ms),
    ):
        assert isinstance(unchanged_by(backend, call), InvalidRequest)


def test_a_cancelled_job_is_not_reclaimed(store, clock):
    claim = run_one(store, "a")
    steer(store).operator_cancel("a")
    clock.advance_ms(60_000)
    assert store.reclaim_expired(10) == []
    assert claim.fence == job(store, "a").fence


def test_crashes_stay_with_a_job_whose_fate_an_operator_changes(store, clock):
    crash(store, clock, run_one(store, "a"))
    steer(store).operator_cancel("a")
    steer(store).operator_retry("a")
    found = job(store, "a")
    assert found.crash_attempt == 1
    assert found.orphaned
    assert [entry.outcome for entry in found.errors] == ["lease_lost"]


# Many jobs


def test_of_many_jobs_those_that_are_unfinished_are_cancelled(store, clock):
    ids = []
    for state in sorted(STORED):
        ids.append(state.value)
        bring_to(
            store,
            clock,
            state.value,
            state,
            queue=f"for {state}",
            fingerprint=state.value,
        )
    states = {id: state_of(store, id) for id in ids}
    assert states == {state.value: state for state in STORED}
    found = steer(store).cancel_jobs([*ids, "nobody", "available", "available"])
    assert found == len(UNFINISHED)
    now = {id: state_of(store, id) for id in ids}
    assert now == states | dict.fromkeys(map(str, UNFINISHED), State.CANCELLED)
    assert job(store, "running").reason_code == "cancelled"
    assert steer(store).cancel_jobs(ids) == 0
    assert steer(store).cancel_jobs([]) == 0


def test_the_holder_of_a_job_that_is_cancelled_among_others_loses_its_lease(store):
    claim = run_one(store, "a")
    enqueue(store, "b")
    assert steer(store).cancel_jobs(["a", "b"]) == 2
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.SUCCESS)


@pytest.mark.parametrize("ids", [["a"] * 1_001, "a", ["a\0"], [None]])
def test_ids_that_cannot_be_cancelled_are_refused(backend, store, ids):
    enqueue(store, "a")
    raised = unchanged_by(backend, lambda: steer(store).cancel_jobs(ids))
    assert isinstance(raised, InvalidRequest)
    assert "ids" in str(raised)
