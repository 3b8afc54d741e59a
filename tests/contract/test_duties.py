"""Singleton tasks of the fleet, held by lease."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import MAX_LEASE_MS
from tests.backends import unchanged_by
from tests.builders import crash, enqueue, envelope, run_one, steer


def test_one_holder_at_a_time(store, clock):
    assert store.claim_duty("d", "a", 60_000) is True
    assert store.claim_duty("d", "b", 60_000) is False
    assert store.claim_duty("d", "a", 60_000) is True
    store.release_duty("d", "a")
    assert store.claim_duty("d", "b", 60_000) is True


def test_a_refused_claim_changes_nothing(backend, store):
    store.claim_duty("d", "a", 60_000)
    before = backend.image()
    assert store.claim_duty("d", "b", 1) is False
    assert backend.image() == before


def test_a_duty_is_free_at_the_end_of_its_lease_and_not_before(store, clock):
    store.claim_duty("d", "a", 1_000)
    clock.advance_ms(999)
    assert store.claim_duty("d", "b", 1_000) is False
    clock.advance_ms(1)
    assert store.claim_duty("d", "b", 1_000) is True


def test_renewing_sets_the_lease_anew(store, clock):
    store.claim_duty("d", "a", 1_000)
    clock.advance_ms(900)
    store.claim_duty("d", "a", 1_000)
    clock.advance_ms(999)
    assert store.claim_duty("d", "b", 1_000) is False


def test_duties_are_leased_one_by_one(store):
    assert store.claim_duty("d1", "a", 1_000) is True
    assert store.claim_duty("d2", "b", 1_000) is True


@pytest.mark.parametrize(("name", "holder"), [("d", "b"), ("unknown", "a")])
def test_a_release_by_another_is_no_error_and_no_change(backend, store, name, holder):
    store.claim_duty("d", "a", 60_000)
    before = backend.image()
    store.release_duty(name, holder)
    assert backend.image() == before


@pytest.mark.parametrize("lease_ms", [0, -1, MAX_LEASE_MS + 1, True])
def test_an_impossible_lease_is_refused(backend, store, lease_ms):
    for call in (
        lambda: store.claim_duty("d", "a", lease_ms),
        lambda: store.duty_tick("a", ["d"], lease_ms),
    ):
        assert isinstance(unchanged_by(backend, call), InvalidRequest)


@pytest.mark.parametrize("bad", ["nul\0", "lone\ud800", "x" * 256, 5])
def test_a_malformed_name_or_holder_is_refused(backend, store, bad):
    for call in (
        lambda: store.claim_duty(bad, "a", 1),
        lambda: store.claim_duty("d", bad, 1),
        lambda: store.duty_tick(bad, ["d"], 1),
        lambda: store.duty_tick("a", ["d", bad], 1),
    ):
        assert isinstance(unchanged_by(backend, call), InvalidRequest)


def test_a_tick_claims_what_is_free_and_tells_what_is_due(store, clock):
    store.claim_duty("d2", "b", 60_000)
    store.enqueue([envelope("a", delay_ms=1)])
    clock.advance_ms(1)
    names = ["promoter", "d1", "d2"]
    assert store.duty_tick("a", names, 1_000) == {"promoter": True, "d1": True}
    store.promote_due(10)
    assert store.duty_tick("a", names, 1_000) == {"promoter": False, "d1": True}


def test_a_tick_holds_the_duties_against_others(store, clock):
    store.duty_tick("a", ["d1", "d2"], 1_000)
    assert store.duty_tick("b", ["d1", "d2", "d3"], 1_000) == {"d3": True}
    clock.advance_ms(1_000)
    assert set(store.duty_tick("b", ["d1", "d2", "d3"], 1_000)) == {"d1", "d2", "d3"}


def test_a_tick_of_nothing_holds_nothing(backend, store):
    before = backend.image()
    assert store.duty_tick("a", [], 1_000) == {}
    assert backend.image() == before


def test_a_name_that_stands_twice_is_claimed_once(store):
    assert store.duty_tick("a", ["d", "d"], 1_000) == {"d": True}


def test_the_reclaimer_is_due_while_a_lease_has_run_out(store, clock):
    run_one(store, "a")
    assert store.duty_tick("w", ["reclaimer"], 1_000) == {"reclaimer": False}
    clock.advance_ms(30_000)
    assert store.duty_tick("w", ["reclaimer"], 1_000) == {"reclaimer": True}
    store.reclaim_expired(10)
    assert store.duty_tick("w", ["reclaimer"], 1_000) == {"reclaimer": False}


def test_retention_is_due_while_a_job_has_lapsed(store, clock):
    from headgate_sync.lifecycle import Outcome

    claim = run_one(store, "a", retention_ms=5)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert store.duty_tick("w", ["retention"], 1_000) == {"retention": False}
    clock.advance_ms(5)
    assert store.duty_tick("w", ["retention"], 1_000) == {"retention": True}


def test_the_quarantine_duty_is_due_while_a_sibling_waits(make_store, clock):
    store = make_store(crash_limit=1)
    store.enqueue([envelope("waiting", delay_ms=86_000_000)])
    assert store.duty_tick("w", ["quarantine"], 1_000) == {"quarantine": False}
    crash(store, clock, run_one(store, "poison"))
    assert store.duty_tick("w", ["quarantine"], 1_000) == {"quarantine": True}
    steer(store).quarantine_sweep(10)
    assert store.duty_tick("w", ["quarantine"], 1_000) == {"quarantine": False}


def test_duties_and_jobs_do_not_mix(store):
    enqueue(store, "d")
    assert store.claim_duty("d", "a", 1_000) is True
