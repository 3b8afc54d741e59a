"""A duplicate that changes or postpones the holder of its key."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import (
    UNIQUE_REPLACE_ALL,
    UNIQUE_REPLACE_MAX_ATTEMPTS,
    UNIQUE_REPLACE_PAYLOAD,
    UNIQUE_REPLACE_PRIORITY,
    UNIQUE_REPLACE_SCHEDULED_AT,
    fingerprint,
)
from headgate_sync.errors import DuplicateJob, IdConflict
from headgate_sync.lifecycle import TERMINAL, Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    KIND,
    START_MS,
    admit,
    bring_to,
    claim_one,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)

KEY = b"K"
CHANGEABLE = [State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]


def duplicate(store, **fields):
    """Enqueue a second job with the key; returns whether the holder was changed."""
    with pytest.raises(DuplicateJob) as caught:
        store.enqueue([envelope("second", unique_key=KEY, **fields)])
    assert caught.value.existing_id == "first"
    assert state_of(store, "second") is State.DELETED
    return caught.value.replaced


def test_only_the_named_fields_are_replaced(store):
    enqueue(store, "first", unique_key=KEY, payload=b"old", priority=1, max_attempts=7)
    assert duplicate(
        store,
        payload=b"new",
        schema_version=4,
        priority=9,
        max_attempts=9,
        queue="other",
        partition_key="other",
        rate_class="other",
        weight=9,
        timeout_ms=9,
        deadline_ms=9,
        retention_ms=9,
        headers={"h": "x"},
        tags=("t",),
        sticky_worker="other",
        unique_replace=UNIQUE_REPLACE_PAYLOAD | UNIQUE_REPLACE_PRIORITY,
    )
    found = job(store, "first")
    assert (found.payload, found.schema_version) == (b"new", 4)
    assert found.fingerprint == fingerprint(KIND, b"new")
    assert (found.priority, found.max_attempts) == (9, 7)
    assert (found.queue, found.partition_key, found.rate_class) == ("q", "", "")
    assert (found.weight, found.timeout_ms, found.deadline_ms) == (1, 0, 0)
    assert (found.retention_ms, dict(found.headers), found.tags) == (86_400_000, {}, ())
    assert (found.sticky_worker, found.state) == ("", State.AVAILABLE)
    claim = claim_one(store)
    assert (claim.envelope.payload, claim.envelope.priority) == (b"new", 9)


@pytest.mark.parametrize(
    ("bit", "incoming", "field", "value"),
    [
        (UNIQUE_REPLACE_PAYLOAD, {"payload": b"new"}, "payload", b"new"),
        (UNIQUE_REPLACE_PRIORITY, {"priority": 9}, "priority", 9),
        (UNIQUE_REPLACE_MAX_ATTEMPTS, {"max_attempts": 9}, "max_attempts", 9),
        (UNIQUE_REPLACE_MAX_ATTEMPTS, {"max_attempts": 0}, "max_attempts", 25),
    ],
)
@pytest.mark.parametrize("state", CHANGEABLE)
def test_a_waiting_holder_is_changed_where_it_stands(
    store, clock, bit, incoming, field, value, state
):
    bring_to(store, clock, "first", state, unique_key=KEY, max_attempts=7)
    before = job(store, "first").scheduled_at_ms
    assert duplicate(store, unique_replace=bit, **incoming)
    found = job(store, "first")
    assert getattr(found, field) == value
    assert (found.state, found.scheduled_at_ms) == (state, before)


@pytest.mark.parametrize("state", [State.RUNNING, State.PENDING])
@pytest.mark.parametrize("request_fields", [
    {"unique_replace": UNIQUE_REPLACE_ALL, "priority": 20, "payload": b"new"},
    {"unique_debounce_ms": 500, "payload": b"new"},
])  # fmt: skip
def test_a_running_or_pending_holder_is_never_changed(
    backend, store, clock, state, request_fields
):
    bring_to(store, clock, "first", state, unique_key=KEY)
    incoming = envelope("second", unique_key=KEY, **request_fields)
    raised = unchanged_by(backend, lambda: store.enqueue([incoming]))
    assert isinstance(raised, DuplicateJob)
    assert raised.replaced is False


def test_the_instant_of_a_scheduled_holder_is_replaced(store):
    enqueue(store, "first", unique_key=KEY, scheduled_at_ms=START_MS + 5_000)
    assert duplicate(
        store,
        scheduled_at_ms=START_MS + 9_000,
        unique_replace=UNIQUE_REPLACE_SCHEDULED_AT,
    )
    found = job(store, "first")
    assert (found.state, found.scheduled_at_ms) == (State.SCHEDULED, START_MS + 9_000)


def test_a_replacing_instant_of_zero_is_now(store):
    enqueue(store, "first", unique_key=KEY, scheduled_at_ms=START_MS + 5_000)
    assert duplicate(
        store, scheduled_at_ms=0, unique_replace=UNIQUE_REPLACE_SCHEDULED_AT
    )
    found = job(store, "first")
    assert (found.state, found.scheduled_at_ms) == (State.SCHEDULED, START_MS)
    assert store.promote_due(10) == 1


@pytest.mark.parametrize("state", [State.AVAILABLE, State.RETRYABLE])
def test_the_instant_of_another_holder_is_kept(backend, store, clock, state):
    bring_to(store, clock, "first", state, unique_key=KEY)
    incoming = envelope(
        "second",
        unique_key=KEY,
        scheduled_at_ms=START_MS + 9_000,
        unique_replace=UNIQUE_REPLACE_SCHEDULED_AT,
    )
    raised = unchanged_by(backend, lambda: store.enqueue([incoming]))
    assert raised.replaced is False


def test_one_field_that_could_be_replaced_is_enough(store):
    enqueue(store, "first", unique_key=KEY)
    assert duplicate(
        store,
        scheduled_at_ms=START_MS + 9_000,
        priority=9,
        unique_replace=UNIQUE_REPLACE_SCHEDULED_AT | UNIQUE_REPLACE_PRIORITY,
    )
    found = job(store, "first")
    assert (found.priority, found.scheduled_at_ms) == (9, 1)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_finished_holder_of_a_throttle_key_is_not_changed(
    backend, store, clock, state
):
    fields = {"unique_key": KEY, "unique_window_ms": 86_400_000, "fingerprint": ""}
    bring_to(store, clock, "first", state, **fields)
    incoming = envelope("second", unique_replace=UNIQUE_REPLACE_ALL, **fields)
    raised = unchanged_by(backend, lambda: store.enqueue([incoming]))
    assert isinstance(raised, DuplicateJob)
    assert (raised.existing_id, raised.replaced) == ("first", False)


def test_a_waiting_holder_of_a_throttle_key_is_changed_and_its_window_kept(
    store, clock
):
    fields = {"unique_key": KEY, "unique_window_ms": 500}
    enqueue(store, "first", **fields)
    clock.advance_ms(400)
    with pytest.raises(DuplicateJob) as caught:
        store.enqueue(
            [
                envelope(
                    "second",
                    priority=9,
                    unique_replace=UNIQUE_REPLACE_PRIORITY,
                    **fields,
                )
            ]
        )
    assert caught.value.replaced is True
    assert job(store, "first").priority == 9
    clock.advance_ms(100)
    enqueue(store, "third", **fields)


def test_a_throttle_holder_whose_row_is_gone_is_not_changed(backend, store):
    fields = {"unique_key": KEY, "unique_window_ms": 500}
    claim = run_one(store, "first", retention_ms=0, **fields)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    incoming = envelope("second", unique_replace=UNIQUE_REPLACE_ALL, **fields)
    raised = unchanged_by(backend, lambda: store.enqueue([incoming]))
    assert (raised.existing_id, raised.replaced) == ("first", False)


def test_a_replacing_job_without_a_holder_is_stored(store):
    enqueue(store, "first", unique_key=KEY, unique_replace=UNIQUE_REPLACE_ALL)
    assert state_of(store, "first") is State.AVAILABLE


def test_after_a_replacement_the_original_request_is_a_conflict(store):
    enqueue(store, "first", unique_key=KEY, payload=b"old")
    duplicate(store, payload=b"new", unique_replace=UNIQUE_REPLACE_PAYLOAD)
    with pytest.raises(IdConflict):
        enqueue(store, "first", unique_key=KEY, payload=b"old")
    enqueue(store, "first", unique_key=KEY, payload=b"new")


def test_a_priority_that_was_replaced_decides_the_order(store):
    enqueue(store, "first", unique_key=KEY)
    enqueue(store, "ahead", priority=5)
    duplicate(store, priority=9, unique_replace=UNIQUE_REPLACE_PRIORITY)
    assert [claim.envelope.id for claim in admit(store).claims] == ["first", "ahead"]


def test_a_first_debounced_job_waits_for_its_quiet_time(store, clock):
    enqueue(store, "first", unique_key=KEY, unique_debounce_ms=500)
    found = job(store, "first")
    assert (found.state, found.scheduled_at_ms) == (State.SCHEDULED, START_MS + 500)
    clock.advance_ms(500)
    store.promote_due(10)
    assert claim_one(store).envelope.id == "first"


@pytest.mark.parametrize("state", CHANGEABLE)
def test_a_debounce_postpones_the_waiting_holder(store, clock, state):
    bring_to(
        store,
        clock,
        "first",
        state,
        unique_key=KEY,
        tags=("blue", "billing"),
        priority=1,
    )
    clock.advance_ms(1_000)
    assert duplicate(
        store,
        unique_debounce_ms=500,
        tags=("urgent",),
        payload=b"new",
        schema_version=2,
        priority=9,
    )
    found = job(store, "first")
    assert (found.state, found.scheduled_at_ms) == (State.SCHEDULED, START_MS + 1_500)
    assert (found.payload, found.schema_version) == (b"new", 2)
    assert found.fingerprint == fingerprint(KIND, b"new")
    assert found.tags == ("urgent",)
    assert found.priority == 1
    assert admit(store).claims == []
    clock.advance_ms(500)
    assert store.promote_due(10) == 1
    assert claim_one(store).envelope.id == "first"


def test_every_debounce_starts_the_quiet_time_again(store, clock):
    enqueue(store, "first", unique_key=KEY, unique_debounce_ms=500)
    for _ in range(5):
        clock.advance_ms(400)
        assert store.promote_due(10) == 0
        assert duplicate(store, unique_debounce_ms=500)
    clock.advance_ms(500)
    assert store.promote_due(10) == 1


def test_a_debounce_replaces_priority_and_attempts_on_request(store):
    enqueue(store, "first", unique_key=KEY)
    assert duplicate(
        store,
        unique_debounce_ms=500,
        unique_replace=UNIQUE_REPLACE_ALL,
        scheduled_at_ms=START_MS + 99_000,
        priority=9,
        max_attempts=9,
    )
    found = job(store, "first")
    assert found.scheduled_at_ms == START_MS + 500, "the debounce names the instant"
    assert (found.priority, found.max_attempts) == (9, 9)


def test_a_debounced_job_keeps_its_counters_and_its_key(store, clock):
    bring_to(store, clock, "first", State.RETRYABLE, unique_key=KEY)
    duplicate(store, unique_debounce_ms=500)
    assert job(store, "first").attempt == 1
    assert steer(store).unfinished("q") == 1
    with pytest.raises(DuplicateJob, match="job first"):
        enqueue(store, "third", unique_key=KEY)


def test_a_changed_holder_leaves_the_counters_as_they_are(store):
    enqueue(store, "first", unique_key=KEY)
    duplicate(store, unique_replace=UNIQUE_REPLACE_ALL, priority=3)
    assert steer(store).unfinished("q") == 1
