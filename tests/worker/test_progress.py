"""Progress: written seldom, never out of order, and never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest, StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.worker.heartbeat import Heartbeat
from tests.builders import envelope, state_of
from tests.worker.rig import PATIENCE_S, Bench, Gate, Steps, Tap, wait_for


def put(store: Any) -> None:
    store.enqueue([envelope("a", kind="k", payload=b"{}")])


def running(store: Any, handler: Callable[..., Any], **config: Any) -> Bench:
    """A bench with one task of kind `k`."""
    registry = Registry()
    registry.task("k")(handler)
    return Bench(store, registry, **config)


def tapped(store: Any) -> tuple[Tap, Tap]:
    """The store, and a tap on its progress."""
    tap, progress = Tap(store), Tap(store.progress)
    tap.__dict__["progress"] = progress
    return tap, progress


def test_progress_is_written_at_most_twice_a_second_and_never_lost(store: Any) -> None:
    steps = Steps()
    written = []

    def handler(ctx: JobContext) -> None:
        for current in range(1, 6):
            ctx.report_progress(current, 10, f"{current} of 10")
            steps.advance(0.2)
            written.append(store.progress.read_progress("a").current)
        ctx.report_progress(7, 10, force=True)
        written.append(store.progress.read_progress("a").current)
        ctx.report_progress(8, 10)

    put(store)
    bench = running(Tap(store), handler, now_s=steps)
    bench.run_next()
    assert written == [1, 1, 1, 4, 4, 7]
    progress = store.progress.read_progress("a")
    assert (progress.current, progress.total) == (8, 10)
    assert state_of(store, "a") is State.COMPLETED


def test_progress_that_cannot_be_written_at_the_end_does_not_fail_the_job(
    store: Any, caplog: Any
) -> None:
    steps = Steps()

    class Away:
        def write_job_progress(self, lease: Any, progress: Any) -> Any:
            raise StoreUnavailable("away")

    def handler(ctx: JobContext) -> None:
        ctx.report_progress(1, 3)
        ctx.report_progress(2, 3)
        tap.__dict__["progress"] = Away()

    put(store)
    tap = Tap(store)
    running(tap, handler, now_s=steps).run_next()
    assert state_of(store, "a") is State.COMPLETED
    assert "job a (queue q): last progress not written" in caplog.text


@pytest.mark.parametrize(
    "args", [(5, 4), (1, 0), (0, 2**53), (-1, 4), (1, 2, "x" * 513)]
)
def test_progress_out_of_range_is_refused(store: Any, args: Any) -> None:
    def handler(ctx: JobContext) -> None:
        with pytest.raises(InvalidRequest):
            ctx.report_progress(*args)

    put(store)
    running(store, handler).run_next()
    assert store.progress.read_progress("a") is None


def test_a_value_that_an_outage_held_back_follows_with_a_later_beat(store: Any) -> None:
    steps = Steps()
    tap, progress = tapped(store)
    seen: list[int] = []

    def beat() -> None:
        before = progress.count("write_job_progress")

        def sent() -> bool:
            if progress.count("write_job_progress") > before:
                return True
            heartbeat.step()  # again, where the thread of the last one is not gone yet
            return False

        wait_for(sent, "it is sent")

    def handler(ctx: JobContext) -> None:
        ctx.report_progress(1, 9)
        ctx.report_progress(2, 9)  # too soon
        progress.fail("write_job_progress", *[StoreUnavailable("away")] * 2)
        beat()
        with pytest.raises(StoreUnavailable):
            ctx.report_progress(3, 9, force=True)
        seen.append(store.progress.read_progress("a").current)
        beat()
        wait_for(lambda: not ctx.progress_waits, "it is written")
        seen.append(store.progress.read_progress("a").current)
        progress.fail("write_job_progress", StoreUnavailable("away"))
        ctx.report_progress(4, 9)
        beat()

    put(store)
    bench = running(tap, handler, now_s=steps)
    heartbeat = Heartbeat(tap, bench.inflight, lease_ms=30_000, now_s=steps)
    bench.run_next()
    assert seen == [1, 3]
    assert store.progress.read_progress("a").current == 4
    assert state_of(store, "a") is State.COMPLETED


@pytest.mark.parametrize("force", [False, True])
def test_a_value_that_comes_during_a_write_is_neither_lost_nor_overtaken(
    store: Any, force: bool
) -> None:
    gate, overtook = Gate(), threading.Event()
    tap, progress = tapped(store)
    written: list[int] = []

    def write(real: Any, lease: Any, update: Any) -> Any:
        if update.current == 1:
            gate.hold()
        else:
            overtook.set()
        written.append(update.current)
        return real(lease, update)

    progress.around["write_job_progress"] = write

    def handler(ctx: JobContext) -> None:
        first = ctx.spawn(ctx.report_progress, 1, 9)
        gate.wait()
        if force:  # waits for the write that is under way, but not for ever
            second = ctx.spawn(lambda: ctx.report_progress(2, 9, force=True))
            assert not overtook.wait(0.2)
            gate.open()
            second.result(PATIENCE_S)
        else:  # waits for nobody
            ctx.report_progress(2, 9)
            gate.open()
        first.result(PATIENCE_S)

    put(store)
    running(tap, handler, now_s=Steps()).run_next()
    assert written == [1, 2]
    assert store.progress.read_progress("a").current == 2
