"""Behind PgBouncer in transaction mode every call may run on another session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from headgate_sync.errors import LeaseRejected
from headgate_sync.lease import Ack, Checkpoint
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from tests.backends import PostgresBackend
from tests.builders import (
    admit,
    claim_one,
    counts,
    enqueue,
    envelope,
    envelopes,
    state_of,
    steer,
)
from tests.postgres.pooler import BINARY, SERVERS, pgbouncer
from tests.scenarios.gate import rate_class
from tests.worker.rig import PATIENCE_S, working

pytestmark = pytest.mark.skipif(BINARY is None, reason="pgbouncer is not installed")


@pytest.fixture(scope="module")
def pooler(database_url: str) -> Iterator[str]:
    with pgbouncer(database_url) as url:
        yield url


@pytest.fixture
def store(postgres: PostgresBackend, pooler: str) -> Iterator[PgStore]:
    """A store that knows the database only through the pooler."""
    made = PgStore.connect(pooler, pool_size=8)
    yield made
    made.close()


def test_the_pooler_really_moves_transactions_between_servers(pooler):
    """Or the tests below would show nothing: a session is lost between two calls."""
    with psycopg.connect(pooler, autocommit=True) as one:
        first = one.info.backend_pid
        pids = set()
        with ThreadPoolExecutor(6) as threads:

            def ask(_: int) -> int:
                with psycopg.connect(pooler, autocommit=True) as connection:
                    row = connection.execute("SELECT pg_backend_pid(), pg_sleep(0.05)")
                    return int(row.fetchone()[0])

            pids = set(threads.map(ask, range(24)))
        assert 2 <= len(pids) <= SERVERS
        assert first not in pids


def test_every_call_of_a_jobs_life_works_through_it(store, clock_of):
    rate_class(store, "c", "100/1000", 100)
    enqueue(store, *[f"n{n}" for n in range(20)], rate_class="c")
    claims = admit(store, capacity=20).claims
    refs = [claim.lease_ref for claim in claims]
    assert len(refs) == 20
    assert store.renew(refs, lease_ms=60_000) == []
    store.checkpoint(refs[0], Checkpoint(completed_steps=("one",)))
    store.ack(refs[0], Outcome.SUCCESS, actual_weight=2)
    store.ack(refs[0], Outcome.SUCCESS, actual_weight=2)
    with pytest.raises(LeaseRejected):
        store.ack(refs[0], Outcome.SKIP)
    acks = [Ack(lease=ref, outcome=Outcome.RATE_LIMITED) for ref in refs[1:10]]
    assert store.ack_batch(acks) == [None] * 9
    assert steer(store).explain_admission("n1").admissible
    clock_of.advance_ms(60_000)
    assert len(store.reclaim_expired(100)) == 10
    clock_of.advance_ms(3_600_000)
    assert store.promote_due(100) == 10
    assert store.claim_duty("d", "h", 1_000)
    assert not store.claim_duty("d", "other", 1_000)
    assert counts(store) == {"completed": 1, "available": 19}
    assert store.maintenance.gate_fold(100) > 0
    assert store.maintenance.gate_reconcile(100) == 0


@pytest.fixture
def clock_of(postgres: PostgresBackend) -> Any:
    return postgres.clock


def test_transactions_of_the_store_and_of_a_caller_work_through_it(store, pooler):
    with store.transactional.transaction() as tx:
        store.transactional.enqueue_tx(tx, [envelope("own")])
        assert steer(store).get_job("own") is None
    assert state_of(store, "own") is State.AVAILABLE
    claim = claim_one(store)
    with store.transactional.transaction() as tx:
        assert store.transactional.claim_effect(tx, "effect")
        store.transactional.complete_tx(tx, claim.lease_ref)
    assert state_of(store, "own") is State.COMPLETED
    with psycopg.connect(pooler, prepare_threshold=None) as connection:
        for id in ("undone", "joined"):
            with connection.transaction():
                tx = store.transactional.join(connection)
                store.transactional.enqueue_tx(tx, [envelope(id)])
                if id == "undone":
                    raise psycopg.Rollback
    assert steer(store).get_job("undone") is None
    assert state_of(store, "joined") is State.AVAILABLE


def test_more_threads_than_servers_share_the_work(store):
    for start in range(0, 300, 100):
        store.enqueue(envelopes(*[f"n{n}" for n in range(start, start + 100)]))

    def work(name: int) -> list[str]:
        done: list[str] = []
        while claims := admit(store, capacity=7, worker=f"w{name}").claims:
            for claim in claims:
                store.ack(claim.lease_ref, Outcome.SUCCESS)
            done += [claim.envelope.id for claim in claims]
        return done

    with ThreadPoolExecutor(8) as threads:
        done = [id for ids in threads.map(work, range(8)) for id in ids]
    while claims := admit(store, capacity=100).claims:
        # Somebody whose time for the lock ran out stopped early.
        for claim in claims:
            store.ack(claim.lease_ref, Outcome.SUCCESS)
        done += [claim.envelope.id for claim in claims]
    assert sorted(done) == sorted(f"n{n}" for n in range(300))


_LEFT_BEHIND = """
SELECT current_setting('lock_timeout'), current_setting('search_path'),
  current_setting('enable_seqscan'), (SELECT count(*) FROM pg_prepared_statements)
"""


def test_nothing_of_a_call_stays_on_the_server_it_ran_on(store, postgres, pooler):
    """Settings and locks of one client must not reach the next one."""
    enqueue(store, "a", "b")
    for _ in range(12):
        for claim in admit(store).claims:
            store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    held = postgres.connection.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    ).fetchone()
    assert held == (0,)
    with psycopg.connect(pooler, autocommit=True, prepare_threshold=None) as client:
        found = {client.execute(_LEFT_BEHIND).fetchone() for _ in range(6)}
    assert found == {("0", '"$user", public', "on", 0)}


def test_statements_are_prepared_on_the_server_itself_alone(store, database_url):
    """A pooler's next server would not know them; nobody has to say that it is one."""
    direct = PgStore.connect(database_url, pool_size=1, heartbeat_connection=False)
    for name, one in (("direct", direct), ("pooled", store)):
        for turn in range(8):
            enqueue(one, f"{name}-{turn}", queue=name)
            assert claim_one(one, queues=(name,))
    with direct.transactional.transaction() as tx:
        prepared = tx.connection.execute(
            "SELECT count(*) FROM pg_prepared_statements"
        ).fetchone()
    direct.close()
    assert prepared > (0,)


def test_a_worker_that_only_polls_does_its_jobs(store):
    """Without an address for wake-ups nothing listens through the pooler."""
    assert store.notifying is None
    registry, done = Registry(), threading.Semaphore(0)

    @registry.task("k")
    def handler() -> None:
        done.release()

    with working(store, registry):
        for turn in range(3):
            store.enqueue(
                [envelope(f"t{turn}-{n}", kind="k", payload=b"{}") for n in range(5)]
            )
            for _ in range(5):
                assert done.acquire(timeout=PATIENCE_S)
    assert counts(store) == {"completed": 15}


def test_an_error_of_the_database_leaves_the_pooler_usable(store):
    failed = pytest.raises(psycopg.errors.DivisionByZero)
    with failed, store.transactional.transaction() as tx:
        tx.connection.execute("SELECT 1 / 0")
    enqueue(store, "a")
    assert state_of(store, "a") is State.AVAILABLE
