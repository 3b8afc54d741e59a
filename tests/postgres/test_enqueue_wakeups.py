"""Which commits notify: those that bring work to a queue on which somebody sleeps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from headgate_sync.envelope import MAX_PAYLOAD_BYTES
from headgate_sync.errors import DuplicateJob
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres.listener import channel_of
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.builders import (
    admit,
    bring_to,
    claim_one,
    enqueue,
    envelope,
    envelopes,
    job,
    run_one,
    steer,
)

CHANNEL = "headgate_wakeup"


@pytest.fixture
def store(postgres) -> PgStore:
    return postgres.open_store()


class Ear:
    """Hears what is sent on a channel."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def heard(self) -> list[str]:
        """The payloads that came since the last look, sorted."""
        # Notifications are delivered before the answer to a later statement.
        self.connection.execute("SELECT")
        found = self.connection.notifies(timeout=0)
        return sorted(notification.payload for notification in found)


@pytest.fixture
def ear(database_url) -> Iterator[Ear]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        yield Ear(connection)


@pytest.fixture
def caller(database_url) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


def busy(store, *queues):
    """Let a worker fill its slots from each queue, which it did not sleep on then."""
    for queue in queues:
        enqueue(store, f"busy-{queue}", queue=queue)
        claim_one(store, worker="busy", queues=[queue])


def test_the_name_of_the_channel_belongs_to_the_schema():
    assert channel_of("headgate") == CHANNEL
    for schema in ("Headgate", "jobs", "a b", "ü" * 31):
        digest = hashlib.sha256(schema.encode()).hexdigest()
        assert channel_of(schema) == f"{CHANNEL}_{digest[:16]}"
        assert len(channel_of(schema)) <= 63


def test_a_queue_that_nobody_came_to_yet_counts_as_slept_on(store, ear):
    enqueue(store, "a")
    enqueue(store, "b")
    assert ear.heard() == ["q", "q"]


def test_the_longest_name_and_the_largest_job_are_notified_by_the_name_alone(
    store, ear
):
    queue = "ü" * 127 + "q"
    largest = bytes(MAX_PAYLOAD_BYTES)
    enqueue(store, "a", queue=queue, payload=largest)
    enqueue(store, *[f"b{n}" for n in range(9)], queue=queue, payload=largest)
    assert ear.heard() == [queue, queue]


def test_a_busy_queue_is_not_notified(store, ear):
    busy(store, "q")
    ear.heard()
    enqueue(store, "a")
    enqueue(store, "b", "c", partition_key="p")
    assert ear.heard() == []


def test_a_sleeper_is_woken_until_its_slots_are_full(store, ear):
    busy(store, "q", "other")
    assert admit(store).claims == []
    ear.heard()
    enqueue(store, "a", queue="other")
    assert ear.heard() == []
    enqueue(store, "b")
    enqueue(store, "c")
    assert ear.heard() == ["q", "q"]
    assert len(admit(store, capacity=3).claims) == 2
    enqueue(store, "d")
    assert ear.heard() == ["q"]
    assert len(admit(store, capacity=1).claims) == 1
    enqueue(store, "e")
    assert ear.heard() == []


def test_a_pause_or_a_weight_of_an_unused_queue_does_not_count_as_use(store, ear):
    steer(store).set_queue_weight("q", 3)
    ear.heard()
    enqueue(store, "a")
    assert ear.heard() == ["q"]


def test_a_transaction_notifies_once_per_queue_when_it_commits(store, ear, caller):
    transactional = store.transactional
    tx = transactional.join(caller)
    for n in range(3):
        transactional.enqueue_tx(
            tx, [envelope(f"a{n}"), envelope(f"b{n}", partition_key=f"p{n}")]
        )
    transactional.enqueue_tx(tx, [envelope("c", queue="ü" * 127)])
    assert ear.heard() == []
    caller.commit()
    assert ear.heard() == ["q", "ü" * 127]


def test_a_large_transaction_notifies_once_per_queue(store, ear, caller):
    """Also where every job is in a lane of its own."""
    tx = store.transactional.join(caller)
    for n in range(10):
        batch = [
            envelope(f"{n}-{m}", partition_key=f"{n}-{m}", payload=b"x" * 10_000)
            for m in range(1000)
        ]
        store.transactional.enqueue_tx(tx, batch)
    caller.commit()
    assert ear.heard() == ["q"]


def test_a_rolled_back_enqueue_wakes_nobody(store, ear, caller):
    tx = store.transactional.join(caller)
    store.transactional.enqueue_tx(tx, [envelope("a")])
    caller.rollback()
    caller.execute("SAVEPOINT s")
    store.transactional.enqueue_tx(tx, [envelope("b")])
    caller.execute("ROLLBACK TO s")
    caller.commit()
    assert ear.heard() == []


def test_who_falls_asleep_after_the_enqueue_is_woken_by_its_commit(store, ear, caller):
    """The sender looks at the commit, not at the enqueue."""
    busy(store, "q")
    tx = store.transactional.join(caller)
    store.transactional.enqueue_tx(tx, [envelope("a")])
    assert admit(store).claims == []
    ear.heard()
    caller.commit()
    assert ear.heard() == ["q"]


def test_jobs_that_cannot_run_yet_wake_nobody(store, ear):
    enqueue(store, "pending", pending=True)
    enqueue(store, "later", delay_ms=500)
    enqueue(store, "far", "off", delay_ms=500)
    assert ear.heard() == []


def test_refusals_and_replays_wake_nobody(store, ear):
    enqueue(store, "a", unique_key=b"k")
    ear.heard()
    enqueue(store, "a", unique_key=b"k")
    with pytest.raises(DuplicateJob):
        enqueue(store, "b", unique_key=b"k")
    with pytest.raises(DuplicateJob):
        store.enqueue([*envelopes("c", "d"), envelope("e", unique_key=b"k")])
    assert ear.heard() == []


def by_promotion(store, clock):
    enqueue(store, "a", delay_ms=500)
    clock.advance_ms(500)
    return lambda: store.promote_due(10)


def by_promotion_after_a_retry(store, clock):
    claim = run_one(store, "a")
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=500)
    clock.advance_ms(500)
    return lambda: store.promote_due(10)


def by_an_operators_promotion(store, clock):
    enqueue(store, "a", pending=True)
    return lambda: steer(store).promote_job("a")


def by_an_operators_retry(store, clock):
    bring_to(store, clock, "a", State.ARCHIVED)
    return lambda: steer(store).operator_retry("a")


def by_a_release_from_quarantine(store, clock):
    bring_to(store, clock, "a", State.QUARANTINED, payload=b"poison")
    fingerprint = job(store, "a").fingerprint
    return lambda: steer(store).quarantine_release(fingerprint)


def by_giving_a_job_back(store, clock):
    claim = run_one(store, "a")
    return lambda: store.ack(claim.lease_ref, Outcome.RATE_LIMITED)


def by_ending_a_pause(store, clock):
    steer(store).set_queue_paused("q", True)
    enqueue(store, "a")
    return lambda: steer(store).set_queue_paused("q", False)


@pytest.mark.parametrize(
    "prepare",
    [
        by_promotion,
        by_promotion_after_a_retry,
        by_an_operators_promotion,
        by_an_operators_retry,
        by_a_release_from_quarantine,
        by_giving_a_job_back,
        by_ending_a_pause,
    ],
)
def test_whoever_lets_work_run_wakes_sleepers(store, postgres, ear, prepare):
    send = prepare(store, postgres.clock)
    assert admit(store).claims == []
    ear.heard()
    send()
    assert ear.heard() == ["q"]
    assert admit(store).claims != []


def test_what_lets_no_work_run_wakes_nobody(store, postgres, ear):
    claims = [run_one(store, id) for id in "abc"]
    assert admit(store).claims == []
    ear.heard()
    store.renew([claim.lease_ref for claim in claims], lease_ms=60_000)
    store.ack(claims[0].lease_ref, Outcome.SUCCESS)
    store.ack(claims[1].lease_ref, Outcome.RETRY, delay_ms=500)
    steer(store).operator_cancel("c")
    steer(store).set_queue_paused("q", False)
    steer(store).set_queue_paused("q", True)
    assert ear.heard() == []


def test_another_schema_has_a_channel_of_its_own(database_url, pool, admin, ear):
    schema = 'It\'s "other"'
    migrate_up(database_url, schema=schema)
    try:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(f"LISTEN {channel_of(schema)}")
            enqueue(PgStore(pool, schema), "a")
            assert Ear(connection).heard() == ["q"]
        assert ear.heard() == []
    finally:
        admin.execute('DROP SCHEMA "It\'s ""other""" CASCADE')
