"""What a failed handler held is let go at once, without the cyclic collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import attrs
import pytest

from headgate_sync.binding import BatchJob
from headgate_sync.context import JobContext
from headgate_sync.injection import Depends
from headgate_sync.registry import Registry
from tests.backends import MemoryBackend
from tests.builders import envelope
from tests.worker.rig import (
    Bench,
    add_batch_handler,
)


class Big:
    """Stands for a megabyte."""


HELD: list[weakref.ref[Big]] = []


def hold() -> Big:
    made = Big()
    HELD.append(weakref.ref(made))
    return made


def plain(ctx: JobContext) -> None:
    big = hold()
    raise ValueError(ctx.job_id, bool(big))


def chained() -> None:
    big = hold()
    try:
        raise LookupError(bool(big))
    except LookupError as error:
        raise ValueError("made of it") from error


def step(ctx: JobContext) -> None:
    def work() -> None:
        big = hold()
        raise ValueError(bool(big))

    ctx.step("a", work)


def block(ctx: JobContext) -> None:
    big = hold()
    with ctx.step("a") as run:
        raise ValueError(run, bool(big))


def loop(ctx: JobContext) -> None:
    big = hold()
    for row in ctx.iterate("rows", lambda at: range(3), cursor=lambda n: n):
        raise ValueError(row, bool(big))


def tracked(ctx: JobContext) -> None:
    def work() -> None:
        big = hold()
        raise ValueError(bool(big))

    ctx.spawn(work)


def resource() -> Iterator[int]:
    yield 1


def dependency(one: Annotated[int, Depends(resource)]) -> None:
    big = hold()
    raise ValueError(one, bool(big))


def brittle() -> Iterator[int]:
    big = hold()
    yield 1
    raise ValueError(bool(big))


def end_of_dependency(one: Annotated[int, Depends(brittle)]) -> None: ...


def result(ctx: JobContext) -> Any:
    big = hold()
    ctx.on_cancel(lambda: big)
    return big


def batch(jobs: list[BatchJob[Any]]) -> Any:
    big = hold()
    raise ValueError(len(jobs), bool(big))


def batch_entry(jobs: list[BatchJob[Any]]) -> Any:
    big = hold()
    try:
        raise ValueError(bool(big))
    except ValueError as error:
        return [error]


HANDLERS = [
    *(plain, chained, step, block, loop, tracked),
    *(dependency, end_of_dependency, result),
]


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    HELD.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail(registry: Registry, **config: Any) -> None:
    store = MemoryBackend().make_store()
    bench = Bench(store, registry, **config)
    for number in range(3):
        store.enqueue([envelope(f"j{number}", kind="k", payload=b"{}")])
        bench.run_next()
    assert len(HELD) == 3
    assert [held() for held in HELD] == [None, None, None]


@pytest.mark.parametrize("async_cancel", [False, True])
@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.__name__)
def test_a_failed_attempt_leaves_nothing_for_the_collector(
    handler: Callable[..., Any], async_cancel: bool
) -> None:
    registry = Registry()
    registry.task("k")(handler)
    fail(registry, async_cancel=async_cancel)


class FailingAround:
    """No generator: what one raises in place of another, Python 3.12 itself keeps."""

    def __enter__(self) -> None: ...

    def __exit__(self, *failure: object) -> None:
        big = hold()
        raise LookupError(bool(big))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_what_fails_around_a_handler_leaves_nothing_for_the_collector(
    caplog: Any, fails: bool, together: bool
) -> None:
    registry = Registry()

    @registry.task("k")
    @attrs.frozen
    class Work:
        pass

    def handle(work: Work) -> None:
        if fails:
            raise ValueError

    def handle_many(jobs: list[BatchJob[Work]]) -> list[None]:
        return [handle(each.args) for each in jobs]

    if together:
        registry.batch_handler(Work, max_size=1, max_delay="1s")(handle_many)
    else:
        registry.handler(Work)(handle)
    caplog.set_level(100, "headgate_sync")  # a kept record would keep the exception
    fail(registry, around=[FailingAround])


@pytest.mark.parametrize("handler", [batch, batch_entry])
def test_a_failed_batch_leaves_nothing_for_the_collector(handler: Any) -> None:
    registry = Registry()
    add_batch_handler(registry, handler, max_size=1)
    fail(registry)
