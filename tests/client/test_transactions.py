"""Enqueueing in a transaction that the application holds, in every supported kind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager, suppress

import psycopg
import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from psycopg.rows import dict_row
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from headgate_sync.client import Client
from headgate_sync.client.circuit import CircuitBreaker
from headgate_sync.client.tx import driver_connection
from headgate_sync.errors import (
    Backpressure,
    CircuitRejected,
    DuplicateJob,
    EnqueueForbidden,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.options import Unique
from headgate_sync.registry import Registry
from tests.builders import admit, claim_one, envelope

registry = Registry()


@registry.task("order:ship", queue="q", unique="{order_id}")
def ship(order_id: int, note: str = "") -> None: ...


@pytest.fixture
def store(postgres):
    return postgres.open_store()


@pytest.fixture
def client(store):
    return Client(store)


@pytest.fixture
def orders(admin):
    """A table of the application, read on a connection of its own."""
    admin.execute("CREATE TABLE IF NOT EXISTS public.app_order (id int PRIMARY KEY)")
    admin.execute("TRUNCATE public.app_order")

    def ids():
        return [
            r[0] for r in admin.execute("SELECT id FROM public.app_order ORDER BY id")
        ]

    yield ids
    admin.execute("DROP TABLE public.app_order")


@pytest.fixture(scope="module")
def engine(database_url):
    made = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(database_url)
    )
    yield made
    made.dispose()


# Each of these opens a transaction that the application owns, and yields the handle, a
# function that runs a statement in it, and functions that commit it and roll it back.


@contextmanager
def plain(url, engine):
    with psycopg.connect(url) as connection:
        yield connection, connection.execute, connection.commit, connection.rollback


@contextmanager
def with_cursor(url, engine):
    with psycopg.connect(url, row_factory=dict_row) as connection:
        cursor = connection.cursor()
        yield cursor, cursor.execute, connection.commit, connection.rollback


@contextmanager
def explicit(url, engine):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        yield (
            connection,
            connection.execute,
            lambda: connection.execute("COMMIT"),
            lambda: connection.execute("ROLLBACK"),
        )


@contextmanager
def sqlalchemy_session(url, engine):
    with Session(engine) as session:
        yield (
            session,
            lambda s: session.execute(sa.text(s)),
            session.commit,
            session.rollback,
        )


@contextmanager
def sqlalchemy_scoped(url, engine):
    scoped = scoped_session(sessionmaker(engine))
    try:
        yield (
            scoped,
            lambda s: scoped.execute(sa.text(s)),
            scoped.commit,
            scoped.rollback,
        )
    finally:
        scoped.remove()


@contextmanager
def sqlalchemy_connection(url, engine):
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT 1"))
        yield (
            connection,
            lambda s: connection.execute(sa.text(s)),
            connection.commit,
            connection.rollback,
        )


@contextmanager
def flask_session(url, engine):
    """`db.session` inside a request."""
    app = Flask("handles")
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"creator": lambda: psycopg.connect(url)}
    db = SQLAlchemy(app)
    with app.test_request_context():
        try:
            yield (
                db.session,
                lambda s: db.session.execute(sa.text(s)),
                db.session.commit,
                db.session.rollback,
            )
        finally:
            db.session.remove()
            db.engine.dispose()


HANDLES = [
    plain, with_cursor, explicit,
    sqlalchemy_session, sqlalchemy_scoped, sqlalchemy_connection, flask_session,
]  # fmt: skip


@pytest.fixture(params=HANDLES, ids=lambda make: make.__name__)
def open_tx(request, database_url, engine):
    return lambda: request.param(database_url, engine)


def test_order_and_job_are_committed_together(open_tx, client, store, orders, postgres):
    with open_tx() as (tx, run, commit, _):
        run("INSERT INTO public.app_order VALUES (1)")
        handle = client.enqueue(ship.job(1), tx=tx)
        assert postgres.snapshot().jobs == {}
        assert admit(store).claims == []
        commit()
    assert orders() == [1]
    assert claim_one(store).envelope.id == handle.id


def test_a_rollback_leaves_neither(open_tx, client, store, orders, postgres):
    with open_tx() as (tx, run, _, rollback):
        run("INSERT INTO public.app_order VALUES (1)")
        client.enqueue(ship.job(1), tx=tx)
        rollback()
    assert orders() == []
    assert postgres.snapshot().jobs == {}
    assert store.inspect.unfinished("q") == 0


def test_after_a_refusal_the_transaction_goes_on(open_tx, client, store, orders):
    first = client.enqueue(ship.job(1))
    with open_tx() as (tx, run, commit, _):
        run("INSERT INTO public.app_order VALUES (1)")
        with pytest.raises(DuplicateJob) as caught:
            client.enqueue(ship.job(1), tx=tx)
        assert caught.value.existing_id == first.id
        with pytest.raises(IdConflict):
            client.enqueue(ship.job(2), id=first.id, tx=tx)
        with pytest.raises(InvalidRequest):
            client.enqueue(ship.job("x"), tx=tx)  # type: ignore[arg-type]
        assert client.enqueue_or_join(ship.job(1), tx=tx).joined
        client.enqueue_many([ship.job(3), ship.job(4)], tx=tx)
        run("INSERT INTO public.app_order VALUES (2)")
        commit()
    assert orders() == [1, 2]
    assert len(admit(store).claims) == 3


def test_a_session_is_flushed_only_by_its_owner(client, engine):
    with Session(engine) as session:
        flushed = []
        sa.event.listen(session, "before_flush", lambda *args: flushed.append(args))
        session.add_all([])
        client.enqueue(ship.job(1), tx=session)
        assert flushed == []
        assert session.in_transaction()
        session.rollback()


def test_a_full_queue_and_a_quarantine_leave_the_transaction_usable(
    open_tx, client, postgres, orders
):
    store = postgres.open_store(crash_limit=1)
    client.enqueue(ship.job(1))
    claim_one(store, lease_ms=1)
    postgres.clock.advance_ms(2)
    store.reclaim_expired(10)
    store.inspect.set_enqueue_limit("q", 1)
    with open_tx() as (tx, run, commit, _):
        run("INSERT INTO public.app_order VALUES (1)")
        with pytest.raises(FingerprintQuarantined):
            client.enqueue(ship.job(1), tx=tx)
        client.enqueue(ship.job(2), tx=tx)
        with pytest.raises(Backpressure):
            client.enqueue_many([ship.job(3)], tx=tx)
        run("INSERT INTO public.app_order VALUES (2)")
        commit()
    assert orders() == [1, 2]
    assert store.inspect.unfinished("q") == 1


def test_what_stands_before_the_store_leaves_the_transaction_usable(
    open_tx, store, orders
):
    breaker = CircuitBreaker(failure_threshold=1)
    seen = []

    def observe(request, proceed):
        seen.append(request.operation)
        if request.batch[0].priority == 9:
            raise LookupError("no")
        if request.batch[0].priority == 8:
            return
        proceed(request)

    client = Client(
        store,
        middleware=[observe],
        authorizer=lambda asked, job: job.priority != 7,
        circuit_breaker=breaker,
    )
    with open_tx() as (tx, run, commit, _):
        run("INSERT INTO public.app_order VALUES (1)")
        with pytest.raises(EnqueueForbidden):
            client.enqueue_many([ship.job(1), ship.using(priority=7).job(2)], tx=tx)
        with pytest.raises(LookupError):
            client.enqueue(ship.using(priority=9).job(3), tx=tx)
        assert client.enqueue(ship.using(priority=8).job(4), tx=tx).dropped
        handle = client.enqueue(ship.job(5), tx=tx)
        with suppress(StoreUnavailable), breaker.permit():
            raise StoreUnavailable("away")
        with pytest.raises(CircuitRejected):
            client.enqueue(ship.job(6), tx=tx)
        run("INSERT INTO public.app_order VALUES (2)")
        commit()
    assert orders() == [1, 2]
    assert [claim.envelope.id for claim in admit(store).claims] == [handle.id]
    assert set(seen) == {"transactional"}


def test_a_middleware_that_tries_again_writes_one_row_in_the_transaction(
    open_tx, store, orders
):
    """The second call of the store is a replay of the transaction's own row."""

    def twice(request, proceed):
        proceed(request)
        proceed(request)

    client = Client(store, middleware=[twice])
    with open_tx() as (tx, run, commit, _):
        run("INSERT INTO public.app_order VALUES (1)")
        client.enqueue(ship.job(1), tx=tx)
        commit()
    assert len(admit(store).claims) == 1


def test_a_replacement_waits_for_the_callers_commit(client, store, database_url):
    rule = Unique("{order_id}", replace="payload")
    first = client.enqueue(ship.job(1), unique=rule)
    for end, note in (("ROLLBACK", ""), ("COMMIT", "new")):
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("BEGIN")
            handle = client.enqueue(ship.job(1, "new"), unique=rule, tx=connection)
            assert (handle.id, handle.replaced) == (first.id, True)
            connection.execute(end)
        job = store.inspect.get_job(first.id, include_payload=True)
        assert (b"new" in job.payload) == bool(note)


def test_the_transaction_of_the_store_itself_is_a_handle(client, store):
    with store.transactional.transaction() as tx:
        client.enqueue(ship.job(1), tx=tx)
        assert admit(store).claims == []
    assert len(admit(store).claims) == 1


# What cannot be joined


def test_autocommit_without_a_transaction_is_refused(client, database_url, postgres):
    with (
        psycopg.connect(database_url, autocommit=True) as connection,
        pytest.raises(InvalidRequest, match="no open transaction"),
    ):
        client.enqueue(ship.job(1), tx=connection)
    assert postgres.snapshot().jobs == {}


def test_an_aborted_transaction_is_refused(client, database_url, engine):
    with psycopg.connect(database_url) as connection:
        with pytest.raises(psycopg.Error):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(InvalidRequest, match="aborted"):
            client.enqueue(ship.job(1), tx=connection)
    with Session(engine) as session:
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1 / 0"))
        with pytest.raises(InvalidRequest, match="aborted"):
            client.enqueue(ship.job(1), tx=session)


def test_a_session_that_failed_to_flush_is_refused(client, engine, orders):
    class Base(sa.orm.DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "app_order"
        id: sa.orm.Mapped[int] = sa.orm.mapped_column(primary_key=True)

    with Session(engine) as session:
        session.add(Order(id=1))
        session.flush()
        session.expunge_all()
        session.add(Order(id=1))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        with pytest.raises(InvalidRequest, match=r"waits for rollback\(\)"):
            client.enqueue(ship.job(1), tx=session)


def test_a_sqlalchemy_connection_that_would_not_commit_is_refused(client, engine):
    with (
        engine.connect() as connection,
        pytest.raises(InvalidRequest, match="no open transaction"),
    ):
        client.enqueue(ship.job(1), tx=connection)
    with engine.begin() as connection:
        client.enqueue(ship.job(1), tx=connection)


def test_sqlalchemy_in_autocommit_is_refused(client, engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("SELECT 1"))
        with pytest.raises(InvalidRequest, match="no open transaction"):
            client.enqueue(ship.job(1), tx=connection)


def test_closed_handles_are_refused(client, database_url, engine):
    connection = psycopg.connect(database_url)
    connection.close()
    with pytest.raises(InvalidRequest, match="closed"):
        client.enqueue(ship.job(1), tx=connection)
    closed = engine.connect()
    closed.close()
    with pytest.raises(InvalidRequest, match="closed"):
        client.enqueue(ship.job(1), tx=closed)


@pytest.mark.parametrize("tx", [3, object(), [], "nope", {"a": 1}, ship])
def test_what_is_no_handle_is_refused(client, tx):
    with pytest.raises(InvalidRequest):
        client.enqueue(ship.job(1), tx=tx)


def named(module, name):
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    "tx",
    [
        named("psycopg2.extensions", "connection"),
        named("pg8000.legacy", "Connection"),
        named("asyncpg.connection", "Connection"),
        named("psycopg", "AsyncConnection"),
        named("sqlalchemy.ext.asyncio.session", "AsyncSession"),
    ],
)
def test_other_drivers_are_refused_with_the_supported_ones(client, tx):
    with pytest.raises(Unsupported, match="supported are psycopg Connection") as caught:
        client.enqueue(ship.job(1), tx=tx)
    assert caught.value.capability == "transactional"


def test_an_asynchronous_psycopg_connection_is_refused(client, database_url):
    async def attempt():
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            with pytest.raises(Unsupported):
                client.enqueue(ship.job(1), tx=connection)

    asyncio.run(attempt())


def test_sqlalchemy_over_another_database_is_refused(client):
    engine = sa.create_engine("sqlite://")
    with (
        Session(engine) as session,
        pytest.raises(Unsupported, match=r"sqlite3.Connection"),
    ):
        client.enqueue(ship.job(1), tx=session)
    engine.dispose()


def test_no_framework_is_imported_for_a_psycopg_connection():
    script = """
import sys
import psycopg
from headgate_sync.client.circuit import CircuitBreaker
from headgate_sync.client.tx import driver_connection
class Fake(psycopg.Connection):
    def __init__(self): pass
    def __del__(self): pass
fake = Fake()
assert driver_connection(fake) is fake
assert not {"sqlalchemy", "django", "flask"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_text_means_a_django_alias():
    script = """
from headgate_sync.client.circuit import CircuitBreaker
from headgate_sync.client.tx import driver_connection
from headgate_sync.errors import InvalidRequest
try:
    driver_connection("default")
except InvalidRequest as error:
    assert "Django is not in use" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# Django, in a process of its own, since its settings are those of the process.

DJANGO = """
import sys
import django
from django.conf import settings
from tests.servers import django_database

database = django_database(sys.argv[1])
settings.configure(
    DATABASES={"default": database, "other": dict(database),
               "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=True,
)
django.setup()
from django.db import connection, connections, transaction, IntegrityError
from headgate_sync.app import Headgate
from headgate_sync.errors import (
    Backpressure, CircuitRejected, DuplicateJob, EnqueueForbidden,
    FingerprintQuarantined, IdConflict, InvalidRequest, StoreUnavailable, Unsupported,
)
from headgate_sync import CircuitBreaker

breaker = CircuitBreaker(failure_threshold=1, recovery_timeout="1h")
hg = Headgate(
    sys.argv[1],
    authorizer=lambda asked, job: job.priority != 7,
    circuit_breaker=breaker,
)

@hg.task("order:ship", queue="q", unique="{order_id}")
def ship(order_id: int) -> None: ...

def insert(order_id):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO public.app_order VALUES (%s)", [order_id])

def refused(call, error, text):
    try:
        call()
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"{error} was not raised")

with transaction.atomic():
    insert(1)
    ship.enqueue(1, tx=connection)
with transaction.atomic():
    insert(2)
    ship.enqueue(2, tx="default")
with transaction.atomic():
    insert(3)
    ship.enqueue(3, tx=connections["default"])
try:
    with transaction.atomic():
        insert(4)
        ship.enqueue(4, tx=connection)
        raise LookupError
except LookupError:
    pass
with transaction.atomic():
    insert(5)
    refused(lambda: ship.enqueue(1, tx=connection), DuplicateJob, "unique key")
    again = ship.using(id="taken")
    refused(lambda: again.enqueue(50, tx=connection), IdConflict, "taken")
    refused(lambda: ship.enqueue(666, tx=connection), FingerprintQuarantined, "quara")
    full = ship.using(queue="full")
    refused(lambda: full.enqueue(51, tx=connection), Backpressure, "full")
    denied = ship.using(priority=7)
    refused(lambda: denied.enqueue(52, tx=connection), EnqueueForbidden, "not allowed")
    refused(lambda: ship.enqueue("x", tx=connection), InvalidRequest, "expected int")
    insert(6)
with transaction.atomic():
    try:
        with transaction.atomic():
            ship.enqueue(7, tx=connection)
            insert(1)
    except IntegrityError:
        pass
    insert(7)
with transaction.atomic():
    try:
        with transaction.atomic(savepoint=False):
            raise LookupError
    except LookupError:
        pass
    refused(lambda: ship.enqueue(8, tx=connection), InvalidRequest, "aborted")
refused(lambda: ship.enqueue(9, tx=connection), InvalidRequest, "no open transaction")
refused(lambda: ship.enqueue(9, tx="nope"), InvalidRequest, "nope")
refused(lambda: ship.enqueue(9, tx="lite"), Unsupported, "supported are")
with transaction.atomic():
    insert(8)
    try:
        with breaker.permit():
            raise StoreUnavailable("away")
    except StoreUnavailable:
        pass
    refused(lambda: ship.enqueue(9, tx="default"), CircuitRejected, "circuit is open")
    insert(9)
connections.close_all()
hg.close()
"""


def test_django_transactions_are_joined(postgres, orders, database_url):
    store = postgres.open_store(crash_limit=1)
    other = Client(store)
    other.enqueue(ship.using(unique=None, queue="crash").job(666))
    claim_one(store, lease_ms=1, queues=["crash"])
    postgres.clock.advance_ms(2)
    store.reclaim_expired(10)
    other.enqueue(envelope("taken", queue="other"))
    store.inspect.set_enqueue_limit("full", 0)
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, database_url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert orders() == [1, 2, 3, 5, 6, 7, 8, 9]
    payloads = {claim.envelope.payload for claim in admit(store).claims}
    assert payloads == {b'{"order_id":%d}' % n for n in (1, 2, 3)}


def test_a_driver_connection_is_found_without_a_store(database_url, engine):
    with psycopg.connect(database_url) as connection:
        assert driver_connection(connection) is connection
        assert driver_connection(connection.cursor()) is connection
    with engine.begin() as joined:
        assert isinstance(driver_connection(joined), psycopg.Connection)
