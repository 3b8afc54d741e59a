"""What a worker has around its handlers: context managers made for each call."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Annotated, Any

import attrs
import pytest

from headgate_sync.binding import BatchJob
from headgate_sync.cancel import CancelReason
from headgate_sync.context import (
    JobContext,
    current_job,
    current_jobs,
    running_attempt,
)
from headgate_sync.errors import AttemptCancelled, AttemptTimeout, InvalidRequest
from headgate_sync.injection import Depends
from headgate_sync.lifecycle import State
from headgate_sync.loglines import read_line
from headgate_sync.registry import Registry
from headgate_sync.signals import Skip, Snooze
from headgate_sync.worker import WorkerConfig
from tests.builders import envelope, job, state_of, steer
from tests.worker.rig import (
    Bench,
    add_batch_handler,
)

TOLD: list[str] = []
WHO: ContextVar[str] = ContextVar("who", default="nobody")


@pytest.fixture(autouse=True)
def _told() -> None:
    TOLD.clear()


def put(store: Any, *ids: str, **fields: Any) -> None:
    for id in ids:
        store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def running(
    store: Any,
    handler: Callable[..., Any],
    *around: Callable[[], Any],
    config: Any = None,
    **options: Any,
) -> Bench:
    """A bench with one task of kind `k`."""
    registry = Registry()
    registry.task("k", **options)(handler)
    return Bench(store, registry, around=around, **(config or {}))


def first_line(store: Any, id: str = "a") -> str:
    return (job(store, id).errors[-1].error or "").partition("\n")[0]


@contextmanager
def telling(name: str = "outer") -> Iterator[None]:
    """Tell how the block inside of it ended."""
    TOLD.append(f"{name} in")
    try:
        yield
    except BaseException as error:
        TOLD.append(f"{name} {type(error).__name__}")
        raise
    else:
        TOLD.append(f"{name} out")


inner = functools.partial(telling, "inner")


@contextmanager
def failing_at_its_end() -> Iterator[None]:
    try:
        yield
    finally:
        raise OSError("cannot leave")


@contextmanager
def swallowing() -> Iterator[None]:
    with suppress(BaseException):
        yield


# When they are entered and left


def test_they_are_entered_in_order_and_left_in_reverse_around_all_of_a_handler(
    store: Any,
) -> None:
    def resource() -> Iterator[int]:
        TOLD.append("made")
        yield 1
        TOLD.append("ended")

    registry = Registry()

    @registry.task("k")
    @attrs.frozen
    class Work:
        def __attrs_post_init__(self) -> None:
            TOLD.append("decoded")

    @registry.handler(Work)
    def handler(work: Work, one: Annotated[int, Depends(resource)]) -> None:
        TOLD.append("called")

    put(store, "a")
    bench = Bench(store, registry, around=[telling, inner])
    (attempt,) = bench.admit()
    assert bench.runner.run(attempt)  # the ack is left, and not sent
    assert [
        *("outer in", "inner in", "decoded", "made"),
        *("called", "ended", "inner out", "outer out"),
    ] == TOLD
    bench.acks.fly()
    assert state_of(store, "a") is State.COMPLETED


def test_they_run_as_the_attempt_on_its_thread_with_its_variables(store: Any) -> None:
    seen: list[Any] = []

    @contextmanager
    def named() -> Iterator[None]:
        seen.append((current_job(), current_jobs(), threading.get_ident()))
        logging.getLogger("app").warning("entered")
        current_job().set_data("made around it")
        token = WHO.set("ada")
        yield
        WHO.reset(token)

    def handler(ctx: JobContext) -> None:
        assert (WHO.get(), ctx.data(str)) == ("ada", "made around it")
        assert seen[-1] == (ctx, (ctx,), threading.get_ident())

    put(store, "a", retention_ms=1)
    bench = running(store, handler, named)
    bench.runner.capture.install()
    try:
        bench.run_next()
    finally:
        bench.runner.capture.uninstall()
    assert state_of(store, "a") is State.COMPLETED
    assert WHO.get() == "nobody"
    (line,) = job(store, "a").errors[-1].logs
    assert read_line(line).message == "entered"


def test_each_attempt_has_its_own(store: Any) -> None:
    put(store, "a", "b")
    bench = running(store, lambda: None, telling)
    bench.run_next()
    bench.run_next()
    assert TOLD == ["outer in", "outer out"] * 2


def test_a_job_that_meets_no_handler_meets_none_of_them(store: Any) -> None:
    put(store, "a", kind="unknown")
    running(store, lambda: None, telling).run_next()
    assert TOLD == []


@pytest.mark.parametrize(
    ("ending", "told", "state"),
    [
        (None, "out", State.COMPLETED),
        (ValueError("no"), "ValueError", State.RETRYABLE),
        (Skip("x"), "Skip", State.ARCHIVED),
        (Snooze("5m"), "Snooze", State.SCHEDULED),
        (SystemExit(1), "SystemExit", State.RETRYABLE),
        (AttemptCancelled("x"), "AttemptCancelled", State.RETRYABLE),
    ],
)
def test_they_see_what_a_handler_raises_and_change_nothing(
    store: Any, ending: BaseException | None, told: str, state: State
) -> None:
    def handler() -> None:
        if ending is not None:
            raise ending

    put(store, "a")
    running(store, handler, telling, swallowing, inner).run_next()
    assert ["outer in", "inner in", f"inner {told}", f"outer {told}"] == TOLD
    assert state_of(store, "a") is state


def test_a_signal_that_is_returned_is_no_exception(store: Any) -> None:
    put(store, "a")
    running(store, lambda: Snooze("5m"), telling).run_next()
    assert TOLD == ["outer in", "outer out"]
    assert state_of(store, "a") is State.SCHEDULED


def test_they_are_around_what_comes_before_the_handler(store: Any) -> None:
    put(store, "a", payload=b'{"nope":1}')
    running(store, lambda: None, telling).run_next()
    assert TOLD == ["outer in", "outer MalformedPayload"]
    assert state_of(store, "a") is State.UNDECODABLE


def test_tracked_threads_end_inside_of_them(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        def child() -> None:
            ctx.wait(0.05)
            TOLD.append("child")
            raise ValueError("of the child")

        ctx.spawn(child)

    put(store, "a")
    running(store, handler, telling).run_next()
    assert TOLD == ["outer in", "child", "outer ValueError"]
    assert first_line(store) == "ValueError: of the child"


def test_a_handler_that_ends_its_thread_leaves_them_first(store: Any) -> None:
    def handler() -> None:
        raise SystemExit(1)

    put(store, "a")
    bench = running(store, handler, telling, config={"catch_base_exceptions": False})
    with pytest.raises(SystemExit):
        bench.run_next()
    assert TOLD == ["outer in", "outer SystemExit"]
    assert state_of(store, "a") is State.RUNNING


# When they fail themselves


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (OSError("no database"), State.RETRYABLE),
        (Snooze("5m"), State.SCHEDULED),
        (SystemExit(1), State.RETRYABLE),
        (ConnectionError("none of ours"), State.AVAILABLE),
    ],
)
def test_what_one_raises_on_entering_counts_as_the_handlers(
    store: Any, error: BaseException, state: State
) -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        raise error
        yield

    put(store, "a")
    running(
        store,
        lambda: TOLD.append("called"),
        telling,
        broken,
        inner,
        is_failure=lambda error: not isinstance(error, ConnectionError),
    ).run_next()
    assert ["outer in", f"outer {type(error).__name__}"] == TOLD
    assert state_of(store, "a") is state


def test_what_one_raises_on_leaving_fails_the_attempt_unless_it_failed_before(
    store: Any, caplog: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        if ctx.job_id == "b":
            raise LookupError("the handler's")

    put(store, "a")
    bench = running(store, handler, telling, failing_at_its_end)
    bench.run_next()
    assert first_line(store) == "OSError: cannot leave"
    assert "failed after its handler" not in caplog.text
    put(store, "b")
    bench.run_next()
    assert first_line(store, "b") == "LookupError: the handler's"
    assert "job b (queue q): a dependency or context manager failed" in caplog.text
    assert TOLD == ["outer in", "outer OSError"] * 2


def test_what_one_raises_after_once_leaves_the_job_completed(
    postgres: Any, caplog: Any
) -> None:
    store = postgres.make_store()
    put(store, "a", retention_ms=1_000)

    def handler(ctx: JobContext) -> None:
        ctx.once(lambda tx: None)

    running(store, handler, failing_at_its_end).run_next()
    assert state_of(store, "a") is State.COMPLETED
    assert "job a (queue q): failed after once had completed it" in caplog.text


@asynccontextmanager
async def asynchronous() -> Any:
    yield


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: None, "returned None, expected a context manager"),
        (asynchronous, "expected a context manager"),
    ],
)
def test_what_is_no_context_manager_fails_the_attempt_and_is_named(
    store: Any, make: Any, text: str
) -> None:
    put(store, "a")
    running(store, lambda: TOLD.append("called"), telling, make).run_next()
    assert TOLD == ["outer in", "outer InvalidRequest"]
    assert text in first_line(store)
    assert "around: <function" in first_line(store)


# Cancellation


def test_a_timeout_inside_of_one_is_that_of_the_attempt(store: Any) -> None:
    @contextmanager
    def slow() -> Iterator[None]:
        attempt = running_attempt()
        assert attempt is not None
        attempt.cancel(CancelReason.TIMEOUT)
        current_job().check()
        yield

    put(store, "a", timeout_ms=50)
    running(store, lambda: TOLD.append("called"), telling, slow).run_next()
    assert TOLD == ["outer in", "outer AttemptTimeout"]
    assert first_line(store) == "attempt timed out after 50ms"


def test_a_job_that_is_lost_inside_of_one_is_not_settled(store: Any) -> None:
    @contextmanager
    def losing() -> Iterator[None]:
        yield
        steer(store).operator_cancel("a")
        current_job().report_progress(1, 1)

    put(store, "a")
    bench = running(store, lambda: None, telling, losing)
    bench.run_next()
    assert TOLD == ["outer in", "outer LeaseLost"]
    assert bench.accepted == []
    assert state_of(store, "a") is State.CANCELLED


def test_an_exception_from_outside_strikes_the_handler_and_none_of_them(
    store: Any,
) -> None:
    @contextmanager
    def struck() -> Iterator[None]:
        attempt = running_attempt()
        assert attempt is not None
        assert attempt.interrupt is None  # there is nothing yet that could strike
        try:
            yield
        finally:
            assert attempt.interrupt is not None
            attempt.interrupt.strike(AttemptTimeout)
            for number in range(1_000):
                TOLD[-1] = f"left {number}"

    put(store, "a")
    running(
        store, lambda: TOLD.append(""), struck, config={"async_cancel": True}
    ).run_next()
    assert TOLD == ["left 999"]
    assert state_of(store, "a") is State.COMPLETED


# Batch handlers


def batching(store: Any, handler: Callable[[list[Any]], Any], *around: Any) -> Bench:
    registry = Registry()
    add_batch_handler(registry, handler)
    bench = Bench(store, registry, around=around)
    put(store, "a", "b")
    for attempt in bench.admit():
        bench.run(attempt)
    return bench


def test_a_batch_handler_is_called_once_inside_of_them(store: Any) -> None:
    seen: list[tuple[JobContext, ...]] = []

    @contextmanager
    def labelled() -> Iterator[None]:
        seen.append(current_jobs())
        token = WHO.set("ada")
        yield
        WHO.reset(token)

    def handler(jobs: list[BatchJob[Any]]) -> list[Any]:
        assert WHO.get() == "ada"
        assert seen == [tuple(each.ctx for each in jobs)]
        return [None, ValueError("of one")]

    batching(store, handler, telling, labelled)
    assert TOLD == ["outer in", "outer out"]
    assert [state_of(store, id) for id in "ab"] == [State.COMPLETED, State.RETRYABLE]


def test_what_a_batch_handler_raises_is_seen(store: Any) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        raise LookupError("all")

    batching(store, handler, telling, swallowing)
    assert TOLD == ["outer in", "outer LookupError"]
    assert [first_line(store, id) for id in "ab"] == ["LookupError: all"] * 2


def test_one_that_fails_on_leaving_fails_every_job_of_the_call(store: Any) -> None:
    batching(store, lambda jobs: [None, None], telling, failing_at_its_end)
    assert TOLD == ["outer in", "outer OSError"]
    assert [first_line(store, id) for id in "ab"] == ["OSError: cannot leave"] * 2


def test_one_that_fails_after_a_failed_batch_is_logged_with_its_jobs(
    store: Any, caplog: Any
) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        raise LookupError("all")

    batching(store, handler, failing_at_its_end)
    assert [first_line(store, id) for id in "ab"] == ["LookupError: all"] * 2
    assert "job a (queue q), b (queue q): a dependency or context" in caplog.text


# The setting


def generator() -> Iterator[None]:
    yield


async def coroutine() -> None: ...


class Awaited:
    async def __call__(self) -> None: ...


def takes_the_job(ctx: JobContext) -> Any: ...


@pytest.mark.parametrize(
    ("around", "text"),
    [
        (telling, "around must be a sequence of callables, got <function telling"),
        ("app", "around must be a sequence of callables, got 'app'"),
        (None, "around must be a sequence of callables, got None"),
        ({telling}, "around must be a sequence"),
        ([nullcontext()], "around: <contextlib.nullcontext .* is not callable"),
        ([telling()], "_GeneratorContextManager .* without arguments"),
        ([generator], "<function generator .* lacks the decorator contextlib.context"),
        ([coroutine], "<function coroutine .* is asynchronous"),
        ([Awaited()], "Awaited .* is asynchronous"),
        ([takes_the_job], "takes_the_job .* cannot be called without arguments"),
        ([telling, 5], "around: 5 is not callable"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(
    around: Any, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        WorkerConfig(around=around)


def test_classes_methods_and_builtins_make_context_managers(store: Any) -> None:
    class Scope:
        def __enter__(self) -> None:
            TOLD.append("scope")

        def __exit__(self, *ending: object) -> None: ...

        def again(self) -> Scope:
            return self

    put(store, "a")
    around = (Scope, Scope().again, threading.Lock)
    running(store, lambda: None, *around).run_next()
    assert TOLD == ["scope"] * 2
    assert state_of(store, "a") is State.COMPLETED
