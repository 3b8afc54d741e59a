"""After many rounds of a queue, what gets work or room again is found at once.

A store may keep from where to look for lanes, and move that on with the rounds.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.gate import (
    ack_all,
    admit,
    ceiling,
    fill,
    ids,
    policies,
    rate_class,
)

ROUNDS = 40
KINDS: list[dict[str, Any]] = [
    {},
    {"rate_class": "c"},
    {"sticky_worker": "w"},
    {"rate_class": "c", "sticky_worker": "w"},
]


@pytest.fixture(params=KINDS, ids=["plain", "classed", "pinned", "both"])
def lane(request: pytest.FixtureRequest, store) -> dict[str, Any]:
    """Fields of the jobs that share a class and a worker in the test."""
    fields: dict[str, Any] = request.param
    if "rate_class" in fields:
        rate_class(store, "c", "0/1000", 1_000)
    return fields


def serve_others(store, lane: dict[str, Any]) -> None:
    """Many rounds in which another partition is served, which has a job left then."""
    for turn in range(ROUNDS):
        fill(store, f"pace{turn}", 1, partition_key="pace", **lane)
        batch = admit(store, 1)
        assert ids(batch) == [f"pace{turn}-1"]
        ack_all(store, batch)
    fill(store, "left", 1, partition_key="pace", **lane)


def test_a_new_partition_comes_first(store, lane):
    serve_others(store, lane)
    fill(store, "A", 1, scheduled_at_ms=9, **lane)
    assert ids(admit(store, 1)) == ["A-1"]


def test_a_partition_that_comes_back_comes_first(store, lane):
    fill(store, "A", 1, **lane)
    ack_all(store, admit(store, 1))
    serve_others(store, lane)
    fill(store, "again", 1, partition_key="A", scheduled_at_ms=9, **lane)
    assert ids(admit(store, 1)) == ["again-1"]


def test_a_lane_whose_partition_was_served_through_another_one_is_found(store, lane):
    fill(store, "A", 1, **lane)
    ack_all(store, admit(store))
    for turn in range(ROUNDS):
        fill(store, f"pace{turn}", 1, partition_key="pace", **lane)
        fill(store, f"A{turn}", 1, partition_key="A", rate_class="another")
        batch = admit(store)
        assert len(batch) == 2
        ack_all(store, batch)
    fill(store, "again", 1, partition_key="A", **lane)
    assert ids(admit(store)) == ["again-1"]


def test_a_partition_that_was_full_comes_first(store, lane):
    ceiling(store, 1, "queue")
    fill(store, "A", 3, scheduled_at_ms=9, **lane)
    first = admit(store, 1)
    serve_others(store, lane)
    ack_all(store, first)
    assert ids(admit(store, 1)) == ["A-2"]


@pytest.mark.parametrize("how", ["raised", "deleted"])
def test_a_partition_whose_ceiling_gives_way_comes_first(store, lane, how):
    ceiling(store, 1, "queue")
    fill(store, "A", 3, scheduled_at_ms=9, **lane)
    admit(store, 1)
    serve_others(store, lane)
    if how == "raised":
        ceiling(store, 2, "queue")
    else:
        policies(store).delete_concurrency_limit("limit")
    assert ids(admit(store, 1)) == ["A-2"]


def test_partitions_take_turns_for_as_long_as_they_have_work(store, lane):
    for name in "ABC":
        fill(store, name, ROUNDS // 2, **lane)
    for turn in range(1, ROUNDS // 2 + 1):
        for name in "ABC":
            batch = admit(store, 1)
            assert ids(batch) == [f"{name}-{turn}"]
            ack_all(store, batch)


def test_two_queues_take_turns_for_as_long_as_they_have_work(store, lane):
    both = ("qa", "qb")
    for queue in both:
        for name in "AB":
            fields = {"partition_key": name, "queue": queue, **lane}
            fill(store, queue + name, ROUNDS // 2, **fields)
    for turn in range(1, ROUNDS // 2 + 1):
        for name in "AB":
            for queue in both:
                batch = admit(store, 1, queues=both)
                assert ids(batch) == [f"{queue}{name}-{turn}"]
                ack_all(store, batch)


def test_a_new_partition_of_many_classes_begins_with_the_first_of_them(store):
    """Also where others had been served in some of them, and in the rest nobody."""
    for turn in range(6):
        for n in range(40):
            fill(store, f"A{turn}-{n:02}", 1, partition_key="A", rate_class=f"c{n:02}")
    for _ in range(6):
        ack_all(store, admit(store, 16))
    for n in range(80):
        fill(store, f"B-{n:02}", 1, partition_key="B", rate_class=f"c{n:02}")
    assert ids(admit(store, 3)) == ["B-00-1", "B-01-1", "B-02-1"]
