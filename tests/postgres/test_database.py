"""Sessions with hostile settings, errors by SQLSTATE, and what a pool gets back."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from contextlib import contextmanager, suppress

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests
from psycopg_pool.pool import StopWorker

from headgate_sync.errors import (
    BackendError,
    StoreClosed,
    StoreConflict,
    StoreError,
    StoreUnavailable,
)
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres.database import Database, translate
from headgate_sync.postgres.store import PgStore
from tests.backends import SCHEMA
from tests.builders import (
    START_MS,
    admit,
    claim_one,
    enqueue,
    envelope,
    state_of,
    steer,
)
from tests.postgres.watching import end_sessions

UNAVAILABLE = (
    "08000", "08001", "08003", "08004", "08006", "08P01", "25006", "25P03", "25P04",
    "53000", "53100", "53200", "53300", "53400", "57014", "57P01", "57P02", "57P03",
    "57P04", "57P05", "58000", "58030", "58P01",
)  # fmt: skip
CONFLICT = ("40001", "40P01", "55P03")
BACKEND = ("22001", "22P05", "23502", "23505", "23514", "42501", "42P01", "42703",
           "0A000", "P0001", "XX000")  # fmt: skip


def of_sqlstate(code: str) -> psycopg.Error:
    try:
        return errors.lookup(code)("text")
    except KeyError:
        error = psycopg.DatabaseError("text")
        error.sqlstate = code
        return error


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        *((code, StoreUnavailable) for code in UNAVAILABLE),
        *((code, StoreConflict) for code in CONFLICT),
        *((code, BackendError) for code in BACKEND),
    ],
)
def test_a_sqlstate_becomes_the_error_of_its_class(code, wanted):
    error = translate(of_sqlstate(code))
    assert type(error) is wanted
    assert getattr(error, "sqlstate", code) == code


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("the connection is closed"),
        psycopg.InterfaceError("the cursor is closed"),
        PoolTimeout("no connection in time"),
        TooManyRequests("the queue is full"),
        ConnectionResetError("reset"),
    ],
)
def test_an_error_of_the_connection_is_an_outage(error):
    assert type(translate(error)) is StoreUnavailable


def test_a_pool_may_be_opened_later_but_not_again():
    pool = ConnectionPool("", min_size=0, max_size=1, open=False)
    with pytest.raises(PoolClosed) as early:
        pool.getconn()
    assert type(translate(early.value)) is StoreUnavailable
    pool.open()
    pool.close()
    with pytest.raises(PoolClosed) as late:
        pool.getconn()
    error = translate(late.value)
    assert type(error) is StoreClosed
    assert not error.retryable


def test_an_error_of_the_driver_is_a_fault_of_the_statement():
    assert type(translate(psycopg.ProgrammingError("placeholder"))) is BackendError


def test_only_outages_and_conflicts_may_be_repeated_blindly():
    assert translate(of_sqlstate("57P01")).retryable
    assert translate(of_sqlstate("40001")).retryable
    assert not translate(of_sqlstate("23514")).retryable


def test_what_a_statement_was_given_is_not_told(admin):
    """The details of a broken constraint are the row, so a payload."""
    admin.execute(
        "CREATE TEMPORARY TABLE told "
        "(payload text, CONSTRAINT short CHECK (payload = ''))"
    )
    with pytest.raises(psycopg.Error) as broken:
        admin.execute("INSERT INTO told VALUES ('a secret')")
    assert "a secret" in str(broken.value)
    told = translate(broken.value)
    assert "short" in str(told)
    assert "a secret" not in str(told)
    admin.execute("DROP TABLE told")
    with pytest.raises(psycopg.Error) as unknown:
        admin.execute("SELECT missing_one('a secret')")
    assert str(translate(unknown.value)).endswith("explicit type casts.)")


# Hostile defaults


HOSTILE = {
    "time zone": {"TimeZone": "Pacific/Kiritimati", "DateStyle": "German, DMY"},
    "serializable": {"default_transaction_isolation": "serializable"},
    "repeatable read": {"default_transaction_isolation": "repeatable read"},
    "read only": {"default_transaction_read_only": "on"},
    "search path": {"search_path": "hostile, pg_catalog"},
    "time limits": {"statement_timeout": "5s", "lock_timeout": "1ms"},
    "idle limit": {"idle_in_transaction_session_timeout": "1s"},
    "encoding": {"client_encoding": "LATIN1"},
    "escapes": {"standard_conforming_strings": "off", "bytea_output": "escape"},
    "planner": {"plan_cache_mode": "force_generic_plan", "enable_indexscan": "off"},
}
DECOYS = """
CREATE SCHEMA hostile;
CREATE TABLE hostile.headgate_job (id text);
CREATE FUNCTION hostile.now() RETURNS timestamptz LANGUAGE sql AS
  'SELECT pg_catalog.timestamptz ''2001-01-01''';
CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS
  'SELECT pg_catalog.timestamptz ''2001-01-01''';
CREATE FUNCTION hostile.floor(double precision) RETURNS double precision LANGUAGE sql AS
  'SELECT 7::pg_catalog.float8';
CREATE FUNCTION hostile.floor(numeric) RETURNS numeric LANGUAGE sql AS
  'SELECT 7::pg_catalog.numeric';
CREATE FUNCTION hostile.mod(bigint, bigint) RETURNS bigint LANGUAGE sql AS
  'SELECT 5::pg_catalog.int8';
CREATE FUNCTION hostile.cardinality(anyarray) RETURNS integer LANGUAGE sql AS
  'SELECT 0';
CREATE FUNCTION hostile.always(text, text) RETURNS boolean LANGUAGE sql AS
  'SELECT true';
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.always);
GRANT USAGE ON SCHEMA hostile TO PUBLIC;
"""


@contextmanager
def hostile_role(admin, settings):
    """A role with hostile defaults and the rights of a run-time role, no more."""
    role = sql.Identifier(f"headgate_test_{os.getpid()}_{threading.get_ident()}")
    admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    try:
        for name, value in settings.items():
            command = "ALTER ROLE {} SET {} = {}"
            if name == "search_path":
                command = "ALTER ROLE {} SET {} TO " + value
            admin.execute(
                sql.SQL(command).format(role, sql.Identifier(name), sql.Literal(value))
                if name != "search_path"
                else sql.SQL(command).format(role, sql.Identifier(name))
            )
        for grant in (
            "GRANT USAGE ON SCHEMA {} TO {}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {} TO {}",
            "GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {} TO {}",
        ):
            admin.execute(sql.SQL(grant).format(sql.Identifier(SCHEMA), role))
        yield role.as_string(admin).strip('"')
    finally:
        admin.execute(sql.SQL("DROP OWNED BY {}").format(role))
        admin.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.mark.parametrize("settings", HOSTILE.values(), ids=HOSTILE)
def test_the_defaults_of_a_role_change_nothing(postgres, admin, database_url, settings):
    admin.execute(DECOYS)
    try:
        with (
            hostile_role(admin, settings) as role,
            ConnectionPool(
                make_conninfo(database_url, user=role),
                min_size=0,
                max_size=3,
                open=True,
            ) as pool,
        ):
            store = PgStore(pool, SCHEMA, retry_jitter=lambda base_ms: 0)
            with clock_of(admin, WATCHFUL):
                live_through(store, postgres.clock)
            store.close()
    finally:
        admin.execute("DROP SCHEMA hostile CASCADE")


def live_through(store, clock):
    """One job through every kind of call that writes."""
    store.enqueue([envelope("a", payload="é\0".encode(), headers={"h": "日本"})])
    enqueue(store, "b", "c", tags=("t",), unique_key=None)
    claims = {claim.envelope.id: claim for claim in admit(store).claims}
    assert set(claims) == {"a", "b", "c"}
    assert claims["a"].envelope.payload == "é\0".encode()
    assert claims["a"].envelope.headers == {"h": "日本"}
    refs = [claim.lease_ref for claim in claims.values()]
    assert store.renew(refs, lease_ms=1_000) == []
    store.ack(claims["a"].lease_ref, Outcome.RETRY, error="日本", delay_ms=1)
    store.ack(claims["b"].lease_ref, Outcome.SUCCESS)
    clock.advance_ms(1_000)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["c"]
    assert store.promote_due(10) == 1
    assert steer(store).unfinished("q") == 2
    assert steer(store).get_job("a").errors[0].error == "日本"
    steer(store).operator_cancel("a")
    clock.advance_ms(86_400_000)
    assert store.evict_retained(10) == 2
    assert store.claim_duty("d", "w", 1_000)
    assert state_of(store, "c") is State.RETRYABLE


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("statement_timeout", errors.QueryCanceled),
        ("transaction_timeout", errors.TransactionTimeout),
    ],
)
def test_the_time_limit_of_a_role_ends_no_statement(
    postgres, admin, database_url, setting, error
):
    if setting == "transaction_timeout" and admin.info.server_version < 170_000:
        pytest.skip("PostgreSQL 17 brought this limit")
    with (
        hostile_role(admin, {setting: "150ms"}) as role,
        ConnectionPool(
            make_conninfo(database_url, user=role), min_size=0, max_size=3, open=True
        ) as pool,
        clock_of(admin, slow(seconds=0.4)),
    ):
        store = PgStore(pool, SCHEMA)
        assert store.promote_due(1) == 0
        with store.transactional.transaction() as tx:
            tx.connection.execute("SELECT pg_sleep(0.4)")
        assert store.inspect.store_now_ms() == START_MS
        with pool.connection() as connection, pytest.raises(error):
            connection.execute("SELECT pg_sleep(0.4)")


# A clock that is read by every writing call, and that refuses what would be unsafe.
WATCHFUL = """
BEGIN
  IF (current_setting('transaction_isolation'),
      current_setting('transaction_read_only'),
      current_setting('statement_timeout')) <> ('read committed', 'off', '0')
  THEN
    RAISE EXCEPTION 'the settings of the role rule this transaction';
  END IF;
  RETURN (SELECT frozen_at_ms FROM {schema}.headgate_test_clock);
END
"""


def slow(seconds):
    """A clock that takes its time, so that whatever reads it does."""
    return f"BEGIN PERFORM pg_sleep({seconds}); RETURN {START_MS}; END"


@contextmanager
def clock_of(admin, body):
    """Another body for the clock of the store."""
    [[usual]] = admin.execute(
        "SELECT pg_get_functiondef(oid) FROM pg_proc"
        " WHERE proname = 'headgate_now_ms' AND pronamespace = %s::regnamespace",
        [SCHEMA],
    ).fetchall()
    admin.execute(
        sql.SQL(
            "CREATE OR REPLACE FUNCTION {schema}.headgate_now_ms() RETURNS bigint"
            " LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog AS $$"
            + body
            + "$$"
        ).format(schema=sql.Identifier(SCHEMA))
    )
    try:
        yield
    finally:
        admin.execute(usual)


# What a pool gets back


@pytest.fixture
def borrowed(database_url):
    """A caller's pool whose connections have settings of their own."""

    def configure(connection):
        connection.row_factory = dict_row
        connection.prepare_threshold = None
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    with ConnectionPool(
        database_url, min_size=1, max_size=1, configure=configure, open=True, timeout=5
    ) as pool:
        yield pool


def attributes(connection):
    return (
        connection.autocommit,
        connection.isolation_level,
        connection.read_only,
        connection.deferrable,
        connection.row_factory,
        connection.prepare_threshold,
        connection.pgconn.transaction_status,
    )


def settings_of(connection):
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute("SELECT name, setting FROM pg_settings WHERE source = 'session'")
        found = cursor.fetchall()
    connection.rollback()
    return found


def test_a_borrowed_connection_goes_back_as_it_came(postgres, borrowed):
    with borrowed.connection() as connection:
        before = attributes(connection), settings_of(connection)
    store = PgStore(borrowed, SCHEMA, heartbeat_connection=False)
    live_through(store, postgres.clock)
    with pytest.raises(StoreError):
        store.enqueue([envelope("c", payload=b"other")])
    with borrowed.connection() as connection:
        assert (attributes(connection), settings_of(connection)) == before


def test_a_failing_call_gives_its_connection_back(postgres, borrowed):
    db = Database(borrowed, "no such schema", pool_timeout_ms=1_000)
    for _ in range(100):
        with pytest.raises(BackendError, match="no such schema"):
            db.rows("store_now")
        with pytest.raises(BackendError), db.transaction() as session:
            session.rows("store_now")
        with pytest.raises(ZeroDivisionError), db.transaction():
            1 / 0  # noqa: B018
    assert borrowed.get_stats()["pool_available"] == 1
    with borrowed.connection() as connection:
        assert connection.info.transaction_status is TransactionStatus.IDLE


def test_a_statement_that_is_cancelled_leaves_a_connection_without_a_transaction(
    postgres, admin, borrowed
):
    store = PgStore(borrowed, SCHEMA, heartbeat_connection=False)
    with borrowed.connection() as connection:
        pid = connection.info.backend_pid
    cancelled = threading.Event()

    def cancel():
        while not cancelled.is_set():
            admin.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
                " WHERE pid = %s AND wait_event = 'PgSleep'",
                [pid],
            )

    with clock_of(admin, slow(seconds=600)):
        thread = threading.Thread(target=cancel)
        thread.start()
        try:
            with pytest.raises(StoreUnavailable, match="cancel"):
                store.promote_due(1)
        finally:
            cancelled.set()
            thread.join()
    with borrowed.connection() as connection:
        assert connection.info.transaction_status is TransactionStatus.IDLE
    assert store.promote_due(1) == 0


def test_a_pool_without_a_free_connection_is_an_outage(borrowed):
    db = Database(borrowed, SCHEMA, pool_timeout_ms=20)
    with borrowed.connection(), pytest.raises(StoreUnavailable, match="connection"):
        db.rows("store_now")


def test_a_pool_whose_threads_have_ended_is_an_outage(admin, database_url):
    """Nobody opens a connection for one that was lost; who waits is told in time."""
    named = make_conninfo(database_url, application_name="headgate-unkept")
    with ConnectionPool(named, min_size=1, max_size=2, open=True) as pool:
        pool.wait()
        db = Database(pool, SCHEMA, pool_timeout_ms=100)
        for _ in pool._workers:
            pool.run_task(StopWorker(pool))
        for worker in pool._workers:
            worker.join()
        assert db.rows("store_now")
        with pool.connection() as connection:
            ended = connection.info.backend_pid
        end_sessions(admin, ended)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                db.rows("store_now")


def test_a_closed_pool_is_an_outage(database_url):
    pool = ConnectionPool(database_url, min_size=0, max_size=1, open=True)
    pool.close()
    with pytest.raises(StoreUnavailable):
        Database(pool, SCHEMA).rows("store_now")


def test_what_is_kept_for_a_connection_goes_when_another_one_takes_its_place(
    borrowed, caplog
):
    caplog.set_level(logging.ERROR, "psycopg.pool")  # a warning would hold its subject
    db = Database(borrowed, SCHEMA)
    seen = []
    for _ in range(3):
        db.rows("store_now")
        with borrowed.connection() as connection:
            seen.append(weakref.ref(connection))
            connection.close()
        del connection
    db.rows("store_now")
    gc.collect()
    assert [known() for known in seen] == [None] * 3


# Transactions of the store's own


def test_a_transaction_commits_at_the_end_of_its_block(postgres, pool):
    db = Database(pool, SCHEMA)
    with db.transaction() as session:
        session.rows("set_enqueue_limit", queue="a", max_unfinished_jobs=1)
    assert postgres.snapshot().enqueue_limits == {"a": 1}


def test_a_transaction_rolls_back_on_an_exception(postgres, pool):
    db = Database(pool, SCHEMA)

    def fail():
        with db.transaction() as session:
            session.rows("set_enqueue_limit", queue="a", max_unfinished_jobs=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert postgres.snapshot().enqueue_limits == {}


def test_a_swallowed_error_does_not_pass_for_a_commit(postgres, pool):
    db = Database(pool, SCHEMA)

    def swallow():
        with db.transaction() as session:
            session.rows("set_enqueue_limit", queue="a", max_unfinished_jobs=1)
            with suppress(BackendError):
                session.rows("set_enqueue_limit", queue="a", max_unfinished_jobs=-1)

    with pytest.raises(BackendError, match="failed"):
        swallow()
    assert postgres.snapshot().enqueue_limits == {}


def test_a_collision_is_tried_again_and_then_told(pool):
    db = Database(pool, SCHEMA)
    tries = []

    def collide(session):
        tries.append(session)
        session.command(b"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    with pytest.raises(StoreConflict):
        db.run(collide)
    assert len(tries) == 3


def test_a_collision_that_passes_is_not_told(postgres, pool):
    db = Database(pool, SCHEMA)
    tries = []

    def collide_once(session):
        tries.append(session)
        session.rows("set_enqueue_limit", queue="a", max_unfinished_jobs=len(tries))
        if len(tries) == 1:
            session.command(
                b"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$"
            )

    db.run(collide_once)
    assert postgres.snapshot().enqueue_limits == {"a": 2}


# Prepared statements


@pytest.mark.parametrize(("prepare", "kept"), [(True, 1), (False, 0)])
def test_statements_are_kept_on_the_server_unless_told_otherwise(
    postgres, database_url, prepare, kept
):
    store = PgStore.connect(
        database_url, SCHEMA, pool_size=1, prepare=prepare, heartbeat_connection=False
    )
    for _ in range(10):
        admit(store)
    with store.transactional.transaction() as tx:
        [[found]] = tx.connection.execute(
            "SELECT count(*) FROM pg_prepared_statements"
        ).fetchall()
    store.close()
    assert found == kept


def test_sessions_that_are_wiped_between_calls_change_nothing(postgres, database_url):
    """As behind a pooler that gives each transaction another session."""

    def wipe(connection):
        connection.autocommit = True
        connection.execute("DISCARD ALL")
        connection.autocommit = False

    with ConnectionPool(
        database_url, min_size=1, max_size=2, reset=wipe, open=True
    ) as pool:
        store = PgStore(pool, SCHEMA, heartbeat_connection=False)
        for _ in range(8):
            live_through(store, postgres.clock)
            postgres.reset()


# Processes


@pytest.mark.parametrize("call", ["promote", "renew"])
def test_a_store_that_was_made_before_a_fork_says_so_in_the_child(postgres, call):
    """Also on the connection of the heartbeat, which is open by then."""
    store = postgres.open_store()
    enqueue(store, "held")
    ref = claim_one(store).lease_ref
    store.renew([ref], lease_ms=60_000)
    enqueue(store, "a")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if call == "renew":
                store.renew([ref], lease_ms=60_000)
            store.promote_due(1)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "after fork" in told.read()
    assert claim_one(store).envelope.id == "a"
    store.close()


# The connection of the heartbeat


def test_leases_are_renewed_while_handlers_hold_the_whole_pool(postgres, borrowed):
    store = PgStore(borrowed, SCHEMA, pool_timeout_ms=20)
    enqueue(store, "a")
    claim = claim_one(store)
    with borrowed.connection():
        with pytest.raises(StoreUnavailable):
            store.promote_due(1)
        assert store.renew([claim.lease_ref], lease_ms=60_000) == []
    assert steer(store).get_job("a").lease_expires_at_ms == 1_060_000
    store.close()


def test_the_pool_stands_in_when_the_server_takes_no_further_connection(
    postgres, admin, database_url, caplog
):
    with (
        hostile_role(admin, {}) as role,
        ConnectionPool(
            make_conninfo(database_url, user=role), min_size=1, max_size=1, open=True
        ) as pool,
    ):
        pool.wait()
        admin.execute(
            sql.SQL("ALTER ROLE {} CONNECTION LIMIT 1").format(sql.Identifier(role))
        )
        store = PgStore(pool, SCHEMA)
        enqueue(store, "a")
        claim = claim_one(store)
        assert store.renew([claim.lease_ref], lease_ms=60_000) == []
        assert "using the pool" in caplog.text
        store.close()


def test_a_renewal_on_the_pool_has_the_same_limit(
    postgres, admin, database_url, caplog
):
    with (
        hostile_role(admin, {}) as role,
        ConnectionPool(
            make_conninfo(database_url, user=role), min_size=1, max_size=1, open=True
        ) as pool,
    ):
        pool.wait()
        admin.execute(
            sql.SQL("ALTER ROLE {} CONNECTION LIMIT 1").format(sql.Identifier(role))
        )
        store = PgStore(pool, SCHEMA)
        enqueue(store, "a")
        ref = claim_one(store).lease_ref
        with (
            clock_of(admin, slow(seconds=600)),
            pytest.raises(StoreUnavailable, match="no answer within 1000 ms"),
        ):
            store.renew([ref], lease_ms=3_000)
        assert "using the pool" in caplog.text
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event = 'PgSleep'"
        )
        with (
            pool.connection(),
            pytest.raises(StoreUnavailable, match=r"after 1\.00 sec"),
        ):
            store.renew([ref], lease_ms=3_000)
        store.close()


def test_a_renewal_without_an_answer_ends_at_its_limit(postgres, admin, pool):
    store = PgStore(pool, SCHEMA)
    enqueue(store, "a")
    claim = claim_one(store)
    with (
        clock_of(admin, slow(seconds=600)),
        pytest.raises(StoreUnavailable, match="no answer within 1000 ms"),
    ):
        store.renew([claim.lease_ref], lease_ms=3_000)
    # The server has not noticed yet: the rows are locked, which loses no lease.
    assert store.renew([claim.lease_ref], lease_ms=3_000) == []
    [[ended]] = admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event = 'PgSleep'"
    ).fetchall()
    assert ended
    store.close()
