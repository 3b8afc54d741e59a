"""Cursors: a step goes on where the last attempt left it."""

from __future__ import annotations

from typing import Any

import pytest

from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from tests.builders import crash, state_of
from tests.worker.rig import Bench, Tap
from tests.worker.stepping import (
    Died,
    come_back,
    leave_checkpoint,
    put,
    refused,
    run_twice,
    running,
    saved,
)


def test_a_cursor_goes_on_where_it_was_and_goes_with_its_step(
    store: Any, clock: Any
) -> None:
    begun: list[Any] = []

    def handler(ctx: JobContext) -> None:
        with ctx.step_cursor("pages") as cursor:
            if cursor:
                begun.append(cursor.value)
                cursor.set({"page": 3})
                if ctx.attempt == 0:
                    raise ValueError
        assert saved(store).cursor is None
        with ctx.step_cursor("other") as cursor:
            begun.append(cursor.value)
            if ctx.attempt == 1:
                raise ValueError
        with pytest.raises(InvalidRequest, match="does not run"):
            cursor.set(1)

    put(store)
    bench = running(store, handler)
    for _ in range(3):
        bench.run_next()
        come_back(store, clock)
    assert begun == [None, {"page": 3}, None, None]
    assert saved(store).completed_steps == ("pages", "other")


def test_a_position_is_none_of_another_step(store: Any, clock: Any) -> None:
    """As in newer code, which calls the step that failed by another name."""
    begun: list[Any] = []

    def handler(ctx: JobContext) -> None:
        with ctx.step_cursor("rows" if ctx.attempt else "pages") as cursor:
            begun.append(cursor.value)
            cursor.set(3)
            if ctx.attempt == 0:
                raise ValueError

    run_twice(store, clock, handler)
    assert begun == [None, None]


def test_a_cursor_step_that_is_done_says_so(store: Any, clock: Any) -> None:
    told: list[bool] = []

    def handler(ctx: JobContext) -> None:
        with ctx.step_cursor("pages") as cursor:
            told.append(bool(cursor))
            if not cursor:
                with pytest.raises(InvalidRequest, match="does not run"):
                    cursor.set(5)
        if ctx.attempt == 0:
            raise ValueError

    run_twice(store, clock, handler)
    assert told == [True, False]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), "step pages: cursor: expected a plain JSON value"),
        (float("nan"), "step pages: cursor"),
        ("x" * 1_048_577, "the limit is 1048576"),
    ],
)
def test_a_position_that_cannot_be_kept_is_refused(
    store: Any, value: Any, match: str
) -> None:
    def handler(ctx: JobContext) -> None:
        with ctx.step_cursor("pages") as cursor:
            with pytest.raises(InvalidRequest, match=match):
                cursor.set(value)
            assert cursor.value is None

    put(store)
    running(store, handler).run_next()
    assert saved(store).completed_steps == ("pages",)


def test_a_saved_position_that_cannot_be_read_is_no_reason_to_start_over(
    store: Any,
) -> None:
    def handler(ctx: JobContext) -> None:
        for _ in ctx.iterate("rows", lambda at: [1], cursor=lambda n: n):
            raise AssertionError("it started over")

    claim = leave_checkpoint(
        store, in_progress_step="rows", cursor_step="rows", cursor=b"\xff"
    )
    bench = running(store, handler)
    bench.run(bench.hold(claim))
    assert state_of(store, "a") is State.UNDECODABLE


@pytest.mark.parametrize("every", [1, 100])
def test_items_go_on_where_the_last_crash_left_them(
    store: Any, clock: Any, every: int
) -> None:
    handled: list[int] = []

    def rows(after: int | None) -> Any:
        return iter(range(0 if after is None else after + 1, 300))

    def handler(ctx: JobContext) -> None:
        for row in ctx.iterate("rows", rows, cursor=lambda n: n, every=every):
            handled.append(row)
            if row == 150 and ctx.crash_attempt == 0:
                raise Died

    put(store)
    registry = Registry()
    registry.task("k")(handler)
    tap = Tap(store)
    bench = Bench(tap, registry, catch_base_exceptions=False)
    (attempt,) = bench.admit()
    with pytest.raises(Died):
        bench.run(attempt)
    crash(store, clock, attempt.claim)
    come_back(store, clock)
    bench.run_next()
    assert sorted(set(handled)) == [*range(300)]
    assert 1 <= len(handled) - 300 <= every
    assert tap.count("checkpoint") <= 300 // every + 5


def test_a_slow_loop_saves_its_position_every_five_seconds(store: Any) -> None:
    tap = Tap(store)

    def handler(ctx: JobContext) -> None:
        for _ in ctx.iterate("rows", lambda at: range(10), cursor=str, every=1000):
            bench.now_s.advance(2)  # type: ignore[attr-defined]

    put(store)
    bench = running(tap, handler)
    bench.run_next()
    positions = [
        given[1].cursor for name, given, _ in tap.arguments if name == "checkpoint"
    ]
    assert positions == [None, b'"2"', b'"5"', b'"8"', None]


def test_a_cancelled_loop_saves_what_it_did_and_stops_before_the_next_item(
    store: Any, clock: Any
) -> None:
    handled: list[int] = []

    def handler(ctx: JobContext) -> None:
        for row in ctx.iterate(
            "rows",
            lambda at: range((at or 0) + 1, 10),
            cursor=lambda n: n,
            every=100,
        ):
            handled.append(row)
            if row == 3:
                attempt.cancel(CancelReason.SHUTDOWN)

    put(store)
    bench = running(store, handler)
    (attempt,) = bench.admit()
    bench.run(attempt)
    assert handled == [1, 2, 3]
    assert state_of(store, "a") is State.AVAILABLE
    bench.run_next()
    assert handled == [*range(1, 10)]


def test_a_loop_that_is_left_early_does_not_count_as_done(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        for row in ctx.iterate("rows", lambda at: range(9), cursor=lambda n: n):
            if row == 4:
                break
        refused(ctx, "cannot follow step rows", "next", print)

    put(store)
    running(store, handler).run_next()
    assert saved(store).completed_steps == ()
    assert saved(store).cursor == b"3"


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_a_loop_saves_after_whole_items(store: Any, every: Any) -> None:
    def handler(ctx: JobContext) -> None:
        with pytest.raises(InvalidRequest, match="every"):
            ctx.iterate("rows", lambda at: [], cursor=str, every=every)

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.COMPLETED
