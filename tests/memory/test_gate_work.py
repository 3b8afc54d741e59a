"""What the gate in memory has to do for one admission, in calls that Python makes.

They are counted in a process of its own: CPython 3.11 can hang when profiling is turned
on in one whose code has been specialised under other threads and traces.
"""

from __future__ import annotations

import json
import subprocess
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


KINDS = ("ready", "class", "ceiling", "sticky", "future")
WIDTHS = (1, 50)


@pytest.fixture(scope="module")
def counted() -> dict[str, list[int]]:
    """Calls of an admission beside few and beside many rows, by kind and width."""
    answer = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, check=True, timeout=120
    )
    counts: dict[str, list[int]] = json.loads(answer.stdout)
    return counts


@pytest.mark.parametrize("partitions", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_admission_does_no_more_beside_a_hundred_times_the_rows(
    counted, kind, partitions
):
    few, many = counted[f"{kind} {partitions}"]
    assert many <= 1.5 * few


if __name__ == "__main__":
    json.dump(
        {
            f"{kind} {partitions}": [
                work(kind, rows, partitions) for rows in (FEW, MANY)
            ]
            for kind in KINDS
            for partitions in WIDTHS
        },
        sys.stdout,
    )
