"""How an attempt ends: states, counters, instants, and who may end it."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT32
from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lease import LeaseRef
from headgate_sync.lifecycle import ACKABLE, Outcome, State
from headgate_sync.retry import DEFAULT_RETRY_BASE_MS, DEFAULT_RETRY_CAP_MS
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    admit,
    bring_to,
    claim_one,
    crash,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)


def delay_for(outcome: Outcome) -> int | None:
    return 300_000 if outcome is Outcome.SNOOZE else None


def fail_times(store, clock, id, times):
    """Let a job fail this often and claim it once more."""
    claim = claim_one(store)
    for _ in range(times):
        store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=1)
        clock.advance_ms(1)
        store.promote_due(10)
        claim = claim_one(store)
    assert (claim.envelope.id, claim.envelope.attempt) == (id, times)
    return claim


def test_success_keeps_a_retained_job(store, clock):
    claim = run_one(store, "a")
    clock.advance_ms(3)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    found = job(store, "a")
    assert found.state == State.COMPLETED
    assert found.finalized_at_ms == START_MS + 3
    assert (found.attempt, found.crash_attempt, found.errors) == (0, 0, ())
    assert (found.claimed_by, found.claimed_at_ms) == (None, None)
    assert found.lease_expires_at_ms is None
    assert found.fence == 1


def test_success_without_retention_removes_the_job(store):
    claim = run_one(store, "a", retention_ms=0, tags=("t",))
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert state_of(store, "a") is State.DELETED


def test_a_failure_waits_for_its_delay(store):
    claim = run_one(store, "a", max_attempts=25)
    store.ack(claim.lease_ref, Outcome.RETRY, error="boom", delay_ms=1)
    found = job(store, "a")
    assert found.state == State.RETRYABLE
    assert (found.attempt, found.crash_attempt) == (1, 0)
    assert found.scheduled_at_ms == START_MS + 1
    assert [entry.error for entry in found.errors] == ["boom"]
    assert found.finalized_at_ms is None


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_the_last_permitted_failure_archives(store, clock, max_attempts):
    enqueue(store, "a", max_attempts=max_attempts)
    claim = fail_times(store, clock, "a", max_attempts - 1)
    before = job(store, "a").scheduled_at_ms
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=5)
    found = job(store, "a")
    assert (found.state, found.attempt) == (State.ARCHIVED, max_attempts)
    assert found.finalized_at_ms == clock.now_ms()
    assert found.scheduled_at_ms == before
    assert found.reason_code == "attempts_exhausted"


def test_attempt_24_of_25_is_the_last(store, clock):
    enqueue(store, "a")
    claim = fail_times(store, clock, "a", 24)
    store.ack(claim.lease_ref, Outcome.RETRY)
    assert (job(store, "a").state, job(store, "a").attempt) == (State.ARCHIVED, 25)


@pytest.mark.parametrize(
    ("failures", "delay_ms"),
    [
        (1, 1_000),
        (2, 2_000),
        (6, 32_000),
        (12, 2_048_000),
        (13, 3_600_000),
        (40, 3_600_000),
    ],
)
def test_the_default_backoff_doubles_up_to_its_cap(store, clock, failures, delay_ms):
    enqueue(store, "a", max_attempts=100)
    claim = fail_times(store, clock, "a", failures - 1)
    store.ack(claim.lease_ref, Outcome.RETRY)
    assert job(store, "a").scheduled_at_ms - clock.now_ms() == delay_ms


def test_jitter_is_added_behind_the_cap(make_store, clock):
    asked = []

    def jitter(base_ms):
        asked.append(base_ms)
        return base_ms

    store = make_store(retry_base_ms=100, retry_cap_ms=300, retry_jitter=jitter)
    enqueue(store, "a")
    for expected in (100, 200, 300, 300):
        claim = claim_one(store)
        store.ack(claim.lease_ref, Outcome.RETRY)
        assert job(store, "a").scheduled_at_ms - clock.now_ms() == expected + 100
        clock.advance_ms(expected + 100)
        store.promote_due(10)
    assert set(asked) == {100}


def test_a_delay_that_was_given_has_neither_jitter_nor_cap(make_store, clock):
    store = make_store(retry_cap_ms=10, retry_base_ms=1, retry_jitter=lambda base: base)
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=99_999_999)
    assert job(store, "a").scheduled_at_ms - clock.now_ms() == 99_999_999


def test_a_retry_delay_of_zero_is_the_default_backoff(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=0)
    assert job(store, "a").scheduled_at_ms == START_MS + DEFAULT_RETRY_BASE_MS


def test_skip_archives_without_counting_a_failure(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SKIP, error="e")
    found = job(store, "a")
    assert (found.state, found.attempt) == (State.ARCHIVED, 0)
    assert [entry.outcome for entry in found.errors] == ["archived"]
    assert found.reason_code == "skipped"


def test_an_undecodable_job_is_not_tried_again(store, clock):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.UNDECODABLE, error="bad bytes")
    found = job(store, "a")
    assert (found.state, found.attempt) == (State.UNDECODABLE, 0)
    assert found.reason_code == "undecodable"
    clock.advance_ms(DEFAULT_RETRY_CAP_MS)
    assert store.promote_due(10) == 0


def test_revoke_removes_the_job_and_frees_its_key(store):
    claim = run_one(store, "a", unique_key=b"k")
    store.ack(claim.lease_ref, Outcome.REVOKE)
    assert state_of(store, "a") is State.DELETED
    enqueue(store, "b", unique_key=b"k")


def test_snooze_schedules_without_a_trace(store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SNOOZE, delay_ms=300_000, error="e", logs=["l"])
    found = job(store, "a")
    assert (found.state, found.attempt) == (State.SCHEDULED, 0)
    assert found.scheduled_at_ms == START_MS + 300_000
    assert found.errors == ()


def test_a_rate_limited_job_keeps_its_place(store, clock):
    enqueue(store, "a", max_attempts=9)
    claim = fail_times(store, clock, "a", 3)
    place = job(store, "a").scheduled_at_ms
    history = job(store, "a").errors
    enqueue(store, "b", scheduled_at_ms=place)
    clock.advance_ms(10)
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED, error="e", logs=["l"])
    found = job(store, "a")
    assert (found.state, found.attempt, found.crash_attempt) == (State.AVAILABLE, 3, 0)
    assert found.scheduled_at_ms == place
    assert found.errors == history
    assert claim_one(store).envelope.id == "a"


def test_a_failed_job_yields_to_one_that_is_due_earlier(store, clock):
    claim = run_one(store, "f")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=1_000)
    enqueue(store, "g", scheduled_at_ms=START_MS + 500)
    clock.advance_ms(1_000)
    assert store.promote_due(10) == 2
    assert [claim.envelope.id for claim in admit(store).claims] == ["g", "f"]


@pytest.mark.parametrize("outcome", sorted(ACKABLE))
def test_a_superseded_lease_cannot_end_the_attempt(backend, store, clock, outcome):
    first = run_one(store, "a")
    crash(store, clock, first)
    clock.advance_ms(1_000)
    store.promote_due(10)
    second = claim_one(store, first.lease_id)
    assert second.fence == first.fence + 1
    raised = unchanged_by(
        backend,
        lambda: store.ack(first.lease_ref, outcome, delay_ms=delay_for(outcome)),
    )
    assert isinstance(raised, LeaseRejected)
    assert (raised.job_id, raised.missing) == ("a", False)


@pytest.mark.parametrize("outcome", sorted(ACKABLE))
@pytest.mark.parametrize(
    "change",
    [
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence + 1),
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence - 1),
        lambda ref: LeaseRef(ref.job_id, "other", ref.fence),
    ],
    ids=["next fence", "last fence", "other lease"],
)
def test_a_foreign_lease_cannot_end_the_attempt(backend, store, outcome, change):
    ref = run_one(store, "a").lease_ref
    raised = unchanged_by(
        backend, lambda: store.ack(change(ref), outcome, delay_ms=delay_for(outcome))
    )
    assert isinstance(raised, LeaseRejected)
    assert (raised.job_id, raised.missing) == ("a", False)


@pytest.mark.parametrize("outcome", sorted(ACKABLE))
@pytest.mark.parametrize("state", sorted(set(State) - {State.RUNNING}))
def test_only_a_running_attempt_can_end(backend, store, clock, outcome, state):
    bring_to(store, clock, "a", state)
    ref = LeaseRef("a", "never", 1)
    raised = unchanged_by(
        backend, lambda: store.ack(ref, outcome, delay_ms=delay_for(outcome))
    )
    assert isinstance(raised, LeaseRejected)
    assert raised.missing == (state is State.DELETED)


@pytest.mark.parametrize(
    "arguments",
    [
        {"outcome": Outcome.LEASE_LOST},
        {"outcome": Outcome.SNOOZE},
        {"outcome": Outcome.SNOOZE, "delay_ms": 0},
        {"outcome": Outcome.SNOOZE, "delay_ms": -1},
        {"outcome": Outcome.RETRY, "delay_ms": -1},
        {"outcome": Outcome.RETRY, "delay_ms": 2**63},
        {"outcome": Outcome.RETRY, "delay_ms": 1.5},
        {"outcome": Outcome.RETRY, "delay_ms": True},
        {"outcome": Outcome.SUCCESS, "actual_weight": -1},
        {"outcome": Outcome.SUCCESS, "actual_weight": MAX_INT32 + 1},
        {"outcome": Outcome.SUCCESS, "latency_ms": -1},
        {"outcome": Outcome.RETRY, "error": b"bytes"},
        {"outcome": Outcome.RETRY, "logs": "one line"},
        {"outcome": Outcome.RETRY, "error_code": "lower"},
        {"outcome": Outcome.RETRY, "error_code": "X" * 65},
        {"outcome": Outcome.SKIP, "reason_code": "x" * 65},
        {"outcome": "success"},
    ],
    ids=str,
)
def test_a_malformed_ack_leaves_the_attempt_running(backend, store, arguments):
    ref = run_one(store, "a").lease_ref
    raised = unchanged_by(backend, lambda: store.ack(ref, **arguments))
    assert isinstance(raised, InvalidRequest)
    store.ack(ref, Outcome.SUCCESS)


def test_a_validation_error_comes_before_the_fence(store):
    with pytest.raises(InvalidRequest):
        store.ack(LeaseRef("missing", "x", 1), Outcome.SNOOZE)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.SKIP, "mine"),
        (Outcome.UNDECODABLE, "mine"),
        (Outcome.RETRY, "mine"),
    ],
)
def test_a_terminal_state_tells_the_reason_that_the_ack_gave(store, outcome, reason):
    claim = run_one(store, "a", max_attempts=1)
    store.ack(
        claim.lease_ref, outcome, reason_code=reason, error_code="E_X", latency_ms=7
    )
    found = job(store, "a")
    assert found.reason_code == reason
    assert (found.error_code, found.latency_ms) == ("E_X", 7)


def test_code_and_latency_are_those_of_the_newest_attempt(store, clock):
    claim = run_one(store, "a")
    store.ack(
        claim.lease_ref, Outcome.RETRY, delay_ms=1, error_code="FIRST", latency_ms=5
    )
    assert (job(store, "a").error_code, job(store, "a").latency_ms) == ("FIRST", 5)
    clock.advance_ms(1)
    store.promote_due(10)
    store.ack(claim_one(store).lease_ref, Outcome.RETRY)
    assert (job(store, "a").error_code, job(store, "a").latency_ms) == ("", None)


def test_every_terminal_outcome_frees_the_slot_of_its_queue(store):
    steered = steer(store)
    for n, outcome in enumerate(sorted(ACKABLE)):
        store.enqueue([envelope(f"n{n}", max_attempts=1)])
        claim = claim_one(store)
        before = steered.unfinished("q")
        store.ack(claim.lease_ref, outcome, delay_ms=delay_for(outcome))
        freed = before - steered.unfinished("q")
        kept = outcome in {Outcome.SNOOZE, Outcome.RATE_LIMITED}
        assert freed == (0 if kept else 1), outcome
        if kept:
            steered.operator_cancel(f"n{n}")
    assert steered.unfinished("q") == 0
