"""Effects that happen exactly once, on PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from headgate_sync.client import Client
from headgate_sync.context import JobContext
from headgate_sync.errors import (
    BackendError,
    InvalidRequest,
    LeaseLost,
    LeaseRejected,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from tests.builders import DAY_MS, envelope, job, state_of, steer
from tests.worker.rig import Bench, Tap


def put(store: Any, id: str, **fields: Any) -> None:
    store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def running(store: Any, handler: Callable[..., Any]) -> Bench:
    """A bench with one task of kind `k`."""
    registry = Registry()
    registry.task("k")(handler)
    return Bench(store, registry)


def test_once_without_transactions_is_refused_before_anything_runs(
    memory: Any,
) -> None:
    called = []

    def handler(ctx: JobContext) -> None:
        with pytest.raises(Unsupported, match="once needs a transactional store, Mem"):
            ctx.once(lambda tx: called.append(1))

    store = memory.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert called == []


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


def apply(ctx: JobContext) -> Callable[[Any], None]:
    def write(tx: Any) -> None:
        tx.connection.execute(
            "INSERT INTO public.effects VALUES (%s, %s)", (ctx.job_id, ctx.lease.fence)
        )

    return write


def test_once_inside_of_once_is_refused_instead_of_waiting_for_itself(
    postgres: Any, effects: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        def outer(tx: Any) -> None:
            with pytest.raises(InvalidRequest, match="inside of once"):
                ctx.once(apply(ctx))
            apply(ctx)(tx)

        assert ctx.once(outer)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == [("a", 1)]


def test_a_job_is_enqueued_in_the_commit_of_once_through_a_client_of_another_store(
    postgres: Any, effects: Any
) -> None:
    """A worker has a store of its own, and the application's facade has another."""
    client = Client(postgres.make_store())

    def handler(ctx: JobContext) -> None:
        ctx.once(lambda tx: client.enqueue(envelope("b"), tx=tx))

    store = postgres.open_store()
    put(store, "a")
    running(store, handler).run_next()
    assert state_of(store, "b") is State.AVAILABLE


@pytest.mark.parametrize("retention_ms", [0, DAY_MS])
def test_an_effect_and_the_completion_are_one_commit(
    postgres: Any, effects: Any, retention_ms: int
) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.report_actual_weight(4)
        assert ctx.once(apply(ctx))
        with pytest.raises(InvalidRequest, match="already completed"):
            ctx.record_result(b"late")

    store = postgres.make_store()
    put(store, "a", retention_ms=retention_ms)
    bench = running(Tap(store), handler)
    bench.run_next()
    assert effects() == [("a", 1)]
    assert bench.store.count("ack_batch") == 0
    expected = State.COMPLETED if retention_ms else State.DELETED
    assert state_of(store, "a") is expected


def test_a_handler_that_fails_after_its_effect_leaves_the_job_completed(
    postgres: Any, effects: Any, caplog: Any
) -> None:
    def handler(ctx: JobContext) -> str:
        ctx.once(apply(ctx))
        raise ValueError("after it")

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert (state_of(store, "a"), job(store, "a").attempt) == (State.COMPLETED, 0)
    assert "failed after once had completed it" in caplog.text
    assert "ValueError" in caplog.text


def test_a_value_returned_after_once_is_dropped_with_an_error(
    postgres: Any, effects: Any, caplog: Any
) -> None:
    def handler(ctx: JobContext) -> str:
        ctx.once(apply(ctx))
        return "late"

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert store.results.read_result("a") is None
    assert "the value returned after once is dropped" in caplog.text


def test_an_effect_whose_body_fails_is_rolled_back_with_its_claim(
    postgres: Any, effects: Any, clock: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        def write(tx: Any) -> None:
            apply(ctx)(tx)
            if not ctx.attempt:
                raise ValueError("x")

        ctx.once(write)

    store = postgres.make_store()
    put(store, "a")
    bench = running(store, handler)
    bench.run_next()
    assert effects() == []
    assert state_of(store, "a") is State.RETRYABLE
    postgres.clock.advance_ms(60_000)
    store.promote_due(10)
    bench.run_next()
    assert effects() == [("a", 2)]


def test_an_effect_of_a_superseded_holder_is_rolled_back(
    postgres: Any, effects: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        steer(store).operator_cancel("a")
        with pytest.raises(LeaseLost):
            ctx.once(apply(ctx))
        assert ctx.cancel_reason == "lease_lost"

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []
    assert state_of(store, "a") is State.CANCELLED


def test_a_delivery_whose_effect_was_committed_before_ends_as_success(
    postgres: Any, effects: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        assert ctx.once(apply(ctx)) is False

    store = postgres.make_store()
    with store.transactional.transaction() as tx:
        assert store.transactional.claim_effect(tx, "a")
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []
    assert state_of(store, "a") is State.COMPLETED


def test_a_commit_whose_reply_is_lost_runs_the_effect_once(
    postgres: Any, effects: Any, caplog: Any
) -> None:
    store = postgres.make_store()
    tap = Tap(store)
    transactional = Tap(store.transactional)

    def lose_reply(real: Any, tx: Any) -> None:
        real(tx)
        raise StoreUnavailable("connection cut after the commit")

    transactional.around["commit_tx"] = lose_reply
    tap.__dict__["transactional"] = transactional
    put(store, "a", retention_ms=0)

    def handler(ctx: JobContext) -> None:
        ctx.once(apply(ctx))

    running(tap, handler).run_next()
    assert effects() == [("a", 1)]
    assert state_of(store, "a") is State.DELETED
    assert "dropped" not in caplog.text


def test_a_recorded_result_and_once_exclude_each_other(
    postgres: Any, effects: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.record_result(b"x")
        with pytest.raises(InvalidRequest, match="result would be lost"):
            ctx.once(apply(ctx))

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []
    assert store.results.read_result("a").data == b"x"


def test_a_result_that_comes_after_the_completion_is_refused(
    postgres: Any, effects: Any
) -> None:
    refusals: list[str] = []

    def handler(ctx: JobContext) -> None:
        ctx.once(apply(ctx))
        try:
            ctx.record_result(b"x")
        except InvalidRequest as refusal:
            refusals.append(str(refusal))

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert refusals == ["record_result after once: the job is already completed"]
    assert store.results.read_result("a") is None


def test_a_refused_commit_is_an_ordinary_failure(postgres: Any, effects: Any) -> None:
    postgres.connection.execute(
        "CREATE TABLE public.parent (id int PRIMARY KEY);"
        "CREATE TABLE public.child (id int REFERENCES public.parent"
        " DEFERRABLE INITIALLY DEFERRED)"
    )
    raised: list[BaseException] = []

    def handler(ctx: JobContext) -> None:
        def write(tx: Any) -> None:
            apply(ctx)(tx)
            tx.connection.execute("INSERT INTO public.child VALUES (1)")

        try:
            ctx.once(write)
        except BackendError as error:
            raised.append(error)
            raise

    try:
        store = postgres.make_store()
        put(store, "a")
        running(store, handler).run_next()
        assert effects() == []
        assert len(raised) == 1
        row = job(store, "a")
        assert (row.state, row.attempt) == ("retryable", 1)
    finally:
        postgres.connection.execute("DROP TABLE public.child, public.parent")


def test_a_lease_that_the_body_lost_for_another_job_is_the_bodys_error(
    postgres: Any, effects: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        def write(tx: Any) -> None:
            raise LeaseRejected("another job")

        ctx.once(write)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert "another job" in (job(store, "a").errors[-1].error or "")


# In a transaction of an ORM


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "effects"
    __table_args__ = ({"schema": "public"},)
    job: Mapped[str] = mapped_column(primary_key=True)


def is_idle(handle: Any) -> bool:
    real = handle() if isinstance(handle, scoped_session) else handle
    return not real.in_transaction()


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(database_url)
    )
    yield made
    made.dispose()


@pytest.fixture(params=["session", "scoped", "connection"])
def handle(request: Any, engine: sa.Engine) -> Iterator[Any]:
    """Each kind of handle of SQLAlchemy, in no transaction."""
    if request.param == "connection":
        with engine.connect() as connection:
            yield connection
    elif request.param == "session":
        with Session(engine) as session:
            yield session
    else:
        scoped = scoped_session(sessionmaker(engine))
        yield scoped
        scoped.remove()


def insert(ctx: JobContext, handle: Any) -> Callable[[Any], None]:
    def write(tx: Any) -> None:
        assert isinstance(tx.connection, psycopg.Connection)
        handle.execute(
            sa.text("INSERT INTO public.effects VALUES (:job, :fence)"),
            {"job": ctx.job_id, "fence": ctx.lease.fence},
        )

    return write


def test_an_effect_may_be_written_through_an_orm(
    postgres: Any, effects: Any, handle: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        assert ctx.once(insert(ctx, handle), tx=handle)

    store = postgres.make_store()
    put(store, "a")
    bench = running(Tap(store), handler)
    bench.run_next()
    assert effects() == [("a", 1)]
    assert state_of(store, "a") is State.COMPLETED
    assert bench.store.count("ack_batch") == 0
    assert is_idle(handle)


def test_what_an_orm_wrote_is_rolled_back_with_the_work(
    postgres: Any, effects: Any, handle: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        def write(tx: Any) -> None:
            insert(ctx, handle)(tx)
            raise ValueError("x")

        ctx.once(write, tx=handle)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []
    assert state_of(store, "a") is State.RETRYABLE
    assert is_idle(handle)


def test_what_an_orm_wrote_is_rolled_back_with_a_lost_lease(
    postgres: Any, effects: Any, handle: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        steer(store).operator_cancel("a")
        with pytest.raises(LeaseLost):
            ctx.once(insert(ctx, handle), tx=handle)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []
    assert is_idle(handle)


def test_an_orm_transaction_that_is_open_is_left_alone(
    postgres: Any, effects: Any, handle: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        handle.execute(sa.text("INSERT INTO public.effects VALUES ('mine', 0)"))
        with pytest.raises(InvalidRequest, match="is in a transaction"):
            ctx.once(insert(ctx, handle), tx=handle)
        handle.commit()

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == [("mine", 0)]


def test_a_session_with_pending_changes_is_left_alone(
    postgres: Any, effects: Any, engine: sa.Engine
) -> None:
    def handler(ctx: JobContext) -> None:
        with Session(engine) as session:
            session.add(Row(job="pending"))
            with pytest.raises(InvalidRequest, match="pending changes"):
                ctx.once(insert(ctx, session), tx=session)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []


def test_a_commit_of_an_orm_whose_reply_is_lost_runs_the_effect_once(
    postgres: Any, effects: Any, engine: sa.Engine, caplog: Any
) -> None:
    class Cut(Session):
        def commit(self) -> None:
            super().commit()
            raise ConnectionResetError("cut after the commit")

    def handler(ctx: JobContext) -> None:
        with Cut(engine) as session:
            ctx.once(insert(ctx, session), tx=session)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == [("a", 1)]
    assert state_of(store, "a") is State.COMPLETED
    assert "dropped" not in caplog.text


@pytest.mark.parametrize("tx", [7, object()])
def test_what_is_no_orm_handle_is_refused(postgres: Any, effects: Any, tx: Any) -> None:
    def handler(ctx: JobContext) -> None:
        with pytest.raises(InvalidRequest, match="once can use the transaction of"):
            ctx.once(apply(ctx), tx=tx)

    store = postgres.make_store()
    put(store, "a")
    running(store, handler).run_next()
    assert effects() == []


DJANGO = """
import sys
import django
from django.conf import settings
from tests.servers import django_database

settings.configure(
    DATABASES={"default": django_database(sys.argv[1])}, USE_TZ=True
)
django.setup()
from django.db import connection, transaction
from headgate_sync.client import Client
from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest, LeaseLost
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from tests.worker.rig import Bench

registry = Registry()
seen = []

def insert(ctx):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO public.effects VALUES (%s, 0)", [ctx.job_id])

@registry.task("k")
def handler(ctx: JobContext) -> None:
    def write(tx):
        insert(ctx)
        if ctx.job_id == "fails":
            raise ValueError("x")
        if ctx.job_id == "lost":
            store.inspect.operator_cancel("lost")
    if ctx.job_id == "open":
        with transaction.atomic():
            try:
                ctx.once(write, tx="default")
            except InvalidRequest as error:
                seen.append(str(error))
        return
    seen.append(ctx.once(write, tx="default"))

store = PgStore.connect(sys.argv[1])
bench = Bench(store, registry)
for attempt in bench.admit():
    bench.run(attempt)
assert len(seen) == 2, seen
assert True in seen
assert any("is in a transaction" in str(one) for one in seen)
assert connection.get_autocommit() and not connection.in_atomic_block
store.close()
"""


def test_an_effect_may_be_written_through_django(
    postgres: Any, effects: Any, database_url: str
) -> None:
    store = postgres.make_store()
    for id in ("done", "fails", "open"):
        put(store, id)
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, database_url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert effects() == [("done", 0)]
    states = [state_of(store, id).value for id in ("done", "fails", "open")]
    assert states == ["completed", "retryable", "completed"]
