"""Enqueues whose database is away, or whose answer got lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from headgate_sync.errors import (
    DuplicateJob,
    IdConflict,
    InvalidRequest,
    StoreUnavailable,
)
from headgate_sync.postgres.store import PgStore
from tests.builders import enqueue, envelope, envelopes, state_of, steer
from tests.concurrency.threads import outcome_of
from tests.postgres.proxy import proxy_to
from tests.postgres.watching import until


@pytest.fixture
def store(postgres) -> PgStore:
    return postgres.open_store()


def test_a_malformed_request_is_told_from_an_outage(tmp_path):
    """What needs no database is judged without one."""
    store = PgStore.connect(f"host={tmp_path} dbname=x", pool_timeout_ms=100)
    with pytest.raises(StoreUnavailable) as outage:
        enqueue(store, "a")
    assert isinstance(outage.value.__cause__, psycopg.OperationalError)
    with pytest.raises(InvalidRequest):
        enqueue(store, "")
    with pytest.raises(InvalidRequest):
        enqueue(store, *map(str, range(1001)))
    with pytest.raises(IdConflict):
        enqueue(store, "a", "a")
    store.enqueue([])
    with pytest.raises(StoreUnavailable):
        store.transactional.begin_tx()
    store.close()


@pytest.mark.parametrize("others", [(), ("b", "c")], ids=["alone", "in a batch"])
def test_a_repeated_enqueue_joins_the_one_whose_answer_was_lost(
    store, database_url, others
):
    """The commit happened; only the client does not know."""
    with proxy_to(database_url) as proxy:
        cut_off = PgStore.connect(proxy.conninfo, pool_size=1)
        enqueue(cut_off, "warm")
        proxy.answers = lambda data: b""
        batch = envelopes("a", *others, unique_key=None)

        with psycopg.connect(database_url, autocommit=True) as watcher:

            def send():
                return outcome_of(lambda: cut_off.enqueue(batch), StoreUnavailable)

            with ThreadPoolExecutor(1) as threads:
                sent = threads.submit(send)
                until(
                    lambda: watcher.execute(
                        "SELECT true FROM headgate.headgate_job WHERE id = 'a'"
                    ).fetchone(),
                    "the commit",
                )
                proxy.answers = bytes  # for the connection that the pool opens next
                proxy.cut()
                assert isinstance(sent.result(20), StoreUnavailable)
        cut_off.enqueue(batch)
        with pytest.raises(IdConflict):
            cut_off.enqueue([envelope("a", payload=b"other")])
        cut_off.close()
    assert steer(store).unfinished("q") == 2 + len(others)


def test_a_statement_time_limit_of_a_joined_session_is_an_outage(store, database_url):
    with psycopg.connect(database_url) as holder, psycopg.connect(database_url) as late:
        transactional = store.transactional
        transactional.enqueue_tx(transactional.join(holder), [envelope("a")])
        late.execute("SET LOCAL statement_timeout = '50ms'")
        with pytest.raises(StoreUnavailable):
            transactional.enqueue_tx(transactional.join(late), [envelope("a")])
        late.rollback()
        holder.rollback()
    assert state_of(store, "a") == "deleted"


def test_many_failing_calls_leave_the_pool_as_it_was(store, pool):
    enqueue(store, "a", unique_key=b"k")
    before = pool.get_stats()["pool_size"]
    for n in range(300):
        with pytest.raises(IdConflict):
            enqueue(store, "a", payload=b"other")
        for ids in ([f"b{n}"], [f"c{n}", f"d{n}"]):
            with pytest.raises(DuplicateJob):
                enqueue(store, *ids, unique_key=b"k")
    stats = pool.get_stats()
    assert stats["pool_size"] == before
    assert stats["pool_available"] == before
    assert stats.get("connections_lost", 0) == 0
