"""Leases are extended in one call, each judged by its own ref."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import MAX_LEASE_MS, LeaseRef
from headgate_sync.lifecycle import Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    admit,
    claim_one,
    crash,
    enqueue,
    job,
    run_one,
    state_of,
    steer,
)


def expiry(store, id):
    return job(store, id).lease_expires_at_ms


def test_a_held_lease_expires_one_length_from_now(store, clock):
    claim = run_one(store, "a")
    clock.advance_ms(10_000)
    assert store.renew([claim.lease_ref], lease_ms=30_000) == []
    assert expiry(store, "a") == START_MS + 40_000


def test_renewing_may_shorten_a_lease(store):
    claim = run_one(store, "a")
    assert store.renew([claim.lease_ref], lease_ms=5_000) == []
    assert expiry(store, "a") == START_MS + 5_000


def test_jobs_that_left_running_are_reported_lost(store):
    enqueue(store, "a", "b", retention_ms=0)
    refs = [claim.lease_ref for claim in admit(store).claims]
    store.ack(refs[0], Outcome.SUCCESS)
    store.ack(refs[1], Outcome.RETRY)
    assert store.renew(refs, lease_ms=1000) == refs
    assert store.renew(refs[::-1], lease_ms=1000) == refs[::-1]


def test_lost_leases_do_not_touch_their_neighbours(store, clock):
    enqueue(store, "c", "h")
    cancelled, held = (claim.lease_ref for claim in admit(store).claims)
    steer(store).operator_cancel("c")
    clock.advance_ms(500)
    assert store.renew([held, cancelled], lease_ms=30_000) == [cancelled]
    assert expiry(store, "h") == START_MS + 30_500


def test_a_lease_past_its_instant_is_held_until_it_is_reclaimed(store, clock):
    claim = run_one(store, "a")
    clock.advance_ms(40_000)
    assert store.renew([claim.lease_ref], lease_ms=1_000) == []
    clock.advance_ms(40_000)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert state_of(store, "a") is State.COMPLETED


def test_the_old_ref_of_a_job_claimed_again_is_lost_and_the_new_one_held(store, clock):
    first = run_one(store, "a")
    crash(store, clock, first)
    clock.advance_ms(1_000)
    store.promote_due(10)
    second = claim_one(store)
    lost = store.renew([first.lease_ref, second.lease_ref], lease_ms=60_000)
    assert lost == [first.lease_ref]
    assert expiry(store, "a") == clock.now_ms() + 60_000


def test_a_ref_named_twice_is_judged_twice(store):
    claim = run_one(store, "a")
    stale = LeaseRef("a", claim.lease_id, claim.fence + 1)
    refs = [stale, claim.lease_ref, stale, claim.lease_ref]
    assert store.renew(refs, lease_ms=1000) == [stale, stale]


@pytest.mark.parametrize(
    "change",
    [
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence + 1),
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence - 1),
        lambda ref: LeaseRef(ref.job_id, "other", ref.fence),
        lambda ref: LeaseRef("missing", ref.lease_id, ref.fence),
    ],
)
def test_a_foreign_ref_extends_nothing(backend, store, clock, change):
    ref = run_one(store, "a").lease_ref
    clock.advance_ms(1)
    before = backend.image()
    assert store.renew([change(ref)], lease_ms=1000) == [change(ref)]
    assert backend.image() == before


def test_no_lease_is_no_work(backend, store):
    run_one(store, "a")
    before = backend.image()
    assert store.renew([], lease_ms=1000) == []
    assert backend.image() == before


@pytest.mark.parametrize("lease_ms", [0, -1, MAX_LEASE_MS + 1, True, 1.5])
def test_an_impossible_length_is_refused(backend, store, lease_ms):
    claim = run_one(store, "a")
    for refs in ([claim.lease_ref], []):
        raised = unchanged_by(backend, lambda r=refs: store.renew(r, lease_ms=lease_ms))
        assert isinstance(raised, InvalidRequest)
        assert "lease_ms" in str(raised)


def test_many_leases_are_renewed_in_one_call(store, clock):
    enqueue(store, *(f"n{n}" for n in range(300)))
    refs = [claim.lease_ref for claim in admit(store, capacity=300).claims]
    clock.advance_ms(1_000)
    assert store.renew(refs, lease_ms=30_000) == []
    expiries = {expiry(store, f"n{n}") for n in range(300)}
    assert expiries == {START_MS + 31_000}
