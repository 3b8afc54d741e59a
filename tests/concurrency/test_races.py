"""Calls that meet on the same jobs: one wins, and everybody is told the truth."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    InvalidRequest,
    LeaseRejected,
)
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State
from tests.builders import (
    admit,
    claim_one,
    counts,
    enqueue,
    envelope,
    job,
    state_of,
    steer,
)
from tests.concurrency.threads import outcome_of, together


def in_batches(ids, size):
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("partitions", [1, 7])
def test_no_job_is_claimed_twice(store, partitions):
    ids = [f"n{n:03}" for n in range(500)]
    for n, batch in enumerate(in_batches(ids, 50)):
        enqueue(store, *batch, partition_key=str(n % partitions))
    batches = together(
        [lambda n=n: admit(store, f"L{n}", capacity=80) for n in range(8)]
    )
    claims = [claim for batch in batches for claim in batch.claims]
    claimed = [claim.envelope.id for claim in claims]
    assert len(set(claimed)) == len(claimed)
    assert {claim.fence for claim in claims} == {1}
    for id in ids:
        assert (state_of(store, id) is State.RUNNING) == (id in set(claimed))
    while rest := admit(store, capacity=80).claims:
        claimed += [claim.envelope.id for claim in rest]
    assert sorted(claimed) == ids


def test_an_ack_and_a_reclaim_of_one_lease_do_not_both_count(store, clock):
    ids = [f"n{n}" for n in range(60)]
    enqueue(store, *ids, max_attempts=9)
    claims = admit(store, capacity=60).claims
    clock.advance_ms(30_000)

    def ack(claim):
        return outcome_of(
            lambda: store.ack(claim.lease_ref, Outcome.RETRY), LeaseRejected
        )

    def ack_all(claims):
        return {claim.envelope.id: ack(claim) for claim in claims}

    shuffled = random.Random(1).sample(claims, len(claims))
    answers = together(
        [
            lambda: ack_all(shuffled[:30]),
            lambda: ack_all(shuffled[30:]),
            *[lambda: store.reclaim_expired(7) for _ in range(12)],
        ]
    )
    acked = answers[0] | answers[1]
    reclaimed = [record.job_id for records in answers[2:] for record in records]
    assert len(set(reclaimed)) == len(reclaimed)
    for id in ids:
        found = job(store, id)
        assert (acked[id] is None) == (id not in reclaimed)
        assert (found.attempt, found.crash_attempt) == (
            (0, 1) if id in reclaimed else (1, 0)
        )
        assert len(found.errors) == 1


def test_a_cancel_and_an_ack_do_not_both_win(store):
    for round in range(30):
        id = f"n{round}"
        enqueue(store, id)
        ref = claim_one(store).lease_ref
        acked, cancelled = together(
            [
                lambda ref=ref: outcome_of(
                    lambda: store.ack(ref, Outcome.SUCCESS), LeaseRejected
                ),
                lambda id=id: outcome_of(
                    lambda: steer(store).operator_cancel(id), InvalidRequest
                ),
            ]
        )
        won = state_of(store, id)
        assert (acked is None) == (won is State.COMPLETED)
        assert (cancelled is None) == (won is State.CANCELLED)


def test_one_of_many_acks_of_a_lease_settles_it(store):
    enqueue(store, "a", max_attempts=9)
    ref = claim_one(store).lease_ref
    outcomes = [Outcome.RETRY, Outcome.SKIP, Outcome.SUCCESS] * 4
    answers = together(
        [
            lambda outcome=outcome: outcome_of(
                lambda: store.ack(ref, outcome), LeaseRejected
            )
            for outcome in outcomes
        ]
    )
    accepted = {
        outcome
        for outcome, answer in zip(outcomes, answers, strict=True)
        if answer is None
    }
    assert len(accepted) == 1, "repeats of the winner are recognised, others rejected"
    assert job(store, "a").attempt == (1 if accepted == {Outcome.RETRY} else 0)
    assert steer(store).unfinished("q") == (1 if accepted == {Outcome.RETRY} else 0)


def test_renewals_in_any_order_lose_nothing_that_is_held(store):
    ids = [f"n{n}" for n in range(80)]
    enqueue(store, *ids)
    refs = [claim.lease_ref for claim in admit(store, capacity=80).claims]
    done = refs[::4]

    def renew(seed):
        chosen = random.Random(seed).sample(refs, len(refs))
        return {ref for _ in range(5) for ref in store.renew(chosen, lease_ms=60_000)}

    def finish():
        for ref in done:
            store.ack_batch([Ack(lease=ref, outcome=Outcome.SUCCESS)])
        return set()

    lost = together([finish, *[lambda seed=seed: renew(seed) for seed in range(6)]])
    assert set().union(*lost) <= set(done)
    assert counts(store) == {"completed": 20, "running": 60}


def test_the_same_new_ids_are_taken_in_once(store):
    def take_in(ids, seed):
        enqueue(store, *random.Random(seed).sample(ids, len(ids)))

    for round in range(10):
        ids = [f"r{round}n{n}" for n in range(20)]
        together([lambda ids=ids, seed=seed: take_in(ids, seed) for seed in range(6)])
    assert counts(store) == {"available": 200}
    assert steer(store).unfinished("q") == 200


@pytest.mark.parametrize("window_ms", [0, 60_000])
def test_of_many_duplicates_one_is_stored_and_the_others_name_it(store, window_ms):
    answers = together(
        [
            lambda n=n: outcome_of(
                lambda: enqueue(
                    store, f"n{n}", unique_key=b"k", unique_window_ms=window_ms
                ),
                DuplicateJob,
            )
            for n in range(64)
        ]
    )
    (winner,) = [f"n{n}" for n, answer in enumerate(answers) if answer is None]
    refusals = [answer for answer in answers if answer is not None]
    assert {refusal.existing_id for refusal in refusals} == {winner}
    assert counts(store) == {"available": 1}


def test_batches_with_the_same_keys_in_opposite_order_do_not_deadlock(store):
    keys = [bytes([n]) for n in range(20)]
    for round in range(10):

        def take(name, keys, round=round):
            batch = [
                envelope(f"{name}-{round}-{key[0]}", unique_key=key) for key in keys
            ]
            return outcome_of(lambda: store.enqueue(batch), DuplicateJob)

        answers = together(
            [
                lambda: take("up", keys),
                lambda: take("down", keys[::-1]),
                lambda: take("some", keys[5:15]),
            ]
        )
        assert answers.count(None) == 1
        for id, count in Counter(c.envelope.id for c in drain(store)).items():
            assert count == 1, id


def drain(store):
    """Complete everything that can be claimed."""
    done = []
    while claims := admit(store, capacity=100).claims:
        store.ack_batch(
            [Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS) for claim in claims]
        )
        done += claims
    return done


def test_a_limit_is_exact_among_many_producers(store):
    steer(store).set_enqueue_limit("q", 25)
    answers = together(
        [
            lambda n=n: outcome_of(lambda: enqueue(store, f"n{n}"), Backpressure)
            for n in range(64)
        ]
    )
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) == 39
    for refusal in refused:
        assert (refusal.queue, refusal.limit, refusal.incoming) == ("q", 25, 1)
        assert refusal.current <= 25
    assert steer(store).unfinished("q") == 25


def test_a_duty_has_one_holder_among_many_claimants(store):
    for round in range(10):
        name = f"duty-{round}"
        taken = together(
            [
                lambda n=n, name=name: store.claim_duty(name, f"w{n}", 60_000)
                for n in range(8)
            ]
        )
        assert taken.count(True) == 1


def test_sweeps_that_run_at_once_share_the_work(store, clock):
    ids = [f"n{n}" for n in range(120)]
    enqueue(store, *ids, retention_ms=1)
    claims = admit(store, capacity=120).claims
    store.ack_batch(
        [
            Ack(lease=claim.lease_ref, outcome=Outcome.SNOOZE, delay_ms=1)
            for claim in claims
        ]
    )
    clock.advance_ms(1)
    promoted = together([lambda: store.promote_due(50) for _ in range(4)])
    promoted.append(store.promote_due(1_000))
    assert sum(promoted) == 120
    drain(store)
    clock.advance_ms(1)
    evicted = together([lambda: store.evict_retained(50) for _ in range(4)])
    evicted.append(store.evict_retained(1_000))
    assert sum(evicted) == 120
    assert counts(store) == {}
