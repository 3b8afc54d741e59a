"""Weight, ledger and pause: which queue is served."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import Outcome
from tests.backends import Backend, unchanged_by
from tests.builders import claim_one, enqueue, state_of, steer
from tests.scenarios.gate import ack_all, admit, dispatched, fill, ids, queues

BOTH = ("heavy", "light")


def weigh(store, **weights: int) -> None:
    for queue, weight in weights.items():
        steer(store).set_queue_weight(queue, weight)


def test_weight_chooses_between_queues_whatever_the_priority(store):
    weigh(store, heavy=3)
    fill(store, "h", 10, queue="heavy")
    fill(store, "l", 10, queue="light", priority=99)
    assert queues(admit(store, 8, queues=BOTH)) == {"heavy": 6, "light": 2}


def test_a_new_weight_keeps_the_place_of_the_queue(store, backend: Backend):
    weigh(store, heavy=3)
    fill(store, "h", 10, queue="heavy")
    fill(store, "l", 10, queue="light")
    admit(store, 8, queues=BOTH)
    weigh(store, heavy=1)
    assert dispatched(backend, *BOTH) == [2, 2]
    assert queues(admit(store, 4, queues=BOTH)) == {"heavy": 2, "light": 2}


def test_an_empty_queue_leaves_its_share_to_the_others(store):
    weigh(store, heavy=3)
    fill(store, "l", 10, queue="light")
    assert queues(admit(store, 8, queues=BOTH)) == {"light": 8}


def test_equal_service_goes_by_name(store):
    enqueue(store, "in-b", queue="b")
    enqueue(store, "in-a", queue="a")
    assert ids(admit(store, 1, queues=("b", "a"))) == ["in-a"]


def test_an_idle_queue_catches_up_with_a_bounded_lag(store):
    fill(store, "early", 300, queue="a")
    assert len(admit(store, 300, queues=("a",))) == 300
    fill(store, "a", 200, queue="a")
    fill(store, "b", 200, queue="b")
    batch = admit(store, 200, queues=("a", "b"))
    assert queues(batch) == {"b": 132, "a": 68}
    assert {id.partition("-")[0] for id in ids(batch)[:64]} == {"b"}


def test_decisions_alone_move_the_ledger(store, backend: Backend):
    fill(store, "a", 3, queue="a")
    assert len(admit(store, queues=("a", "b"))) == 3
    admit(store, queues=("a", "b"))
    assert dispatched(backend, "a") == [3]
    assert backend.snapshot().queues["a"][3] == 1


def test_an_exit_does_not_move_the_ledger(store, backend: Backend):
    """Not even where the queue is far behind another one that is asked for too."""
    fill(store, "b", 1, queue="b")
    running = admit(store, queues=("b",))
    fill(store, "a", 100, queue="a")
    assert len(admit(store, 100, queues=("a",))) == 100
    ack_all(store, running)
    assert ids(admit(store, queues=("a", "b"))) == []
    assert dispatched(backend, "a", "b") == [100, 1]


def test_a_paused_queue_is_skipped_and_its_running_jobs_go_on(store):
    fill(store, "job", 6)
    running = claim_one(store)
    steer(store).set_queue_paused("q", True)
    assert ids(admit(store)) == []
    store.ack(running.lease_ref, Outcome.SUCCESS)
    assert state_of(store, "job-1") == "completed"
    enqueue(store, "another")
    steer(store).set_queue_paused("q", False)
    assert len(admit(store)) == 6


def test_a_queue_named_twice_counts_once(store):
    fill(store, "job", 3)
    assert len(admit(store, 2, queues=("q", "q"))) == 2


@pytest.mark.parametrize("request_", [{"queues": ()}, {"capacity": 0}])
def test_asking_for_nothing_changes_nothing(store, backend: Backend, request_):
    fill(store, "job", 3)
    asked = {"capacity": 5, **request_}
    assert unchanged_by(backend, lambda: admit(store, **asked)) is None


def test_a_weight_of_zero_is_refused(store):
    with pytest.raises(InvalidRequest, match="weight is 0"):
        steer(store).set_queue_weight("q", 0)


def test_queues_that_are_all_paused_answer_nothing(store):
    for queue in ("a", "b"):
        fill(store, queue, 1, queue=queue)
        steer(store).set_queue_paused(queue, True)
    assert ids(admit(store, queues=("a", "b"))) == []
    steer(store).set_queue_paused("b", False)
    assert ids(admit(store, queues=("a", "b"))) == ["b-1"]
