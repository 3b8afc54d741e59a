"""The id is the first idempotency boundary."""

from __future__ import annotations

import pytest
from attrs import evolve

from headgate_sync.errors import IdConflict
from headgate_sync.lifecycle import STORED, Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    bring_to,
    claim_one,
    counts,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)


def test_a_replay_of_an_accepted_id_changes_nothing(backend, store, clock):
    enqueue(store, "idc-1")
    clock.advance_ms(5)
    assert unchanged_by(backend, lambda: enqueue(store, "idc-1")) is None
    assert counts(store) == {"available": 1}


@pytest.mark.parametrize(
    "difference",
    [
        {"payload": b"fail"},
        {"queue": "elsewhere"},
        {"kind": "tk:other"},
        {"fingerprint": ""},
    ],
)
def test_other_content_under_a_known_id_is_a_conflict(backend, store, difference):
    enqueue(store, "idc-1")
    raised = unchanged_by(
        backend, lambda: store.enqueue([envelope("idc-1", **difference)])
    )
    assert isinstance(raised, IdConflict)
    assert raised.job_id == "idc-1"


def test_two_jobs_without_fingerprint_differ_by_kind(store):
    store.enqueue([envelope("a", fingerprint="")])
    store.enqueue([envelope("a", fingerprint="", payload=b"other")])
    with pytest.raises(IdConflict):
        store.enqueue([envelope("a", fingerprint="", kind="tk:other")])


def test_a_conflict_rejects_the_whole_batch(backend, store):
    enqueue(store, "idc-1")
    batch = [envelope("idc-2"), envelope("idc-1", payload=b"fail")]
    raised = unchanged_by(backend, lambda: store.enqueue(batch))
    assert isinstance(raised, IdConflict)
    assert state_of(store, "idc-2") is State.DELETED
    assert state_of(store, "idc-1") is State.AVAILABLE


def test_the_first_conflict_in_the_order_of_the_batch_is_named(store):
    enqueue(store, "a", "b")
    with pytest.raises(IdConflict, match=r"id conflict: job b "):
        store.enqueue([envelope("b", payload=b"x"), envelope("a", payload=b"x")])


@pytest.mark.parametrize("state", sorted(STORED))
def test_a_replay_succeeds_in_every_state(backend, store, clock, state):
    bring_to(store, clock, "a", state)
    assert unchanged_by(backend, lambda: enqueue(store, "a")) is None
    conflict = unchanged_by(
        backend, lambda: store.enqueue([envelope("a", payload=b"other")])
    )
    assert isinstance(conflict, IdConflict)


def test_a_replay_may_name_the_default_queue(store):
    unnamed = evolve(envelope("x"), queue="")
    store.enqueue([unnamed])
    store.enqueue([evolve(unnamed, queue="default")])
    assert counts(store, "default") == {"available": 1}


def test_a_replay_beside_new_jobs_lets_the_new_ones_in(store):
    enqueue(store, "a")
    enqueue(store, "a", "b")
    assert counts(store) == {"available": 2}


def test_an_evicted_id_is_free(store, clock):
    claim = run_one(store, "r", retention_ms=1)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    clock.advance_ms(1)
    assert store.evict_retained(10) == 1
    store.enqueue([envelope("r", payload=b"other")])
    assert claim_one(store).fence == 1


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.REVOKE])
def test_an_id_whose_row_is_gone_is_free(store, outcome):
    claim = run_one(store, "r", retention_ms=0)
    store.ack(claim.lease_ref, outcome)
    store.enqueue([envelope("r", payload=b"other")])
    assert job(store, "r").payload == b"other"


def test_a_deleted_id_is_free(store):
    enqueue(store, "a")
    steer(store).delete_job("a")
    store.enqueue([envelope("a", payload=b"other")])
    assert job(store, "a").payload == b"other"


def test_other_fields_of_a_replay_are_ignored(store):
    store.enqueue([envelope("a", priority=1)])
    store.enqueue([envelope("a", priority=9, tags=("late",), headers={"h": "x"})])
    found = job(store, "a")
    assert (found.priority, found.tags, dict(found.headers)) == (1, (), {})
