"""What the gate in memory has to do for one admission, in calls that Python makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.memory.store import MemStore
from tests.builders import DAY_MS, enqueue, envelope, steer
from tests.scenarios.gate import admit, ceiling, ids, rate_class

FEW, MANY = 100, 10_000


def calls_of(call: Callable[[], Any]) -> int:
    """How many functions a call enters, those of the interpreter included."""
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def work(kind: str, rows: int, partitions: int) -> int:
    """Calls of an admission of ten jobs beside so many rows of a kind."""
    store = MemStore()
    fields: dict[str, Any] = {"priority": 9, "fingerprint": ""}
    if kind == "class":
        rate_class(store, "c", "0/1000", 1)
        enqueue(store, "spends", rate_class="c")
        fields["rate_class"] = "c"
    elif kind == "ceiling":
        ceiling(store, 1, "queue")
        names = [f"runs-{n}" for n in range(partitions)]
        store.enqueue(
            [envelope(name, partition_key=name[5:], **fields) for name in names]
        )
    elif kind == "sticky":
        fields["sticky_worker"] = "elsewhere"
    elif kind == "future":
        fields["delay_ms"] = DAY_MS
    while admit(store, 1_000):
        pass
    jobs = [
        envelope(f"j{n}", partition_key=str(n % partitions), **fields)
        for n in range(rows)
    ]
    for start in range(0, rows, 1_000):
        store.enqueue(jobs[start : start + 1_000])
    if kind == "ready":
        assert len(admit(store, 10)) == 10
    else:
        assert ids(admit(store, 10)) == []
        store.enqueue([envelope(f"free-{n}", partition_key=f"f{n}") for n in range(20)])
        assert len(admit(store, 10)) == 10
    counted = calls_of(lambda: admit(store, 10))
    assert steer(store).counts("q").counts["running"] >= 20
    return counted


@pytest.mark.parametrize("partitions", [1, 50])
@pytest.mark.parametrize("kind", ["ready", "class", "ceiling", "sticky", "future"])
def test_an_admission_does_no_more_beside_a_hundred_times_the_rows(kind, partitions):
    few, many = (work(kind, rows, partitions) for rows in (FEW, MANY))
    assert many <= 1.5 * few
