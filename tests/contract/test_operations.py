"""Many jobs at a time: bulk verbs in steps, and the end of a queue."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.operations import MAX_OPERATION_BATCH, BulkRequest
from tests.backends import unchanged_by
from tests.builders import (
    admit,
    bring_to,
    counts,
    enqueue,
    run_one,
    state_of,
    steer,
)


def create(store, action, **fields):
    steer(store).create_operation(BulkRequest(id="op", action=action, **fields))


def status(store, operation_id="op"):
    found = steer(store).get_operation(operation_id)
    return found.status, found.affected


def run_to_the_end(store, batch=1000):
    """Step until nothing is open, and say how often that was."""
    for step in range(1, 100):
        steer(store).run_pending_operations(batch)
        if status(store)[0] in ("completed", "failed"):
            return step
    raise AssertionError("the operation does not end")


def test_a_dry_run_estimates_and_touches_nothing(store, clock):
    for name in "abc":
        bring_to(store, clock, name, State.ARCHIVED)
    create(store, "retry", queue="q", dry_run=True)
    found = steer(store).get_operation("op")
    assert (found.status, found.total_estimated, found.affected) == ("completed", 3, 0)
    assert found.dry_run
    assert steer(store).run_pending_operations(10) == 0
    assert counts(store) == {"archived": 3}


def test_a_retry_brings_back_what_gave_up(store, clock):
    for name, state in [
        ("a", State.ARCHIVED),
        ("b", State.CANCELLED),
        ("c", State.UNDECODABLE),
        ("d", State.COMPLETED),
    ]:
        bring_to(store, clock, name, state)
    create(store, "retry", queue="q")
    assert status(store) == ("pending", 0)
    run_to_the_end(store)
    assert status(store) == ("completed", 3)
    assert counts(store) == {"available": 3, "completed": 1}
    assert len(admit(store).claims) == 3


def test_a_cancel_ends_every_unfinished_job_and_its_lease(store, clock):
    bring_to(store, clock, "retryable", State.RETRYABLE)
    claim = run_one(store, "running")
    bring_to(store, clock, "pending", State.PENDING)
    bring_to(store, clock, "scheduled", State.SCHEDULED)
    bring_to(store, clock, "available", State.AVAILABLE)
    create(store, "cancel", queue="q")
    run_to_the_end(store)
    assert status(store) == ("completed", 5)
    assert counts(store) == {"cancelled": 5}
    assert steer(store).unfinished("q") == 0
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.SUCCESS)


def test_a_delete_spares_running_jobs(store, clock):
    run_one(store, "running")
    enqueue(store, "available", tags=("t",))
    create(store, "delete", queue="q")
    run_to_the_end(store)
    assert status(store) == ("completed", 1)
    assert counts(store) == {"running": 1}


def test_an_operation_on_a_busy_queue_ends(store):
    enqueue(store, *"abcde")
    create(store, "delete", queue="q")
    enqueue(store, *"wxyz")
    steps = run_to_the_end(store, batch=2)
    assert status(store) == ("completed", 5)
    assert counts(store) == {"available": 4}
    assert steps <= 6


def test_an_operation_says_how_far_it_is(store):
    enqueue(store, *"abcde")
    create(store, "delete", queue="q")
    assert steer(store).run_pending_operations(2) == 2
    found = steer(store).get_operation("op")
    assert (found.status, found.affected, found.total_estimated) == ("running", 2, 5)


@pytest.mark.parametrize(
    ("selector", "left"),
    [
        ({"queue": "q"}, {"r1"}),
        ({"kind": "k2"}, {"q1", "r1"}),
        ({"partition_key": "p"}, {"q1", "q2"}),
        ({"state": "available"}, set()),
        ({"state": "completed"}, {"q1", "q2", "r1"}),
        ({"queue": "q", "kind": "k2"}, {"q1", "r1"}),
        ({"queue": "none"}, {"q1", "q2", "r1"}),
        ({"older_than_ms": 1_000}, {"q2", "r1"}),
        ({"older_than_ms": 0}, set()),
    ],
)
@pytest.mark.parametrize("batch", [1, 100])
def test_a_selector_chooses(store, clock, selector, left, batch):
    enqueue(store, "q1", kind="k1")
    clock.advance_ms(1)
    enqueue(store, "q2", kind="k2")
    enqueue(store, "r1", queue="r", partition_key="p")
    clock.advance_ms(999)
    create(store, "delete", **selector)
    assert steer(store).get_operation("op").total_estimated == 3 - len(left)
    run_to_the_end(store, batch)
    assert {job.id for job in steer(store).get_jobs(["q1", "q2", "r1"])} == left
    assert status(store) == ("completed", 3 - len(left))


def test_a_job_whose_key_is_taken_stays_and_stops_nothing(store, clock):
    bring_to(store, clock, "old", State.ARCHIVED, unique_key=b"k")
    bring_to(store, clock, "twin", State.ARCHIVED, unique_key=b"k")
    bring_to(store, clock, "free", State.ARCHIVED)
    enqueue(store, "live", unique_key=b"k")
    create(store, "retry", queue="q")
    run_to_the_end(store)
    assert status(store) == ("completed", 1)
    assert state_of(store, "old") is state_of(store, "twin") is State.ARCHIVED


def test_of_two_that_share_a_key_one_comes_back(store, clock):
    bring_to(store, clock, "one", State.ARCHIVED, unique_key=b"k")
    bring_to(store, clock, "two", State.ARCHIVED, unique_key=b"k")
    create(store, "retry", state="archived")
    run_to_the_end(store)
    assert status(store) == ("completed", 1)
    assert state_of(store, "one") is State.AVAILABLE
    assert state_of(store, "two") is State.ARCHIVED


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "retry"},
        {"action": "archive", "queue": "q"},
        {"action": "retry", "state": "completed"},
        {"action": "cancel", "state": "finished"},
        {"action": "delete", "queue": "nul\0"},
        {"action": "delete", "older_than_ms": -1},
        {"action": "delete", "older_than_ms": True},
        {"action": "delete", "queue": "q", "dry_run": "yes"},
        {"action": "delete", "queue": "q", "id": ""},
        {"action": "delete", "queue": "q", "id": "x" * 256},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InvalidRequest):
        BulkRequest(**{"id": "op", **fields})


def test_an_empty_selector_is_refused_by_name():
    with pytest.raises(InvalidRequest) as raised:
        BulkRequest(id="op", action="retry")
    assert raised.value.message == "empty selector is rejected"


def test_a_state_that_the_action_does_not_know_is_refused_with_those_it_does():
    with pytest.raises(InvalidRequest) as raised:
        BulkRequest(id="op", action="retry", state="quarantined")
    assert raised.value.message == (
        "retry is not defined from quarantined, "
        "only from archived, cancelled, undecodable"
    )


def test_an_id_names_one_operation(backend, store):
    create(store, "delete", queue="q")
    raised = unchanged_by(backend, lambda: create(store, "cancel", queue="r"))
    assert isinstance(raised, InvalidRequest)
    assert raised.message == "operation op exists"


@pytest.mark.parametrize("batch", [0, MAX_OPERATION_BATCH + 1, True])
def test_a_batch_has_bounds(store, batch):
    with pytest.raises(InvalidRequest, match="batch"):
        steer(store).run_pending_operations(batch)


def test_an_unknown_operation_is_none(store):
    assert steer(store).get_operation("nothing") is None


def test_hostile_text_is_data_in_an_operation(store):
    enqueue(store, "a")
    for place, text in enumerate(("' OR true --", "%", "_", "$$", "q'")):
        steer(store).create_operation(
            BulkRequest(id=f"{text}{place}", action="delete", queue=text, kind=text)
        )
    steer(store).run_pending_operations(100)
    assert counts(store) == {"available": 1}


# The end of a queue


def test_a_queue_without_jobs_is_removed_at_once(store):
    steer(store).set_queue_paused("q", True)
    steer(store).set_enqueue_limit("q", 5)
    enqueue(store, "a")
    steer(store).delete_job("a")
    assert steer(store).delete_queue("q") is None
    assert steer(store).queue_stats() == []
    assert steer(store).history("q", 0) == []
    enqueue(store, "b")
    [found] = steer(store).queue_stats()
    assert (found.paused, found.max_unfinished_jobs, found.unfinished_jobs) == (
        False,
        None,
        1,
    )


@pytest.mark.parametrize("state", [State.AVAILABLE, State.RUNNING, State.COMPLETED])
def test_a_queue_with_jobs_is_removed_by_force_only(backend, store, clock, state):
    if state is State.RUNNING:
        run_one(store, "a")
    else:
        bring_to(store, clock, "a", state)
    raised = unchanged_by(backend, lambda: steer(store).delete_queue("q"))
    assert isinstance(raised, InvalidRequest)
    assert raised.message == "queue is not empty; retry with force=true"


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_force_ends_all_jobs_and_then_the_queue(store, clock, batch):
    steer(store).set_queue_weight("q", 3)
    claim = run_one(store, "running", rate_class="c", partition_key="p")
    bring_to(store, clock, "pending", State.PENDING)
    enqueue(store, "waiting", "more")
    enqueue(store, "spared", queue="other")
    operation_id = steer(store).delete_queue("q", force=True)
    assert operation_id == f"qdel-{clock.now_ms()}-q"
    assert steer(store).delete_queue("q", force=True) == operation_id
    assert steer(store).queue_stats(queues=["q"])[0].max_unfinished_jobs == 0
    for _ in range(40):
        steer(store).run_pending_operations(batch)
    assert status(store, operation_id) == ("completed", 4)
    assert [q.queue for q in steer(store).queue_stats()] == ["other"]
    assert counts(store) == {"available": 1}
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.SUCCESS)
    enqueue(store, "again", rate_class="c")
    assert len(admit(store).claims) == 1
    assert steer(store).partitions("q")[0].inflight == 1


def test_two_queues_with_like_names_have_operations_of_their_own(store):
    enqueue(store, "a", queue="a/b")
    enqueue(store, "b", queue="a_b")
    enqueue(store, "c", queue="x" * 255)
    names = {
        steer(store).delete_queue(queue, force=True)
        for queue in ("a/b", "a_b", "x" * 255)
    }
    assert len(names) == 3
    for _ in range(4):
        steer(store).run_pending_operations(10)
    assert steer(store).queue_stats() == []
