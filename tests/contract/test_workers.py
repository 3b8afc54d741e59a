"""Worker processes as the store knows them, and what they are asked to do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headgate_sync.envelope import MAX_INT64
from headgate_sync.errors import InvalidRequest, NotFound
from headgate_sync.memory.store import MemStore
from headgate_sync.workers import (
    COMMANDS,
    FORGOTTEN_MS,
    LIVE_MS,
    ClusterView,
    QueueCover,
    WorkerState,
    cluster_of,
)
from tests.backends import unchanged_by
from tests.builders import START_MS, beat, enqueue, steer


def ids(store: Any, *args: int) -> list[str]:
    return [worker.worker_id for worker in steer(store).list_workers(*args)]


def pending(store: Any, worker_id: str = "w") -> str | None:
    found = {w.worker_id: w.pending_command for w in steer(store).list_workers()}
    return found[worker_id]


def test_a_beat_is_kept_as_it_was_told_with_the_stores_time(store, clock):
    beat(store)
    clock.advance_ms(10_000)
    beat(
        store,
        queues=("b", "a"),
        inflight=3,
        polls=128,
        empty_polls=128,
        status="quiet",
        duties_active=False,
        beat_ms=1_000,
    )
    (worker,) = steer(store).list_workers()
    assert worker.heartbeat_at_ms == START_MS + 10_000
    assert (worker.host, worker.pid, worker.started_at_ms) == ("host", 7, 500)
    assert (worker.queues, worker.concurrency) == (("b", "a"), 8)
    assert (worker.inflight, worker.polls, worker.empty_polls) == (3, 128, 128)
    assert (worker.status, worker.duties_active) == ("quiet", False)
    assert (worker.beat_ms, worker.pending_command) == (1_000, None)
    assert (worker.utilization, worker.empty_poll_ratio) == (3 / 8, 1.0)


def test_one_worker_is_found_by_its_id_however_long_it_was_silent(store, clock):
    beat(store, "a")
    beat(store, "b", inflight=1)
    clock.advance_ms(10 * FORGOTTEN_MS)
    found = steer(store).get_worker("b")
    assert found is not None
    assert (found.worker_id, found.inflight, found.heartbeat_at_ms) == (
        "b",
        1,
        START_MS,
    )
    assert steer(store).list_workers(MAX_INT64)[1] == found
    assert steer(store).get_worker("c") is None
    for bad in ("", "x" * 256, None, "\0"):
        with pytest.raises(InvalidRequest, match="worker_id"):
            steer(store).get_worker(bad)


def test_workers_are_listed_by_id_and_only_while_they_beat(store, clock):
    beat(store, "b")
    clock.advance_ms(1)
    beat(store, "a")
    clock.advance_ms(LIVE_MS - 1)
    assert ids(store) == ["a"]
    assert ids(store, LIVE_MS + 1) == ["a", "b"]
    clock.advance_ms(1)
    assert ids(store) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_waits_until_it_is_applied(store, command):
    assert beat(store) is None
    steer(store).signal_worker("w", command)
    assert pending(store) == command
    assert beat(store) == command
    assert beat(store) == command
    assert beat(store, applied=command) is None
    assert beat(store) is None
    assert pending(store) is None


def test_a_later_command_replaces_an_earlier_one(store):
    beat(store)
    steer(store).signal_worker("w", "quiet")
    steer(store).signal_worker("w", "restart")
    assert beat(store) == "restart"


def test_a_command_is_taken_back_with_none(store):
    beat(store)
    steer(store).signal_worker("w", "terminate")
    steer(store).signal_worker("w", None)
    assert beat(store) is None


def test_applying_one_command_does_not_swallow_a_newer_one(store):
    """An operator may change the mind between two beats."""
    beat(store)
    steer(store).signal_worker("w", "quiet")
    assert beat(store) == "quiet"
    steer(store).signal_worker("w", "restart")
    assert beat(store, applied="quiet") == "restart"


def test_a_successor_of_the_name_does_not_inherit_a_command(store):
    beat(store)
    steer(store).signal_worker("w", "restart")
    assert beat(store, pid=8, started_at_ms=900) is None
    assert pending(store) is None


def test_only_a_known_worker_can_be_signalled(backend, store):
    beat(store)
    error = unchanged_by(backend, lambda: steer(store).signal_worker("x", "quiet"))
    assert isinstance(error, NotFound)
    assert str(error) == "worker x does not exist"


@pytest.mark.parametrize("word", ["dance", "", "QUIET", 7])
def test_a_word_that_is_no_command_is_refused(backend, store, word):
    beat(store)
    error = unchanged_by(backend, lambda: steer(store).signal_worker("w", word))
    assert isinstance(error, InvalidRequest)
    assert str(error) == (
        f"command is {word!r}, allowed are "
        "quiet, resume, restart, terminate, resign or None"
    )


def test_a_worker_that_ends_is_forgotten_and_its_successor_is_not(store):
    beat(store)
    beat(store, "other")
    steer(store).forget_worker("w", 499)
    assert ids(store) == ["other", "w"]
    steer(store).forget_worker("w", 500)
    steer(store).forget_worker("nobody", 500)
    assert ids(store) == ["other"]


def test_a_new_worker_forgets_those_that_were_silent_for_a_week(store, clock):
    beat(store, "old")
    beat(store, "known")
    clock.advance_ms(1)
    beat(store, "younger")
    clock.advance_ms(FORGOTTEN_MS - 1)
    beat(store, "known")
    assert ids(store, FORGOTTEN_MS * 2) == ["known", "old", "younger"]
    beat(store, "new")
    assert ids(store, FORGOTTEN_MS * 2) == ["known", "new", "younger"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"worker_id": ""}, "worker_id must not be empty"),
        ({"worker_id": "x" * 256}, "worker_id has 256 bytes, the limit is 255"),
        ({"host": "\0"}, "host must not contain NUL (U+0000)"),
        ({"queues": "q"}, "queues must be a sequence of str, got one text"),
        ({"queues": ("",)}, "queue must not be empty"),
        ({"queues": ("q",) * 257}, "queues has 257 entries, the limit is 256"),
        ({"concurrency": -1}, "concurrency is -1, allowed is 0 to 2147483647"),
        ({"polls": 1, "empty_polls": 2}, "empty_polls is 2, allowed is 0 to 1"),
        ({"beat_ms": 0}, "beat_ms is 0, allowed is 1 to 86400000"),
        (
            {"status": "asleep"},
            "status is 'asleep', allowed are running, quiet, restarting, terminating",
        ),
        (
            {"applied": "dance"},
            f"command is 'dance', allowed are {', '.join(COMMANDS)} or None",
        ),
    ],
)
def test_a_beat_out_of_range_cannot_be_made(fields, text):
    with pytest.raises(InvalidRequest) as refusal:
        beat(MemStore(), **fields)
    assert str(refusal.value) == text


@pytest.mark.parametrize("stale_after_ms", [-1, 2**63, True])
def test_a_window_out_of_range_is_refused(store, stale_after_ms):
    with pytest.raises(InvalidRequest, match="stale_after_ms"):
        steer(store).list_workers(stale_after_ms)


# The fleet as a whole.


def test_an_empty_fleet_has_no_ratios(store):
    assert steer(store).cluster() == ClusterView(
        now_ms=START_MS,
        live=0,
        late=0,
        stale=0,
        capacity_total=0,
        inflight_total=0,
        polls_total=0,
        empty_polls_total=0,
        queues=(),
    )
    assert steer(store).cluster().utilization == 0
    assert steer(store).cluster().empty_poll_ratio == 0


def test_ratios_of_one_worker(store):
    beat(store)
    view = steer(store).cluster()
    assert (view.utilization, view.empty_poll_ratio) == (0.75, 0.2)


def test_the_fleets_ratios_are_ratios_of_sums(store):
    beat(store, "a")
    beat(store, "b", concurrency=2, inflight=0)
    view = steer(store).cluster()
    assert (view.capacity_total, view.inflight_total) == (10, 6)
    assert view.utilization == 0.6


def test_a_worker_that_misses_its_beats_is_late_before_it_is_stale(store, clock):
    beat(store, "slow", beat_ms=30_000)
    beat(store, "quick", beat_ms=1_000)
    clock.advance_ms(60_001)
    view = steer(store).cluster()
    assert (view.live, view.late, view.stale, view.total) == (2, 1, 0, 2)
    assert view.queues == (QueueCover(queue="q", live_workers=2, late_workers=1),)
    clock.advance_ms(30_000)
    assert steer(store).cluster().late == 2
    clock.advance_ms(LIVE_MS)
    view = steer(store).cluster()
    assert (view.live, view.late, view.stale, view.total) == (0, 0, 2, 2)
    assert view.capacity_total == 0


def test_a_queue_that_nobody_serves_is_shown(store):
    beat(store, queues=("served", "both"))
    enqueue(store, "a", queue="alone")
    enqueue(store, "b", queue="both")
    steer(store).set_queue_paused("paused", True)
    assert steer(store).cluster().queues == (
        QueueCover(queue="alone", live_workers=0, late_workers=0),
        QueueCover(queue="both", live_workers=1, late_workers=0),
        QueueCover(queue="paused", live_workers=0, late_workers=0),
        QueueCover(queue="served", live_workers=1, late_workers=0),
    )


def test_a_queue_that_a_worker_names_twice_is_served_by_one(store):
    beat(store, queues=("twice", "twice"))
    cover = QueueCover(queue="twice", live_workers=1, late_workers=0)
    assert steer(store).cluster().queues == (cover,)


def test_a_large_fleet_on_many_queues_is_summed_up_in_a_moment():
    """Not by asking each worker about each queue: all dashboards wait for it."""
    names = [f"q{number}" for number in range(10_000)]
    workers = [
        WorkerState(
            worker_id=f"w{number}", host="h", pid=1, queues=tuple(names[number:][:10]),
            concurrency=1, started_at_ms=0, heartbeat_at_ms=0, inflight=0, polls=0,
            empty_polls=0, status="running", duties_active=True, beat_ms=1_000,
            pending_command=None,
        )
        for number in range(5_000)
    ]  # fmt: skip
    began_s = time.perf_counter()
    view = cluster_of(workers, names, 0)
    assert time.perf_counter() - began_s < 5.0
    assert len(view.queues) == 10_000
    assert sum(cover.live_workers for cover in view.queues) == 50_000


def test_a_queue_whose_last_worker_fell_silent_is_shown_until_it_is_forgotten(
    store, clock
):
    beat(store, "gone", queues=("orphaned",))
    clock.advance_ms(LIVE_MS)
    cover = QueueCover(queue="orphaned", live_workers=0, late_workers=0)
    assert steer(store).cluster().queues == (cover,)
    clock.advance_ms(FORGOTTEN_MS)
    beat(store, "new", queues=())
    assert steer(store).cluster().queues == ()
