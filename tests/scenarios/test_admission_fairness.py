"""Shares, credit and order between the partitions of a queue."""

from __future__ import annotations

import random

import pytest

from headgate_sync.lifecycle import Outcome
from tests.backends import Backend, Clock
from tests.builders import QUEUE, claim_one, enqueue, envelope, state_of, steer
from tests.scenarios.gate import (
    ack_all,
    admit,
    ceiling,
    deficits,
    fill,
    ids,
    policies,
    rate_class,
    served,
)


def test_the_quantum_bounds_a_lone_partition(store):
    fill(store, "A", 6)
    assert len(admit(store, 10, quantum=1)) == 1


def test_credit_is_spent_on_top_of_the_quantum(store, backend: Backend):
    fill(store, "A", 1, scheduled_at_ms=2)
    fill(store, "B", 10, scheduled_at_ms=3)
    for round in range(3):
        fill(store, f"old-{round}", 1)
        assert served(admit(store, 1, quantum=1)) == {f"old-{round}": 1}
    assert deficits(backend, "B") == [3]
    assert served(admit(store, 10, quantum=1)) == {"A": 1, "B": 4}
    assert deficits(backend, "B") == [0]


def test_a_flood_leaves_the_others_their_quantum(store):
    fill(store, "noisy", 5000)
    fill(store, "A", 3)
    fill(store, "B", 3)
    assert served(admit(store, 9, quantum=3)) == {"noisy": 3, "A": 3, "B": 3}


@pytest.mark.parametrize(
    ("quantum", "claims", "credit"),
    [
        (1, {"A": 1, "B": 1, "C": 1}, [0, 0, 0]),
        (2, {"A": 2, "B": 2, "C": 2}, [0, 0, 0]),
        (3, {"A": 3, "B": 3}, [0, 0, 3]),
        (1000, {"A": 4, "B": 2}, [0, 998, 1000]),
    ],
)
def test_the_quantum_decides_how_a_batch_is_cut(
    store, backend: Backend, quantum, claims, credit
):
    for name in "ABC":
        fill(store, name, 4)
    assert served(admit(store, 6, quantum=quantum)) == claims
    assert deficits(backend, *"ABC") == credit


def test_who_was_passed_over_comes_first_and_keeps_its_credit(store, backend: Backend):
    for name in "ABC":
        fill(store, name, 6)
    assert ids(admit(store, 4, quantum=2)) == ["A-1", "A-2", "B-1", "B-2"]
    assert deficits(backend, *"ABC") == [0, 0, 2]
    assert ids(admit(store, 4, quantum=2)) == ["C-1", "C-2", "C-3", "C-4"]
    assert deficits(backend, *"ABC") == [2, 2, 0]


def test_a_large_quantum_lets_an_old_flood_through_once(store):
    fill(store, "noisy", 1000)
    fill(store, "A", 3)
    assert served(admit(store, 16, quantum=100)) == {"noisy": 16}
    assert served(admit(store, 16, quantum=100))["A"] == 3


def test_automatic_shares_leave_no_slot_idle(store):
    fill(store, "noisy", 5000)
    fill(store, "A", 3)
    fill(store, "B", 3)
    assert served(admit(store, 12, quantum=0)) == {"noisy": 6, "A": 3, "B": 3}


def test_automatic_shares_leave_no_slot_idle_in_any_of_several_queues(store):
    fill(store, "A", 1, queue="qa")
    fill(store, "noisy", 20, queue="qb")
    fill(store, "B", 1, queue="qb")
    batch = admit(store, 12, quantum=0, queues=("qa", "qb"))
    assert served(batch) == {"A": 1, "noisy": 10, "B": 1}


def test_automatic_shares_do_not_bound_a_lone_partition(store):
    fill(store, "A", 10)
    assert len(admit(store, 6, quantum=0)) == 6


def test_quiet_partitions_come_before_noisy_ones(store):
    """Also where both were served by the same call, and the noisy one waits longer."""
    fill(store, "A", 20)
    fill(store, "B", 11, scheduled_at_ms=2)
    first = admit(store, 11, quantum=10)
    assert served(first) == {"A": 10, "B": 1}
    ack_all(store, first, only=["B-1"])
    batch = admit(store, 4, quantum=0)
    assert ids(batch) == ["B-2", "B-3", "B-4", "B-5"]


def test_quiet_partitions_come_first_though_noisy_ones_could_fill_the_call(store):
    for name in ("noisy1", "noisy2"):
        fill(store, name, 9)
    assert served(admit(store, 6, quantum=3)) == {"noisy1": 3, "noisy2": 3}
    for number in range(5):
        fill(store, f"quiet{number}", 2)
    first = admit(store, 5, quantum=1)
    assert served(first) == {f"quiet{number}": 1 for number in range(5)}
    ack_all(store, first)
    assert ids(admit(store, 2, quantum=0)) == ["quiet0-2", "quiet1-2"]


def test_an_explicit_quantum_is_a_contract_and_ignores_who_is_noisy(store):
    fill(store, "A", 20)
    fill(store, "B", 20, scheduled_at_ms=2)
    admit(store, 10, quantum=10)
    admit(store, 2, quantum=10)
    batch = admit(store, 4, quantum=2)
    assert ids(batch) == ["A-11", "A-12", "A-13", "A-14"]


def test_a_partition_that_ran_empty_loses_its_credit(store, backend: Backend):
    fill(store, "A", 8)
    fill(store, "B", 1, scheduled_at_ms=2)
    fill(store, "B2", 3, scheduled_at_ms=3)
    admit(store, 2, quantum=4)
    assert deficits(backend, "B", "B2") == [4, 4]
    admit(store, 10, quantum=4)
    fill(store, "again", 1, partition_key="B", scheduled_at_ms=4)
    assert deficits(backend, "B") == [0]


def test_credit_ends_at_four_quanta(store, backend: Backend):
    fill(store, "A", 100)
    fill(store, "B", 100)
    claims = [admit(store, 1, quantum=5) for _ in range(20)]
    assert sum(served(batch).get("A", 0) for batch in claims) == 10
    assert deficits(backend, "A", "B") == [20, 20]


def test_priority_is_total_inside_a_partition(store):
    for priority, scheduled_at_ms in ((0, 1000), (9, 1001), (5, 1002)):
        enqueue(
            store, f"p{priority}", priority=priority, scheduled_at_ms=scheduled_at_ms
        )
    assert [ids(admit(store, 1)) for _ in range(3)] == [["p9"], ["p5"], ["p0"]]


def test_an_unrelated_rate_class_does_not_change_the_order(store):
    rate_class(store, "other", "1/1000", 1)
    for priority, scheduled_at_ms in ((0, 1000), (9, 1001), (5, 1002)):
        enqueue(
            store, f"p{priority}", priority=priority, scheduled_at_ms=scheduled_at_ms
        )
    assert [ids(admit(store, 1)) for _ in range(3)] == [["p9"], ["p5"], ["p0"]]


def test_equal_priority_goes_by_schedule_and_then_by_insertion(store):
    for id, scheduled_at_ms in (("z", 1002), ("b", 1000), ("a", 1000), ("y", 1001)):
        enqueue(store, id, scheduled_at_ms=scheduled_at_ms)
    assert ids(admit(store)) == ["b", "a", "y", "z"]


def test_a_retried_job_queues_behind_its_siblings(store, clock: Clock):
    enqueue(store, "old", "middle", "new")
    store.ack(claim_one(store).lease_ref, Outcome.RETRY, delay_ms=1000)
    clock.advance_ms(1000)
    store.promote_due(10)
    assert ids(admit(store)) == ["middle", "new", "old"]


def test_a_rate_limited_job_keeps_its_place(store):
    enqueue(store, "old", "new")
    store.ack(claim_one(store).lease_ref, Outcome.RATE_LIMITED)
    again = admit(store)
    assert ids(again) == ["old", "new"]
    assert [claim.fence for claim in again.claims] == [2, 1]


def test_a_partition_can_have_a_quantum_of_its_own(store):
    fill(store, "A", 10)
    fill(store, "B", 10)
    policies(store).set_partition_quantum(QUEUE, "A", 4)
    assert served(admit(store, 10, quantum=1)) == {"A": 4, "B": 1}
    policies(store).set_partition_quantum(QUEUE, "A", None)
    assert served(admit(store, 10, quantum=1)) == {"A": 1, "B": 1}


@pytest.mark.parametrize(
    ("partitions", "jobs", "classed"),
    [
        *[(600, jobs, classed) for jobs in (1, 3) for classed in (False, True)],
        *[
            pytest.param(10_000, jobs, classed, marks=pytest.mark.crash)
            for jobs, classed in ((1, True), (10, False))
        ],
    ],
)
def test_every_one_of_many_partitions_gets_its_turn(
    store, backend, partitions, jobs, classed
):
    """More partitions than a window, and more lanes than are folded at once."""
    if classed and backend.name == "memory":
        # Each call merges the lists of all classes: minutes go by with ten thousand.
        # These are four times as many as all windows of a call look at.
        partitions = min(partitions, 2_500)
    for turn in range(jobs):
        for start in range(0, partitions, 1_000):
            store.enqueue(
                [
                    envelope(
                        f"{partition}-{turn}",
                        partition_key=f"p{partition}",
                        rate_class=f"c{partition}" if classed else "",
                    )
                    for partition in range(start, min(start + 1_000, partitions))
                ]
            )
    seen: list[str] = []
    for _ in range(partitions // 10):
        batch = admit(store, 10)
        seen += served(batch)
        assert max(served(batch).values()) == 1
        ack_all(store, batch)
    assert sorted(seen) == sorted(f"p{partition}" for partition in range(partitions))


@pytest.mark.parametrize("seed", range(6))
def test_a_partition_waits_no_longer_than_the_bound_says(store, seed):
    """Everybody else can be ahead of it at most once, with at most five quanta."""
    luck = random.Random(seed)
    partitions, quantum = luck.randint(2, 16), luck.randint(1, 4)
    capacity = luck.randint(1, 8)
    for name in range(partitions - 1):
        fill(store, f"p{name}", 60)
    # The others may have saved up credit by then.
    for _ in range(luck.randint(0, 6)):
        admit(store, capacity, quantum=quantum)
    fill(store, "late", 1, scheduled_at_ms=9)
    calls = 0
    while state_of(store, "late-1") == "available":
        admit(store, capacity, quantum=quantum)
        calls += 1
    assert calls <= -(-(partitions - 1) * 5 * quantum // capacity) + 1


def test_a_cancelled_lane_does_not_take_a_share(store):
    """A lane can run empty without the gate being told."""
    for name in "ABCD":
        fill(store, name, 4)
    for number in range(1, 5):
        steer(store).operator_cancel(f"D-{number}")
    assert served(admit(store, 6, quantum=0)) == {"A": 2, "B": 2, "C": 2}


def test_a_partition_alone_passes_its_own_quantum_and_is_counted_as_refused(store):
    """The slack after the shares leaves no slot idle; telemetry sees the refusal."""
    steer(store).set_partition_quantum(QUEUE, "A", 1)
    fill(store, "A", 3)
    batch = admit(store, 3, quantum=0)
    assert ids(batch) == ["A-1", "A-2", "A-3"]
    assert batch.refused == {"fairness": 1}


def test_a_lane_that_leads_its_class_into_the_window_is_seen(store):
    """Of more classes than a window holds lanes; its partition is first by name."""
    fill(store, "Z", 1, rate_class="last")
    for number in range(40):
        fill(store, f"M{number:02}", 1, rate_class=f"c{number:02}")
    assert ids(admit(store, 1)) == ["M00-1"]
    fill(store, "A", 1, rate_class="last", priority=1)
    assert ids(admit(store, 1)) == ["A-1"]


def test_many_classes_without_work_do_not_hide_one_that_has_some(store):
    for number in range(30):
        fill(store, f"M{number:02}", 1, rate_class=f"c{number:02}")
    for _ in range(2):
        ack_all(store, admit(store, 16, quantum=1))
    fill(store, "A", 3, rate_class="c")
    claimed = [ids(admit(store, 16, quantum=1)) for _ in range(3)]
    assert claimed == [["A-1"], ["A-2"], ["A-3"]]


@pytest.mark.parametrize("capacity", [1, 16])
@pytest.mark.parametrize("quantum", [0, 1000])
@pytest.mark.parametrize(("partitions", "classes"), [(1, 40), (2, 17), (4, 13)])
def test_each_class_of_a_partition_gets_its_turn(
    store, partitions, classes, quantum, capacity
):
    """However many there are: more than an admission looks at, and all have work."""
    lanes = [
        {"partition_key": f"p{n % partitions}", "rate_class": f"c{n // partitions:02}"}
        for n in range(partitions * classes)
    ]
    for n, lane in enumerate(lanes):
        fill(store, f"first{n}", 1, **lane)
    met: set[tuple[str, str]] = set()
    for turn in range(len(lanes)):
        batch = admit(store, capacity, quantum=quantum)
        assert len(batch.claims) == capacity
        ack_all(store, batch)
        for place, claim in enumerate(batch.claims):
            job = claim.envelope
            met.add((job.partition_key, job.rate_class))
            again = {"partition_key": job.partition_key, "rate_class": job.rate_class}
            fill(store, f"again{turn}-{place}", 1, **again)
        if len(met) == len(lanes):
            return
    pytest.fail(f"{len(met)} of {len(lanes)} lanes had a turn")


def test_lanes_of_a_partition_that_filled_up_do_not_hide_those_of_others(store):
    """Though they were more than an admission looks at, in classes of their own."""
    ceiling(store, 1, "queue", scope="partition")
    for n in range(60):
        fill(store, f"A{n:02}", 1, partition_key="A", rate_class=f"c{n:02}")
    for n in range(40, 80):
        fill(store, f"B{n:02}", 1, partition_key="B", rate_class=f"c{n:02}")
    assert ids(admit(store, 2, quantum=0)) == ["A00-1", "B40-1"]
