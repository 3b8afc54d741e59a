"""Who waits for an enqueue that is not committed yet: nobody but who wants the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from headgate_sync.envelope import UNIQUE_REPLACE_ALL
from headgate_sync.errors import Backpressure, DuplicateJob, IdConflict
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.store import PgStore
from tests.builders import admit, claim_one, enqueue, envelope, job, state_of, steer
from tests.concurrency.threads import outcome_of
from tests.postgres.watching import wait_until_blocked

# Whoever is blocked is so for ever: the blocking transaction ends after the assertion.
SOON_S = 5

Threads = Callable[[Callable[[], Any]], Future[Any]]


@pytest.fixture
def store(postgres) -> PgStore:
    return postgres.open_store()


@pytest.fixture
def start() -> Iterator[Threads]:
    """Run a call on a thread of its own."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


@pytest.fixture
def caller(database_url, start) -> Iterator[psycopg.Connection[Any]]:
    """An application's connection, in a transaction from its first statement on.

    It ends before the threads do, so that none waits for it for ever.
    """
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


def enqueue_open(store, caller, id, **fields):
    """Enqueue on the caller's connection without committing."""
    tx = store.transactional.join(caller)
    store.transactional.enqueue_tx(tx, [envelope(id, **fields)])
    return tx


@pytest.mark.parametrize("limit", [None, 1000])
def test_an_open_enqueue_delays_nobody(store, postgres, caller, start, limit):
    if limit is not None:
        steer(store).set_enqueue_limit("q", limit)
    enqueue(store, "done", "limited", "renewed", "lost")
    claims = {claim.envelope.id: claim.lease_ref for claim in admit(store).claims}
    enqueue(store, "due", delay_ms=500)
    enqueue_open(store, caller, "open", unique_key=b"k", tags=("t",))
    postgres.clock.advance_ms(30_000)

    def enqueue_and_commit():
        with store.transactional.transaction() as tx:
            store.transactional.enqueue_tx(tx, [envelope("in-tx")])

    calls = {
        "another producer": lambda: enqueue(store, "other"),
        "a batch": lambda: enqueue(store, "a", "b", partition_key="p"),
        "another key": lambda: enqueue(store, "c", unique_key=b"other"),
        "another window": lambda: enqueue(
            store, "d", unique_key=b"k", unique_window_ms=1
        ),
        "another transaction": enqueue_and_commit,
        "renew": lambda: store.renew([claims["renewed"]], lease_ms=60_000),
        "ack success": lambda: store.ack(claims["done"], Outcome.SUCCESS),
        "ack rate_limited": lambda: store.ack(claims["limited"], Outcome.RATE_LIMITED),
        "promote": lambda: store.promote_due(10),
        "reclaim": lambda: store.reclaim_expired(10),
        "evict": lambda: store.evict_retained(10),
        "upkeep": lambda: store.maintenance.gate_fold(100),
        "cancel": lambda: steer(store).operator_cancel("other"),
        "limit": lambda: steer(store).set_enqueue_limit("q", 2000),
        "admit": lambda: admit(store, capacity=100),
    }
    for name, call in calls.items():
        try:
            start(call).result(SOON_S)
        except TimeoutError:
            caller.rollback()
            pytest.fail(f"{name} waited for an open enqueue")
    caller.rollback()


def test_an_open_transaction_may_hold_a_claimed_job_without_stopping_producers(
    store, caller, start
):
    """A handler's transaction keeps its own job locked for as long as it lasts."""
    enqueue(store, "a", unique_key=b"k", retention_ms=0)
    claim = claim_one(store)
    tx = store.transactional.join(caller)
    store.transactional.checkpoint_tx(tx, claim.lease_ref, Checkpoint())
    store.transactional.complete_tx(tx, claim.lease_ref)

    def answer(id, **fields):
        call = start(
            lambda: outcome_of(
                lambda: enqueue(store, id, **fields), DuplicateJob, IdConflict
            )
        )
        try:
            return call.result(SOON_S)
        except TimeoutError:
            caller.rollback()
            raise

    assert answer("b", unique_key=b"k").existing_id == "a"
    replacing = answer("b", unique_key=b"k", unique_replace=UNIQUE_REPLACE_ALL)
    assert (replacing.existing_id, replacing.replaced) == ("a", False)
    assert answer("b", unique_key=b"k", unique_debounce_ms=5).replaced is False
    assert answer("a", retention_ms=0) is None
    assert answer("a", payload=b"other").job_id == "a"
    caller.commit()
    assert answer("b", unique_key=b"k") is None


@pytest.mark.parametrize(
    "key",
    [
        {"unique_key": b"k"},
        {"unique_key": b"k", "unique_window_ms": 60_000},
        {"unique_key": b"k", "unique_replace": UNIQUE_REPLACE_ALL},
        {"unique_key": b"k", "unique_debounce_ms": 500},
    ],
    ids=["lifecycle", "throttle", "replace", "debounce"],
)
@pytest.mark.parametrize("committed", [True, False])
def test_a_key_of_an_open_enqueue_is_decided_with_its_transaction(
    store, admin, caller, start, key, committed
):
    plain = {**key, "unique_replace": 0, "unique_debounce_ms": 0}
    enqueue_open(store, caller, "first", **plain)
    second = start(
        lambda: outcome_of(lambda: enqueue(store, "second", **key), DuplicateJob)
    )
    wait_until_blocked(admin, caller)
    if committed:
        caller.commit()
        assert second.result(SOON_S).existing_id == "first"
        assert steer(store).unfinished("q") == 1
    else:
        caller.rollback()
        assert second.result(SOON_S) is None
        with pytest.raises(DuplicateJob, match="second"):
            enqueue(store, "third", **plain)


@pytest.mark.parametrize("others", [(), ("a", "c")], ids=["alone", "in a batch"])
def test_an_id_of_an_open_enqueue_is_decided_with_its_transaction(
    store, admin, caller, start, others
):
    def take(payload):
        batch = [
            envelope(id, payload=payload if id == "b" else b"ok")
            for id in ("b", *others)
        ]
        return outcome_of(lambda: store.enqueue(batch), IdConflict)

    enqueue_open(store, caller, "b", payload=b"mine")
    same, other = start(lambda: take(b"mine")), start(lambda: take(b"yours"))
    wait_until_blocked(admin, caller)
    assert not same.done()
    assert not other.done()
    caller.commit()
    assert same.result(SOON_S) is None
    assert other.result(SOON_S).job_id == "b"
    assert steer(store).unfinished("q") == 1 + len(others)


def test_a_rolled_back_enqueue_leaves_its_id_to_the_next(store, admin, caller, start):
    enqueue_open(store, caller, "a", payload=b"mine")
    next_one = start(lambda: enqueue(store, "a", payload=b"yours"))
    wait_until_blocked(admin, caller)
    caller.rollback()
    next_one.result(SOON_S)
    assert job(store, "a").payload == b"yours"


def test_a_limit_is_locked_only_until_the_store_commits(store, caller, start):
    """What is open counts for its own transaction only, and is not waited for."""
    steer(store).set_enqueue_limit("q", 2)
    enqueue_open(store, caller, "open-1")
    enqueue_open(store, caller, "open-2")
    with pytest.raises(Backpressure) as refused:
        enqueue_open(store, caller, "open-3")
    assert (refused.value.current, refused.value.incoming) == (2, 1)
    start(lambda: enqueue(store, "a", "b")).result(SOON_S)
    with pytest.raises(Backpressure):
        enqueue(store, "c")
    caller.commit()
    with pytest.raises(Backpressure) as refused:
        enqueue(store, "c")
    assert refused.value.current == 4


def test_who_waits_for_a_key_does_not_hold_up_the_queue_meanwhile(
    store, admin, caller, start
):
    """Its lock on the limit would make everybody else wait for the same transaction."""
    steer(store).set_enqueue_limit("q", 10)
    enqueue_open(store, caller, "open", unique_key=b"k")
    waiting = start(
        lambda: outcome_of(
            lambda: enqueue(store, "late", unique_key=b"k"), DuplicateJob
        )
    )
    wait_until_blocked(admin, caller)
    try:
        start(lambda: enqueue(store, "a", "b")).result(SOON_S)
        start(lambda: steer(store).set_enqueue_limit("q", 3)).result(SOON_S)
    finally:
        caller.rollback()
    assert waiting.result(SOON_S) is None
    with pytest.raises(Backpressure):
        enqueue(store, "c")


def test_a_queue_filled_while_a_producer_waited_for_a_key_refuses_it(
    store, postgres, admin, caller, start
):
    steer(store).set_enqueue_limit("q", 2)
    enqueue_open(store, caller, "open", unique_key=b"k")
    waiting = start(
        lambda: outcome_of(
            lambda: enqueue(store, "late", unique_key=b"k", tags=("t",)), Backpressure
        )
    )
    wait_until_blocked(admin, caller)
    enqueue(store, "a", "b")
    before = postgres.image()
    caller.rollback()
    refusal = waiting.result(SOON_S)
    assert (refusal.limit, refusal.current, refusal.incoming) == (2, 2, 1)
    assert postgres.image() == before


def test_a_replacement_locks_the_job_it_changes_and_no_other(store, caller, start):
    enqueue(store, "a", "free")
    enqueue(store, "held", unique_key=b"k", priority=1)
    tx = store.transactional.join(caller)
    with pytest.raises(DuplicateJob, match="changed"):
        store.transactional.enqueue_tx(
            tx,
            [
                envelope(
                    "x", unique_key=b"k", unique_replace=UNIQUE_REPLACE_ALL, priority=9
                )
            ],
        )
    claims = start(lambda: admit(store)).result(SOON_S).claims
    assert {claim.envelope.id for claim in claims} == {"a", "free"}
    start(lambda: enqueue(store, "b", unique_key=b"other")).result(SOON_S)
    start(lambda: outcome_of(lambda: enqueue(store, "c", unique_key=b"k"), DuplicateJob)
          ).result(SOON_S)  # fmt: skip
    caller.rollback()
    assert job(store, "held").priority == 1
    assert claim_one(store).envelope.id in ("held", "b")
    assert state_of(store, "x") == "deleted"
