"""What an admission stamps on a job, and what it may never claim."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import MAX_LEASE_MS
from headgate_sync.lifecycle import Outcome, State
from tests.builders import (
    DAY_MS,
    START_MS,
    admit,
    bring_to,
    claim_one,
    counts,
    enqueue,
    envelope,
    envelopes,
    job,
    state_of,
    steer,
)


def ids(batch):
    return [claim.envelope.id for claim in batch.claims]


def test_claims_of_one_call_share_the_lease_and_count_their_own_fence(store):
    enqueue(store, "a", "b")
    batch = admit(store, "L1")
    assert [unit.size for unit in batch] == [1, 1]
    assert {claim.fence for claim in batch.claims} == {1}
    assert {claim.lease_id for claim in batch.claims} == {"L1"}
    assert {claim.expires_at_ms for claim in batch.claims} == {START_MS + 30_000}
    assert {claim.claimed_at_ms for claim in batch.claims} == {START_MS}


def test_a_claimed_job_shows_its_holder(store, clock):
    enqueue(store, "a")
    clock.advance_ms(7)
    claim = claim_one(store, worker="me", lease_ms=100)
    found = job(store, "a")
    assert found.state == State.RUNNING
    assert found.claimed_by == "me"
    assert found.claimed_at_ms == claim.claimed_at_ms == START_MS + 7
    assert found.lease_expires_at_ms == claim.expires_at_ms == START_MS + 107
    assert found.fence == 1


def test_capacity_bounds_the_claims(store):
    enqueue(store, *(f"n{n:02}" for n in range(20)))
    assert len(admit(store, capacity=10).claims) == 10
    assert counts(store) == {"available": 10, "running": 10}
    for n in range(20):
        found = job(store, f"n{n:02}")
        assert (found.claimed_by is None) == (found.state == State.AVAILABLE)


def test_a_call_fills_its_capacity_while_there_is_work(store):
    for n in range(4):
        enqueue(store, f"a{n}", partition_key="a")
    enqueue(store, "b0", partition_key="b")
    assert len(admit(store, capacity=5).claims) == 5


def test_capacity_zero_changes_nothing(backend, store):
    enqueue(store, "a")
    before = backend.image()
    assert list(admit(store, capacity=0)) == []
    assert backend.image() == before


def test_no_queue_is_no_work(backend, store):
    enqueue(store, "a")
    before = backend.image()
    assert list(admit(store, queues=())) == []
    assert backend.image() == before


@pytest.mark.parametrize(
    "request_fields",
    [
        {"lease_ms": 0},
        {"lease_ms": MAX_LEASE_MS + 1},
        {"capacity": -1},
        {"capacity": 10_001},
        {"quantum": -1},
        {"quantum": 1_000_001},
        {"worker": "é"},
        {"worker": "w" * 256},
        {"lease_id": "x" * 256},
        {"queues": ("",)},
        {"queues": tuple(f"q{n}" for n in range(257))},
        {"queues": ("nul\0",)},
    ],
    ids=str,
)
def test_a_malformed_request_claims_nothing(store, request_fields):
    enqueue(store, "a")
    with pytest.raises(InvalidRequest):
        admit(store, **request_fields)
    assert state_of(store, "a") is State.AVAILABLE


def test_queues_are_a_set(store):
    enqueue(store, "a")
    store.enqueue([envelope("b", queue="p")])
    assert sorted(ids(admit(store, queues=("q", "q", "p")))) == ["a", "b"]


def test_the_order_of_queues_does_not_matter(store):
    store.enqueue([envelope("a", queue="p"), envelope("b", queue="q")])
    first = ids(admit(store, queues=("q", "p"), capacity=1))
    assert first == ["a"], "equal weights: the first name wins"


def test_other_queues_are_left_alone(store):
    store.enqueue([envelope("a", queue="other")])
    assert ids(admit(store)) == []
    assert state_of(store, "a") is State.AVAILABLE


def test_within_a_partition_priority_then_instant_then_insertion_decide(store):
    store.enqueue(
        [
            envelope("late", scheduled_at_ms=9),
            envelope("second", scheduled_at_ms=5),
            envelope("z-first", scheduled_at_ms=5, priority=1),
            envelope("a-third", scheduled_at_ms=5),
        ]
    )
    assert ids(admit(store)) == ["z-first", "second", "a-third", "late"]


def test_sticky_jobs_are_found_behind_any_number_of_foreign_ones(store):
    for start in range(0, 5000, 500):
        store.enqueue(
            envelopes(
                *(f"b{n}" for n in range(start, start + 500)),
                sticky_worker="worker-b",
                priority=10_000,
            )
        )
    store.enqueue(
        [
            envelope("pinned", sticky_worker="worker-a", priority=50),
            envelope("free", priority=1),
        ]
    )
    claims = {
        claim.envelope.id: claim
        for claim in admit(store, worker="worker-a", capacity=2).claims
    }
    assert set(claims) == {"pinned", "free"}
    store.ack(claims["pinned"].lease_ref, Outcome.RATE_LIMITED)
    store.ack(claims["free"].lease_ref, Outcome.SUCCESS)
    assert ids(admit(store, worker="worker-c")) == []
    assert ids(admit(store, worker="worker-a")) == ["pinned"]
    assert ids(admit(store, worker="worker-b", capacity=1)) == ["b0"]


def test_an_anonymous_worker_gets_only_unpinned_jobs(store):
    store.enqueue([envelope("pinned", sticky_worker="w"), envelope("free")])
    assert ids(admit(store, worker="")) == ["free"]


def test_a_future_job_waits_for_its_instant_and_for_promotion(store, clock):
    store.enqueue(
        [envelope("due"), envelope("later", scheduled_at_ms=START_MS + 60_000)]
    )
    assert ids(admit(store)) == ["due"]
    clock.advance_ms(60_000)
    assert ids(admit(store)) == [], "a due job is not admittable until it is promoted"
    assert store.promote_due(10) == 1
    assert ids(admit(store)) == ["later"]


def test_priority_does_not_bring_a_scheduled_job_forward(store):
    store.enqueue([envelope("a", scheduled_at_ms=START_MS + 1, priority=100)])
    assert ids(admit(store)) == []


def test_a_pending_job_is_never_claimed(store, clock):
    store.enqueue([envelope("a", pending=True)])
    assert ids(admit(store)) == []
    clock.advance_ms(DAY_MS)
    assert store.promote_due(10) == 0
    assert ids(admit(store)) == []


@pytest.mark.parametrize(
    "state", sorted(set(State) - {State.DELETED, State.AVAILABLE, State.RUNNING})
)
def test_only_available_jobs_are_claimed(store, clock, state):
    bring_to(store, clock, "a", state)
    assert ids(admit(store)) == []


def test_a_claimed_job_is_not_claimed_again(store):
    enqueue(store, "a")
    claim_one(store)
    assert ids(admit(store)) == []


def test_a_paused_queue_gives_nothing_and_keeps_its_intake(store):
    enqueue(store, "a")
    steer(store).set_queue_paused("q", True)
    assert ids(admit(store)) == []
    enqueue(store, "b")
    steer(store).set_queue_paused("q", False)
    assert ids(admit(store)) == ["a", "b"]


def test_pausing_leaves_running_jobs_alone(store):
    enqueue(store, "a")
    claim = claim_one(store)
    steer(store).set_queue_paused("q", True)
    assert store.renew([claim.lease_ref], lease_ms=1000) == []
    store.ack(claim.lease_ref, Outcome.SUCCESS)


def test_an_unconfigured_rate_class_is_unlimited(store):
    enqueue(store, *(f"n{n}" for n in range(10)), rate_class="smtp", weight=1000)
    batch = admit(store)
    assert len(batch.claims) == 10
    assert batch.retry_after_ms is None


def test_the_fence_counts_entries_into_running(store):
    enqueue(store, "a")
    for fence in range(1, 5):
        claim = claim_one(store)
        assert claim.fence == fence
        store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
