"""Jobs in a transaction of the application, which stays the application's alone."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor
from psycopg.adapt import Dumper, Loader
from psycopg.rows import class_row, dict_row, scalar_row

from headgate_sync.envelope import UNIQUE_REPLACE_ALL
from headgate_sync.errors import (
    BackendError,
    Backpressure,
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    LeaseRejected,
    StoreConflict,
    StoreUnavailable,
)
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from tests.backends import unchanged_by
from tests.builders import (
    admit,
    claim_one,
    crash_until_quarantined,
    enqueue,
    envelope,
    envelopes,
    job,
    run_one,
    state_of,
    steer,
)
from tests.postgres.watching import end_sessions

SOON_S = 20


@pytest.fixture
def store(postgres) -> PgStore:
    return postgres.open_store()


@pytest.fixture
def transactional(store):
    return store.transactional


@pytest.fixture
def orders(admin) -> Iterator[str]:
    """A table of the application."""
    admin.execute("CREATE TABLE orders (id text PRIMARY KEY)")
    yield "orders"
    admin.execute("DROP TABLE orders")


@pytest.fixture
def caller(database_url, orders) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        yield connection
        if not connection.closed:
            connection.rollback()


def place(connection, id):
    connection.execute("INSERT INTO orders VALUES (%s)", [id])


def placed(admin):
    return {id for (id,) in admin.execute("SELECT id FROM orders")}


# Visibility


def test_the_callers_commit_shows_the_order_and_the_job(
    store, transactional, caller, admin
):
    place(caller, "o")
    tx = transactional.join(caller)
    transactional.enqueue_tx(tx, [envelope("a", unique_key=b"k", tags=("t",))])
    assert admit(store).claims == []
    assert state_of(store, "a") == "deleted"
    assert placed(admin) == set()
    caller.commit()
    assert placed(admin) == {"o"}
    assert claim_one(store).envelope.tags == ("t",)


def test_the_callers_rollback_leaves_neither_and_a_sibling_is_admitted(
    store, postgres, transactional, caller, admin
):
    enqueue(store, "sibling")
    before = postgres.image()
    place(caller, "o")
    tx = transactional.join(caller)
    transactional.enqueue_tx(tx, [envelope("a", unique_key=b"k", tags=("t",))])
    transactional.enqueue_tx(
        tx, envelopes("b", "c", unique_key=None, partition_key="p")
    )
    caller.rollback()
    assert postgres.image() == before
    assert placed(admin) == set()
    assert claim_one(store).envelope.id == "sibling"
    assert admit(store).claims == []
    enqueue(store, "next", unique_key=b"k")


def test_an_idle_connection_opens_its_transaction_with_the_enqueue(
    store, transactional, caller
):
    tx = transactional.join(caller)
    transactional.enqueue_tx(tx, [envelope("a")])
    caller.rollback()
    assert admit(store).claims == []
    transactional.enqueue_tx(tx, [envelope("b")])
    caller.commit()
    assert claim_one(store).envelope.id == "b"


def test_a_block_of_the_driver_decides_like_a_transaction(
    store, transactional, database_url
):
    with psycopg.connect(database_url, autocommit=True) as connection:
        with connection.transaction():
            tx = transactional.join(connection)
            transactional.enqueue_tx(tx, [envelope("a")])
            with suppress(ZeroDivisionError), connection.transaction():
                transactional.enqueue_tx(tx, [envelope("lost")])
                raise ZeroDivisionError
        with pytest.raises(InvalidRequest, match="autocommit"):
            transactional.enqueue_tx(tx, [envelope("late")])
    assert [claim.envelope.id for claim in admit(store).claims] == ["a"]


def test_jobs_of_one_transaction_see_each_other(store, transactional, caller):
    tx = transactional.join(caller)
    transactional.enqueue_tx(tx, [envelope("a", unique_key=b"k")])
    transactional.enqueue_tx(tx, [envelope("a", unique_key=b"k")])
    with pytest.raises(DuplicateJob) as duplicate:
        transactional.enqueue_tx(tx, [envelope("b", unique_key=b"k")])
    assert duplicate.value.existing_id == "a"
    with pytest.raises(IdConflict):
        transactional.enqueue_tx(tx, [envelope("a", payload=b"other")])
    caller.commit()
    assert steer(store).unfinished("q") == 1


# What may be joined


@pytest.mark.parametrize("stranger", [None, 5, "postgresql://", object()])
def test_what_is_no_connection_is_refused(transactional, stranger):
    with pytest.raises(InvalidRequest, match=r"psycopg\.Connection"):
        transactional.join(stranger)


def test_an_asynchronous_connection_is_refused(transactional):
    with pytest.raises(InvalidRequest, match="AsyncConnection"):
        transactional.join(object.__new__(psycopg.AsyncConnection))


def test_a_connection_in_autocommit_without_a_transaction_is_refused(
    store, transactional, database_url
):
    with (
        psycopg.connect(database_url, autocommit=True) as connection,
        pytest.raises(InvalidRequest, match="no open transaction"),
    ):
        transactional.enqueue_tx(transactional.join(connection), [envelope("a")])
    assert admit(store).claims == []


def test_a_closed_connection_is_refused(transactional, caller):
    tx = transactional.join(caller)
    caller.close()
    for call in (
        lambda: transactional.join(caller),
        lambda: transactional.enqueue_tx(tx, [envelope("a")]),
    ):
        with pytest.raises(InvalidRequest, match="closed"):
            call()


def test_an_aborted_transaction_is_refused_until_its_owner_ends_it(
    store, transactional, caller
):
    tx = transactional.join(caller)
    with pytest.raises(psycopg.Error):
        caller.execute("SELECT 1 / 0")
    for call in (
        lambda: transactional.join(caller),
        lambda: transactional.enqueue_tx(tx, [envelope("a")]),
        lambda: transactional.claim_effect(tx, "e"),
    ):
        with pytest.raises(InvalidRequest, match="aborted by an error: roll it back"):
            call()
    caller.rollback()
    transactional.enqueue_tx(tx, [envelope("a")])
    caller.commit()
    assert claim_one(store).envelope.id == "a"


def test_a_connection_that_is_busy_is_refused_instead_of_waited_for(
    transactional, caller
):
    tx = transactional.join(caller)
    with caller.cursor() as cursor, cursor.copy("COPY orders FROM STDIN") as copy:
        copy.write_row(["o"])
        with pytest.raises(InvalidRequest, match="busy"):
            transactional.enqueue_tx(tx, [envelope("a")])


def test_a_joined_transaction_is_ended_by_its_owner_alone(store, transactional, caller):
    tx = transactional.join(caller)
    transactional.enqueue_tx(tx, [envelope("a")])
    for end in (transactional.commit_tx, transactional.rollback_tx):
        with pytest.raises(InvalidRequest, match="owner"):
            end(tx)
    assert caller.info.transaction_status.name == "INTRANS"
    caller.commit()
    assert claim_one(store).envelope.id == "a"


def test_a_joined_handle_belongs_to_its_thread_and_store(
    postgres, transactional, caller
):
    tx = transactional.join(caller)
    with ThreadPoolExecutor(1) as threads:
        stranger = threads.submit(transactional.enqueue_tx, tx, [envelope("a")])
        with pytest.raises(InvalidRequest, match="thread"):
            stranger.result(SOON_S)
    with pytest.raises(InvalidRequest, match="this store"):
        postgres.open_store().transactional.enqueue_tx(tx, [envelope("a")])


def test_a_handle_that_is_dropped_leaves_the_callers_connection_alone(
    store, transactional, caller
):
    transactional.enqueue_tx(transactional.join(caller), [envelope("a")])
    transactional.enqueue_tx(transactional.join(caller), [envelope("b")])
    caller.commit()
    assert len(admit(store).claims) == 2


# Refusals


@pytest.fixture
def refused(store, postgres):
    """Batches that are refused, each with the class of the refusal."""
    poison = run_one(store, "poison", payload=b"poison")
    crash_until_quarantined(store, postgres.clock, poison)
    enqueue(store, "holder", unique_key=b"k")
    enqueue(store, "throttled", unique_key=b"w", unique_window_ms=10_000_000_000)
    run_one(store, "running", queue="r", unique_key=b"r")
    steer(store).set_enqueue_limit("full", 0)
    return {
        "id": ([envelope("holder", payload=b"other")], IdConflict),
        "id in a batch": (
            [*envelopes("x", "y"), envelope("holder", payload=b"other")],
            IdConflict,
        ),
        "id twice": (envelopes("x", "x"), IdConflict),
        "key": ([envelope("x", unique_key=b"k")], DuplicateJob),
        "key in a batch": (
            [*envelopes("x", "y"), envelope("z", unique_key=b"k")],
            DuplicateJob,
        ),
        "key twice": (envelopes("x", "y", unique_key=b"n"), DuplicateJob),
        "window": (
            [envelope("x", unique_key=b"w", unique_window_ms=5)],
            DuplicateJob,
        ),
        "running holder": (
            [envelope("x", unique_key=b"r", unique_replace=UNIQUE_REPLACE_ALL)],
            DuplicateJob,
        ),
        "full": ([envelope("x", queue="full")], Backpressure),
        "full in a batch": (
            [*envelopes("x", "y"), envelope("z", queue="full")],
            Backpressure,
        ),
        "quarantined": ([envelope("x", payload=b"poison")], FingerprintQuarantined),
        "quarantined in a batch": (
            [*envelopes("x", "y"), envelope("z", payload=b"poison")],
            FingerprintQuarantined,
        ),
        "too many": (envelopes(*map(str, range(1001))), InvalidRequest),
        "no envelope": (["x"], InvalidRequest),
    }


def test_after_every_refusal_the_caller_goes_on_and_commits(
    postgres, transactional, caller, admin, refused
):
    tx = transactional.join(caller)
    for name, (batch, expected) in refused.items():
        place(caller, f"before {name}")

        def call(batch=batch):
            transactional.enqueue_tx(tx, batch)

        error = unchanged_by(postgres, call)
        assert type(error) is expected, name
        place(caller, f"after {name}")
    before = postgres.image()
    caller.commit()
    assert postgres.image() == before
    assert len(placed(admin)) == 2 * len(refused)


def test_every_refusal_alone_leaves_nothing_behind(
    postgres, transactional, caller, admin, refused
):
    for name, (batch, expected) in refused.items():
        tx = transactional.join(caller)

        def call(tx=tx, batch=batch):
            try:
                transactional.enqueue_tx(tx, batch)
            finally:
                caller.commit()

        error = unchanged_by(postgres, call)
        assert type(error) is expected, name


def test_a_replacement_waits_for_the_callers_commit(store, transactional, caller):
    enqueue(store, "a", unique_key=b"k", priority=1)
    tx = transactional.join(caller)

    def replace():
        with pytest.raises(DuplicateJob) as duplicate:
            transactional.enqueue_tx(
                tx,
                [
                    envelope(
                        "b",
                        unique_key=b"k",
                        unique_replace=UNIQUE_REPLACE_ALL,
                        priority=9,
                        payload=b"new",
                    )
                ],
            )
        assert duplicate.value.replaced

    replace()
    caller.rollback()
    assert job(store, "a").priority == 1
    replace()
    caller.commit()
    assert (job(store, "a").priority, job(store, "a").payload) == (9, b"new")


def test_a_rejected_lease_leaves_the_callers_transaction_usable(
    store, transactional, caller, admin
):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    tx = transactional.join(caller)
    place(caller, "before")
    with pytest.raises(LeaseRejected):
        transactional.checkpoint_tx(tx, claim.lease_ref, Checkpoint())
    steer(store).delete_job("a")
    with pytest.raises(LeaseRejected):
        transactional.complete_tx(tx, claim.lease_ref)
    place(caller, "after")
    caller.commit()
    assert placed(admin) == {"before", "after"}


def test_a_hostile_level_of_isolation_is_a_conflict_at_once(
    store, transactional, caller, database_url
):
    caller.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    place(caller, "o")
    with transactional.transaction() as other:
        transactional.claim_effect(other, "e")
    enqueue(store, "a", unique_key=b"k")
    tx = transactional.join(caller)
    with pytest.raises(StoreConflict) as conflict:
        transactional.enqueue_tx(tx, [envelope("b", unique_key=b"k")])
    assert conflict.value.sqlstate == "40001"
    caller.rollback()
    caller.execute("SELECT FROM orders")
    with transactional.transaction() as other:
        transactional.claim_effect(other, "late")
    with pytest.raises(StoreConflict):
        transactional.claim_effect(tx, "late")
    caller.rollback()
    transactional.enqueue_tx(tx, [envelope("c")])
    caller.commit()
    assert {claim.envelope.id for claim in admit(store).claims} == {"a", "c"}


def test_a_lock_the_caller_will_not_wait_for_is_a_conflict(
    store, transactional, caller, database_url
):
    with psycopg.connect(database_url) as other:
        transactional.enqueue_tx(transactional.join(other), [envelope("a")])
        caller.execute("SET LOCAL lock_timeout = '50ms'")
        with pytest.raises(StoreConflict):
            transactional.enqueue_tx(transactional.join(caller), [envelope("a")])


def test_a_read_only_transaction_takes_in_nothing(store, transactional, caller):
    caller.execute("SET TRANSACTION READ ONLY")
    with pytest.raises(StoreUnavailable, match=r"is read-only: .* READ WRITE"):
        transactional.enqueue_tx(transactional.join(caller), [envelope("a")])


def test_a_database_without_the_schema_is_a_fault_and_no_outage(
    store, transactional, server_url
):
    enqueue(store, "a")
    with psycopg.connect(server_url, dbname="template1") as elsewhere:
        tx = transactional.join(elsewhere)
        with pytest.raises(BackendError) as raised:
            transactional.enqueue_tx(tx, [envelope("b")])
    assert "does not exist in database template1: a transaction" in str(raised.value)


def test_a_killed_transaction_commits_nothing(store, transactional, caller, admin):
    tx = transactional.join(caller)
    transactional.enqueue_tx(tx, [envelope("a")])
    end_sessions(admin, caller.info.backend_pid)
    with pytest.raises(StoreUnavailable):
        transactional.enqueue_tx(tx, [envelope("b")])
    with pytest.raises(InvalidRequest, match="closed"):
        transactional.enqueue_tx(tx, [envelope("c")])
    assert admit(store).claims == []


# Whatever the application has made of its connection


class Record:
    def __init__(self, **columns: object) -> None:
        raise AssertionError("the application's rows were made from the store's")


def unlike_tuples(connection):
    connection.row_factory = class_row(Record)


def of_dicts(connection):
    connection.row_factory = dict_row


def of_scalars(connection):
    connection.row_factory = scalar_row


def of_client_cursors(connection):
    connection.cursor_factory = ClientCursor


def never_prepared(connection):
    connection.prepare_threshold = None


def prepared_at_once(connection):
    connection.prepare_threshold = 0


def in_a_strange_path(connection):
    connection.execute("CREATE TEMPORARY TABLE headgate_job (id text)")
    connection.execute("SET LOCAL search_path = pg_temp, nowhere")


def behind_a_strange_path(connection):
    """Functions and operators of the application stand before the server's own."""
    connection.execute("CREATE SCHEMA IF NOT EXISTS strange")
    for body in (
        "FUNCTION strange.array_position(text[], text) RETURNS integer",
        "FUNCTION strange.mod(bigint, integer) RETURNS bigint",
        "FUNCTION strange.pg_notify(text, text) RETURNS void",
        "FUNCTION strange.cardinality(text[]) RETURNS integer",
    ):
        connection.execute(f"CREATE OR REPLACE {body} LANGUAGE sql AS 'SELECT 1 / 0'")
    connection.execute("SET LOCAL search_path = strange, pg_catalog")


def with_other_styles(connection):
    for setting in (
        "DateStyle = 'German'",
        "TimeZone = 'Pacific/Apia'",
        "bytea_output = 'escape'",
        "extra_float_digits = 0",
        "standard_conforming_strings = off",
        "plan_cache_mode = force_custom_plan",
        "enable_indexscan = off",
        "client_encoding = 'LATIN1'",
    ):
        connection.execute(f"SET LOCAL {setting}")


class ShoutingLoader(Loader):
    def load(self, data):
        return bytes(data).upper()


class ShoutingDumper(Dumper):
    def dump(self, obj):
        return str(obj).upper().encode()


def of_other_values(connection):
    for name in ("text", "text[]", "int8", "bool"):
        connection.adapters.register_loader(name, ShoutingLoader)
    connection.adapters.register_dumper(str, ShoutingDumper)


def without_an_encoding(connection):
    connection.execute("SET LOCAL client_encoding = 'SQL_ASCII'")


@pytest.mark.parametrize(
    "made",
    [
        unlike_tuples,
        of_dicts,
        of_scalars,
        of_client_cursors,
        never_prepared,
        prepared_at_once,
        in_a_strange_path,
        behind_a_strange_path,
        with_other_styles,
        of_other_values,
        without_an_encoding,
    ],
)
def test_the_connection_works_and_stays_as_the_application_made_it(
    store, transactional, caller, admin, made
):
    claim = run_one(store, "mine")
    enqueue(store, "holder", unique_key=b"k")
    made(caller)
    attributes = (
        caller.row_factory,
        caller.cursor_factory,
        caller.prepare_threshold,
        caller.autocommit,
        caller.isolation_level,
    )
    for round in range(7):  # also past the point where the driver prepares statements
        tx = transactional.join(caller)
        transactional.enqueue_tx(tx, [envelope(f"one{round}", tags=("t",))])
        transactional.enqueue_tx(tx, envelopes(f"a{round}", f"b{round}"))
        with pytest.raises(DuplicateJob) as duplicate:
            transactional.enqueue_tx(tx, [envelope("x", unique_key=b"k")])
        assert duplicate.value.existing_id == "holder"
        with pytest.raises(IdConflict):
            transactional.enqueue_tx(tx, [envelope("holder", payload=b"other")])
        assert transactional.claim_effect(tx, f"e{round}")
        assert not transactional.claim_effect(tx, f"e{round}")
        transactional.checkpoint_tx(
            tx, claim.lease_ref, Checkpoint(completed_steps=(f"s{round}",))
        )
    transactional.complete_tx(tx, claim.lease_ref)
    assert attributes == (
        caller.row_factory,
        caller.cursor_factory,
        caller.prepare_threshold,
        caller.autocommit,
        caller.isolation_level,
    )
    caller.commit()
    admin.execute("DROP SCHEMA IF EXISTS strange CASCADE")
    assert state_of(store, "mine") == "completed"
    assert steer(store).unfinished("q") == 22


def test_the_first_look_at_the_schema_may_be_on_any_connection(store, postgres, caller):
    enqueue(store, "é", unique_key=b"k")
    fresh = postgres.open_store()
    without_an_encoding(caller)
    of_other_values(caller)
    tx = fresh.transactional.join(caller)
    with pytest.raises(DuplicateJob) as duplicate:
        fresh.transactional.enqueue_tx(tx, [envelope("x", unique_key=b"k")])
    assert duplicate.value.existing_id == "é"


def test_a_pipeline_of_the_application_is_served_in_its_order(
    store, transactional, caller, admin
):
    enqueue(store, "holder", unique_key=b"k")
    with caller.pipeline():
        place(caller, "queued")
        tx = transactional.join(caller)
        transactional.enqueue_tx(tx, [envelope("a")])
        place(caller, "between")
        with pytest.raises(DuplicateJob):
            transactional.enqueue_tx(tx, [envelope("x", unique_key=b"k")])
        with pytest.raises(IdConflict):
            transactional.enqueue_tx(
                tx, [envelope("b"), envelope("holder", payload=b"other")]
            )
        assert transactional.claim_effect(tx, "e")
        place(caller, "after")
        transactional.enqueue_tx(tx, envelopes("c", "d"))
    caller.commit()
    assert placed(admin) == {"queued", "between", "after"}
    assert steer(store).unfinished("q") == 4


def test_a_failure_that_the_application_has_queued_is_found_before_the_enqueue(
    store, transactional, caller
):
    with suppress(psycopg.Error), caller.pipeline():
        tx = transactional.join(caller)
        caller.execute("SELECT 1 / 0")
        with pytest.raises(InvalidRequest, match="aborted"):
            transactional.enqueue_tx(tx, [envelope("a")])
        caller.execute("SELECT 1")
    caller.rollback()
    transactional.enqueue_tx(tx, [envelope("b")])
    caller.commit()
    assert claim_one(store).envelope.id == "b"


def test_nothing_but_its_own_statements_is_sent_on_a_borrowed_connection(
    store, transactional, caller, refused
):
    """No begin, no end, no setting, no savepoint: read from what the driver sends."""
    claim = run_one(store, "mine", queue="mine")
    place(caller, "o")
    tx = transactional.join(caller)
    with tempfile.TemporaryFile() as trace:
        caller.pgconn.trace(trace.fileno())
        transactional.enqueue_tx(tx, [envelope("a")])
        transactional.enqueue_tx(tx, envelopes("b", "c"))
        for batch, expected in refused.values():
            with pytest.raises(expected):
                transactional.enqueue_tx(tx, batch)
        transactional.claim_effect(tx, "e")
        transactional.checkpoint_tx(tx, claim.lease_ref, Checkpoint())
        transactional.complete_tx(tx, claim.lease_ref)
        caller.pgconn.untrace()
        trace.seek(0)
        sent = trace.read().decode()
    statements = re.findall(r'\tF\t\d+\t(?:Query|Parse)\t (?:"[^"]*" )?"(.*)', sent)
    assert len(statements) > 10
    forbidden = re.compile(
        r"\b(BEGIN|START|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SET|RESET|DISCARD|LISTEN)\b"
    )
    for statement in statements:
        text = re.sub(r"--.*?\\n", "", statement)
        assert not forbidden.search(text), statement
