"""Many threads on the gate at once: limits hold, counters end exact, work drains."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any

import psycopg
import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected, NotFound
from headgate_sync.lease import Claim
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.store import Store
from tests.backends import PostgresBackend
from tests.builders import DAY_MS, admit, counts, envelope, steer
from tests.postgres.watching import wait_until_blocked
from tests.scenarios.gate import ids

QUEUES = ("qa", "qb", "qc")
CEILINGS = (
    Ceiling(name="partitions", queue="qa", max_concurrent=2),
    Ceiling(name="whole", queue="qb", scope="queue", max_concurrent=20),
    Ceiling(name="class", rate_class="c2", scope="class", max_concurrent=15),
    Ceiling(name="newest", queue="qc", max_concurrent=3, on_saturated="cancel_running"),
)
OUTCOMES = (Outcome.SUCCESS, Outcome.SUCCESS, Outcome.RETRY, Outcome.RATE_LIMITED)


class Crowd:
    """What the threads share, and what they saw."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lock = Lock()
        self.jobs = 0
        self.claimed: Counter[tuple[str, int]] = Counter()
        self.charged = 0

    def act(self, seed: int) -> None:
        """A random history of one thread; any error but a refusal ends the test."""
        pick = random.Random(seed)
        held: list[Claim] = []
        for _ in range(30):
            act = pick.choices(
                [self.enqueue, self.admit, self.settle, self.steer, self.sweep],
                [3, 6, 6, 1, 2],
            )[0]
            act(pick, held)

    def enqueue(self, pick: random.Random, held: list[Claim]) -> None:
        with self.lock:
            first, self.jobs = self.jobs, self.jobs + 20
        self.store.enqueue(
            [
                envelope(
                    f"j{number}",
                    queue=pick.choice(QUEUES),
                    partition_key=f"p{pick.randint(0, 5)}",
                    rate_class=pick.choice(["", "c1", "c2"]),
                    sticky_worker=pick.choice(["", "", "w1"]),
                    fingerprint="",
                    retention_ms=DAY_MS,
                )
                for number in range(first, first + 20)
            ]
        )

    def admit(self, pick: random.Random, held: list[Claim]) -> None:
        batch = admit(
            self.store,
            worker=pick.choice(["w1", "w2"]),
            queues=pick.sample(QUEUES, pick.randint(1, 3)),
            capacity=pick.choice([1, 8, 16]),
            quantum=pick.choice([0, 0, 1, 5]),
        )
        with self.lock:
            for claim in batch.claims:
                self.claimed[claim.envelope.id, claim.fence] += 1
                self.charged += claim.envelope.rate_class == "c1"
        held += batch.claims

    def settle(self, pick: random.Random, held: list[Claim]) -> None:
        for _ in range(pick.randint(0, len(held))):
            with suppress(LeaseRejected):
                self.store.ack(
                    held.pop().lease_ref, pick.choice(OUTCOMES), delay_ms=None
                )

    def steer(self, pick: random.Random, held: list[Claim]) -> None:
        inspect, queue = steer(self.store), pick.choice(QUEUES)
        inspect.set_queue_weight(queue, pick.randint(1, 5))
        inspect.upsert_concurrency_limit(pick.choice(CEILINGS))
        inspect.set_partition_quantum(queue, "p1", pick.choice([None, 3]))
        with suppress(InvalidRequest, NotFound):
            inspect.operator_cancel(f"j{pick.randint(0, max(1, self.jobs))}")

    def sweep(self, pick: random.Random, held: list[Claim]) -> None:
        maintenance = self.store.maintenance
        assert maintenance is not None
        maintenance.gate_fold(256)
        maintenance.gate_reconcile(50)
        self.store.promote_due(100)


@pytest.mark.parametrize("threads", [6])
def test_a_crowd_keeps_to_the_limits_and_leaves_exact_counters(
    postgres: PostgresBackend, threads: int
):
    store: Any = postgres.make_store()
    inspect = steer(store)
    for limit in CEILINGS:
        inspect.upsert_concurrency_limit(limit)
    for name in ("c1", "c2"):
        inspect.upsert_rate_class(
            RateClassConfig(name=name, limit=0, window_ms=1000, burst=60)
        )
    crowd = Crowd(store)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(crowd.act, range(threads)))

    assert set(crowd.claimed.values()) <= {1}
    assert crowd.charged <= 60
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(6)) == 0
    postgres.audit()

    for limit in CEILINGS:
        inspect.delete_concurrency_limit(limit.name)
    for name in ("c1", "c2"):
        inspect.delete_rate_class(name)
    postgres.clock.advance_ms(DAY_MS)
    store.promote_due(10_000)
    store.reclaim_expired(10_000)
    postgres.clock.advance_ms(DAY_MS)
    store.promote_due(10_000)
    for worker in ("w1", "w2"):
        while batch := admit(store, worker=worker, queues=QUEUES, capacity=500):
            for claim in batch.claims:
                store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert not set(counts(store)) & {"available", "running", "retryable", "scheduled"}


def test_a_class_resumed_while_its_first_lanes_are_taken_in_stays_open(
    postgres: PostgresBackend, other: psycopg.Connection[Any]
):
    """The operator cannot tell a queue whose lanes nobody else can see yet."""
    store = postgres.make_store()
    config = RateClassConfig(name="c", limit=0, window_ms=1000, burst=9, paused=True)
    steer(store).upsert_rate_class(config)
    store.enqueue([envelope("a", rate_class="c")])
    resume = (
        "SELECT headgate.headgate_upsert_rate_class"
        "('c', ARRAY[0], ARRAY[1000], ARRAY[9], false, true, 0)"
    )
    other.execute(resume)
    assert ids(admit(store)) == []
    other.execute("UPDATE headgate.headgate_budget SET units = 9000")
    other.commit()
    assert ids(admit(store)) == ["a"]


def test_a_mark_is_not_set_for_a_reason_that_came_while_it_waited(
    postgres: PostgresBackend, other: psycopg.Connection[Any]
):
    """A release of the new reason's row could cross a mark that does not hold it."""
    store = postgres.make_store()
    store.enqueue([envelope("a", fingerprint="old")])
    for fingerprint in ("old", "new"):
        postgres.connection.execute(
            "INSERT INTO headgate.headgate_quarantine VALUES (%s, 'k', 3, 1, '', '')",
            [fingerprint],
        )
    other.execute("SELECT FROM headgate.headgate_quarantine FOR UPDATE").fetchall()
    with ThreadPoolExecutor(1) as pool:
        marked = pool.submit(
            lambda: postgres.connection.execute(
                "SELECT headgate.headgate_mark_holds("
                "ARRAY (SELECT seq FROM headgate.headgate_job), 20000)"
            ).fetchone()
        )
        with psycopg.connect(other.info.dsn, autocommit=True) as admin:
            wait_until_blocked(admin, other)
            other.execute("UPDATE headgate.headgate_job SET fingerprint = 'new'")
            other.commit()
        assert marked.result() == (0,)


def test_a_new_limit_does_not_wait_for_a_job_that_somebody_holds(
    postgres: PostgresBackend, other: psycopg.Connection[Any]
):
    """Its holder may be waiting for the class; the upkeep looks again."""
    store: Any = postgres.make_store()
    config = RateClassConfig(name="c", limit=9, window_ms=1, burst=1)
    steer(store).upsert_rate_class(config)
    jobs = [envelope(name, rate_class="c", weight=5) for name in ("a", "b")]
    store.enqueue(jobs)
    assert ids(admit(store)) == []
    other.execute(
        "SELECT FROM headgate.headgate_job WHERE id = 'a' FOR UPDATE"
    ).fetchall()
    with psycopg.connect(other.info.dsn, autocommit=True) as operator:
        operator.execute("SET lock_timeout = '2s'")
        operator.execute(
            "SELECT headgate.headgate_upsert_rate_class"
            "('c', ARRAY[9], ARRAY[1], ARRAY[50], false, true, 0)"
        )
    postgres.clock.advance_ms(10)
    assert ids(admit(store)) == ["b"]
    other.rollback()
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 1
    assert ids(admit(store)) == ["a"]
