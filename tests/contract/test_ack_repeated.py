"""An ack whose reply was lost may be sent again."""

from __future__ import annotations

import pytest

from headgate_sync.errors import LeaseRejected
from headgate_sync.lease import Ack, JobResult
from headgate_sync.lifecycle import ACKABLE, Outcome, State
from tests.backends import unchanged_by
from tests.builders import claim_one, crash, job, run_one, state_of, steer

KEEPS_ROW = sorted(ACKABLE - {Outcome.REVOKE})


def delay_for(outcome):
    return 5 if outcome in {Outcome.SNOOZE, Outcome.RETRY} else None


@pytest.mark.parametrize("outcome", KEEPS_ROW)
def test_the_same_ack_again_changes_nothing(backend, store, outcome):
    ref = run_one(store, "a").lease_ref
    store.ack(ref, outcome, delay_ms=delay_for(outcome), error="e", logs=["l"])
    again = unchanged_by(
        backend,
        lambda: store.ack(ref, outcome, delay_ms=delay_for(outcome), error="other"),
    )
    assert again is None


@pytest.mark.parametrize("outcome", KEEPS_ROW)
def test_another_outcome_afterwards_is_rejected(backend, store, outcome):
    ref = run_one(store, "a").lease_ref
    store.ack(ref, outcome, delay_ms=delay_for(outcome))
    for other in ACKABLE - {outcome}:
        raised = unchanged_by(
            backend, lambda o=other: store.ack(ref, o, delay_ms=delay_for(o))
        )
        assert isinstance(raised, LeaseRejected), other
        assert raised.missing is False


def test_another_lease_with_the_same_outcome_is_rejected(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    for ref in (
        type(claim.lease_ref)("a", "other", 1),
        type(claim.lease_ref)("a", claim.lease_id, 2),
        type(claim.lease_ref)("a", claim.lease_id, 0),
    ):
        with pytest.raises(LeaseRejected):
            store.ack(ref, Outcome.SUCCESS)


def test_an_ack_is_recognised_while_the_job_waits_and_until_it_is_claimed_again(
    store, clock
):
    claim = run_one(store, "c")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=5)
    clock.advance_ms(5)
    store.promote_due(10)
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=5)
    assert state_of(store, "c") is State.AVAILABLE
    claim_one(store)
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=5)


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.REVOKE])
def test_an_ack_of_a_removed_job_says_that_the_row_is_gone(backend, store, outcome):
    ref = run_one(store, "a", retention_ms=0).lease_ref
    store.ack(ref, outcome)
    raised = unchanged_by(backend, lambda: store.ack(ref, outcome))
    assert isinstance(raised, LeaseRejected)
    assert (raised.job_id, raised.missing) == ("a", True)


def test_a_reclaim_leaves_nothing_to_recognise(store, clock):
    claim = run_one(store, "a")
    crash(store, clock, claim)
    for outcome in ACKABLE:
        with pytest.raises(LeaseRejected):
            store.ack(claim.lease_ref, outcome, delay_ms=delay_for(outcome))


def test_an_operator_cancel_leaves_nothing_to_recognise(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=5)
    steer(store).operator_cancel("a")
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=5)


def test_an_operator_retry_keeps_what_is_recognised(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SKIP)
    steer(store).operator_retry("a")
    store.ack(claim.lease_ref, Outcome.SKIP)
    assert state_of(store, "a") is State.AVAILABLE


@pytest.mark.needs("results")
def test_a_result_ack_is_recognised_and_keeps_the_first_result(backend, store):
    ref = run_one(store, "a").lease_ref
    store.results.ack_success_with_result(ref, JobResult(1, b"first"))
    again = unchanged_by(
        backend,
        lambda: store.results.ack_success_with_result(ref, JobResult(2, b"second")),
    )
    assert again is None
    assert unchanged_by(backend, lambda: store.ack(ref, Outcome.SUCCESS)) is None
    assert store.results.read_result("a") == JobResult(1, b"first")


def test_a_repeated_ack_in_a_batch_settles_once(store):
    ref = run_one(store, "a", max_attempts=5).lease_ref
    ack = Ack(lease=ref, outcome=Outcome.RETRY, delay_ms=5, error="e")
    assert store.ack_batch([ack]) == [None]
    assert store.ack_batch([ack, ack]) == [None, None]
    assert job(store, "a").attempt == 1
    assert len(job(store, "a").errors) == 1
