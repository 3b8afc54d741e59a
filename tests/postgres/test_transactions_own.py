"""Transactions that the store opens: ends, effects, steps, and handles gone astray."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.context import JobContext
from headgate_sync.errors import (
    BackendError,
    DuplicateJob,
    InvalidRequest,
    LeaseRejected,
    StoreUnavailable,
)
from headgate_sync.lease import Checkpoint, LeaseRef
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from tests.builders import (
    KIND,
    START_MS,
    admit,
    claim_one,
    enqueue,
    envelope,
    job,
    run_one,
    state_of,
    steer,
)
from tests.postgres.watching import end_sessions, until, wait_until_blocked
from tests.worker.rig import Bench

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


def place(tx, id):
    tx.connection.execute("INSERT INTO orders VALUES (%s)", [id])


def placed(admin):
    return {id for (id,) in admin.execute("SELECT id FROM orders")}


def effects(admin):
    return dict(
        admin.execute("SELECT key, claimed_at_ms FROM headgate.headgate_effect")
    )


def test_a_committed_enqueue_is_admitted_and_a_rolled_back_one_never_was(
    store, transactional
):
    lost = transactional.begin_tx()
    transactional.enqueue_tx(lost, [envelope("t-a")])
    assert admit(store).claims == []
    transactional.rollback_tx(lost)
    kept = transactional.begin_tx()
    transactional.enqueue_tx(kept, [envelope("t-b")])
    transactional.commit_tx(kept)
    assert claim_one(store).envelope.id == "t-b"
    assert admit(store).claims == []
    assert steer(store).unfinished("q") == 1
    assert state_of(store, "t-a") == "deleted"


def test_application_rows_and_jobs_share_the_end_of_the_block(
    store, transactional, orders, admin
):
    with transactional.transaction() as tx:
        place(tx, "kept")
        transactional.enqueue_tx(tx, [envelope("a")])
    with suppress(ZeroDivisionError), transactional.transaction() as tx:
        place(tx, "lost")
        transactional.enqueue_tx(tx, [envelope("b")])
        raise ZeroDivisionError
    assert placed(admin) == {"kept"}
    assert [claim.envelope.id for claim in admit(store).claims] == ["a"]


def test_a_block_may_end_its_transaction_itself(store, transactional):
    with transactional.transaction() as tx:
        transactional.enqueue_tx(tx, [envelope("a")])
        transactional.commit_tx(tx)
    with suppress(ZeroDivisionError), transactional.transaction() as tx:
        transactional.enqueue_tx(tx, [envelope("b")])
        transactional.rollback_tx(tx)
        raise ZeroDivisionError
    assert [claim.envelope.id for claim in admit(store).claims] == ["a"]


def test_a_refusal_leaves_the_rest_of_the_transaction(
    store, transactional, orders, admin
):
    enqueue(store, "holder", unique_key=b"k")
    with transactional.transaction() as tx:
        place(tx, "before")
        with pytest.raises(DuplicateJob):
            transactional.enqueue_tx(tx, [envelope("a", unique_key=b"k")])
        place(tx, "after")
        transactional.enqueue_tx(tx, [envelope("b")])
    assert placed(admin) == {"before", "after"}
    assert {claim.envelope.id for claim in admit(store).claims} == {"holder", "b"}


# Effects


def test_an_effect_is_claimed_once_and_a_rolled_back_claim_never_was(
    transactional, admin
):
    tx = transactional.begin_tx()
    assert transactional.claim_effect(tx, "e")
    assert not transactional.claim_effect(tx, "e")
    transactional.rollback_tx(tx)
    with transactional.transaction() as tx:
        assert transactional.claim_effect(tx, "e")
        assert transactional.claim_effect(tx, "other")
    with transactional.transaction() as tx:
        assert not transactional.claim_effect(tx, "e")
    assert effects(admin) == {"e": START_MS, "other": START_MS}


@pytest.mark.parametrize("committed", [True, False])
def test_a_second_claim_of_an_effect_waits_for_the_first(
    transactional, admin, committed
):
    first = transactional.begin_tx()
    assert transactional.claim_effect(first, "e")

    def claim():
        with transactional.transaction() as tx:
            return transactional.claim_effect(tx, "e")

    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(claim)
        wait_until_blocked(admin, first.connection)
        if committed:
            transactional.commit_tx(first)
        else:
            transactional.rollback_tx(first)
        assert second.result(SOON_S) is not committed
    assert list(effects(admin)) == ["e"]


@pytest.mark.parametrize("key", ["", "x" * 1025, "ü" * 513, "nul\0", 5, None])
def test_a_malformed_effect_key_is_refused(transactional, key):
    with transactional.transaction() as tx:
        with pytest.raises(InvalidRequest):
            transactional.claim_effect(tx, key)
        assert transactional.claim_effect(tx, "x" * 1024)


def test_an_effect_and_the_completion_are_one_commit(
    store, transactional, orders, admin
):
    claim = run_one(store, "a")

    def once(tx):
        if not transactional.claim_effect(tx, "a"):
            return False
        place(tx, "a")
        transactional.complete_tx(tx, claim.lease_ref)
        return True

    with transactional.transaction() as tx:
        assert once(tx)
    with transactional.transaction() as again:
        assert not once(again)
    with pytest.raises(LeaseRejected):
        store.ack(claim.lease_ref, Outcome.RETRY)
    assert state_of(store, "a") == "completed"
    assert job(store, "a").attempt == 0
    assert placed(admin) == {"a"}
    assert list(effects(admin)) == ["a"]


def test_a_job_cancelled_meanwhile_takes_its_effect_with_it(
    store, transactional, orders, admin
):
    enqueue(store, "a", "b")
    claims = {claim.envelope.id: claim for claim in admit(store).claims}

    def once(id):
        with transactional.transaction() as tx:
            transactional.claim_effect(tx, id)
            place(tx, id)
            if id == "a":
                steer(store).operator_cancel("a")
            transactional.complete_tx(tx, claims[id].lease_ref)

    with pytest.raises(LeaseRejected):
        once("a")
    once("b")
    assert (state_of(store, "a"), state_of(store, "b")) == ("cancelled", "completed")
    assert placed(admin) == {"b"}
    assert list(effects(admin)) == ["b"]


def test_a_step_and_its_mark_are_one_commit(store, transactional, orders, admin):
    claim = run_one(store, "a")
    done = Checkpoint(completed_steps=("charge",))
    with suppress(ZeroDivisionError), transactional.transaction() as tx:
        place(tx, "lost")
        transactional.checkpoint_tx(tx, claim.lease_ref, done)
        raise ZeroDivisionError
    with transactional.transaction() as tx:
        assert transactional.claim_effect(tx, "a/charge")
        place(tx, "charged")
        transactional.checkpoint_tx(tx, claim.lease_ref, done)
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    again = claim_one(store)
    assert again.checkpoint == done
    assert placed(admin) == {"charged"}
    with transactional.transaction() as tx:
        assert not transactional.claim_effect(tx, "a/charge")


def test_a_checkpoint_and_the_completion_fit_into_one_transaction(store, transactional):
    claim = run_one(store, "a", retention_ms=0)
    with transactional.transaction() as tx:
        transactional.checkpoint_tx(
            tx, claim.lease_ref, Checkpoint(completed_steps=("s",))
        )
        transactional.complete_tx(tx, claim.lease_ref, actual_weight=3)
        assert state_of(store, "a") == "running"
    assert state_of(store, "a") == "deleted"
    assert steer(store).unfinished("q") == 0


def test_a_superseded_holder_is_told_and_may_still_roll_back(
    store, transactional, orders, admin
):
    claim = run_one(store, "a")
    stale = LeaseRef("a", claim.lease_id, claim.fence + 1)
    for call in (
        lambda tx: transactional.checkpoint_tx(tx, stale, Checkpoint()),
        lambda tx: transactional.complete_tx(tx, stale),
    ):
        tx = transactional.begin_tx()
        place(tx, "lost")
        with pytest.raises(LeaseRejected) as rejected:
            call(tx)
        assert not rejected.value.missing
        place(tx, "usable")
        transactional.rollback_tx(tx)
    with transactional.transaction() as tx, pytest.raises(LeaseRejected) as rejected:
        transactional.complete_tx(tx, LeaseRef("gone", "L", 1))
    assert rejected.value.missing
    assert placed(admin) == set()
    assert state_of(store, "a") == "running"


# Handles


def calls_on(transactional, ref):
    return {
        "commit": transactional.commit_tx,
        "rollback": transactional.rollback_tx,
        "enqueue": lambda tx: transactional.enqueue_tx(tx, [envelope("x")]),
        "effect": lambda tx: transactional.claim_effect(tx, "x"),
        "checkpoint": lambda tx: transactional.checkpoint_tx(tx, ref, Checkpoint()),
        "complete": lambda tx: transactional.complete_tx(tx, ref),
    }


CALLS = ("commit", "rollback", "enqueue", "effect", "checkpoint", "complete")


@pytest.mark.parametrize("name", CALLS)
def test_a_finished_handle_is_refused(store, transactional, name):
    ref = run_one(store, "a").lease_ref
    call = calls_on(transactional, ref)[name]
    for end in (transactional.commit_tx, transactional.rollback_tx):
        tx = transactional.begin_tx()
        end(tx)
        with pytest.raises(InvalidRequest, match="finished"):
            call(tx)
    assert state_of(store, "a") == "running"


@pytest.mark.parametrize("name", CALLS)
def test_a_handle_of_another_store_or_type_is_refused(
    postgres, store, transactional, name
):
    ref = run_one(store, "a").lease_ref
    call = calls_on(transactional, ref)[name]
    other = postgres.open_store().transactional
    with other.transaction() as tx, pytest.raises(InvalidRequest, match="this store"):
        call(tx)
    for stranger in (None, object(), "tx", 5):
        with pytest.raises(InvalidRequest, match="this store"):
            call(stranger)
    assert state_of(store, "a") == "running"


@pytest.mark.parametrize("name", CALLS)
def test_a_handle_belongs_to_its_thread(store, transactional, name):
    ref = run_one(store, "a").lease_ref
    call = calls_on(transactional, ref)[name]
    tx = transactional.begin_tx()
    with ThreadPoolExecutor(1) as threads:
        stranger = threads.submit(call, tx)
        with pytest.raises(InvalidRequest, match="another thread"):
            stranger.result(SOON_S)
    transactional.rollback_tx(tx)
    assert state_of(store, "a") == "running"


def test_a_commit_that_would_commit_nothing_says_so(
    store, transactional, orders, admin
):
    tx = transactional.begin_tx()
    transactional.enqueue_tx(tx, [envelope("a")])
    with pytest.raises(psycopg.Error):
        tx.connection.execute("SELECT 1 / 0")
    with pytest.raises(InvalidRequest, match="aborted"):
        transactional.enqueue_tx(tx, [envelope("b")])
    with pytest.raises(BackendError):
        transactional.commit_tx(tx)
    tx = transactional.begin_tx()
    place(tx, "by itself")
    tx.connection.execute("COMMIT")
    with pytest.raises(InvalidRequest):
        transactional.enqueue_tx(tx, [envelope("c")])
    with pytest.raises(BackendError):
        transactional.commit_tx(tx)
    assert admit(store).claims == []
    assert placed(admin) == {"by itself"}
    enqueue(store, "works")


def test_a_lost_connection_is_an_outage_and_its_place_in_the_pool_is_filled(
    store, transactional, admin
):
    for _ in range(2):
        tx = transactional.begin_tx()
        transactional.enqueue_tx(tx, [envelope("a")])
        end_sessions(admin, tx.connection.info.backend_pid)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                transactional.enqueue_tx(tx, [envelope("b")])
        with pytest.raises(StoreUnavailable):
            transactional.commit_tx(tx)
    tx = transactional.begin_tx()
    transactional.enqueue_tx(tx, [envelope("a")])
    end_sessions(admin, tx.connection.info.backend_pid)
    transactional.rollback_tx(tx)
    assert admit(store).claims == []


@pytest.fixture
def small(database_url, postgres) -> Iterator[ConnectionPool]:
    """A pool of one connection."""
    with ConnectionPool(
        database_url, min_size=1, max_size=1, timeout=SOON_S, open=True
    ) as pool:
        yield pool


def in_transaction(admin, pid):
    found = admin.execute(
        "SELECT state FROM pg_stat_activity WHERE pid = %s", [pid]
    ).fetchone()
    return found is not None and found[0].startswith("idle in transaction")


def test_a_handle_that_is_dropped_rolls_back_and_frees_its_connection(small, admin):
    store = PgStore(small)
    tx = store.transactional.begin_tx()
    store.transactional.enqueue_tx(tx, [envelope("a")])
    pid = tx.connection.info.backend_pid
    del tx
    gc.collect()
    until(lambda: not in_transaction(admin, pid), "the end of the dropped transaction")
    assert admit(store).claims == []
    enqueue(store, "b")
    assert claim_one(store).envelope.id == "b"
    with store.transactional.transaction() as tx:
        assert tx.connection.info.backend_pid != pid


def test_a_handle_in_a_cycle_is_cleaned_up_with_it(small):
    store = PgStore(small)

    class Holder:
        pass

    holder = Holder()
    holder.itself = holder
    holder.tx = store.transactional.begin_tx()
    store.transactional.enqueue_tx(holder.tx, [envelope("a")])
    del holder
    gc.collect()
    assert admit(store).claims == []


def test_every_way_to_end_gives_the_connection_back_as_it_was(small):
    store = PgStore(small)
    transactional = store.transactional
    with small.connection() as connection:
        attributes = (connection.autocommit, connection.row_factory)
    enqueue(store, "a", unique_key=b"k")
    for _ in range(3):
        with transactional.transaction() as tx:
            transactional.enqueue_tx(tx, [envelope("b")])
        transactional.rollback_tx(transactional.begin_tx())
        with pytest.raises(ZeroDivisionError), transactional.transaction():
            raise ZeroDivisionError
        with pytest.raises(DuplicateJob), transactional.transaction() as tx:
            transactional.enqueue_tx(tx, [envelope("c", unique_key=b"k")])
        tx = transactional.begin_tx()
        with pytest.raises(psycopg.Error):
            tx.connection.execute("SELECT 1 / 0")
        transactional.rollback_tx(tx)
    with small.connection() as again:
        assert again is connection
        assert (again.autocommit, again.row_factory) == attributes
        assert again.info.transaction_status.name == "IDLE"


def test_a_forked_child_leaves_open_transactions_of_its_parent_alone(
    store, transactional
):
    with transactional.transaction() as tx:
        transactional.enqueue_tx(tx, [envelope("a")])
        child = os.fork()
        if child == 0:
            del tx
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        transactional.enqueue_tx(tx, [envelope("b")])
    assert len(admit(store).claims) == 2


def test_transactions_of_many_threads_need_one_connection_each(database_url, postgres):
    """A call inside a transaction takes no second connection, so nobody starves."""
    with ConnectionPool(
        database_url, min_size=0, max_size=4, timeout=SOON_S, open=True
    ) as pool:
        transactional = PgStore(pool).transactional
        inside = threading.Barrier(4)

        def work(name):
            with transactional.transaction() as tx:
                inside.wait(SOON_S)
                transactional.claim_effect(tx, name)
                transactional.enqueue_tx(tx, [envelope(name)])

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, "abcd"))
        assert pool.get_stats()["pool_size"] == 4
        assert len(admit(postgres.open_store()).claims) == 4


# Second connections


@pytest.mark.parametrize("debugging", [True, False])
def test_debugging_tells_of_a_second_connection_inside_of_a_transaction(
    postgres, monkeypatch, caplog, debugging
):
    monkeypatch.setenv("HEADGATE_DEBUG", "1" if debugging else "0")
    store = postgres.open_store()
    registry = Registry()

    @registry.task(KIND)
    def handler(ctx: JobContext) -> None:
        ctx.once(lambda tx: tx.connection.execute("SELECT 1"))

    @registry.task("careless")
    def careless(ctx: JobContext) -> None:
        ctx.once(lambda tx: ctx.client.enqueue(envelope("beside")))

    store.enqueue([envelope("a", payload=b"{}")])
    bench = Bench(store, registry)
    bench.run_next()
    assert caplog.records == []
    store.enqueue([envelope("b", kind="careless", payload=b"{}")])
    bench.run_next()
    told = [r for r in caplog.records if r.name == "headgate_sync.postgres.database"]
    assert len(told) == debugging
    for record in told:
        assert record.getMessage().startswith("a second connection is taken")
        assert "in careless" in record.stack_info
    caplog.clear()
    store.enqueue([envelope("c")])
    assert caplog.records == []
