"""What an operator's scripts do: replays, sweeps by age, samples, the health check."""

from __future__ import annotations

import pytest

from headgate_sync.errors import (
    Backpressure,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    NotFound,
)
from headgate_sync.lifecycle import Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    admit,
    bring_to,
    counts,
    crash_until_quarantined,
    enqueue,
    job,
    run_one,
    state_of,
    steer,
)

COPIED = (
    "kind", "schema_version", "payload", "fingerprint", "partition_key", "rate_class",
    "weight", "priority", "max_attempts", "timeout_ms", "retention_ms", "headers",
    "tags", "sticky_worker", "queue",
)  # fmt: skip
EVERYTHING = {
    "partition_key": "p",
    "rate_class": "c",
    "weight": 3,
    "priority": -4,
    "max_attempts": 5,
    "timeout_ms": 6,
    "headers": {"h": "x"},
    "tags": ("s", "t"),
    "schema_version": 2,
}
STATES = [state for state in State if state is not State.DELETED]


@pytest.mark.parametrize("state", [s for s in STATES if s is not State.QUARANTINED])
def test_a_job_is_replayed_from_every_state(store, clock, state):
    bring_to(store, clock, "old", state, unique_key=b"k", **EVERYTHING)
    clock.advance_ms(5)
    new_id = steer(store).replay_job("old")
    old, new = job(store, "old"), job(store, new_id)
    assert {name: getattr(new, name) for name in COPIED} == {
        name: getattr(old, name) for name in COPIED
    }
    assert (new.state, new.replay_of, old.replay_of) == ("available", "old", "")
    assert (new.attempt, new.crash_attempt, new.fence, new.errors) == (0, 0, 0, ())
    assert new.scheduled_at_ms == new.enqueued_at_ms == clock.now_ms()
    assert state_of(store, "old") is state


def test_a_replay_leaves_deadline_schedule_and_key_behind(store):
    enqueue(
        store,
        "old",
        deadline_ms=START_MS + 1,
        periodic_schedule_id="s",
        periodic_tick_ms=9,
        unique_key=b"k",
    )
    new = job(store, steer(store).replay_job("old"))
    assert (new.deadline_ms, new.periodic_schedule_id, new.periodic_tick_ms) == (
        0,
        "",
        0,
    )
    steer(store).replay_job("old")


def test_a_replay_goes_where_and_when_it_is_told(store, clock):
    enqueue(store, "old")
    new_id = steer(store).replay_job(
        "old", queue="other", run_at_ms=clock.now_ms() + 7, new_id="new"
    )
    new = job(store, new_id)
    assert (new.id, new.queue, new.state) == ("new", "other", "scheduled")
    assert new.scheduled_at_ms == clock.now_ms() + 7


def test_a_repeated_replay_of_a_named_job_makes_no_second_one(store):
    enqueue(store, "old", "other")
    assert steer(store).replay_job("old", new_id="new") == "new"
    before = counts(store)
    assert steer(store).replay_job("old", new_id="new") == "new"
    assert counts(store) == before
    for call in (
        lambda: steer(store).replay_job("other", new_id="new"),
        lambda: steer(store).replay_job("old", new_id="new", queue="x"),
        lambda: steer(store).replay_job("old", new_id="other"),
    ):
        with pytest.raises(IdConflict):
            call()


def test_a_replay_of_a_replay_names_its_direct_source(store):
    enqueue(store, "a")
    steer(store).replay_job("a", new_id="b")
    steer(store).replay_job("b", new_id="c")
    assert job(store, "c").replay_of == "b"


def test_a_replay_is_refused_like_any_enqueue(backend, make_store, clock):
    store = make_store(crash_limit=1)
    steered = steer(store)
    crash_until_quarantined(store, clock, run_one(store, "bad"))
    enqueue(store, "good", fingerprint="good", queue="full")
    steered.set_enqueue_limit("full", 1)
    for job_id, refusal in (
        ("bad", FingerprintQuarantined),
        ("good", Backpressure),
        ("nobody", NotFound),
    ):
        raised = unchanged_by(backend, lambda j=job_id: steered.replay_job(j))
        assert isinstance(raised, refusal)


@pytest.mark.parametrize(
    "fields",
    [
        {"queue": ""},
        {"new_id": "x" * 256},
        {"run_at_ms": -1},
        {"run_at_ms": True},
        {"new_id": "nul\0"},
    ],
)
def test_an_impossible_replay_is_refused(store, fields):
    enqueue(store, "a")
    with pytest.raises(InvalidRequest):
        steer(store).replay_job("a", **fields)


def test_jobs_that_succeeded_before_an_instant_go_the_earliest_first(store, clock):
    for name in ("a", "b", "c"):
        bring_to(store, clock, name, State.COMPLETED)
        clock.advance_ms(10)
    bring_to(store, clock, "gave up", State.ARCHIVED)
    cutoff_ms = START_MS + 20
    assert steer(store).archive_completed_older_than(cutoff_ms, 1) == 1
    assert state_of(store, "a") is State.DELETED
    assert steer(store).archive_completed_older_than(cutoff_ms, 10) == 1
    assert steer(store).archive_completed_older_than(cutoff_ms, 10) == 0
    assert state_of(store, "c") is State.COMPLETED
    assert state_of(store, "gave up") is State.ARCHIVED


@pytest.mark.parametrize("state", STATES)
def test_only_the_named_terminal_states_are_deleted(store, clock, state):
    bring_to(store, clock, "a", state, tags=("t",))
    others = [s for s in STATES if s.value in
              ("archived", "cancelled", "undecodable", "completed", "quarantined")
              and s is not state]  # fmt: skip
    later_ms = clock.now_ms() + 1
    assert steer(store).delete_terminal(others, later_ms, 10) == 0
    if len(others) == 4:
        assert steer(store).delete_terminal([state], clock.now_ms(), 10) == 0
        assert steer(store).delete_terminal([state.value], later_ms, 10) == 1
        assert state_of(store, "a") is State.DELETED
    else:
        with pytest.raises(InvalidRequest, match="is not one of"):
            steer(store).delete_terminal([state], later_ms, 10)


def test_histories_are_trimmed_and_the_jobs_stay(store, clock):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY, error="x", delay_ms=1)
    clock.advance_ms(1)
    store.promote_due(1)
    store.ack(admit(store).claims[0].lease_ref, Outcome.SUCCESS, logs=("one",))
    bring_to(store, clock, "plain", State.COMPLETED)
    bring_to(store, clock, "failed", State.ARCHIVED)
    clock.advance_ms(1)
    assert steer(store).trim_history(clock.now_ms() - 1, 10) == (0, 0)
    assert steer(store).trim_history(clock.now_ms(), 10) == (2, 0)
    assert steer(store).trim_history(clock.now_ms(), 10) == (0, 0)
    assert job(store, "a").errors == ()
    assert counts(store) == {"completed": 2, "archived": 1}


@pytest.mark.parametrize("limit", [0, 10_001, True])
@pytest.mark.parametrize("cutoff_ms", [5, -1])
def test_a_sweep_by_age_has_bounds(store, limit, cutoff_ms):
    for call in (
        lambda: steer(store).archive_completed_older_than(cutoff_ms, limit),
        lambda: steer(store).trim_history(cutoff_ms, limit),
        lambda: steer(store).delete_terminal(["completed"], cutoff_ms, limit),
    ):
        with pytest.raises(InvalidRequest, match=r"limit|cutoff_ms"):
            call()


def test_a_sweep_needs_a_state(store):
    with pytest.raises(InvalidRequest):
        steer(store).delete_terminal([], 5, 5)
    with pytest.raises(InvalidRequest):
        steer(store).delete_terminal("run", 5, 5)


def test_samples_tell_roughly_what_a_queue_takes(store):
    enqueue(store, *(f"small-{n}" for n in range(20)), queue="small")
    enqueue(store, *(f"big-{n}" for n in range(20)), queue="big", payload=b"x" * 1500)
    steer(store).set_queue_paused("empty", True)
    assert steer(store).sample_queue_memory(5) == 3
    found = {q.queue: q.memory_bytes for q in steer(store).queue_stats()}
    assert found["empty"] == 0
    assert 20 * 100 < found["small"] < 20 * 1_000
    assert 20 * 1_500 < found["big"] < 20 * 3_000


def test_samples_come_to_every_queue_in_turn(store, clock):
    for n in range(201):
        steer(store).set_queue_paused(f"q{n}", False)
    for _ in range(2):
        assert steer(store).sample_queue_memory(9_999) == 200
        clock.advance_ms(1)
    pages = steer(store).queue_stats() + steer(store).queue_stats(cursor="q98")
    assert all(queue.memory_bytes == 0 for queue in pages)


def test_a_healthy_store_says_nothing(store):
    assert store.health_check() is None
