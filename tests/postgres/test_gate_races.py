"""Many threads on the gate at once: limits hold, counters end exact, work drains."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected, NotFound
from headgate_sync.lease import Claim
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.store import Store
from tests.backends import PostgresBackend
from tests.builders import DAY_MS, admit, counts, envelope, steer

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
