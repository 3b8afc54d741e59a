"""Fingerprints that killed workers: sweep, refusal at intake, release."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import fingerprint
from headgate_sync.errors import FingerprintQuarantined, InvalidRequest, NotFound
from headgate_sync.lifecycle import Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    KIND,
    PAYLOAD,
    admit,
    bring_to,
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


@pytest.fixture
def poisoned(make_store, clock):
    """A store that holds a quarantined job and a sibling in every waiting state."""
    store = make_store(crash_limit=1)
    bring_to(store, clock, "retryable", State.RETRYABLE)
    claim = run_one(store, "poison", unique_key=b"k")
    store.enqueue([envelope("scheduled", delay_ms=86_000_000)])
    store.enqueue([envelope("pending", pending=True)])
    crash(store, clock, claim)
    return store


def put_available_sibling(store, clock):
    """A sibling that was let in before the registration and waits."""
    store.enqueue([envelope("available", fingerprint="other")])
    steer(store).edit_payload("available", PAYLOAD, schema_version=1, fingerprint=PRINT)


def test_waiting_siblings_are_swept_into_quarantine(poisoned, clock):
    store = poisoned
    put_available_sibling(store, clock)
    before = {id: job(store, id) for id in ("retryable", "scheduled", "pending")}
    assert steer(store).quarantine_sweep(100) == 4
    assert counts(store) == {"quarantined": 5}
    for id, earlier in before.items():
        found = job(store, id)
        assert (found.attempt, found.crash_attempt) == (
            earlier.attempt,
            earlier.crash_attempt,
        )
        assert found.finalized_at_ms == clock.now_ms()
        assert found.scheduled_at_ms == earlier.scheduled_at_ms
        assert found.reason_code == "quarantine_sweep"
    assert admit(store).claims == []
    assert steer(store).unfinished("q") == 0


def test_a_sweep_is_bounded_and_goes_by_insertion(poisoned):
    steered = steer(poisoned)
    assert steered.quarantine_sweep(1) == 1
    assert state_of(poisoned, "retryable") is State.QUARANTINED
    assert steered.quarantine_sweep(100) == 2
    assert steered.quarantine_sweep(100) == 0


def test_other_fingerprints_are_left_alone(poisoned):
    poisoned.enqueue([envelope("other", payload=b"other")])
    steer(poisoned).quarantine_sweep(100)
    assert claim_one(poisoned).envelope.id == "other"


def test_a_waiting_sibling_is_not_admitted_even_before_the_sweep(poisoned, clock):
    put_available_sibling(poisoned, clock)
    assert admit(poisoned).claims == []
    assert state_of(poisoned, "available") is State.AVAILABLE


def test_intake_refuses_the_fingerprint_and_the_whole_batch(backend, poisoned):
    batch = [envelope("fine", payload=b"other"), envelope("bad")]
    raised = unchanged_by(backend, lambda: poisoned.enqueue(batch))
    assert isinstance(raised, FingerprintQuarantined)
    assert raised.fingerprint == PRINT


def test_the_first_quarantined_job_in_the_order_of_the_batch_is_named(
    make_store, clock
):
    store = make_store(crash_limit=1)
    for id in ("x", "y"):
        crash(store, clock, run_one(store, id, fingerprint=id))
    with pytest.raises(FingerprintQuarantined, match="fingerprint y"):
        store.enqueue([envelope("1", fingerprint="y"), envelope("2", fingerprint="x")])


def test_release_makes_all_of_them_available_now(poisoned, clock):
    store, steered = poisoned, steer(poisoned)
    steered.quarantine_sweep(100)
    clock.advance_ms(1_000)
    assert steered.quarantine_release(PRINT) == 4
    assert counts(store) == {"available": 4}
    for id in ("retryable", "poison", "scheduled", "pending"):
        found = job(store, id)
        assert found.scheduled_at_ms == clock.now_ms()
        assert found.finalized_at_ms is None
        assert found.reason_code == ""
    assert steered.quarantine_list() == []
    assert [claim.envelope.id for claim in admit(store).claims] == [
        "retryable",
        "poison",
        "scheduled",
        "pending",
    ]
    enqueue(store, "new")
    assert steered.unfinished("q") == 5


def test_a_released_job_keeps_its_crashes_and_falls_at_the_next(poisoned, clock):
    store = poisoned
    steer(store).quarantine_release(PRINT)
    assert job(store, "poison").crash_attempt == 1
    claim = claim_one(store)
    assert claim.envelope.id == "poison"
    crash(store, clock, claim)
    assert job(store, "poison").crash_attempt == 2
    assert state_of(store, "poison") is State.QUARANTINED


def test_release_of_a_registered_fingerprint_without_jobs_unregisters_it(poisoned):
    steered = steer(poisoned)
    steered.delete_job("poison")
    assert steered.quarantine_release(PRINT) == 0
    assert steered.quarantine_list() == []
    enqueue(poisoned, "new")


@pytest.mark.parametrize("unknown", ["nobody", "", PRINT.upper()])
def test_release_of_an_unknown_fingerprint_is_not_found(backend, poisoned, unknown):
    raised = unchanged_by(backend, lambda: steer(poisoned).quarantine_release(unknown))
    assert isinstance(raised, NotFound)


def test_jobs_without_fingerprint_are_released_together(make_store, clock):
    store = make_store(crash_limit=1)
    enqueue(store, "a", "b", fingerprint="")
    admit(store, lease_ms=1)
    clock.advance_ms(1)
    store.reclaim_expired(10)
    assert counts(store) == {"quarantined": 2}
    assert steer(store).quarantine_release("") == 2
    assert counts(store) == {"available": 2}


def test_a_job_whose_key_is_taken_stays_and_is_taken_by_a_later_release(poisoned):
    store, steered = poisoned, steer(poisoned)
    store.enqueue([envelope("holder", unique_key=b"k", payload=b"other")])
    assert steered.quarantine_release(PRINT) == 0
    assert state_of(store, "poison") is State.QUARANTINED
    enqueue(store, "new")
    steered.operator_cancel("holder")
    assert steered.quarantine_release(PRINT) == 1
    assert state_of(store, "poison") is State.AVAILABLE


def test_of_two_quarantined_jobs_with_one_key_the_older_is_released(make_store, clock):
    store = make_store(crash_limit=1)
    for id in ("older", "younger"):
        claim = run_one(store, id, unique_key=b"k", fingerprint="")
        crash(store, clock, claim)
    assert steer(store).quarantine_release("") == 1
    assert state_of(store, "older") is State.AVAILABLE
    assert state_of(store, "younger") is State.QUARANTINED


def test_a_running_sibling_is_not_swept(make_store, clock):
    store = make_store(crash_limit=1)
    enqueue(store, "a", "b")
    claim_one(store, lease_ms=1)
    running = claim_one(store)
    clock.advance_ms(1)
    store.reclaim_expired(10)
    assert steer(store).quarantine_sweep(10) == 0
    store.ack(running.lease_ref, Outcome.SUCCESS)


def test_a_payload_edit_takes_a_job_out_of_reach_of_the_sweep(poisoned, clock):
    store, steered = poisoned, steer(poisoned)
    put_available_sibling(store, clock)
    assert admit(store).claims == []
    steered.edit_payload("available", b"new", schema_version=1, fingerprint="new")
    assert claim_one(store).envelope.id == "available"


def test_the_list_shows_the_newest_first_and_goes_on_from_a_cursor(make_store, clock):
    store = make_store(crash_limit=1)
    for print_ in ("one", "two", "three"):
        crash(store, clock, run_one(store, print_, fingerprint=print_))
    steered = steer(store)
    assert [e.fingerprint for e in steered.quarantine_list()] == ["three", "two", "one"]
    assert [e.fingerprint for e in steered.quarantine_list(2)] == ["three", "two"]
    last = steered.quarantine_list(2)[-1].cursor
    steered.quarantine_release("two")  # what was seen last may be gone by now
    assert [e.fingerprint for e in steered.quarantine_list(2, last)] == ["one"]
    assert steered.quarantine_list(2, steered.quarantine_list()[-1].cursor) == []


@pytest.mark.parametrize(
    "cursor", ["", "one", ":one", "-1:one", "١:one", "9" * 20 + ":x", "1:\0", 7]
)
def test_a_forged_cursor_of_the_list_is_refused(store, cursor):
    with pytest.raises(InvalidRequest, match="cursor"):
        steer(store).quarantine_list(2, cursor)


@pytest.mark.parametrize("limit", [0, 201, True])
def test_an_impossible_page_is_refused(store, limit):
    with pytest.raises(InvalidRequest, match="limit"):
        steer(store).quarantine_list(limit)
