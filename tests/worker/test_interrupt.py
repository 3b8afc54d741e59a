"""Exceptions raised in a handler's thread: one strike, and never at the next job."""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import AttemptCancelled, AttemptTimeout, InvalidRequest
from headgate_sync.interrupt import Interrupt
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from tests.builders import envelope, job, state_of
from tests.worker.rig import PATIENCE_S, Gate, wait_for, working


def put(store: Any, *ids: str, **fields: Any) -> None:
    for id in ids:
        store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def spin() -> None:
    """Never look at anything; the clock only keeps a failing test from hanging."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        pass


def registry_of(handler: Callable[..., Any], **options: Any) -> Registry:
    registry = Registry()
    registry.task("k", **options)(handler)
    return registry


def test_a_busy_loop_is_ended_and_its_thread_goes_on(store: Any) -> None:
    threads: list[str] = []

    def handler(ctx: JobContext) -> None:
        threads.append(threading.current_thread().name)
        if ctx.job_id == "a":
            spin()

    put(store, "a", timeout_ms=50, max_attempts=1)
    registry = registry_of(handler)
    with working(store, registry, capacity=1, async_cancel=True, cancel_grace="50ms"):
        wait_for(lambda: state_of(store, "a") is State.ARCHIVED, "it was ended")
        put(store, "b")
        wait_for(lambda: state_of(store, "b") is State.COMPLETED, "others work")
        assert threads[0] in {thread.name for thread in threading.enumerate()}
    text = job(store, "a").errors[-1].error or ""
    assert text.partition("\n")[0] == "attempt timed out after 50ms"
    assert "in spin" in text


def test_a_handler_may_opt_out_of_what_the_worker_wants(store: Any) -> None:
    gate = Gate()

    def handler(ctx: JobContext) -> None:
        assert ctx.wait(PATIENCE_S)
        until_s = time.monotonic() + 0.3  # several graces
        while time.monotonic() < until_s:
            pass
        gate.hold()

    put(store, "a", timeout_ms=20)
    registry = registry_of(handler, async_cancel=False)
    with working(store, registry, async_cancel=True, cancel_grace="10ms"):
        gate.wait()
        gate.open()
        wait_for(lambda: state_of(store, "a") is State.COMPLETED, "it was left alone")


def test_a_shielded_block_is_finished_first(store: Any) -> None:
    done: list[str] = []

    def handler(ctx: JobContext) -> None:
        with ctx.shield():
            assert ctx.wait(PATIENCE_S)
            until_s = time.monotonic() + 0.3
            while time.monotonic() < until_s:
                pass
            done.append("block")
        done.append("after")

    put(store, "a", timeout_ms=20)
    registry = registry_of(handler, async_cancel=True)
    with working(store, registry, cancel_grace="10ms"):
        wait_for(lambda: state_of(store, "a") is State.RETRYABLE, "it was struck")
    assert done == ["block"]


def test_a_strike_at_the_moment_of_the_return_hits_this_attempt_or_none() -> None:
    """In thousands of rounds nothing arrives outside of the guard."""
    outside: list[BaseException] = []
    hits = 0
    draw = random.Random(1)

    def rounds() -> None:
        nonlocal hits
        for number in range(5_000):
            interrupt = Interrupt()
            ready.put(interrupt)
            left = draw.randrange(400)
            try:
                try:
                    interrupt.guard(lambda left=left: sum(range(left)))
                except AttemptCancelled:
                    hits += 1
                for _ in range(20):  # a late one would strike here
                    number += 1
            except BaseException as error:
                outside.append(error)

    ready: queue.SimpleQueue[Interrupt | None] = queue.SimpleQueue()

    def striker() -> None:
        while (interrupt := ready.get()) is not None:
            interrupt.strike(AttemptTimeout)

    thread = threading.Thread(target=striker)
    thread.start()
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else the two hardly ever meet
    try:
        rounds()
    finally:
        sys.setswitchinterval(usual_s)
        ready.put(None)
        thread.join(PATIENCE_S)
    assert outside == []
    assert hits > 0  # more than a hundred, as a rule


def test_a_value_that_was_returned_is_kept() -> None:
    interrupt = Interrupt()
    assert interrupt.guard(lambda: 5) == 5
    interrupt.strike(AttemptTimeout)  # late: nothing runs any more
    assert not interrupt.struck


def test_a_strike_hits_once() -> None:
    interrupt = Interrupt()

    def struck() -> None:
        interrupt.strike(AttemptTimeout)
        spin()

    def stubborn() -> str:
        with pytest.raises(AttemptTimeout):
            struck()
        interrupt.strike(AttemptTimeout)
        return "survived"

    assert interrupt.guard(stubborn) == "survived"


def test_a_shield_around_a_shield_holds_until_the_outer_end() -> None:
    interrupt = Interrupt()
    passed: list[str] = []

    def handler() -> None:
        with interrupt.shield():
            with interrupt.shield():
                interrupt.strike(AttemptTimeout)
                passed.append("inner")
            passed.append("outer")
        passed.append("after")

    with pytest.raises(AttemptTimeout):
        interrupt.guard(handler)
    assert passed == ["inner", "outer"]


def test_the_handlers_own_code_inside_of_a_shield_is_exposed() -> None:
    interrupt = Interrupt()
    passed: list[str] = []

    def handler() -> None:
        with interrupt.shield():
            interrupt.strike(AttemptTimeout)
            passed.append("shielded")
            with interrupt.exposed():
                passed.append("exposed")

    with pytest.raises(AttemptTimeout):
        interrupt.guard(handler)
    assert passed == ["shielded"]


def test_a_tracked_thread_does_not_take_the_shield_of_its_handler() -> None:
    interrupt = Interrupt()
    inside, leave = threading.Event(), threading.Event()

    def child() -> None:
        with interrupt.shield():
            inside.set()
            leave.wait(PATIENCE_S)

    def handler() -> None:
        thread = threading.Thread(target=child)
        thread.start()
        assert inside.wait(PATIENCE_S)
        try:
            interrupt.strike(AttemptTimeout)
            spin()
        finally:
            leave.set()

    with pytest.raises(AttemptTimeout):
        interrupt.guard(handler)


def test_async_cancel_is_a_yes_or_no() -> None:
    with pytest.raises(InvalidRequest, match="async_cancel must be True, False"):
        registry_of(lambda: None, async_cancel="yes")
