"""The memory ceiling."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.memory.store import MemStore
from headgate_sync.registry import Registry
from headgate_sync.telemetry import WorkerMemory
from headgate_sync.worker import ExitStatus, WorkerConfig
from headgate_sync.worker.memory import MemoryWatch
from headgate_sync.worker.reporting import Emitter
from headgate_sync.worker.samplers import cgroup_current, rss_high_water, rss_now
from tests.builders import envelope, job
from tests.worker.rig import START_S, Gate, Steps, wait_for, working

INTERVAL_S = 30.0


class Watching:
    """A watch with a limit of 100 bytes whose samples a test provides."""

    def __init__(self, sampler: Callable[[], int]) -> None:
        self.steps = Steps()
        self.events: list[Any] = []
        self.crossings = 0
        self.noted: list[BaseException] = []
        self.watch = MemoryWatch(
            sampler,
            worker_id="w",
            limit_bytes=100,
            interval_ms=int(INTERVAL_S * 1000),
            crossed=self._count,
            emit=Emitter(self),
            note=self.noted.append,
            now_s=self.steps,
        )

    def on_event(self, event: Any) -> None:
        self.events.append(event)

    def _count(self) -> None:
        self.crossings += 1

    def sample(self) -> float:
        self.steps.advance(INTERVAL_S)
        return self.watch.step()


@pytest.mark.parametrize(
    ("used", "over"), [(75, False), (99, False), (100, True), (125, True)]
)
def test_a_sample_at_the_limit_asks_for_a_restart(used: int, over: bool) -> None:
    watching = Watching(lambda: used)
    watching.sample()
    assert watching.events == [
        WorkerMemory(
            worker="w", used_bytes=used, limit_bytes=100, restart_requested=over
        )
    ]
    assert watching.crossings == over


def test_the_first_sample_is_taken_after_one_interval_and_then_one_per_interval() -> (
    None
):
    watching = Watching(lambda: 75)
    assert watching.watch.step() == START_S + INTERVAL_S
    assert watching.events == []
    for number in range(1, 4):
        assert watching.sample() == START_S + INTERVAL_S * (number + 1)
        assert watching.watch.step() == START_S + INTERVAL_S * (number + 1)
        assert len(watching.events) == number


def test_a_sampler_that_fails_skips_the_sample() -> None:
    left = [OSError("gone"), ValueError("odd")]

    def sampler() -> int:
        if left:
            raise left.pop()
        return 75

    watching = Watching(sampler)
    watching.sample()
    watching.sample()
    assert (watching.events, watching.crossings) == ([], 0)
    watching.sample()
    assert len(watching.events) == 1


def test_a_worker_that_has_grown_too_large_drains_and_ends_with_code_12(
    caplog: Any,
) -> None:
    store, registry, gate = MemStore(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    used = [75]
    config = {
        "memory_limit_bytes": 100,
        "memory_check_interval": "10ms",
        "memory_sampler": lambda: used[0],
    }
    with working(store, registry, **config) as worker:
        gate.wait()
        assert worker.health().status == "running"
        used[0] = 125
        wait_for(lambda: worker.health().status == "terminating", "it drains")
        gate.open()
        worker._over.wait()
    assert worker.exit_status == ExitStatus(12, 0, 0)
    assert job(store, "a").state == "completed"
    assert "125 bytes of memory are used, the limit is 100" in caplog.text


def test_memory_that_crosses_its_limit_after_a_stop_changes_no_exit_code() -> None:
    store, registry, gate = MemStore(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    store.enqueue([envelope("a", kind="k", payload=b"{}")])
    samples: list[int] = []
    used = [75]

    def sampler() -> int:
        samples.append(used[0])
        return used[0]

    config = {
        "memory_limit_bytes": 100,
        "memory_check_interval": "10ms",
        "memory_sampler": sampler,
    }
    with working(store, registry, **config) as worker:
        gate.wait()
        worker.stop()
        wait_for(lambda: worker.health().status == "terminating", "it drains")
        used[0] = 125
        wait_for(lambda: 125 in samples, "it is sampled")
        gate.open()
    assert worker.exit_status == ExitStatus(0, 0, 0)


def test_without_a_limit_nothing_is_sampled() -> None:
    with working(MemStore(), Registry()) as worker:
        assert "memory" not in worker.health().threads


@pytest.mark.parametrize("limit", [0, -1, True])
def test_a_limit_out_of_range_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="memory_limit_bytes"):
        WorkerConfig(memory_limit_bytes=limit)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own files")
def test_the_samplers_see_what_this_process_holds() -> None:
    before = rss_now()
    # Mapped for itself: what was freed before could serve an object of Python's.
    with mmap.mmap(-1, 30_000_000) as block:
        block.write(bytes(len(block)))
        held = rss_now()
        assert held - before > 25_000_000
        assert rss_high_water() >= held - 1_000_000
    assert rss_high_water() >= held - 1_000_000
    try:
        used = cgroup_current()
    except OSError:
        pytest.skip("no unified control group on this machine")
    assert used > 1_000_000
