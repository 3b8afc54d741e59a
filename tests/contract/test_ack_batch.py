"""Many acks in one commit, each judged alone."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lease import Ack, JobResult, LeaseRef
from headgate_sync.lifecycle import ACKABLE, Outcome, State
from headgate_sync.validation import MAX_ACKS
from tests.backends import unchanged_by
from tests.builders import admit, enqueue, envelope, job, state_of, steer


def shape(answers):
    """What a batch answered, in a form that compares."""
    return [
        None if answer is None else (type(answer), answer.job_id, answer.missing)
        for answer in answers
    ]


def test_members_are_settled_in_order_and_apart(store):
    enqueue(store, "a", "b", "c")
    a, b, c = (claim.lease_ref for claim in admit(store).claims)
    steer(store).operator_cancel("b")
    answers = store.ack_batch(
        [
            Ack(lease=a, outcome=Outcome.SUCCESS),
            Ack(lease=b, outcome=Outcome.SUCCESS),
            Ack(lease=c, outcome=Outcome.RETRY),
            Ack(lease=a, outcome=Outcome.SUCCESS),
        ]
    )
    assert shape(answers) == [None, (LeaseRejected, "b", False), None, None]
    assert [state_of(store, id) for id in "abc"] == [
        State.COMPLETED,
        State.CANCELLED,
        State.RETRYABLE,
    ]


def test_a_job_that_the_batch_removed_is_missing_for_its_second_ack(store):
    enqueue(store, "a", retention_ms=0)
    (claim,) = admit(store).claims
    ack = Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS)
    assert shape(store.ack_batch([ack, ack])) == [None, (LeaseRejected, "a", True)]


def test_the_second_of_two_different_acks_of_one_job_is_rejected(store):
    enqueue(store, "a")
    (claim,) = admit(store).claims
    answers = store.ack_batch(
        [
            Ack(lease=claim.lease_ref, outcome=Outcome.SKIP),
            Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS),
        ]
    )
    assert shape(answers) == [None, (LeaseRejected, "a", False)]
    assert state_of(store, "a") is State.ARCHIVED


def test_a_stale_ref_of_a_job_does_not_hide_its_live_one(store):
    enqueue(store, "a")
    (claim,) = admit(store).claims
    stale = LeaseRef("a", claim.lease_id, claim.fence + 1)
    answers = store.ack_batch(
        [
            Ack(lease=stale, outcome=Outcome.SUCCESS),
            Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS),
        ]
    )
    assert shape(answers) == [(LeaseRejected, "a", False), None]


def test_a_batch_of_rejected_acks_changes_nothing(backend, store):
    enqueue(store, "a")
    ref = admit(store).claims[0].lease_ref
    acks = [
        Ack(lease=LeaseRef("a", ref.lease_id, 9), outcome=Outcome.SUCCESS),
        Ack(lease=LeaseRef("b", ref.lease_id, 1), outcome=Outcome.REVOKE),
    ]
    before = backend.image()
    assert shape(store.ack_batch(acks)) == [
        (LeaseRejected, "a", False),
        (LeaseRejected, "b", True),
    ]
    assert backend.image() == before


def test_nothing_to_ack_is_no_work(backend, store):
    before = backend.image()
    assert store.ack_batch([]) == []
    assert backend.image() == before


def test_more_than_a_thousand_acks_are_refused(backend, store):
    enqueue(store, "a")
    ref = admit(store).claims[0].lease_ref
    acks = [Ack(lease=ref, outcome=Outcome.SUCCESS)] * (MAX_ACKS + 1)
    raised = unchanged_by(backend, lambda: store.ack_batch(acks))
    assert isinstance(raised, InvalidRequest)
    assert str(MAX_ACKS) in str(raised)


def test_a_full_batch_is_settled(store):
    ids = [f"n{n}" for n in range(MAX_ACKS)]
    enqueue(store, *ids, retention_ms=0)
    claims = admit(store, capacity=MAX_ACKS).claims
    acks = [Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS) for claim in claims]
    assert store.ack_batch(acks) == [None] * MAX_ACKS
    assert steer(store).unfinished("q") == 0


def test_every_outcome_in_one_batch_ends_as_it_would_alone(store):
    outcomes = sorted(ACKABLE)
    store.enqueue([envelope(outcome.value, max_attempts=1) for outcome in outcomes])
    claims = {claim.envelope.id: claim for claim in admit(store).claims}
    answers = store.ack_batch(
        [
            Ack(
                lease=claims[outcome.value].lease_ref,
                outcome=outcome,
                delay_ms=9 if outcome is Outcome.SNOOZE else None,
                logs=["l"],
            )
            for outcome in outcomes
        ]
    )
    assert answers == [None] * len(outcomes)
    assert {outcome: state_of(store, outcome.value) for outcome in outcomes} == {
        Outcome.SUCCESS: State.COMPLETED,
        Outcome.RETRY: State.ARCHIVED,
        Outcome.SKIP: State.ARCHIVED,
        Outcome.REVOKE: State.DELETED,
        Outcome.SNOOZE: State.SCHEDULED,
        Outcome.UNDECODABLE: State.UNDECODABLE,
        Outcome.RATE_LIMITED: State.AVAILABLE,
    }


@pytest.mark.needs("results")
def test_members_carry_their_results(store):
    enqueue(store, "a", "b")
    a, b = (claim.lease_ref for claim in admit(store).claims)
    store.ack_batch(
        [
            Ack(lease=a, outcome=Outcome.SUCCESS, result=JobResult(1, b"\x00a")),
            Ack(lease=b, outcome=Outcome.SUCCESS, result=JobResult(2, b"")),
        ]
    )
    assert store.results.read_result("a") == JobResult(1, b"\x00a")
    assert store.results.read_result("b") == JobResult(2, b"")


def test_hostile_error_text_does_not_poison_the_batch(store):
    enqueue(store, "a", "b", max_attempts=9)
    a, b = (claim.lease_ref for claim in admit(store).claims)
    answers = store.ack_batch(
        [
            Ack(
                lease=a,
                outcome=Outcome.RETRY,
                error="\0\ud800" * 9000,
                logs=["\0\udfff"],
            ),
            Ack(lease=b, outcome=Outcome.SUCCESS),
        ]
    )
    assert answers == [None, None]
    assert job(store, "a").state == State.RETRYABLE
