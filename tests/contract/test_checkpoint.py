"""How far a handler has come survives every way of losing the job."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lease import MAX_CURSOR_BYTES, Checkpoint, LeaseRef
from headgate_sync.lifecycle import Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    bring_to,
    claim_one,
    crash,
    job,
    run_one,
    state_of,
    steer,
)

FULL = Checkpoint(
    completed_steps=("fetch", "transform"),
    in_progress_step="publish",
    cursor_step="transform",
    cursor=b"\x00\xff42",
    schema_version=2,
    step_set_hash="steps-v2",
    crashes_by_step={"publish": 1},
    remaining_weight=3,
)
RETURNS = {
    "retry": lambda store, clock, claim: store.ack(
        claim.lease_ref, Outcome.RETRY, delay_ms=1
    ),
    "snooze": lambda store, clock, claim: store.ack(
        claim.lease_ref, Outcome.SNOOZE, delay_ms=1
    ),
    "rate_limited": lambda store, clock, claim: store.ack(
        claim.lease_ref, Outcome.RATE_LIMITED
    ),
    "reclaim": crash,
}


def test_a_first_claim_has_an_empty_checkpoint(store):
    assert run_one(store, "a").checkpoint == Checkpoint()


@pytest.mark.parametrize("way", RETURNS)
def test_the_next_claim_carries_the_checkpoint(store, clock, way):
    claim = run_one(store, "a")
    kept = Checkpoint(
        completed_steps=("download",), cursor=b"42", cursor_step="x", step_set_hash="v1"
    )
    store.checkpoint(claim.lease_ref, kept)
    RETURNS[way](store, clock, claim)
    clock.advance_ms(1_000)
    store.promote_due(10)
    again = claim_one(store)
    assert again.checkpoint == kept
    assert again.checkpoint.last_completed_step == "download"
    assert again.envelope.attempt == (1 if way == "retry" else 0)


def test_every_field_of_a_checkpoint_is_kept(store):
    claim = run_one(store, "a")
    store.checkpoint(claim.lease_ref, FULL)
    assert steer(store).read_checkpoint("a") == FULL
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    assert claim_one(store).checkpoint == FULL


def test_a_write_replaces_the_whole_value(store):
    claim = run_one(store, "a")
    store.checkpoint(claim.lease_ref, FULL)
    store.checkpoint(claim.lease_ref, Checkpoint(completed_steps=("fetch",)))
    assert steer(store).read_checkpoint("a") == Checkpoint(completed_steps=("fetch",))
    store.checkpoint(claim.lease_ref, Checkpoint())
    assert steer(store).read_checkpoint("a") == Checkpoint()


def test_a_checkpoint_moves_neither_job_nor_lease(store, clock):
    claim = run_one(store, "a")
    before = job(store, "a")
    clock.advance_ms(7)
    store.checkpoint(claim.lease_ref, FULL)
    assert job(store, "a") == before


def test_a_remaining_weight_leaves_the_weight_of_the_job(store):
    claim = run_one(store, "a", weight=9)
    store.checkpoint(claim.lease_ref, FULL)
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    again = claim_one(store)
    assert again.envelope.weight == 9
    assert again.checkpoint.remaining_weight == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda ref: LeaseRef(ref.job_id, ref.lease_id, ref.fence + 1),
        lambda ref: LeaseRef(ref.job_id, "other", ref.fence),
        lambda ref: LeaseRef("missing", ref.lease_id, ref.fence),
    ],
)
def test_a_foreign_lease_writes_nothing(backend, store, change):
    ref = run_one(store, "a").lease_ref
    raised = unchanged_by(backend, lambda: store.checkpoint(change(ref), FULL))
    assert isinstance(raised, LeaseRejected)
    assert raised.missing == (change(ref).job_id == "missing")


@pytest.mark.parametrize("state", sorted(set(State) - {State.RUNNING}))
def test_nothing_is_written_to_a_job_that_does_not_run(backend, store, clock, state):
    bring_to(store, clock, "a", state)
    ref = LeaseRef("a", "lease", 1)
    raised = unchanged_by(backend, lambda: store.checkpoint(ref, FULL))
    assert isinstance(raised, LeaseRejected)


def test_the_old_holder_cannot_write_after_a_turnover(backend, store, clock):
    first = run_one(store, "a")
    store.checkpoint(first.lease_ref, Checkpoint(completed_steps=("one",)))
    crash(store, clock, first)
    clock.advance_ms(1_000)
    store.promote_due(10)
    second = claim_one(store)
    raised = unchanged_by(backend, lambda: store.checkpoint(first.lease_ref, FULL))
    assert isinstance(raised, LeaseRejected)
    assert steer(store).read_checkpoint("a") == second.checkpoint


@pytest.mark.parametrize("state", [State.ARCHIVED, State.UNDECODABLE, State.CANCELLED])
def test_a_checkpoint_survives_an_operators_retry(store, state):
    claim = run_one(store, "a")
    kept = Checkpoint(completed_steps=("one",), cursor=b"c", cursor_step="two")
    store.checkpoint(claim.lease_ref, kept)
    if state is State.CANCELLED:
        steer(store).operator_cancel("a")
    else:
        outcome = Outcome.SKIP if state is State.ARCHIVED else Outcome.UNDECODABLE
        store.ack(claim.lease_ref, outcome)
    assert state_of(store, "a") is state
    steer(store).operator_retry("a")
    assert claim_one(store).checkpoint == kept


def test_a_reader_tells_a_missing_job_from_one_without_steps(store):
    run_one(store, "a")
    assert steer(store).read_checkpoint("a") == Checkpoint()
    assert steer(store).read_checkpoint("missing") is None


def test_a_checkpoint_goes_with_its_row(store):
    claim = run_one(store, "a", retention_ms=0)
    store.checkpoint(claim.lease_ref, FULL)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert steer(store).read_checkpoint("a") is None
    assert run_one(store, "a").checkpoint == Checkpoint()


def test_a_cursor_of_one_mebibyte_is_kept(store):
    claim = run_one(store, "a")
    large = Checkpoint(cursor=b"\xff" * MAX_CURSOR_BYTES, cursor_step="s")
    store.checkpoint(claim.lease_ref, large)
    assert steer(store).read_checkpoint("a") == large


@pytest.mark.parametrize(
    "fields",
    [
        {"completed_steps": ("nul\0",)},
        {"completed_steps": ("",)},
        {"completed_steps": ("lone\ud800",)},
        {"completed_steps": tuple(str(n) for n in range(1001))},
        {"in_progress_step": "x" * 256},
        {"cursor": b"x" * (MAX_CURSOR_BYTES + 1)},
        {"crashes_by_step": {"s": -1}},
        {"remaining_weight": -1},
        {"remaining_weight": 2**31},
        {"schema_version": -1},
        {"step_set_hash": "nul\0"},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_malformed_checkpoint_is_refused(backend, store, fields):
    claim = run_one(store, "a")
    raised = unchanged_by(
        backend, lambda: store.checkpoint(claim.lease_ref, Checkpoint(**fields))
    )
    assert isinstance(raised, InvalidRequest)


def test_hostile_step_names_are_data(store):
    claim = run_one(store, "a")
    name = "'; DROP -- \" \\ {x} %s \x01 😀"
    hostile = Checkpoint(
        completed_steps=(name,), in_progress_step=name, crashes_by_step={name: 1}
    )
    store.checkpoint(claim.lease_ref, hostile)
    assert steer(store).read_checkpoint("a") == hostile
