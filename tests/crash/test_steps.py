"""Workers killed inside of a step: what was finished is not done again."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.crash.fleet import Fleet

pytestmark = pytest.mark.crash

WORK = ["a", "b", *(f"row {number}" for number in range(1, 21)), "invoice"]


def parts(fleet: Fleet) -> list[tuple[str, int]]:
    """What was done, and by which claim."""
    rows = fleet.query("SELECT name, fence FROM public.part")
    return [(name, fence) for name, fence in rows]


@pytest.mark.parametrize(
    ("at", "step", "repeated"),
    [
        ("a", "a", {"a"}),
        ("b", "b", {"b"}),
        ("row 11", "rows", {"row 9", "row 10", "row 11"}),
        ("invoice", "invoice", set()),
        ("after", None, {"after"}),
    ],
)
def test_the_next_worker_goes_on_in_the_step_where_the_first_one_died(
    fleet: Fleet, at: str, step: str | None, repeated: set[str]
) -> None:
    victim = fleet.start()
    fleet.enqueue("steps", "a", payload=b'{"at":"%s"}' % at.encode())
    fleet.wait_point(at)
    victim.kill()
    fleet.start()
    fleet.wait_state("a", "completed")
    done = Counter(name for name, _ in parts(fleet))
    assert set(done) == {*WORK, "after"}
    assert {name for name, count in done.items() if count > 1} == repeated
    assert max(done.values()) <= 2
    job = fleet.job("a")
    assert (job.attempt, job.crash_attempt, job.fence) == (0, 1, 2)
    inspect = fleet.facade.inspect
    checkpoint = inspect.read_checkpoint("a")
    assert checkpoint is not None
    assert checkpoint.completed_steps == ("a", "b", "rows", "invoice")
    assert dict(checkpoint.crashes_by_step) == ({} if step is None else {step: 1})


def test_a_fleet_that_is_killed_again_and_again_finishes_every_step(
    fleet: Fleet,
) -> None:
    ids = [f"j{number:02}" for number in range(30)]
    fleet.enqueue("steps", *ids, payload=b'{"at":""}')
    workers = [fleet.start("--threads", "4") for _ in range(2)]
    for round_number in range(3):
        done = 120 * (round_number + 1)
        fleet.wait_for(lambda done=done: len(parts(fleet)) >= done, "some are done")
        workers.pop(0).kill()
        workers.append(fleet.start("--threads", "4"))
    fleet.wait_for(
        lambda: all(fleet.state(id) == "completed" for id in ids), "all are completed"
    )
    done = Counter(name for name, _ in parts(fleet))
    assert done["invoice"] == len(ids)
    crashes = sum(fleet.job(id).crash_attempt for id in ids)
    assert len(ids) <= done["a"] <= len(ids) + crashes
    assert [worker.stop() for worker in workers] == [0, 0]
