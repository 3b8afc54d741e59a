"""One handler alone: attempts, data, steps from their middle, and stepped time."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import pytest

from headgate_sync import (
    BatchJob,
    Data,
    Headgate,
    InvalidRequest,
    JobContext,
    MemStore,
    Registry,
    Snooze,
    State,
    TaskOptions,
    WorkerConfig,
)
from headgate_sync.extensions import Extensions
from headgate_sync.lease import Checkpoint
from headgate_sync.store import Store
from headgate_sync.testing import (
    FakeClock,
    drain,
    resume_after,
    resume_at_cursor,
    run_handler,
)
from tests.builders import counts, state_of


@pytest.fixture
def steps() -> tuple[Any, list[str], Registry]:
    """A task of the steps a, b and c, what it ran, and its registry."""
    ran: list[str] = []
    registry = Registry()

    @registry.task("abc", steps=["a", "b", "c"])
    def abc(ctx: JobContext) -> None:
        for name in "abc":
            ctx.step(name, ran.append, name)

    return abc, ran, registry


def test_a_handler_resumes_behind_a_step(steps):
    abc, ran, registry = steps
    assert (
        run_handler(registry, abc.job(), checkpoint=resume_after("b")).outcome
        == "success"
    )
    assert ran == ["c"]


def test_steps_that_are_not_declared_are_named_in_full():
    ran: list[str] = []
    registry = Registry()

    @registry.task("free")
    def free(ctx: JobContext) -> None:
        for name in "abc":
            ctx.step(name, ran.append, name)

    run_handler(registry, free.job(), checkpoint=resume_after("a", "b"), reraise=True)
    assert ran == ["c"]
    performed = run_handler(registry, free.job(), checkpoint=resume_after("b"))
    assert performed.outcome == "undecodable"


def test_an_undeclared_step_is_refused(steps):
    abc, ran, registry = steps
    with pytest.raises(InvalidRequest, match="step d is not declared"):
        run_handler(registry, abc.job(), checkpoint=resume_after("d"))
    with pytest.raises(InvalidRequest, match="needs the name of a step"):
        resume_after()
    assert ran == []


def test_a_checkpoint_of_other_steps_is_stale(steps):
    abc, ran, registry = steps
    stale = Checkpoint(completed_steps=("a",), schema_version=1, step_set_hash="other")
    assert run_handler(registry, abc.job(), checkpoint=stale).outcome == "undecodable"
    assert ran == []


def test_a_handler_resumes_at_a_position():
    seen: list[int] = []
    registry = Registry()

    @registry.task("rows", steps=["open", "rows"])
    def rows(ctx: JobContext) -> None:
        ctx.step("open", seen.append, -1)
        seen.extend(
            ctx.iterate(
                "rows", lambda at: range(at or 0, 6), cursor=lambda row: row + 1
            )
        )

    job = rows.job()
    run_handler(registry, job, checkpoint=resume_at_cursor("rows", 4), reraise=True)
    assert seen == [4, 5]
    seen.clear()
    run_handler(registry, job, reraise=True)
    assert seen == [-1, 0, 1, 2, 3, 4, 5]


def test_the_attempt_is_what_the_test_says():
    registry = Registry()

    @registry.task("act", max_attempts=3)
    def act(ctx: JobContext) -> int:
        return ctx.attempt

    assert run_handler(registry, act.job(), attempt=2).result == 2
    with pytest.raises(InvalidRequest, match="attempt is 3"):
        run_handler(registry, act.job(), attempt=3)


def test_nothing_of_the_job_keeps_it_from_running():
    registry = Registry()

    @registry.task("act", queue="far", unique=True)
    def act(n: int) -> int:
        return n

    job = act.using(delay="1h", sticky_worker="other", priority=-5).job(7)
    assert run_handler(registry, job).result == 7
    assert run_handler(registry, act.using(pending=True).job(8)).result == 8


def test_a_payload_class_and_its_data():
    @attrs.frozen
    class Sums:
        base: int

    registry = Registry()

    @registry.task("add")
    @attrs.frozen
    class Add:
        n: int

    @registry.handler(Add)
    def add(job: Add, sums: Annotated[Sums, Data]) -> int:
        return sums.base + job.n

    assert run_handler(registry, Add(2), data=[Sums(5)]).result == 7
    shared = Extensions()
    shared.set(Sums(10))
    assert run_handler(registry, Add(2), data=shared).result == 12


def test_the_settings_of_a_facade_hold():
    hg, shared = Headgate(), Extensions()
    shared.set("shared")
    hg.configure_worker(extensions=shared, retry=lambda info: "3h")

    @hg.task("act")
    def act(text: Annotated[str, Data], number: Annotated[int, Data]) -> str:
        return f"{text} {number}"

    assert run_handler(hg, act.job(), data=[7]).result == "shared 7"
    assert run_handler(hg, act.job(), data=["own", 7]).result == "own 7"
    assert shared.get(str) == "shared"
    assert shared.get(int) is None
    assert run_handler(hg, act.job(), config=WorkerConfig()).outcome == "retry"


def test_a_batch_handler_gets_a_batch_of_one():
    registry = Registry()

    @registry.task("mail")
    @attrs.frozen
    class Mail:
        to: str

    @registry.batch_handler(Mail, max_size=10, max_delay="1h")
    def deliver(jobs: list[BatchJob[Mail]]) -> list[str]:
        return [f"{job.args.to} {job.ctx.attempt}" for job in jobs]

    assert run_handler(registry, Mail("ann"), attempt=3).result == "ann 3"


def test_a_facade_gets_what_the_handler_enqueues(store: Store):
    hg = Headgate(store, defaults=TaskOptions(queue="q"))

    @hg.task("parent")
    def parent(ctx: JobContext) -> None:
        ctx.client.enqueue(child.job())

    @hg.task("child")
    def child() -> None: ...

    assert run_handler(hg, parent.job()).outcome == "success"
    assert counts(store) == {"available": 1}


def test_a_facade_needs_no_database_for_it():
    hg = Headgate()

    @hg.task("act")
    def act() -> None:
        raise Snooze("5m")

    assert run_handler(hg, act.job()).outcome == "snooze"
    with pytest.raises(InvalidRequest, match="expected a Registry or a Headgate"):
        run_handler(MemStore(), act.job())


# Time.


def test_time_that_a_handler_spends_meets_its_timeout():
    clock, registry = FakeClock(), Registry()

    @registry.task("slow", timeout="5m")
    def slow(ctx: JobContext, minutes: int) -> None:
        for _ in range(minutes):
            clock.advance(60_000)
            ctx.check()

    assert run_handler(registry, slow.job(4), clock=clock).outcome == "success"
    performed = run_handler(registry, slow.job(6), clock=clock)
    assert performed.outcome == "retry"
    assert performed.error is not None
    assert performed.error.startswith("attempt timed out after 300000ms")


def test_a_handler_that_ignores_its_timeout_is_settled_without_it():
    clock, registry = FakeClock(), Registry()

    @registry.task("deaf", timeout="1s")
    def deaf() -> None:
        clock.advance(1_000)
        clock.advance(10_000)

    performed = run_handler(registry, deaf.job(), clock=clock)
    assert performed.outcome == "retry"
    assert "handler still running" in (performed.error or "")


def test_store_and_attempts_share_the_time(headgate_store):
    store = headgate_store
    clock, hg = FakeClock(5_000_000), Headgate(store)
    clock.drive(hg)
    clock.drive(store)

    @hg.task("later", timeout="1h")
    def later(ctx: JobContext) -> None:
        clock.advance(90_000)  # three leases
        ctx.check()

    later.using(id="a", delay="1m", retention="1h").enqueue()
    assert drain(hg, clock=clock) == []
    clock.advance(59_999)
    assert drain(hg, clock=clock) == []
    clock.advance(1)
    assert [each.outcome for each in drain(hg, clock=clock)] == ["success"]
    assert clock.now_ms == 5_150_000 == store.inspect.store_now_ms()
    job = store.inspect.get_job("a")
    assert job is not None
    assert job.finalized_at_ms == 5_150_000
    assert state_of(store, "a") is State.COMPLETED
    store.unfreeze_clock()
    assert store.inspect.store_now_ms() > 1_700_000_000_000
    store.freeze_clock_at(7)
    store.advance_clock(3)
    assert store.inspect.store_now_ms() == 10


def test_a_drain_with_a_clock_drives_the_store(headgate_store):
    drain(Headgate(headgate_store), clock=FakeClock(9_000_000))
    assert headgate_store.inspect.store_now_ms() == 9_000_000


def test_a_clock_refuses_what_it_cannot_do():
    with pytest.raises(InvalidRequest, match="by_ms is -1"):
        FakeClock().advance(-1)
    with pytest.raises(InvalidRequest, match="start_ms"):
        FakeClock(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="clock of a Fixed cannot be set"):
        FakeClock().drive(Fixed())


class Fixed:
    """A store whose time is its own."""

    admit = None
