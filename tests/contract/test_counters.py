"""Counts kept beside the rows: arrivals and completions by minute, slots in use."""

from __future__ import annotations

import pytest

from headgate_sync.errors import StoreError
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import ACKABLE, Outcome, State
from tests.builders import (
    START_MS,
    admit,
    bring_to,
    crash,
    enqueue,
    envelope,
    run_one,
    steer,
)

MINUTE_MS = START_MS - START_MS % 60_000


def minutes(backend):
    return dict(backend.snapshot().minutes)


def running(backend):
    """Slots in use by (queue, partition)."""
    partitions = backend.snapshot().partitions
    return {key: value[1] for key, value in partitions.items() if value[1]}


def test_arrivals_are_counted_by_minute_queue_and_partition(backend, store, clock):
    enqueue(store, "a", "b", partition_key="x")
    enqueue(store, "c", partition_key="y")
    enqueue(store, "d", queue="other")
    clock.advance_ms(60_000)
    enqueue(store, "e", partition_key="x")
    assert minutes(backend) == {
        ("q", "x", MINUTE_MS): (2, 0),
        ("q", "y", MINUTE_MS): (1, 0),
        ("other", "", MINUTE_MS): (1, 0),
        ("q", "x", MINUTE_MS + 60_000): (1, 0),
    }


@pytest.mark.parametrize("retention_ms", [0, 5])
def test_only_successes_are_counted_as_completed(backend, store, clock, retention_ms):
    store.enqueue(
        [envelope(o.value, max_attempts=1, retention_ms=retention_ms) for o in ACKABLE]
    )
    claims = admit(store).claims
    clock.advance_ms(60_000)
    store.ack_batch(
        [
            Ack(
                lease=claim.lease_ref,
                outcome=Outcome(claim.envelope.id),
                delay_ms=1 if claim.envelope.id == "snooze" else None,
            )
            for claim in claims
        ]
    )
    assert minutes(backend) == {
        ("q", "", MINUTE_MS): (len(ACKABLE), 0),
        ("q", "", MINUTE_MS + 60_000): (0, 1),
    }


def test_replays_and_refusals_are_no_arrivals(backend, store):
    enqueue(store, "a", unique_key=b"k")
    enqueue(store, "a", unique_key=b"k")
    with pytest.raises(StoreError):
        enqueue(store, "b", unique_key=b"k")
    assert minutes(backend) == {("q", "", MINUTE_MS): (1, 0)}


def test_a_job_that_an_operator_brings_back_does_not_arrive_again(
    backend, store, clock
):
    bring_to(store, clock, "a", State.ARCHIVED)
    steer(store).operator_retry("a")
    assert minutes(backend) == {("q", "", MINUTE_MS): (1, 0)}


@pytest.mark.parametrize("outcome", sorted(ACKABLE))
def test_every_ack_frees_its_slot_once(backend, store, outcome):
    enqueue(store, "a", "b", partition_key="p")
    first, _ = (claim.lease_ref for claim in admit(store).claims)
    assert running(backend) == {("q", "p"): 2}
    delay_ms = 5 if outcome is Outcome.SNOOZE else None
    for _ in range(2):
        try:
            store.ack(first, outcome, delay_ms=delay_ms)
        except StoreError:
            assert outcome is Outcome.REVOKE
    assert running(backend) == {("q", "p"): 1}


def test_a_reclaim_and_a_cancel_free_their_slot(backend, store, clock):
    claim = run_one(store, "a", partition_key="p")
    crash(store, clock, claim)
    assert running(backend) == {}
    run_one(store, "b")
    assert running(backend) == {("q", ""): 1}
    steer(store).operator_cancel("b")
    assert running(backend) == {}


def test_an_expired_lease_occupies_its_slot_until_it_is_reclaimed(
    backend, store, clock
):
    run_one(store, "a")
    clock.advance_ms(60_000)
    assert running(backend) == {("q", ""): 1}
