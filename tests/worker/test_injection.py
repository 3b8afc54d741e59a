"""Parameters beyond the payload: data by type, dependencies, metadata."""

# Annotations are evaluated at once here: they use names of the test around them, which
# a helper that declares the task does not have.
import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import attrs
import pytest

from headgate_sync.binding import BatchJob
from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest
from headgate_sync.extensions import Extensions
from headgate_sync.injection import Data, Depends, Meta, Metadata, TaskId
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.signals import Skip, Snooze
from tests.builders import envelope, job, state_of
from tests.worker.rig import Bench, Gate, wait_for, working


@attrs.frozen
class Pool:
    name: str


class WidePool(Pool):
    pass


def put(store: Any, *ids: str, **fields: Any) -> None:
    for id in ids:
        store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def running(store: Any, handler: Callable[..., Any], **config: Any) -> Bench:
    registry = Registry()
    registry.task("k")(handler)
    return Bench(store, registry, **config)


def first_line(store: Any, id: str = "a") -> str:
    return (job(store, id).errors[-1].error or "").partition("\n")[0]


def shared(*values: Any) -> Extensions:
    extensions = Extensions()
    for value in values:
        extensions.set(value)
    return extensions


def test_a_missing_value_keeps_the_handler_from_being_entered(store: Any) -> None:
    entered: list[Any] = []

    def handler(pool: Annotated[Pool, Data]) -> None:
        entered.append(pool)

    put(store, "a")
    bench = running(store, handler, extensions=shared(WidePool("not exactly")))
    bench.run_next()
    assert entered == []
    assert job(store, "a").attempt == 1
    assert "ExtractionError" in first_line(store)
    assert "(data): no data of type Pool" in first_line(store)


def test_data_is_looked_up_from_the_attempt_to_the_worker(store: Any) -> None:
    seen: list[Any] = []

    def handler(ctx: JobContext, worker: Annotated[Pool, Data]) -> None:
        seen.append(worker.name)
        ctx.set_data(WidePool("wide"), as_type=Pool)
        seen.extend([ctx.data(Pool).name, ctx.worker_data(Pool).name])
        with pytest.raises(LookupError, match="no data of type int"):
            ctx.data(int)
        with pytest.raises(LookupError, match="in this attempt"):
            ctx.job_data(int)
        with pytest.raises(InvalidRequest, match="is no"):
            ctx.set_data(5, as_type=str)

    put(store, "a")
    running(store, handler, extensions=shared(Pool("shared"))).run_next()
    assert state_of(store, "a") is State.COMPLETED
    assert seen == ["shared", "wide", "shared"]


def test_two_attempts_at_once_see_their_own_data(store: Any) -> None:
    gate = Gate()
    seen: dict[str, str] = {}

    def handler(ctx: JobContext) -> None:
        ctx.set_data(Pool(ctx.job_id))
        gate.hold()
        seen[ctx.job_id] = ctx.data(Pool).name

    registry = Registry()
    registry.task("k")(handler)
    put(store, "a", "b")
    with working(store, registry):
        gate.wait(2)
        gate.open()
        wait_for(lambda: len(seen) == 2, "both have looked")
    assert seen == {"a": "a", "b": "b"}


def test_what_surrounds_the_payload_can_be_asked_for(store: Any) -> None:
    seen: list[Any] = []

    def tenant(metadata: Metadata) -> str:
        return metadata.headers["tenant"].upper()

    def handler(meta: Metadata, who: Annotated[str, Meta(tenant)]) -> None:
        seen.extend([meta, who])

    put(
        store,
        "a",
        partition_key="p",
        rate_class="c",
        weight=3,
        priority=7,
        headers={"tenant": "acme"},
    )
    running(store, handler).run_next()
    assert seen == [
        Metadata(
            queue="q",
            partition_key="p",
            rate_class="c",
            weight=3,
            priority=7,
            schema_version=1,
            headers={"tenant": "acme"},
        ),
        "ACME",
    ]


def test_a_value_that_cannot_be_made_is_an_ordinary_failure(store: Any) -> None:
    def broken(metadata: Metadata) -> str:
        raise KeyError("tenant")

    def handler(who: Annotated[str, Meta(broken)]) -> None:
        raise AssertionError("entered")

    put(store, "a")
    running(store, handler).run_next()
    assert "(meta): KeyError: 'tenant'" in first_line(store)
    assert job(store, "a").attempt == 1


def test_a_dependency_is_made_once_and_may_depend_on_others(store: Any) -> None:
    made: list[str] = []

    def base(task_id: TaskId) -> str:
        made.append("base")
        return f"base of {task_id}"

    def upper(text: Annotated[str, Depends(base)], loud: bool = True) -> str:
        made.append("upper")
        return text.upper() if loud else text

    def handler(
        one: Annotated[str, Depends(upper)],
        two: Annotated[str, Depends(base)],
        three: Annotated[str, Depends(upper)],
    ) -> None:
        made.extend([one, two, three])

    put(store, "a")
    running(store, handler).run_next()
    assert made == ["base", "upper", "BASE OF A", "base of a", "BASE OF A"]


ENDS: list[str] = []


def session() -> Iterator[str]:
    try:
        yield "session"
    except ValueError:
        ENDS.append("rolled back")
        raise
    except BaseException as error:
        ENDS.append(type(error).__name__)
        raise
    else:
        ENDS.append("committed")
    finally:
        ENDS.append("closed")


@pytest.mark.parametrize(
    ("raised", "ends", "state"),
    [
        (None, ["committed", "closed"], State.COMPLETED),
        (ValueError("no"), ["rolled back", "closed"], State.RETRYABLE),
        (Skip("x"), ["Skip", "closed"], State.ARCHIVED),
        (SystemExit(1), ["SystemExit", "closed"], State.RETRYABLE),
    ],
)
def test_a_generator_is_ended_after_the_handler_and_before_the_ack(
    store: Any, raised: BaseException | None, ends: list[str], state: State
) -> None:
    ENDS.clear()

    def handler(ctx: JobContext, db: Annotated[str, Depends(session)]) -> None:
        assert (db, ENDS) == ("session", [])
        if raised is not None:
            raise raised

    put(store, "a")
    bench = running(store, handler)
    (attempt,) = bench.admit()
    assert bench.runner.run(attempt)  # the ack is left, and not sent
    assert ends == ENDS
    bench.acks.fly()
    assert state_of(store, "a") is state


def test_a_swallowed_error_fails_the_attempt_and_is_seen_outside(store: Any) -> None:
    ENDS.clear()

    def lenient(db: Annotated[str, Depends(session)]) -> Iterator[int]:
        with contextlib.suppress(ValueError):
            yield 1

    def handler(one: Annotated[int, Depends(lenient)]) -> None:
        raise ValueError("counts")

    put(store, "a")
    running(store, handler).run_next()
    assert first_line(store) == "ValueError: counts"
    assert ENDS == ["rolled back", "closed"]


def test_an_end_that_fails_fails_the_attempt_unless_it_failed_before(
    store: Any, caplog: Any
) -> None:
    def brittle() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise OSError("cannot commit")

    def handler(ctx: JobContext, one: Annotated[int, Depends(brittle)]) -> None:
        if ctx.job_id == "b":
            raise ValueError("the handler's")

    put(store, "a")
    bench = running(store, handler)
    bench.run_next()
    assert first_line(store) == "OSError: cannot commit"
    put(store, "b")
    bench.run_next()
    assert first_line(store, "b") == "ValueError: the handler's"
    assert (
        "job b (queue q): a dependency or context manager failed after its handler"
        in caplog.text
    )


def test_what_was_opened_is_closed_when_a_later_parameter_fails(store: Any) -> None:
    ENDS.clear()

    def handler(
        db: Annotated[str, Depends(session)], pool: Annotated[Pool, Data]
    ) -> None:
        raise AssertionError("entered")

    put(store, "a")
    running(store, handler).run_next()
    assert ENDS == ["ExtractionError", "closed"]


def test_a_dependency_may_give_the_job_back(store: Any) -> None:
    def not_yet() -> int:
        raise Snooze("5m")

    def handler(one: Annotated[int, Depends(not_yet)]) -> None:
        raise AssertionError("entered")

    put(store, "a")
    running(store, handler).run_next()
    assert state_of(store, "a") is State.SCHEDULED


def test_a_dependency_that_nothing_can_fill_is_refused_at_its_declaration() -> None:
    def open_ended(number: int) -> int:
        return number

    async def later() -> int:
        return 1

    class Later:
        async def __call__(self) -> int:
            return 1

    for function, match in (
        (open_ended, "open_ended: number: nothing fills"),
        (later, "no plain function"),
        (Later(), "no plain function"),
        ("text", "no plain function"),
    ):

        def handler(one: Annotated[int, Depends(function)]) -> None:  # type: ignore[arg-type]
            """Never run."""

        with pytest.raises(InvalidRequest, match=match):
            Registry().task("k")(handler)


def test_a_job_waits_for_the_worker_it_is_pinned_to(store: Any) -> None:
    ran: list[str] = []
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.lease.lease_id.partition(":")[0])

    put(store, "a", sticky_worker="gpu-1")
    with working(store, registry, worker_id="gpu-2") as worker:
        put(store, "b")
        wait_for(lambda: state_of(store, "b") is State.COMPLETED, "the other has run")
        assert worker.health().in_flight == 0
    assert state_of(store, "a") is State.AVAILABLE
    with working(store, registry, worker_id="gpu-1"):
        wait_for(lambda: state_of(store, "a") is State.COMPLETED, "it has run")
    assert ran == ["gpu-2", "gpu-1"]


def test_a_job_of_a_batch_reads_its_own_data(store: Any) -> None:
    registry = Registry()

    @registry.task("m")
    @attrs.frozen
    class Mail:
        to: str = ""

    def handler(jobs: list[BatchJob[Any]]) -> list[str]:
        for each in jobs:
            each.ctx.set_data(Pool(each.ctx.job_id))
        return [each.ctx.data(Pool).name for each in jobs]

    registry.batch_handler(Mail, max_size=2, max_delay="1s")(handler)
    for id in "ab":
        put(store, id, kind="m")
    bench = Bench(store, registry)
    for attempt in bench.admit():
        bench.run(attempt)
    assert [store.results.read_result(id).data for id in "ab"] == [b'"a"', b'"b"']
