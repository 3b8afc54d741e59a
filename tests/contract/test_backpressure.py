"""Bounds on the unfinished jobs of a queue, and the order of an enqueue's checks."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT64
from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
)
from headgate_sync.lifecycle import ACKABLE, UNFINISHED, Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    admit,
    bring_to,
    counts,
    crash,
    enqueue,
    envelope,
    envelopes,
    run_one,
    steer,
)


def full(error):
    """The facts of a refusal."""
    assert isinstance(error, Backpressure), error
    return error.queue, error.limit, error.current, error.incoming


def test_a_full_queue_refuses_with_its_figures(backend, store):
    steer(store).set_enqueue_limit("q", 25)
    enqueue(store, *(f"n{n}" for n in range(25)))
    raised = unchanged_by(backend, lambda: enqueue(store, "x", "y"))
    assert full(raised) == ("q", 25, 25, 2)


def test_the_limit_itself_is_allowed(store):
    steer(store).set_enqueue_limit("q", 3)
    enqueue(store, "a")
    enqueue(store, "b", "c")
    assert steer(store).unfinished("q") == 3


def test_a_batch_that_would_pass_the_limit_is_refused_whole(backend, store):
    steer(store).set_enqueue_limit("q", 3)
    enqueue(store, "a", "b")
    assert full(unchanged_by(backend, lambda: enqueue(store, "c", "d"))) == (
        "q",
        3,
        2,
        2,
    )


@pytest.mark.parametrize("state", sorted(UNFINISHED))
def test_every_unfinished_job_counts(backend, store, clock, state):
    steer(store).set_enqueue_limit("q", 1)
    bring_to(store, clock, "a", state)
    assert full(unchanged_by(backend, lambda: enqueue(store, "b"))) == ("q", 1, 1, 1)


@pytest.mark.parametrize(
    "outcome", sorted(ACKABLE - {Outcome.SNOOZE, Outcome.RATE_LIMITED, Outcome.RETRY})
)
@pytest.mark.parametrize("retention_ms", [0, 5])
def test_every_end_of_a_job_frees_its_slot(store, outcome, retention_ms):
    steer(store).set_enqueue_limit("q", 1)
    claim = run_one(store, "a", retention_ms=retention_ms)
    store.ack(claim.lease_ref, outcome)
    enqueue(store, "b")


def test_cancel_delete_and_quarantine_free_a_slot(make_store, clock):
    store = make_store(crash_limit=1)
    steer(store).set_enqueue_limit("q", 1)
    enqueue(store, "a")
    steer(store).operator_cancel("a")
    enqueue(store, "b")
    steer(store).delete_job("b")
    claim = run_one(store, "c", fingerprint="c")
    crash(store, clock, claim)
    enqueue(store, "d")


def test_what_an_operator_brings_back_occupies_a_slot_without_asking(backend, store):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SKIP)
    steer(store).set_enqueue_limit("q", 1)
    enqueue(store, "b")
    steer(store).operator_retry("a")
    assert full(unchanged_by(backend, lambda: enqueue(store, "c"))) == ("q", 1, 2, 1)


def test_lowering_a_limit_only_stops_growth(backend, store):
    steered = steer(store)
    enqueue(store, *(f"n{n}" for n in range(25)))
    steered.set_enqueue_limit("q", 10)
    assert full(unchanged_by(backend, lambda: enqueue(store, "x"))) == ("q", 10, 25, 1)
    steered.set_enqueue_limit("q", None)
    enqueue(store, "x")
    assert steered.unfinished("q") == 26


def test_lifting_a_limit_that_was_never_set_is_no_error(backend, store):
    before = backend.image()
    steer(store).set_enqueue_limit("q", None)
    assert backend.image() == before


def test_a_limit_of_zero_closes_intake_and_leaves_running_jobs_alone(backend, store):
    claim = run_one(store, "a")
    steer(store).set_enqueue_limit("q", 0)
    assert full(unchanged_by(backend, lambda: enqueue(store, "b"))) == ("q", 0, 1, 1)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert full(unchanged_by(backend, lambda: enqueue(store, "b"))) == ("q", 0, 0, 1)


def test_other_queues_have_no_limit(store):
    steer(store).set_enqueue_limit("q", 0)
    store.enqueue([envelope("a", queue="other")])


@pytest.mark.parametrize("limit", [-1, MAX_INT64 + 1, True, 1.5])
def test_an_impossible_limit_is_refused(backend, store, limit):
    raised = unchanged_by(backend, lambda: steer(store).set_enqueue_limit("q", limit))
    assert isinstance(raised, InvalidRequest)


def test_a_replay_passes_a_full_queue(backend, store):
    steer(store).set_enqueue_limit("q", 1)
    enqueue(store, "a")
    assert unchanged_by(backend, lambda: enqueue(store, "a")) is None


def test_replays_do_not_count_as_incoming(store, backend):
    enqueue(store, "a", "b")
    steer(store).set_enqueue_limit("q", 3)
    enqueue(store, "a", "b", "c")
    raised = unchanged_by(backend, lambda: enqueue(store, "a", "d", "e"))
    assert full(raised) == ("q", 3, 3, 2)


def test_of_two_full_queues_the_first_by_name_is_reported(backend, store):
    for queue in ("b", "a"):
        steer(store).set_enqueue_limit(queue, 0)
    batch = [
        envelope("1", queue="b"),
        envelope("2", queue="a"),
        envelope("3", queue="a"),
    ]
    raised = unchanged_by(backend, lambda: store.enqueue(batch))
    assert full(raised) == ("a", 0, 0, 2)


def test_a_full_queue_is_reported_before_a_duplicate(store):
    enqueue(store, "a", unique_key=b"k")
    steer(store).set_enqueue_limit("q", 1)
    with pytest.raises(Backpressure):
        enqueue(store, "b", unique_key=b"k")
    steer(store).set_enqueue_limit("q", None)
    with pytest.raises(DuplicateJob):
        enqueue(store, "b", unique_key=b"k")


def test_quarantine_is_reported_before_a_full_queue_and_a_duplicate(make_store, clock):
    store = make_store(crash_limit=1)
    crash(store, clock, run_one(store, "poison"))
    enqueue(store, "holder", unique_key=b"k", payload=b"other")
    steer(store).set_enqueue_limit("q", 0)
    with pytest.raises(FingerprintQuarantined):
        enqueue(store, "b", unique_key=b"k")


def test_an_id_conflict_is_reported_first_of_all(make_store, clock):
    store = make_store(crash_limit=1)
    crash(store, clock, run_one(store, "poison"))
    steer(store).set_enqueue_limit("q", 0)
    with pytest.raises(IdConflict):
        store.enqueue([envelope("new"), envelope("poison", payload=b"other")])


def test_a_replay_of_a_quarantined_job_succeeds(backend, make_store, clock):
    store = make_store(crash_limit=1)
    crash(store, clock, run_one(store, "poison"))
    assert unchanged_by(backend, lambda: enqueue(store, "poison")) is None


def test_a_debounce_of_a_holder_is_refused_on_a_full_queue(backend, store):
    enqueue(store, "a", unique_key=b"k")
    steer(store).set_enqueue_limit("q", 1)
    late = envelope("b", unique_key=b"k", unique_debounce_ms=500)
    assert full(unchanged_by(backend, lambda: store.enqueue([late]))) == ("q", 1, 1, 1)


def test_the_counter_follows_the_rows_through_every_state(store, clock):
    steered = steer(store)
    for n, state in enumerate(sorted(set(State) - {State.DELETED})):
        bring_to(store, clock, f"n{n}", state, queue=f"q{n}", fingerprint="")
        expected = sum(counts(store, f"q{n}").get(s, 0) for s in UNFINISHED)
        assert steered.unfinished(f"q{n}") == expected, state


def test_a_queue_that_nobody_used_has_no_unfinished_jobs(store):
    assert steer(store).unfinished("nowhere") == 0


def test_a_large_batch_counts_each_of_its_queues(store):
    store.enqueue(
        envelopes(*(f"a{n}" for n in range(300)), queue="a")
        + envelopes(*(f"b{n}" for n in range(200)), queue="b")
    )
    assert [steer(store).unfinished(q) for q in ("a", "b")] == [300, 200]
    assert len(admit(store, queues=("a", "b"), capacity=500).claims) == 500
    assert [steer(store).unfinished(q) for q in ("a", "b")] == [300, 200]
