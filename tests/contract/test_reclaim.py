"""Leases that ran out: taking jobs back, counting crashes, quarantine at the limit."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT32, fingerprint
from headgate_sync.errors import FingerprintQuarantined, InvalidRequest, LeaseRejected
from headgate_sync.inspection import CRASH_LIMIT_REASON
from headgate_sync.lease import Checkpoint, Reclaimed
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.retry import APART_MS
from headgate_sync.validation import MAX_SWEEP
from tests.builders import (
    KIND,
    PAYLOAD,
    START_MS,
    admit,
    claim_one,
    counts,
    crash,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)

PRINT = fingerprint(KIND, PAYLOAD)


def test_a_lost_lease_counts_a_crash_and_waits(store, clock):
    run_one(store, "a", max_attempts=1)
    clock.advance_ms(30_000)
    assert store.reclaim_expired(100) == [
        Reclaimed(job_id="a", fingerprint=PRINT, crash_attempt=1, quarantined=False)
    ]
    found = job(store, "a")
    assert found.state == State.RETRYABLE
    assert (found.attempt, found.crash_attempt) == (0, 1)
    assert found.scheduled_at_ms == START_MS + 31_000
    assert [entry.outcome for entry in found.errors] == ["lease_lost"]
    assert found.claimed_by is None
    assert found.orphaned


def test_who_lost_what_is_told_for_the_log(store, clock):
    enqueue(store, "a", queue="mail")
    admit(store, worker="w-7", queues=("mail",))
    clock.advance_ms(30_000)
    [told] = store.reclaim_expired(100)
    assert (told.kind, told.queue, told.worker) == (KIND, "mail", "w-7")


def test_a_lease_is_lost_at_its_instant_and_not_before(store, clock):
    run_one(store, "a")
    clock.advance_ms(29_999)
    assert store.reclaim_expired(100) == []
    assert state_of(store, "a") is State.RUNNING
    clock.advance_ms(1)
    assert len(store.reclaim_expired(100)) == 1


def test_one_sweep_takes_a_lease_once(store, clock):
    run_one(store, "a")
    clock.advance_ms(30_000)
    assert len(store.reclaim_expired(100)) == 1
    assert store.reclaim_expired(100) == []


def test_a_renewed_lease_is_left_alone(store, clock):
    claim = run_one(store, "a")
    clock.advance_ms(29_999)
    store.renew([claim.lease_ref], lease_ms=30_000)
    clock.advance_ms(29_999)
    assert store.reclaim_expired(100) == []


def test_the_limit_bounds_a_sweep_that_takes_the_oldest_first(store, clock):
    for n in range(5):
        enqueue(store, f"n{n}")
        claim_one(store, lease_ms=1_000 - n)
    clock.advance_ms(2_000)
    first = [record.job_id for record in store.reclaim_expired(2)]
    rest = [record.job_id for record in store.reclaim_expired(10)]
    assert first == ["n4", "n3"]
    assert rest == ["n2", "n1", "n0"]


def test_leases_that_end_together_are_taken_in_order_of_insertion(store, clock):
    enqueue(store, "z", "a", "m")
    admit(store)
    clock.advance_ms(30_000)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["z", "a", "m"]


def test_backoff_doubles_until_the_crash_limit_quarantines(store, clock):
    claim = run_one(store, "a")
    states = []
    for crashes in (1, 2):
        crash(store, clock, claim)
        found = job(store, "a")
        states.append(found.state)
        assert found.scheduled_at_ms - clock.now_ms() == 1_000 * crashes
        clock.advance_ms(1_000 * crashes)
        store.promote_due(10)
        claim = claim_one(store)
    place = job(store, "a").scheduled_at_ms
    clock.advance_ms(30_000)
    assert store.reclaim_expired(10) == [
        Reclaimed(job_id="a", fingerprint=PRINT, crash_attempt=3, quarantined=True)
    ]
    found = job(store, "a")
    assert [*states, found.state] == ["retryable", "retryable", "quarantined"]
    assert found.finalized_at_ms == clock.now_ms()
    assert found.scheduled_at_ms == place
    assert found.reason_code == "crash_limit"


def test_the_crash_backoff_has_a_cap_and_no_jitter(make_store, clock):
    store = make_store(
        crash_limit=50,
        retry_base_ms=100,
        retry_cap_ms=350,
        retry_jitter=lambda base: base,
    )
    claim = run_one(store, "a")
    for expected in (100, 200, 350, 350):
        crash(store, clock, claim)
        assert job(store, "a").scheduled_at_ms - clock.now_ms() == expected
        clock.advance_ms(expected)
        store.promote_due(10)
        claim = claim_one(store)


def lose_together(store, clock):
    """Claim what waits, and let the worker die; returns the delays by job."""
    claims = admit(store, lease_ms=1_000).claims
    clock.advance_ms(1_000)
    store.reclaim_expired(100)
    now_ms = clock.now_ms()
    ids = [claim.envelope.id for claim in claims]
    return {id: job(store, id).scheduled_at_ms - now_ms for id in sorted(ids)}


def test_before_its_last_chance_each_job_of_a_dead_worker_gets_a_moment_of_its_own(
    store, clock
):
    """The one that ends its worker must not take the others into quarantine."""
    enqueue(store, "a", "b", "c")
    assert lose_together(store, clock) == dict.fromkeys("abc", 1_000)
    clock.advance_ms(1_000)
    store.promote_due(10)
    enqueue(store, "fresh")
    assert lose_together(store, clock) == {
        "a": 2_000, "b": 2_000 + APART_MS, "c": 2_000 + 2 * APART_MS, "fresh": 1_000
    }  # fmt: skip


def test_jobs_of_different_workers_need_not_be_kept_apart(make_store, clock):
    store = make_store(crash_limit=2)
    enqueue(store, "a", "b", "c")
    admit(store, capacity=1, worker="other", lease_ms=1_000)
    assert lose_together(store, clock) == {"b": 1_000, "c": 1_000 + APART_MS}
    assert job(store, "a").scheduled_at_ms - clock.now_ms() == 1_000


def test_the_moments_of_many_jobs_stay_below_the_cap(make_store, clock):
    store = make_store(crash_limit=2, retry_cap_ms=3_000)
    enqueue(store, "a", "b", "c")
    assert list(lose_together(store, clock).values()) == [1_000, 3_000, 3_000]


def test_jobs_of_one_fingerprint_are_quarantined_together_at_their_limit(
    make_store, clock
):
    store = make_store(crash_limit=1)
    enqueue(store, "a", "b", "c")
    claims = admit(store, lease_ms=1).claims
    clock.advance_ms(60_000)
    records = store.reclaim_expired(100)
    assert [record.quarantined for record in records] == [True, True, True]
    with pytest.raises(FingerprintQuarantined, match=PRINT):
        enqueue(store, "d")
    with pytest.raises(LeaseRejected):
        store.ack(claims[0].lease_ref, Outcome.SUCCESS)
    (entry,) = steer(store).quarantine_list()
    assert (entry.fingerprint, entry.kind, entry.crash_count) == (PRINT, KIND, 1)
    assert entry.quarantined_at_ms == clock.now_ms()
    assert entry.reason == CRASH_LIMIT_REASON


def test_a_later_crash_leaves_the_registration_as_it_is(make_store, clock):
    store = make_store(crash_limit=1)
    enqueue(store, "a", "b")
    claim_one(store, lease_ms=1_000)
    claim_one(store, lease_ms=5_000)
    clock.advance_ms(1_000)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a"]
    registered = steer(store).quarantine_list()
    clock.advance_ms(4_000)
    assert [record.quarantined for record in store.reclaim_expired(10)] == [True]
    assert counts(store) == {"quarantined": 2}
    assert steer(store).quarantine_list() == registered


def test_a_reclaimed_job_goes_behind_its_waiting_siblings(store, clock):
    enqueue(store, "p", "s1", "s2", "s3")
    crash(store, clock, claim_one(store))
    clock.advance_ms(1_000)
    store.promote_due(10)
    order = [claim_one(store).envelope.id for _ in range(4)]
    assert order == ["s1", "s2", "s3", "p"]


def test_a_reclaimed_job_of_high_priority_is_next_once_it_is_due(store, clock):
    store.enqueue([envelope("high", priority=10)])
    claim = claim_one(store)
    enqueue(store, *(f"n{n}" for n in range(50)))
    crash(store, clock, claim)
    clock.advance_ms(1_000)
    store.promote_due(100)
    assert claim_one(store).envelope.id == "high"


def test_an_empty_fingerprint_is_never_registered(make_store, clock):
    store = make_store(crash_limit=1)
    store.enqueue([envelope("a", fingerprint="")])
    crash(store, clock, claim_one(store))
    assert state_of(store, "a") is State.QUARANTINED
    assert steer(store).quarantine_list() == []
    store.enqueue([envelope("b", fingerprint="", payload=b"other")])
    assert claim_one(store).envelope.id == "b"


def test_a_crash_is_charged_to_the_step_in_progress(store, clock):
    claim = run_one(store, "a")
    store.checkpoint(
        claim.lease_ref,
        Checkpoint(
            completed_steps=("fetch",),
            in_progress_step="transcode",
            crashes_by_step={"fetch": 2},
        ),
    )
    crash(store, clock, claim)
    clock.advance_ms(1_000)
    store.promote_due(10)
    found = claim_one(store).checkpoint
    assert dict(found.crashes_by_step) == {"fetch": 2, "transcode": 1}
    assert found.completed_steps == ("fetch",)


def test_a_crash_outside_of_steps_is_charged_to_none(store, clock):
    claim = run_one(store, "a")
    store.checkpoint(claim.lease_ref, Checkpoint(completed_steps=("fetch",)))
    crash(store, clock, claim)
    found = steer(store).read_checkpoint("a")
    assert dict(found.crashes_by_step) == {}


def test_a_crash_count_that_cannot_grow_does_not_stop_the_sweep(store, clock):
    claim = run_one(store, "a")
    store.checkpoint(
        claim.lease_ref,
        Checkpoint(in_progress_step="s", crashes_by_step={"s": MAX_INT32}),
    )
    run_one(store, "b")
    clock.advance_ms(30_000)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a", "b"]
    found = steer(store).read_checkpoint("a")
    assert dict(found.crashes_by_step) == {"s": MAX_INT32}


def test_quarantine_at_the_limit_frees_the_lifecycle_key(make_store, clock):
    store = make_store(crash_limit=1)
    claim = run_one(store, "a", unique_key=b"k")
    crash(store, clock, claim)
    store.enqueue([envelope("b", unique_key=b"k", payload=b"other")])


@pytest.mark.parametrize("limit", [0, -1, MAX_SWEEP + 1, True, 1.0])
def test_an_impossible_limit_is_refused_by_every_sweep(store, limit):
    for sweep in (
        store.reclaim_expired,
        store.promote_due,
        store.evict_retained,
        steer(store).quarantine_sweep,
    ):
        with pytest.raises(InvalidRequest, match="limit"):
            sweep(limit)
