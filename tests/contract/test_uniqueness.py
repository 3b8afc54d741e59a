"""Lifecycle and throttle keys: who holds one, for how long, and against whom."""

from __future__ import annotations

import pytest

from headgate_sync.errors import DuplicateJob
from headgate_sync.lifecycle import STORED, TERMINAL, UNFINISHED, Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    bring_to,
    claim_one,
    crash,
    enqueue,
    envelope,
    run_one,
    state_of,
    steer,
)

KEY = b"K1"


def throttled(id, window_ms=60_000, **fields):
    return envelope(id, unique_key=b"K2", unique_window_ms=window_ms, **fields)


def duplicate_of(backend, call):
    """The error of a refused duplicate that left nothing behind."""
    raised = unchanged_by(backend, call)
    assert isinstance(raised, DuplicateJob), raised
    assert raised.replaced is False
    return raised.existing_id


@pytest.mark.parametrize("state", sorted(UNFINISHED))
def test_a_key_is_held_in_every_unfinished_state(backend, store, clock, state):
    bring_to(store, clock, "u-1", state, unique_key=KEY)
    holder = duplicate_of(backend, lambda: enqueue(store, "u-2", unique_key=KEY))
    assert holder == "u-1"
    assert state_of(store, "u-2") is State.DELETED


@pytest.mark.parametrize("state", sorted(TERMINAL | {State.DELETED}))
def test_a_key_is_free_in_every_other_state(store, clock, state):
    bring_to(store, clock, "u-1", state, unique_key=KEY, fingerprint="")
    enqueue(store, "u-2", unique_key=KEY, fingerprint="")
    with pytest.raises(DuplicateJob, match="job u-2"):
        enqueue(store, "u-3", unique_key=KEY, fingerprint="")


@pytest.mark.parametrize(
    "give_back",
    [
        lambda store, clock, claim: store.ack(claim.lease_ref, Outcome.RATE_LIMITED),
        lambda store, clock, claim: store.ack(
            claim.lease_ref, Outcome.SNOOZE, delay_ms=1
        ),
        lambda store, clock, claim: store.ack(
            claim.lease_ref, Outcome.RETRY, delay_ms=1
        ),
        crash,
    ],
    ids=["rate_limited", "snooze", "retry", "reclaim"],
)
def test_a_key_stays_with_a_job_that_is_given_back(store, clock, give_back):
    claim = run_one(store, "u-1", unique_key=KEY)
    give_back(store, clock, claim)
    with pytest.raises(DuplicateJob, match="job u-1"):
        enqueue(store, "u-2", unique_key=KEY)
    clock.advance_ms(1_000)
    store.promote_due(10)
    assert claim_one(store).envelope.id == "u-1"


def test_deleting_frees_the_key(store):
    enqueue(store, "u-1", unique_key=KEY)
    steer(store).delete_job("u-1")
    enqueue(store, "u-2", unique_key=KEY)


def test_a_replay_of_the_holder_is_no_duplicate(store):
    enqueue(store, "u-1", unique_key=KEY)
    enqueue(store, "u-1", unique_key=KEY)


def test_an_empty_key_is_a_key(store):
    enqueue(store, "u-1", unique_key=b"")
    with pytest.raises(DuplicateJob, match="job u-1"):
        enqueue(store, "u-2", unique_key=b"")


def test_without_a_key_nothing_is_unique(store):
    enqueue(store, "a", "b")
    assert state_of(store, "b") is State.AVAILABLE


def test_a_throttle_window_is_exact(backend, store, clock):
    store.enqueue([throttled("t-1")])
    for step_ms in (0, 59_999):
        clock.advance_ms(step_ms)
        held = duplicate_of(backend, lambda: store.enqueue([throttled("t-2")]))
        assert held == "t-1"
    clock.advance_ms(1)
    store.enqueue([throttled("t-2")])


def test_duplicates_do_not_extend_a_window(store, clock):
    store.enqueue([throttled("t-1", 500)])
    for _ in range(4):
        clock.advance_ms(100)
        with pytest.raises(DuplicateJob):
            store.enqueue([throttled("t-2", 500)])
    clock.advance_ms(100)
    store.enqueue([throttled("t-2", 500)])


def test_the_window_is_that_of_the_holder(store, clock):
    store.enqueue([throttled("t-1", 500)])
    clock.advance_ms(400)
    with pytest.raises(DuplicateJob):
        store.enqueue([throttled("t-2", 1)])


@pytest.mark.parametrize("state", sorted(STORED | {State.DELETED}))
def test_a_throttle_key_is_held_whatever_becomes_of_the_job(
    backend, store, clock, state
):
    day_ms = 86_400_000
    bring_to(
        store,
        clock,
        "t-1",
        state,
        unique_key=KEY,
        unique_window_ms=day_ms,
        fingerprint="",
    )
    again = envelope("t-2", unique_key=KEY, unique_window_ms=day_ms, fingerprint="")
    assert duplicate_of(backend, lambda: store.enqueue([again])) == "t-1"


def test_a_throttle_key_outlives_the_row_of_its_holder(backend, store, clock):
    claim = run_one(
        store, "t-1", unique_key=KEY, unique_window_ms=60_000, retention_ms=0
    )
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert state_of(store, "t-1") is State.DELETED
    again = envelope("t-2", unique_key=KEY, unique_window_ms=60_000)
    assert duplicate_of(backend, lambda: store.enqueue([again])) == "t-1"
    clock.advance_ms(60_000)
    store.enqueue([again])


def test_lifecycle_and_throttle_keys_are_separate(store):
    enqueue(store, "life", unique_key=KEY)
    enqueue(store, "throttle", unique_key=KEY, unique_window_ms=60_000)
    with pytest.raises(DuplicateJob, match="job life"):
        enqueue(store, "x", unique_key=KEY)
    with pytest.raises(DuplicateJob, match="job throttle"):
        enqueue(store, "x", unique_key=KEY, unique_window_ms=60_000)


@pytest.mark.parametrize("window_ms", [0, 60_000])
def test_a_key_belongs_to_its_kind_unless_it_is_shared(store, window_ms):
    fields = {"unique_key": b"event", "unique_window_ms": window_ms}
    enqueue(store, "a", **fields)
    enqueue(store, "b", kind="tk:other", **fields)
    shared = {**fields, "unique_key": b"global-key", "unique_exclude_kind": True}
    enqueue(store, "c", **shared)
    with pytest.raises(DuplicateJob, match="job c"):
        enqueue(store, "d", kind="tk:other", **shared)


def test_no_kind_and_key_run_together(store):
    enqueue(store, "a", kind="a", unique_key=b"bc")
    enqueue(store, "b", kind="ab", unique_key=b"c")
    enqueue(store, "c", kind="abc", unique_key=b"")


@pytest.mark.parametrize("window_ms", [0, 60_000])
def test_a_key_that_stands_twice_in_a_batch_names_the_first(backend, store, window_ms):
    batch = [
        envelope(id, unique_key=KEY, unique_window_ms=window_ms)
        for id in ("u-1", "u-2")
    ]
    assert duplicate_of(backend, lambda: store.enqueue(batch)) == "u-1"


def test_both_modes_of_a_key_may_stand_in_one_batch(store):
    store.enqueue(
        [
            envelope("life", unique_key=KEY),
            envelope("throttle", unique_key=KEY, unique_window_ms=5),
        ]
    )


def test_a_duplicate_rejects_the_whole_batch(backend, store):
    enqueue(store, "u-1", unique_key=KEY)
    batch = [envelope("x"), envelope("u-2", unique_key=KEY), envelope("y")]
    assert duplicate_of(backend, lambda: store.enqueue(batch)) == "u-1"


@pytest.mark.parametrize("window_ms", [0, 60_000])
def test_the_first_duplicate_in_the_order_of_the_batch_is_named(store, window_ms):
    enqueue(store, "z", unique_key=b"z", unique_window_ms=window_ms)
    enqueue(store, "a", unique_key=b"a", unique_window_ms=window_ms)
    with pytest.raises(DuplicateJob, match="job z"):
        store.enqueue(
            [
                envelope(f"n{key!r}", unique_key=key, unique_window_ms=window_ms)
                for key in (b"z", b"a")
            ]
        )


def test_a_throttle_duplicate_ahead_of_a_lifecycle_one_is_named(store):
    enqueue(store, "t", unique_key=b"t", unique_window_ms=60_000)
    enqueue(store, "u", unique_key=b"u")
    lifecycle = envelope("n1", unique_key=b"u")
    throttle = envelope("n2", unique_key=b"t", unique_window_ms=60_000)
    with pytest.raises(DuplicateJob, match="job t,"):
        store.enqueue([throttle, lifecycle])
    with pytest.raises(DuplicateJob, match="job u,"):
        store.enqueue([lifecycle, throttle])


def test_a_replay_in_the_batch_holds_its_key_against_its_neighbours(store):
    enqueue(store, "u-1", unique_key=KEY)
    with pytest.raises(DuplicateJob, match="job u-1"):
        store.enqueue(
            [envelope("u-1", unique_key=KEY), envelope("u-2", unique_key=KEY)]
        )


def test_a_far_window_does_not_overflow(store, clock):
    enqueue(store, "t-1", unique_key=KEY, unique_window_ms=31_536_000_000_000)
    clock.advance_ms(86_400_000)
    with pytest.raises(DuplicateJob):
        enqueue(store, "t-2", unique_key=KEY, unique_window_ms=31_536_000_000_000)
