"""Steps whose work and completion are one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import (
    InvalidRequest,
    LeaseLost,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import State
from tests.builders import job, state_of, steer
from tests.worker.rig import Tap
from tests.worker.stepping import come_back, put, running, saved


@pytest.fixture
def effects(postgres: Any) -> Any:
    """A table of effects beside the jobs; without any constraint that could help."""
    postgres.connection.execute(
        "CREATE TABLE IF NOT EXISTS public.effects (job text, fence bigint)"
    )
    postgres.connection.execute("TRUNCATE public.effects")
    yield lambda: [
        tuple(row)
        for row in postgres.connection.execute("SELECT job, fence FROM public.effects")
    ]
    postgres.connection.execute("DROP TABLE public.effects")


def write(ctx: JobContext) -> Callable[[Any], None]:
    def work(tx: Any) -> None:
        tx.connection.execute(
            "INSERT INTO public.effects VALUES (%s, %s)", (ctx.job_id, ctx.lease.fence)
        )

    return work


async def asynchronous(tx: Any) -> None:
    raise AssertionError


def generating(tx: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize("work", [asynchronous, generating])
@pytest.mark.parametrize("way", ["once", "step_once"])
def test_an_effect_whose_function_has_not_run_is_not_committed(
    postgres: Any, work: Any, way: str
) -> None:
    store = postgres.make_store()

    def handler(ctx: JobContext) -> None:
        if way == "once":
            ctx.once(work)
        else:
            ctx.step_once("a", work)

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert f"{way}: the function gave a" in (job(store, "a").errors[-1].error or "")
    assert saved(store).completed_steps == ()


def test_an_effect_and_its_step_are_one_commit(postgres: Any, effects: Any) -> None:
    store = postgres.make_store()
    told: list[bool] = []

    def handler(ctx: JobContext) -> None:
        ctx.step("a", lambda: None)
        told.append(ctx.step_once("invoice", write(ctx)))
        assert saved(store).completed_steps == ("a", "invoice")
        if ctx.attempt == 0:
            raise ValueError("after the commit")
        ctx.step("z", lambda: None)

    put(store)
    bench = running(store, handler)
    bench.run_next()
    assert saved(store).completed_steps == ("a", "invoice")
    come_back(store, postgres.clock)
    bench.run_next()
    assert told == [True, False]
    assert effects() == [("a", 1)]
    assert state_of(store, "a") is State.COMPLETED


def test_an_effect_whose_work_fails_leaves_neither_row_nor_step(
    postgres: Any, effects: Any
) -> None:
    store = postgres.make_store()

    def handler(ctx: JobContext) -> None:
        def work(tx: Any) -> None:
            write(ctx)(tx)
            if ctx.attempt == 0:
                raise ValueError("no")

        ctx.step_once("invoice", work)

    put(store)
    bench = running(store, handler)
    bench.run_next()
    assert effects() == []
    assert saved(store).completed_steps == ()
    assert saved(store).in_progress_step == "invoice"
    come_back(store, postgres.clock)
    bench.run_next()
    assert effects() == [("a", 2)]


def test_a_step_that_was_committed_without_a_reply_is_not_run_again(
    postgres: Any, effects: Any
) -> None:
    store = postgres.make_store()

    class Lossy:
        """The reply to the first commit is lost."""

        def __init__(self) -> None:
            self.lost = False

        def __getattr__(self, name: str) -> Any:
            return getattr(store.transactional, name)

        def commit_tx(self, tx: Any) -> None:
            store.transactional.commit_tx(tx)
            if not self.lost:
                self.lost = True
                raise StoreUnavailable("no reply")

    class Around(Tap):
        transactional = Lossy()

    def handler(ctx: JobContext) -> None:
        ctx.step_once("invoice", write(ctx))
        ctx.step("z", lambda: None)

    put(store)
    bench = running(Around(store), handler)
    bench.run_next()
    assert state_of(store, "a") is State.RETRYABLE
    come_back(store, postgres.clock)
    bench.run_next()
    assert effects() == [("a", 1)]
    assert saved(store).completed_steps == ("invoice", "z")


def test_an_effect_of_a_step_that_the_checkpoint_lost_is_only_marked(
    postgres: Any, effects: Any
) -> None:
    """As when a checkpoint was put back by hand; the effect's key decides."""
    store = postgres.make_store()

    def handler(ctx: JobContext) -> None:
        ctx.step_once("invoice", write(ctx))
        if ctx.attempt == 0:
            ctx.checkpoint(Checkpoint())
            raise ValueError

    put(store)
    bench = running(store, handler)
    bench.run_next()
    come_back(store, postgres.clock)
    bench.run_next()
    assert effects() == [("a", 1)]
    assert saved(store).completed_steps == ("invoice",)


def test_an_effect_of_a_superseded_step_is_rolled_back(
    postgres: Any, effects: Any
) -> None:
    store = postgres.make_store()

    def handler(ctx: JobContext) -> None:
        def work(tx: Any) -> None:
            write(ctx)(tx)
            steer(store).operator_cancel("a")

        with pytest.raises(LeaseLost):
            ctx.step_once("invoice", work)
        assert ctx.cancel_reason == "lease_lost"

    put(store)
    running(store, handler).run_next()
    assert effects() == []
    assert state_of(store, "a") is State.CANCELLED


def test_a_job_whose_id_holds_a_slash_has_no_step_once(
    postgres: Any, effects: Any
) -> None:
    store = postgres.make_store()

    def handler(ctx: JobContext) -> None:
        with pytest.raises(InvalidRequest, match="holds a slash"):
            ctx.step_once("b", write(ctx))

    put(store, "a/b")
    running(store, handler).run_next()
    assert effects() == []


def test_step_once_without_transactions_is_refused_before_anything_runs(
    memory: Any,
) -> None:
    store = memory.make_store()

    def handler(ctx: JobContext) -> None:
        with pytest.raises(Unsupported, match="step_once needs a transactional"):
            ctx.step_once("a", lambda tx: None)
        assert saved(store) == Checkpoint()

    put(store)
    running(store, handler).run_next()
    assert state_of(store, "a") is State.COMPLETED


def test_a_job_may_be_completed_by_once_inside_of_a_step(
    postgres: Any, effects: Any
) -> None:
    store = postgres.make_store()

    def handler(ctx: JobContext) -> None:
        ctx.step("a", ctx.once, write(ctx))

    put(store)
    running(store, handler).run_next()
    assert effects() == [("a", 1)]
    assert state_of(store, "a") is State.COMPLETED
