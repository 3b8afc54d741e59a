"""What a job remembers of its attempts."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT32
from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import MAX_ERROR_BYTES, MAX_HISTORY
from headgate_sync.lifecycle import Outcome
from tests.builders import (
    START_MS,
    WORKER,
    claim_one,
    crash,
    enqueue,
    job,
    run_one,
    steer,
)


def test_a_failure_is_told_with_its_logs(store):
    claim = run_one(store, "a")
    store.ack(
        claim.lease_ref,
        Outcome.RETRY,
        error="boom",
        logs=["opened", "returned 500"],
        error_code="HTTP_500",
        latency_ms=12,
    )
    assert job(store, "a").errors == (
        AttemptEntry(
            at_ms=START_MS,
            outcome="retry",
            attempt=1,
            error="boom",
            logs=("opened", "returned 500"),
            error_code="HTTP_500",
            latency_ms=12,
            worker=WORKER,
            fence=1,
        ),
    )


def test_a_failure_without_a_text_is_remembered(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY)
    (entry,) = job(store, "a").errors
    assert (entry.outcome, entry.error, entry.logs) == ("retry", None, ())


@pytest.mark.parametrize(
    ("outcome", "told"),
    [(Outcome.SKIP, "archived"), (Outcome.UNDECODABLE, "undecodable")],
)
@pytest.mark.parametrize(
    ("arguments", "entries"),
    [
        ({"error": "e"}, 1),
        ({"logs": ["l"]}, 1),
        ({"error": "e", "logs": ["l"]}, 1),
        ({}, 0),
    ],
)
def test_giving_up_is_remembered_when_there_is_something_to_tell(
    store, outcome, told, arguments, entries
):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, outcome, **arguments)
    history = job(store, "a").errors
    assert len(history) == entries
    for entry in history:
        assert entry.outcome == told
        assert entry.error == arguments.get("error")
        assert entry.logs == tuple(arguments.get("logs", ()))
        assert entry.attempt is None


@pytest.mark.parametrize(("logs", "entries"), [(["l1", "l2"], 1), ([], 0)])
def test_success_is_remembered_for_its_logs_alone(store, logs, entries):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SUCCESS, logs=logs, error="ignored")
    history = job(store, "a").errors
    assert len(history) == entries
    for entry in history:
        assert (entry.outcome, entry.attempt, entry.error) == ("success", 0, None)
        assert entry.logs == tuple(logs)


@pytest.mark.parametrize(
    ("outcome", "delay_ms"), [(Outcome.SNOOZE, 5), (Outcome.RATE_LIMITED, None)]
)
def test_giving_a_job_back_is_not_remembered(store, outcome, delay_ms):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, outcome, delay_ms=delay_ms, error="e", logs=["l"])
    assert job(store, "a").errors == ()


def test_a_lost_lease_is_told_with_its_count(store, clock):
    claim = run_one(store, "a")
    crash(store, clock, claim)
    (entry,) = job(store, "a").errors
    assert (entry.outcome, entry.crash_attempt, entry.attempt) == (
        "lease_lost",
        1,
        None,
    )
    assert entry.at_ms == clock.now_ms()
    assert (entry.worker, entry.fence) == (WORKER, 1)
    assert entry.error
    assert entry.error_code == "LEASE_EXPIRED"


def test_a_lost_lease_is_the_newest_attempt_of_its_job(store, clock):
    claim = run_one(store, "a")
    store.ack(
        claim.lease_ref,
        Outcome.RETRY,
        delay_ms=1,
        error_code="DB_DEADLOCK",
        latency_ms=7,
    )
    clock.advance_ms(1)
    store.promote_due(1)
    crash(store, clock, claim_one(store))
    found = job(store, "a")
    assert (found.error_code, found.latency_ms) == ("LEASE_EXPIRED", 30_000)
    assert found.errors[-1].latency_ms == 30_000


def test_a_lost_lease_of_months_is_as_long_as_can_be_told(store, clock):
    run_one(store, "a")
    clock.advance_ms(MAX_INT32 + 1)
    store.reclaim_expired(1)
    found = job(store, "a")
    assert found.latency_ms == found.errors[-1].latency_ms == MAX_INT32


def test_the_newest_fifty_entries_are_kept(store, clock):
    enqueue(store, "a", max_attempts=100)
    for n in range(60):
        claim = claim_one(store)
        store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=1, error=str(n))
        clock.advance_ms(1)
        store.promote_due(1)
    history = job(store, "a").errors
    assert len(history) == MAX_HISTORY
    assert [entry.attempt for entry in history] == list(range(11, 61))
    assert history[-1].error == "59"


@pytest.mark.parametrize("arm", ["reclaim", Outcome.SKIP, Outcome.SUCCESS])
def test_every_kind_of_entry_obeys_the_cap(make_store, clock, arm):
    store = make_store(crash_limit=100)
    enqueue(store, "a", max_attempts=100)
    for _ in range(MAX_HISTORY):
        store.ack(claim_one(store).lease_ref, Outcome.RETRY, delay_ms=1)
        clock.advance_ms(1)
        store.promote_due(1)
    claim = claim_one(store)
    if arm == "reclaim":
        crash(store, clock, claim)
    else:
        store.ack(claim.lease_ref, arm, logs=["l"])
    history = job(store, "a").errors
    assert len(history) == MAX_HISTORY
    assert history[0].attempt == 2
    assert history[-1].outcome != "retry"


def test_hostile_error_text_is_stored_in_a_form_that_text_columns_hold(store):
    claim = run_one(store, "a")
    store.ack(
        claim.lease_ref,
        Outcome.RETRY,
        error="\0" + "é" * 10_000,
        logs=["nul \0", "lone \ud800", "😀"],
    )
    (entry,) = job(store, "a").errors
    assert entry.error == "\ufffd" + "é" * ((MAX_ERROR_BYTES - 3) // 2)
    assert entry.logs == ("nul \ufffd", "lone \ufffd", "😀")


def test_history_survives_an_operators_retry(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SKIP, error="first")
    steer(store).operator_retry("a")
    store.ack(claim_one(store).lease_ref, Outcome.SKIP, error="second")
    assert [entry.error for entry in job(store, "a").errors] == ["first", "second"]


def test_a_page_of_jobs_shows_the_newest_entry_alone(store, clock):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=1, error="first")
    clock.advance_ms(1)
    store.promote_due(1)
    store.ack(claim_one(store).lease_ref, Outcome.RETRY, delay_ms=1, error="second")
    (found,) = steer(store).get_jobs(["a"])
    assert [entry.error for entry in found.errors] == ["second"]
