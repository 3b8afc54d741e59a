"""What an attempt takes from the budget of its class, and what an ack gives back."""

from __future__ import annotations

import pytest

from headgate_sync.errors import LeaseRejected
from headgate_sync.lease import Ack, Checkpoint, LeaseRef
from headgate_sync.lifecycle import Outcome
from tests.backends import unchanged_by
from tests.builders import admit, claim_one, crash, envelope, set_rate_limit

POINTS = "points"


@pytest.fixture(autouse=True)
def budget(store):
    """Five tokens that nothing refills."""
    set_rate_limit(store, POINTS, 0, 60_000, 5)


def put(store, *weights, **fields):
    """Enqueue a job per weight, named after it."""
    store.enqueue(
        [
            envelope(f"w{weight}-{n}", rate_class=POINTS, weight=weight, **fields)
            for n, weight in enumerate(weights)
        ]
    )


def weights(batch):
    return [claim.envelope.weight for claim in batch.claims]


def passes(store, weight):
    """Whether a further job of this weight is admitted now."""
    store.enqueue([envelope(f"probe-{weight}", rate_class=POINTS, weight=weight)])
    return weights(admit(store)) == [weight]


def test_a_budget_admits_what_it_can_pay(store):
    put(store, 3, 2, 1)
    assert weights(admit(store)) == [3, 2]
    assert weights(admit(store)) == []


def test_an_ack_gives_back_what_the_work_did_not_cost(store):
    put(store, 3, 2, 1)
    three, two = admit(store).claims
    store.ack(three.lease_ref, Outcome.SUCCESS, actual_weight=1)
    (one,) = admit(store).claims
    assert one.envelope.weight == 1
    store.ack(two.lease_ref, Outcome.SUCCESS, actual_weight=4)
    assert not passes(store, 1), "the class is in debt"


def test_without_an_actual_weight_the_estimate_stands(store):
    put(store, 5)
    store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
    assert not passes(store, 1)


def test_work_that_cost_nothing_is_refunded_whole(store):
    put(store, 5)
    store.ack(claim_one(store).lease_ref, Outcome.SUCCESS, actual_weight=0)
    assert passes(store, 5)


@pytest.mark.parametrize(
    ("outcome", "delay_ms"),
    [
        (Outcome.RETRY, None),
        (Outcome.SNOOZE, 5),
        (Outcome.SKIP, None),
        (Outcome.REVOKE, None),
        (Outcome.UNDECODABLE, None),
    ],
)
def test_a_refund_does_not_depend_on_the_outcome(store, outcome, delay_ms):
    put(store, 5)
    claim = claim_one(store)
    store.ack(claim.lease_ref, outcome, delay_ms=delay_ms, actual_weight=1)
    assert passes(store, 4)


def test_a_job_given_back_is_charged_again(store):
    put(store, 5)
    store.ack(claim_one(store).lease_ref, Outcome.RATE_LIMITED)
    assert admit(store).claims == []


def test_a_class_that_comes_later_is_not_charged_for_what_runs(store):
    store.enqueue([envelope("early", rate_class="later", weight=3)])
    claim = claim_one(store)
    set_rate_limit(store, "later", 0, 60_000, 5)
    store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=10)
    store.enqueue([envelope("probe", rate_class="later", weight=5)])
    assert claim_one(store).envelope.id == "probe"


@pytest.mark.parametrize("actual_weight", [0, 9])
def test_a_rejected_ack_moves_no_budget(backend, store, actual_weight):
    put(store, 5)
    claim = claim_one(store)
    stale = LeaseRef(claim.envelope.id, claim.lease_id, claim.fence + 1)
    raised = unchanged_by(
        backend,
        lambda: store.ack(stale, Outcome.SUCCESS, actual_weight=actual_weight),
    )
    assert isinstance(raised, LeaseRejected)
    assert not passes(store, 1)


def test_a_repeated_ack_refunds_once(backend, store):
    put(store, 3)
    ref = claim_one(store).lease_ref
    store.ack(ref, Outcome.SUCCESS, actual_weight=2)
    again = unchanged_by(
        backend, lambda: store.ack(ref, Outcome.SUCCESS, actual_weight=0)
    )
    assert again is None
    assert passes(store, 3)
    assert not passes(store, 1)


def test_members_of_a_batch_are_settled_each_with_its_own_weight(store):
    put(store, 3, 2)
    three, two = admit(store).claims
    answers = store.ack_batch(
        [
            Ack(lease=three.lease_ref, outcome=Outcome.SUCCESS, actual_weight=1),
            Ack(lease=two.lease_ref, outcome=Outcome.RETRY, actual_weight=0),
            Ack(lease=three.lease_ref, outcome=Outcome.SKIP, actual_weight=0),
        ]
    )
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], LeaseRejected)
    assert passes(store, 4)
    assert not passes(store, 1)


def test_a_lost_lease_is_not_refunded(store, clock):
    put(store, 5)
    crash(store, clock, claim_one(store))
    assert not passes(store, 1)


def test_a_refund_never_fills_a_budget_beyond_its_burst(store, clock):
    set_rate_limit(store, POINTS, 1, 1, 5)
    put(store, 5)
    claim = claim_one(store)
    clock.advance_ms(1_000)
    store.ack(claim.lease_ref, Outcome.SUCCESS, actual_weight=0)
    put(store, *[1] * 6, queue="q")
    assert weights(admit(store)) == [1] * 5


def test_time_refills_a_budget_without_losing_a_fraction(store, clock):
    set_rate_limit(store, POINTS, 5, 1_000, 5)
    put(store, *[1] * 10)
    assert len(weights(admit(store))) == 5
    taken = 0
    for _ in range(10):
        clock.advance_ms(100)
        taken += len(weights(admit(store)))
    assert taken == 5


def test_an_empty_budget_says_when_to_ask_again(store):
    set_rate_limit(store, POINTS, 5, 1_000, 5)
    put(store, 5, 3)
    batch = admit(store)
    assert weights(batch) == [5]
    assert batch.retry_after_ms == 600


def test_a_heavy_job_is_not_overtaken_by_a_lighter_one_of_its_class(store):
    put(store, 3)
    put(store, 4, 1)
    assert weights(admit(store)) == [3]


def test_a_job_that_no_budget_can_ever_pay_does_not_stop_its_class(store):
    put(store, 6, 2)
    assert weights(admit(store)) == [2]
    assert weights(admit(store)) == []


def test_a_remaining_weight_is_charged_instead_of_the_whole(store):
    put(store, 4)
    claim = claim_one(store)
    store.checkpoint(
        claim.lease_ref, Checkpoint(completed_steps=("s",), remaining_weight=1)
    )
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    again = claim_one(store)
    assert again.envelope.weight == 4
    assert not passes(store, 1), "four and one were charged"


def test_remaining_steps_that_are_free_pass_an_empty_budget(store):
    put(store, 5)
    claim = claim_one(store)
    store.checkpoint(
        claim.lease_ref, Checkpoint(completed_steps=("s",), remaining_weight=0)
    )
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    assert claim_one(store).envelope.weight == 5


def test_a_rate_limited_ack_with_a_delay_pauses_its_class(store, clock):
    put(store, 1, 1)
    claim = claim_one(store)
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED, delay_ms=500)
    assert admit(store).claims == []
    store.enqueue([envelope("free")])
    assert claim_one(store).envelope.id == "free"
    clock.advance_ms(499)
    assert admit(store).claims == []
    clock.advance_ms(1)
    assert len(admit(store).claims) == 2


def test_a_pause_of_an_unknown_class_ends_by_itself(store, clock):
    store.enqueue([envelope(id, rate_class="unknown") for id in "ab"])
    claim = claim_one(store)
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED, delay_ms=500)
    assert admit(store).claims == []
    clock.advance_ms(500)
    assert len(admit(store).claims) == 2
