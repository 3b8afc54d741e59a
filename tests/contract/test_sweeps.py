"""Promotion of due jobs and eviction of kept ones."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT64, MAX_RELATIVE_MS
from headgate_sync.lifecycle import EVICTABLE, STORED, Outcome, State
from tests.builders import (
    DAY_MS,
    admit,
    bring_to,
    claim_one,
    counts,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)


def test_due_jobs_are_promoted_earliest_first_and_bounded(store, clock):
    for n, delay_ms in enumerate((300, 100, 200, 999)):
        store.enqueue([envelope(f"n{n}", delay_ms=delay_ms)])
    clock.advance_ms(300)
    assert store.promote_due(2) == 2
    assert {
        id for id in ("n0", "n1", "n2") if state_of(store, id) is State.AVAILABLE
    } == {
        "n1",
        "n2",
    }
    assert store.promote_due(2) == 1
    assert store.promote_due(2) == 0
    assert state_of(store, "n3") is State.SCHEDULED


def test_a_job_is_due_at_its_instant_and_not_before(store, clock):
    store.enqueue([envelope("a", delay_ms=500)])
    clock.advance_ms(499)
    assert store.promote_due(10) == 0
    clock.advance_ms(1)
    assert store.promote_due(10) == 1


def test_jobs_that_are_due_together_are_promoted_by_insertion(store, clock):
    for id in ("z", "a", "m"):
        store.enqueue([envelope(id, delay_ms=500)])
    clock.advance_ms(500)
    assert store.promote_due(1) == 1
    assert state_of(store, "z") is State.AVAILABLE
    store.promote_due(1)
    assert state_of(store, "a") is State.AVAILABLE


@pytest.mark.parametrize("state", [State.SCHEDULED, State.RETRYABLE])
def test_promotion_keeps_the_instant_as_the_place_in_the_queue(store, clock, state):
    bring_to(store, clock, "a", state)
    place = job(store, "a").scheduled_at_ms
    clock.advance_ms(DAY_MS)
    assert store.promote_due(10) == 1
    found = job(store, "a")
    assert (found.state, found.scheduled_at_ms) == (State.AVAILABLE, place)
    assert found.attempt == (1 if state is State.RETRYABLE else 0)


@pytest.mark.parametrize(
    "state",
    sorted(STORED - {State.SCHEDULED, State.RETRYABLE, State.RUNNING, State.COMPLETED}),
)
def test_time_alone_moves_no_other_state(store, clock, state):
    bring_to(store, clock, "a", state, retention_ms=0)
    clock.advance_ms(365 * DAY_MS)
    assert store.promote_due(10) == 0
    assert store.reclaim_expired(10) == []
    assert store.evict_retained(10) == 0
    assert state_of(store, "a") is state


def test_a_job_of_the_far_future_disturbs_nobody(store, clock):
    store.enqueue(
        [envelope("never", scheduled_at_ms=MAX_INT64), envelope("soon", delay_ms=1)]
    )
    clock.advance_ms(1)
    assert store.promote_due(10) == 1
    assert claim_one(store).envelope.id == "soon"


def test_a_finished_job_goes_when_its_retention_is_over(store, clock):
    bring_to(store, clock, "short", State.COMPLETED, retention_ms=1)
    bring_to(store, clock, "long", State.COMPLETED, retention_ms=DAY_MS)
    clock.advance_ms(30)
    assert store.evict_retained(1000) == 1
    assert state_of(store, "short") is State.DELETED
    assert state_of(store, "long") is State.COMPLETED


def test_retention_ends_at_its_instant_and_not_before(store, clock):
    bring_to(store, clock, "a", State.COMPLETED, retention_ms=60_000)
    clock.advance_ms(59_999)
    assert store.evict_retained(10) == 0
    clock.advance_ms(1)
    assert store.evict_retained(10) == 1


@pytest.mark.parametrize("state", sorted(EVICTABLE))
def test_every_finished_state_but_quarantine_is_evicted(store, clock, state):
    bring_to(store, clock, "a", state, retention_ms=5, tags=("t",))
    clock.advance_ms(5)
    assert store.evict_retained(10) == 1
    assert counts(store) == {}


def test_quarantined_jobs_are_kept_for_ever(store, clock):
    bring_to(store, clock, "a", State.QUARANTINED, retention_ms=1)
    clock.advance_ms(365 * DAY_MS)
    assert store.evict_retained(10) == 0
    assert state_of(store, "a") is State.QUARANTINED


@pytest.mark.parametrize("state", sorted(EVICTABLE - {State.COMPLETED}))
def test_a_failed_job_without_retention_waits_for_an_operator(store, clock, state):
    bring_to(store, clock, "a", state, retention_ms=0)
    clock.advance_ms(365 * DAY_MS)
    assert store.evict_retained(10) == 0
    assert state_of(store, "a") is state


def test_eviction_is_bounded_and_takes_the_first_due(store, clock):
    for n in range(5):
        bring_to(store, clock, f"n{n}", State.COMPLETED, retention_ms=100 - n)
    clock.advance_ms(100)
    assert [store.evict_retained(2) for _ in range(3)] == [2, 2, 1]
    assert store.evict_retained(2) == 0


def test_the_first_lapsed_is_the_first_evicted(store, clock):
    for n in range(3):
        bring_to(store, clock, f"n{n}", State.COMPLETED, retention_ms=100 - n)
    clock.advance_ms(100)
    store.evict_retained(1)
    assert state_of(store, "n2") is State.DELETED


def test_retention_counts_from_the_end_of_the_job(store, clock):
    claim = run_one(store, "a", retention_ms=10)
    clock.advance_ms(1_000)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert store.evict_retained(10) == 0
    clock.advance_ms(10)
    assert store.evict_retained(10) == 1


def test_the_longest_retention_never_lapses_and_never_overflows(store, clock):
    bring_to(store, clock, "a", State.COMPLETED, retention_ms=MAX_RELATIVE_MS)
    clock.advance_ms(DAY_MS)
    assert store.evict_retained(10) == 0
    assert state_of(store, "a") is State.COMPLETED


def test_a_job_brought_back_by_an_operator_is_not_evicted(store, clock):
    bring_to(store, clock, "a", State.ARCHIVED, retention_ms=5)
    steer(store).operator_retry("a")
    clock.advance_ms(DAY_MS)
    assert store.evict_retained(10) == 0
    assert [claim.envelope.id for claim in admit(store).claims] == ["a"]


def test_sweeps_of_nothing_change_nothing(backend, store, clock):
    enqueue(store, "a")
    claim_one(store)
    store.enqueue([envelope("later", delay_ms=100)])
    bring_to(store, clock, "done", State.COMPLETED)
    before = backend.image()
    assert store.promote_due(10) == 0
    assert store.reclaim_expired(10) == []
    assert store.evict_retained(10) == 0
    assert backend.image() == before
