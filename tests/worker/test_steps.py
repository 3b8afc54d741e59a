"""Steps: what is done stays done, whatever ends the attempt."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext
from headgate_sync.errors import (
    InvalidRequest,
    LeaseLost,
    StoreClosed,
    StoreUnavailable,
)
from headgate_sync.lease import MAX_STEPS, Checkpoint, step_set_hash
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.steps import StepPlan
from tests.backends import Backend, MemoryBackend
from tests.builders import claim_one, crash, job, set_rate_limit, state_of, steer
from tests.worker.rig import Bench, Tap
from tests.worker.stepping import (
    Died,
    come_back,
    first_line,
    leave_checkpoint,
    put,
    refused,
    run_twice,
    running,
    saved,
)

# Skipping what is done


def test_the_next_attempt_goes_on_with_the_step_that_failed(
    store: Any, clock: Any
) -> None:
    ran: list[str] = []
    seen: list[Checkpoint] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("a", ran.append, "a")
        with ctx.step("b") as run:
            if run:
                ran.append("b")
                seen.append(saved(store))
                if ctx.attempt == 0:
                    raise ValueError("b fails")
        ctx.step("c", lambda: ran.append("c"))

    put(store)
    bench = running(store, handler)
    bench.run_next()
    assert seen[0] == Checkpoint(
        completed_steps=("a",),
        in_progress_step="b",
        schema_version=1,
        step_set_hash=step_set_hash(["a"]),
    )
    come_back(store, clock)
    bench.run_next()
    assert ran == ["a", "b", "b", "c"]
    assert state_of(store, "a") is State.COMPLETED
    assert saved(store).completed_steps == ("a", "b", "c")


def test_a_step_returns_its_value_once_and_none_when_it_is_skipped(
    store: Any, clock: Any
) -> None:
    values: list[Any] = []

    def handler(ctx: JobContext) -> None:
        values.append(ctx.step("a", divmod, 7, 2))
        values.append(ctx.step("b", dict, name="kept for the function"))
        if ctx.attempt == 0:
            raise ValueError

    run_twice(store, clock, handler)
    assert values == [(3, 1), {"name": "kept for the function"}, None, None]


async def asynchronous() -> None: ...


def generating() -> Iterator[int]:
    yield 1


async def both() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("work", [asynchronous, generating, both, lambda: both()])
def test_a_step_whose_function_has_not_run_is_not_done(store: Any, work: Any) -> None:
    """It is known of the value only, whatever stands around the function."""

    def handler(ctx: JobContext) -> None:
        ctx.step("a", lambda: work())

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert "so it has not run" in (job(store, "a").errors[-1].error or "")
    assert saved(store).completed_steps == ()


@pytest.mark.parametrize("way", ["call", "block", "cursor"])
def test_a_lost_lease_is_found_out_before_the_work_of_a_step(
    store: Any, clock: Any, way: str
) -> None:
    ran: list[str] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("a", ran.append, "a")
        steer(store).operator_cancel("a")
        if way == "call":
            ctx.step("b", ran.append, "b")
        elif way == "block":
            with ctx.step("b") as run:
                ran.append(f"b {run}")
        else:
            with ctx.step_cursor("b") as cursor:
                ran.append(f"b {cursor}")

    tap = Tap(store)
    put(store)
    bench = running(tap, handler)
    bench.run_next()
    assert ran == ["a"]
    assert tap.count("ack_batch") == 0
    assert state_of(store, "a") is State.CANCELLED


def test_a_cancelled_attempt_enters_no_step_but_keeps_what_it_finished(
    store: Any, clock: Any
) -> None:
    ran: list[str] = []

    def handler(ctx: JobContext) -> None:
        def first() -> None:
            ran.append("a")
            if ctx.attempt == 0:
                attempt.cancel(CancelReason.TIMEOUT)

        ctx.step("a", first)
        ctx.step("b", ran.append, "b")

    put(store, timeout_ms=100)
    bench = running(store, handler)
    (attempt,) = bench.admit()
    bench.run(attempt)
    assert first_line(store) == "attempt timed out after 100ms"
    assert saved(store).completed_steps == ("a",)
    come_back(store, clock)
    bench.run_next()
    assert ran == ["a", "b"]


def test_a_step_of_a_stale_checkpoint_is_not_run(store: Any) -> None:
    ran: list[str] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("a", ran.append, "a")
        ctx.step("x", ran.append, "x")

    put(store)
    claim = claim_one(store)
    store.checkpoint(
        claim.lease_ref,
        Checkpoint(
            completed_steps=("a", "b"),
            schema_version=1,
            step_set_hash=step_set_hash(["a", "b"]),
        ),
    )
    bench = running(store, handler)
    bench.run(bench.hold(attrs.evolve(claim, checkpoint=saved(store))))
    assert ran == []
    assert state_of(store, "a") is State.UNDECODABLE
    assert job(store, "a").attempt == 0
    assert "expects step 'b', the handler entered 'x'" in first_line(store)
    assert job(store, "a").error_code == "BAD_PAYLOAD"


def test_what_could_not_be_replayed_is_refused_at_once(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.step("a", lambda: None)
        refused(ctx, "entered before", "a", print)
        ctx.step("b", lambda: refused(ctx, "inside of another", "c", print))
        refused(ctx, "255", "x" * 256, print)
        refused(ctx, "empty", "", print)
        refused(ctx, "step", "a\0b", print)
        refused(ctx, "step", "\udcff", print)
        refused(ctx, "must hold str", 5, print)
        with pytest.raises(ZeroDivisionError):
            ctx.step("d", lambda: 1 // 0)
        refused(ctx, "cannot follow step d", "e", print)

    put(store)
    bench = running(store, handler)
    bench.run_next()
    assert state_of(store, "a") is State.COMPLETED
    assert saved(store).completed_steps == ("a", "b")


def test_a_step_of_another_thread_does_not_slip_in_between(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        with ctx.step("a") as run:
            assert run
            refusal = ctx.spawn(refused, ctx, "inside of another", "b", print)
            assert refusal.result(10) is None

    put(store)
    running(store, handler).run_next()
    assert saved(store).completed_steps == ("a",)


def test_a_thousand_steps_are_enough(memory: MemoryBackend) -> None:
    store = memory.make_store()
    ran: list[int] = []

    def handler(ctx: JobContext) -> None:
        for number in range(MAX_STEPS + 1):
            ctx.step(f"s{number}", ran.append, number)

    put(store)
    running(store, handler).run_next()
    assert len(ran) == MAX_STEPS
    assert "the limit is 1000 steps" in first_line(store)


# Outages


def test_an_outage_between_two_steps_repeats_none_of_them(store: Any) -> None:
    ran: list[str] = []
    tap = Tap(store)

    def handler(ctx: JobContext) -> None:
        ctx.step("a", ran.append, "a")
        tap.fail("checkpoint", StoreUnavailable("away"), StoreUnavailable("away"))
        ctx.step("b", ran.append, "b")

    put(store)
    running(tap, handler).run_next()
    assert ran == ["a", "b"]
    assert state_of(store, "a") is State.COMPLETED
    assert saved(store).completed_steps == ("a", "b")


def test_a_store_that_was_closed_is_not_waited_for(store: Any) -> None:
    tap = Tap(store)

    def handler(ctx: JobContext) -> None:
        tap.fail("checkpoint", StoreClosed("for good"))
        with pytest.raises(StoreClosed):
            ctx.step("a", lambda: None)

    put(store)
    running(tap, handler).run_next()
    assert tap.count("checkpoint") == 1


def test_an_outage_is_waited_out_only_while_the_lease_lasts(store: Any) -> None:
    ran: list[str] = []
    tap = Tap(store)

    def away(real: Any, *args: Any) -> None:
        bench.now_s.advance(31)  # type: ignore[attr-defined]
        raise StoreUnavailable("away")

    def handler(ctx: JobContext) -> None:
        tap.around["checkpoint"] = away
        with pytest.raises(StoreUnavailable):
            ctx.step("a", ran.append, "a")

    put(store)
    bench = running(tap, handler)
    bench.run_next()
    assert (ran, tap.count("checkpoint")) == ([], 2)


def test_a_cancelled_attempt_does_not_wait_for_the_store(store: Any) -> None:
    tap = Tap(store)

    def away(real: Any, *args: Any) -> None:
        attempt.cancel(CancelReason.SHUTDOWN)
        raise StoreUnavailable("away")

    def handler(ctx: JobContext) -> None:
        tap.around["checkpoint"] = away
        ctx.step("a", lambda: None)

    put(store)
    bench = running(tap, handler)
    (attempt,) = bench.admit()
    bench.run(attempt)
    assert state_of(store, "a") is State.AVAILABLE
    assert job(store, "a").attempt == 0


def test_a_step_that_could_not_begin_may_be_tried_again(store: Any) -> None:
    ran: list[str] = []
    tap = Tap(store)

    def away(real: Any, *args: Any) -> None:
        bench.now_s.advance(31)  # type: ignore[attr-defined]
        raise StoreUnavailable("away")

    def handler(ctx: JobContext) -> None:
        tap.around["checkpoint"] = away
        with pytest.raises(StoreUnavailable):
            ctx.step("a", ran.append, "a")
        del tap.around["checkpoint"]
        ctx.step("a", ran.append, "a")

    put(store)
    bench = running(tap, handler)
    bench.run_next()
    assert ran == ["a"]
    assert saved(store).completed_steps == ("a",)


# Versions


def test_unchanged_names_resume_in_every_version(store: Any) -> None:
    ran: list[str] = []

    def handler(ctx: JobContext) -> None:
        for name in ("a", "b", "c"):
            ctx.step(name, ran.append, name)

    claim = leave_checkpoint(store, completed_steps=("a", "b"))
    bench = running(store, handler, version=7)
    bench.run(bench.hold(claim))
    assert ran == ["c"]
    assert saved(store).schema_version == 7


def test_steps_of_an_older_version_go_on_under_their_new_names(store: Any) -> None:
    ran: list[str] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("fetch", ran.append, "fetch")
        rows = ctx.iterate("rows", lambda at: range(at, 4), cursor=lambda n: n)
        ran.extend(f"row {row}" for row in rows)

    claim = leave_checkpoint(
        store,
        completed_steps=("download",),
        in_progress_step="lines",
        cursor_step="lines",
        cursor=b"2",
        crashes_by_step={"lines": 2, "rows": 1},
    )
    bench = running(
        store,
        handler,
        version=2,
        step_map={1: {"download": "fetch", "lines": "rows"}},
    )
    bench.run(bench.hold(claim))
    assert ran == ["row 2", "row 3"]
    assert saved(store).completed_steps == ("fetch", "rows")
    assert saved(store).crashes_by_step == {"rows": 3}


def test_changed_names_without_a_map_never_start_over(store: Any) -> None:
    entered: list[str] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("fetch", entered.append, "fetch")

    claim = leave_checkpoint(store, completed_steps=("download",))
    bench = running(store, handler, version=2, step_map={3: {"download": "fetch"}})
    bench.run(bench.hold(claim))
    assert entered == []
    assert state_of(store, "a") is State.UNDECODABLE


def test_declared_steps_may_change_with_the_version_only(store: Any) -> None:
    entered: list[str] = []

    def handler(ctx: JobContext) -> None:
        entered.append(f"version {ctx.last_checkpoint.schema_version}")
        ctx.step("a", lambda: None)
        ctx.step("b", lambda: None)
        refused(ctx, "not declared; declared are a, b", "c", print)

    declared = step_set_hash(["a", "x"])
    claim = leave_checkpoint(store, completed_steps=("a",), step_set_hash=declared)
    bench = running(store, handler, steps=("a", "b"))
    bench.run(bench.hold(claim))
    assert entered == []
    assert state_of(store, "a") is State.UNDECODABLE
    assert "a change of steps needs a new version" in first_line(store)
    steer(store).operator_retry("a")
    bench = running(store, handler, steps=("a", "b"), version=2)
    bench.run_next()
    assert entered == ["version 1"]
    assert state_of(store, "a") is State.COMPLETED
    assert saved(store).step_set_hash == step_set_hash(["a", "b"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": "abc"}, "steps must be a sequence"),
        ({"steps": 5}, "steps must be a sequence"),
        ({"steps": ("a", "a")}, "one step twice"),
        ({"steps": ("a", "")}, "empty name"),
        ({"steps": ("a", 5)}, "must hold str, got int"),
        ({"steps": tuple(map(str, range(1001)))}, "1001 names, the limit is 1000"),
        ({"steps": {"a": -1}}, "weight of step a"),
        ({"steps": {"a": 1.5}}, "weight of step a"),
        ({"step_map": {1: {"a": "b"}}}, "1 is the present version"),
        ({"step_map": {0: {"a": "b"}}}, "step_map version"),
        ({"step_map": {2: "ab"}}, "mapping of names by version"),
        ({"step_map": {2: {"a": "c", "b": "c"}}}, "maps two steps to one"),
        ({"steps": ["a"], "step_map": {2: {"b": "c"}}}, "step c is not declared"),
    ],
)
def test_a_bad_declaration_of_steps_is_refused_with_the_task(
    options: Any, match: str
) -> None:
    registry = Registry()
    with pytest.raises(InvalidRequest, match=f"task k: .*{match}"):
        registry.task("k", **options)(lambda ctx: None)
    assert registry.kinds() == frozenset()


@given(st.lists(st.text(min_size=1, max_size=5), max_size=6, unique=True))
def test_a_map_of_no_names_changes_no_checkpoint(names: list[str]) -> None:
    names = [
        name.replace("\0", "x").encode(errors="replace").decode() for name in names
    ]
    old = Checkpoint(
        completed_steps=names, schema_version=1, step_set_hash=step_set_hash(names)
    )
    assert StepPlan(version=2, renames={1: {}}).resumed(old) == old


# Weights


def test_a_resumed_job_is_charged_for_the_steps_that_are_left(
    store: Any, clock: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.step("heavy", lambda: None)
        if ctx.attempt == 0:
            raise ValueError
        ctx.step("light", lambda: None)

    set_rate_limit(store, "c", limit=10, window_ms=60_000, burst=10)
    put(store, rate_class="c", weight=10)
    bench = running(store, handler, steps={"heavy": 8, "light": 2})
    bench.run_next()
    assert saved(store).remaining_weight == 2
    clock.advance_ms(12_000)  # two of ten units come back in a fifth of the window
    store.promote_due(10)
    bench.run_next()
    assert state_of(store, "a") is State.COMPLETED
    assert saved(store).remaining_weight == 0


def test_steps_without_weights_leave_the_jobs_weight_alone(
    store: Any, clock: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.step("a", lambda: None)

    put(store)
    running(store, handler, steps=("a",)).run_next()
    assert saved(store).remaining_weight is None


# Crashes


def test_a_crash_is_charged_to_the_step_in_progress(store: Any, clock: Any) -> None:
    ran: list[str] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("a", ran.append, "a")
        with ctx.step("b") as run:
            if run:
                ran.append("b")
                if ctx.crash_attempt == 0:
                    raise Died

    put(store)
    registry = Registry()
    registry.task("k")(handler)
    bench = Bench(store, registry, catch_base_exceptions=False)
    (attempt,) = bench.admit()
    with pytest.raises(Died):
        bench.run(attempt)
    crash(store, clock, attempt.claim)
    come_back(store, clock)
    again = bench.run_next()
    assert again.claim.envelope.crash_attempt == 1
    assert again.claim.envelope.attempt == 0
    assert again.claim.checkpoint.crashes_by_step == {"b": 1}
    assert ran == ["a", "b", "b"]
    assert saved(store).crashes_by_step == {"b": 1}


FORMS = ["call", "block", "cursor", "iterate"]


@settings(max_examples=40, deadline=None)
@given(
    program=st.lists(st.sampled_from(FORMS), min_size=1, max_size=6),
    deaths=st.lists(st.integers(0, 60), max_size=2),
)
def test_whatever_dies_where_the_work_of_a_finished_step_is_done_once(
    program: list[str], deaths: list[int]
) -> None:
    """At each point of a run the process may be gone; the points are counted."""
    run_with_deaths(MemoryBackend(), program, deaths)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    program=st.lists(st.sampled_from(FORMS), min_size=1, max_size=3),
    deaths=st.lists(st.integers(0, 20), max_size=2),
)
def test_whatever_dies_the_same_holds_in_a_database(
    postgres: Backend, program: list[str], deaths: list[int]
) -> None:
    run_with_deaths(postgres, program, deaths)


def run_with_deaths(backend: Backend, program: list[str], deaths: list[int]) -> None:
    """Run a program of steps, with deaths at some of the points of its runs."""
    store = backend.make_store()
    put(store)
    points = itertools.count()
    left = sorted(set(deaths), reverse=True)
    began: list[str] = []
    finished: list[str] = []

    def point() -> None:
        if left and next(points) >= left[-1]:
            left.pop()
            raise Died

    def work(name: str) -> None:
        began.append(name)
        point()
        if saved(store).in_progress_step != name:
            raise AssertionError(f"{name} runs and is not noted")

    def cursor_step(ctx: JobContext, name: str) -> None:
        with ctx.step_cursor(name) as cursor:
            if cursor:
                for number in range((cursor.value or 0), 3):
                    work(name)
                    cursor.set(number + 1)
                    finished.append(f"{name} item {number}")
                    point()

    def handler(ctx: JobContext) -> None:
        for number, form in enumerate(program):
            name = f"s{number}"
            if form == "call":
                ctx.step(name, work, name)
            elif form == "block":
                with ctx.step(name) as run:
                    if run:
                        work(name)
            elif form == "cursor":
                cursor_step(ctx, name)
            else:
                for item in ctx.iterate(
                    name, lambda at: range(at or 0, 3), cursor=lambda n: n + 1
                ):
                    work(name)
                    finished.append(f"{name} item {item}")
            finished.append(name)
            point()

    registry = Registry()
    registry.task("k")(handler)
    bench = Bench(store, registry, catch_base_exceptions=False)
    for _ in range(len(deaths) + 1):
        (attempt,) = bench.admit()
        before = attempt.claim.checkpoint.completed_steps
        start = len(began)
        try:
            bench.run(attempt)
        except Died:
            crash(store, backend.clock, attempt.claim)
            come_back(store, backend.clock)
        # What an earlier attempt completed was not begun again.
        assert set(before).isdisjoint(began[start:])
        if state_of(store, "a") is State.COMPLETED:
            break
    assert state_of(store, "a") is State.COMPLETED
    assert saved(store).completed_steps == tuple(f"s{n}" for n in range(len(program)))
    backend.audit()


def test_time_outside_of_steps_is_pointed_out_where_one_debugs(
    store: Any, clock: Any, caplog: Any, monkeypatch: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        bench.now_s.advance(0.25)  # type: ignore[attr-defined]
        ctx.step("a", lambda: None)
        ctx.step("b", lambda: 1 // 0)

    put(store)
    bench = running(store, handler)
    bench.run_next()
    come_back(store, clock)
    bench.run_next()
    assert "outside of steps" not in caplog.text
    monkeypatch.setenv("HEADGATE_DEBUG", "1")
    come_back(store, clock)
    bench.run_next()
    assert "250 ms passed outside of steps" in caplog.text


def test_a_zombies_step_changes_nothing(store: Any, clock: Any) -> None:
    """The fence guards the second holder's checkpoint, byte for byte."""

    def zombie(ctx: JobContext) -> None:
        ctx.step("a", lambda: None)
        crash(store, clock, attempt.claim)
        come_back(store, clock)
        second = claim_one(store)
        mine = Checkpoint(completed_steps=("a", "b"), step_set_hash="x")
        store.checkpoint(second.lease_ref, mine)
        with pytest.raises(LeaseLost):
            ctx.step("c", lambda: None)
        with pytest.raises(LeaseLost):
            ctx.step("d", lambda: None)
        assert saved(store) == mine

    put(store)
    bench = running(store, zombie)
    (attempt,) = bench.admit()
    bench.run(attempt)
    assert state_of(store, "a") is State.RUNNING
