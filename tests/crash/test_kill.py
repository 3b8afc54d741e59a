"""Workers that die at a named point: every job is done once, and counted right."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import psutil
import pytest

from headgate_sync.errors import DuplicateJob
from headgate_sync.lifecycle import UNFINISHED
from tests.crash.fleet import PATIENCE_S, Fleet, timed

pytestmark = pytest.mark.crash

LEASE_S = 2.0
BACKOFF_S = 1.0
TICK_S = 1.0
SLACK_S = 10.0  # of a machine that does other things too


def counts(fleet: Fleet, id: str) -> tuple[str, int, int, int]:
    """State, attempts, crashes, claims."""
    job = fleet.job(id)
    return job.state, job.attempt, job.crash_attempt, job.fence


def gone(pid: int) -> bool:
    """Whether a process has ended, whoever has to collect it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_killed_in_a_handler_is_replaced_within_its_lease(
    fleet: Fleet,
) -> None:
    victim = fleet.start()
    fleet.enqueue("effect", "a", payload=b'{"at":"handler"}')
    fleet.wait_point("handler")
    victim.kill()
    with timed() as passed_s:
        fleet.start()
        fleet.wait_state("a", "completed")
        assert passed_s() < LEASE_S + BACKOFF_S + 3 * TICK_S + SLACK_S
    assert counts(fleet, "a") == ("completed", 0, 1, 2)
    assert fleet.runs("a") == [1, 2]
    assert fleet.effects() == {"a": 1}


@pytest.mark.parametrize("forked", [False, True])
def test_an_attempt_in_a_process_of_its_own_dies_with_its_worker(
    fleet: Fleet, forked: bool
) -> None:
    """Also where another process has the worker's end of its pipes."""
    worker = fleet.start_ready()
    fleet.enqueue("apart", "a")
    fleet.wait_for(lambda: bool(fleet.runs("a")), "it runs")
    [pid] = fleet.pids("a")
    assert pid != worker.pid
    if forked:
        fleet.enqueue("leaves", "b")
        fleet.wait_state("b", "completed")
    worker.kill()
    try:
        fleet.wait_for(lambda: gone(pid), "its process is gone")
    finally:
        for (left,) in fleet.query("SELECT pid FROM public.reached"):
            os.kill(left, signal.SIGKILL)


def test_a_worker_killed_inside_its_transaction_leaves_no_effect(fleet: Fleet) -> None:
    victim = fleet.start()
    fleet.enqueue("effect", "a", payload=b'{"at":"transaction"}')
    fleet.wait_point("transaction")
    victim.kill()
    fleet.start()
    fleet.wait_state("a", "completed")
    assert counts(fleet, "a") == ("completed", 0, 1, 2)
    assert fleet.query("SELECT job, fence FROM public.effect") == [("a", 2)]


def test_a_worker_killed_after_its_commit_is_not_repeated(fleet: Fleet) -> None:
    victim = fleet.start()
    fleet.enqueue("effect", "a", payload=b'{"at":"committed"}')
    fleet.wait_point("committed")
    victim.kill()
    fleet.start_ready()
    assert counts(fleet, "a") == ("completed", 0, 0, 1)
    assert fleet.runs("a") == [1]
    assert fleet.effects() == {"a": 1}


def test_a_worker_killed_before_its_ack_runs_the_job_again(fleet: Fleet) -> None:
    victim = fleet.start(CRASH_POINT="before-ack")
    fleet.enqueue("plain", "a")
    fleet.wait_point("before-ack")
    victim.kill()
    fleet.start()
    fleet.wait_state("a", "completed")
    assert counts(fleet, "a") == ("completed", 0, 1, 2)
    assert fleet.runs("a") == [1, 2]


def test_a_worker_killed_after_its_ack_was_committed_does_not(fleet: Fleet) -> None:
    victim = fleet.start(CRASH_POINT="after-ack")
    fleet.enqueue("plain", "a")
    fleet.wait_point("after-ack")
    victim.kill()
    fleet.start_ready()
    assert counts(fleet, "a") == ("completed", 0, 0, 1)
    assert fleet.runs("a") == [1]


def test_a_worker_killed_while_it_drains_is_a_crash_like_any_other(
    fleet: Fleet,
) -> None:
    victim = fleet.start("--shutdown-timeout", "60s")
    fleet.enqueue("effect", "a", payload=b'{"at":"handler"}')
    fleet.wait_point("handler")
    victim.signal(signal.SIGTERM)
    fleet.wait_for(lambda: "stops" in victim.said, "it drains")
    victim.kill()
    fleet.start()
    fleet.wait_state("a", "completed")
    assert counts(fleet, "a") == ("completed", 0, 1, 2)
    assert fleet.effects() == {"a": 1}


@pytest.mark.parametrize("how", ["exit", "abort", "kill"])
def test_a_payload_that_kills_its_worker_is_quarantined_after_three_starts(
    fleet: Fleet, how: str
) -> None:
    fleet.enqueue("dies", "a", payload=b'{"how":"%s"}' % how.encode())
    for _ in range(6):
        victim = fleet.start()
        fleet.wait_for(
            lambda victim=victim: victim.ended or fleet.state("a") == "quarantined",
            "it dies",
        )
        if fleet.state("a") == "quarantined":
            break
    assert counts(fleet, "a") == ("quarantined", 0, 3, 3)
    assert fleet.runs("a") == [1, 2, 3]
    fleet.enqueue("plain", "other")
    fleet.wait_state("other", "completed")


def test_two_processes_of_one_name_do_not_vouch_for_each_other(fleet: Fleet) -> None:
    victim = fleet.start("--worker-id", "twin")
    fleet.enqueue("effect", "a", payload=b'{"at":"handler"}', sticky_worker="twin")
    fleet.wait_point("handler")
    fleet.start("--worker-id", "twin")
    victim.kill()
    fleet.wait_state("a", "completed")
    assert counts(fleet, "a") == ("completed", 0, 1, 2)
    assert fleet.effects() == {"a": 1}


def test_three_hundred_jobs_survive_a_fleet_that_is_killed_again_and_again(
    fleet: Fleet,
) -> None:
    ids = [f"j{number:03}" for number in range(300)]
    fleet.enqueue("effect", *ids)
    workers = [fleet.start("--threads", "4", "--prefetch", "12") for _ in range(2)]
    for round_number in range(4):
        done = 40 * (round_number + 1)
        fleet.wait_for(lambda done=done: len(fleet.effects()) >= done, "some are done")
        workers.pop(0).kill()
        workers.append(fleet.start("--threads", "4", "--prefetch", "12"))
    fleet.wait_for(lambda: len(fleet.effects()) == 300, "all are done")
    fleet.wait_for(
        lambda: all(fleet.state(id) == "completed" for id in ids), "all are completed"
    )
    assert set(fleet.effects().values()) == {1}
    jobs = [fleet.job(id) for id in ids]
    assert all(job.attempt == 0 for job in jobs)
    assert all(job.fence == job.crash_attempt + 1 for job in jobs)
    assert [worker.stop() for worker in workers] == [0, 0]


KEYED = [
    *[("waits", b'{"seconds":0.3}')] * 6,
    *[("effect", b"{}")] * 6,
    *[("plain", b"no arguments")] * 3,
    ("dies", b'{"how":"kill"}'),
]
OVER = "SELECT count(finalized_at_ms), count(*) FROM headgate.headgate_job"


def test_a_key_is_held_by_a_live_job_and_by_no_other(fleet: Fleet) -> None:
    """Wherever in the life of the jobs their workers are killed."""
    luck = random.Random(5)
    ids = [f"j{number:02}" for number in range(48)]
    for number, id in enumerate(ids):
        kind, payload = KEYED[number % len(KEYED)]
        fleet.enqueue(kind, id, payload=payload, **keyed(id))
    workers = [fleet.start("--threads", "2") for _ in range(2)]

    def over() -> tuple[Any, ...]:
        """How many jobs are, and of how many; the dead are replaced meanwhile."""
        for place, worker in enumerate(workers):
            if worker.ended:
                workers[place] = fleet.start("--threads", "2")
        return fleet.query(OVER)[0]

    def enqueue_twin(id: str, twin: str) -> bool:
        try:
            # By a content of its own: one that luck kills thrice must not stop others.
            fleet.enqueue("plain", twin, fingerprint=twin, **keyed(id))
        except DuplicateJob:
            return False
        return True

    accepted = []
    for turn in range(12):
        fleet.wait_for(lambda turn=turn: over()[0] >= 3 * turn, "some are over")
        fleet.let_pass(luck.uniform(0, 0.6))
        luck.choice(workers).kill()
        for id in luck.sample(ids, 4):
            twin = f"{id}-twin-{turn}"
            accepted.append(enqueue_twin(id, twin))
            assert not accepted[-1] or fleet.state(id) not in UNFINISHED

    fleet.wait_for(lambda: len(set(over())) == 1, "all are over", 2 * PATIENCE_S)
    assert set(accepted) == {True, False}
    found = {fleet.state(id) for id in ids}
    assert found == {"completed", "undecodable", "quarantined"}
    assert all(enqueue_twin(id, f"{id}-last") for id in ids)


def keyed(id: str) -> dict[str, Any]:
    """What gives a job and its twins of any kind one key."""
    return {"unique_key": id.encode(), "unique_exclude_kind": True}


@pytest.mark.parametrize("how", ["adds", "divides", "digests"])
def test_busy_handlers_do_not_cost_a_lease(fleet: Fleet, how: str) -> None:
    """More than twice as long as it lasts, with another worker that would take it.

    Where the process gets a tenth of a processor, a renewal waits seconds for its turn
    among eight such threads: so long at least must a lease be.
    """
    looker = fleet.start_ready("--threads", "1")
    worker = fleet.start(
        *("--threads", "8", "--lease", "5s"), "--no-duties", "--worker-id", "busy"
    )
    ids = [f"j{number}" for number in range(8)]
    payload = b'{"how":"%s","seconds":12}' % how.encode()
    fleet.enqueue("burns", *ids, payload=payload, sticky_worker="busy")
    fleet.wait_for(
        lambda: all(fleet.state(id) == "completed" for id in ids), "all are completed"
    )
    assert {counts(fleet, id) for id in ids} == {("completed", 0, 0, 1)}
    assert [worker.stop(), looker.stop()] == [0, 0]


def test_a_handler_that_finds_no_memory_fails_and_its_worker_goes_on(
    fleet: Fleet,
) -> None:
    worker = fleet.start()
    fleet.enqueue("hungers", "a", max_attempts=1)
    fleet.wait_state("a", "archived")
    assert counts(fleet, "a") == ("archived", 1, 0, 1)
    [entry] = fleet.job("a").errors
    assert entry.error is not None
    assert "MemoryError" in entry.error
    fleet.enqueue("plain", "b")
    fleet.wait_state("b", "completed")
    assert fleet.pids("b") == [worker.pid]
    assert worker.stop() == 0


def test_a_job_that_ends_its_worker_takes_no_other_into_quarantine(
    fleet: Fleet,
) -> None:
    """It runs with the same four twice, and alone when it counts."""
    others = ["a", "b", "d", "e"]
    fleet.enqueue("waits", *others[:2], payload=b'{"seconds":1}')
    fleet.enqueue("dies", "killer", payload=b'{"how":"exit","seconds":0.5}')
    fleet.enqueue("waits", *others[2:], payload=b'{"seconds":1}')

    def is_over() -> bool:
        if fleet.processes[-1].ended:
            fleet.start("--threads", "8")
        return fleet.state("killer") == "quarantined" and all(
            fleet.state(id) == "completed" for id in others
        )

    fleet.start("--threads", "8")
    fleet.wait_for(is_over, "the killer is alone in quarantine", 2 * PATIENCE_S)
    assert counts(fleet, "killer") == ("quarantined", 0, 3, 3)
    assert {counts(fleet, id)[2] for id in others} == {2}
