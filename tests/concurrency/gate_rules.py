"""The limits of a crowd, what its members do, and what has to be true of their log."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from attrs import frozen

from headgate_sync.errors import InvalidRequest, LeaseRejected, NotFound
from headgate_sync.lease import Ack, Claim
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import BudgetConfig, Ceiling, RateClassConfig
from headgate_sync.store import Store
from tests.builders import DAY_MS, admit, envelope, steer

QUEUES = ("qa", "qb", "qc")
LONGEST_CALL_S = 5.0
# Never changed during a run, so that what they promise can be checked at any instant.
CEILINGS = (
    Ceiling(name="each", queue="qa", max_concurrent=2),
    Ceiling(name="newest", queue="qb", max_concurrent=3, on_saturated="cancel_running"),
    Ceiling(name="whole", queue="qc", scope="queue", max_concurrent=9),
    Ceiling(name="class", rate_class="narrow", scope="class", max_concurrent=7),
)
METERED = RateClassConfig(
    name="metered",
    limit=40,
    window_ms=1_000,
    burst=12,
    further=(BudgetConfig(limit=50, window_ms=2_000, burst=30),),
)
NARROW = RateClassConfig(name="narrow", limit=1_000, window_ms=1_000, burst=1_000)
CLASSES = ("", "metered", "narrow")
OUTCOMES = (
    *[Outcome.SUCCESS] * 4,
    Outcome.RETRY,
    Outcome.RATE_LIMITED,
    Outcome.SNOOZE,
    Outcome.SKIP,
    Outcome.REVOKE,
)


@frozen
class Claimed:
    """A claim as the log keeps it; the instant is the store's."""

    job: str
    fence: int
    at_ms: int
    rate_class: str
    weight: int


def set_up(store: Store) -> None:
    """Put the limits up."""
    inspect = steer(store)
    for limit in CEILINGS:
        inspect.upsert_concurrency_limit(limit)
    inspect.upsert_rate_class(METERED)
    inspect.upsert_rate_class(NARROW)


def crowded_by(running: Iterable[tuple[str, str, str]]) -> list[str]:
    """Ceilings that running jobs, as (queue, partition, class), are above of."""
    counted: Counter[tuple[str, ...]] = Counter()
    for queue, partition, rate_class in running:
        counted["partition", queue, partition] += 1
        counted["queue", queue] += 1
        counted["class", rate_class] += 1
    limits: dict[tuple[str, ...], int] = {}
    for key in counted:
        for limit in CEILINGS:
            name = limit.rate_class or limit.queue
            if (key[0], key[1]) == (limit.scope, name):
                limits[key] = limit.max_concurrent
    return [
        f"{counted[key]} run under {key}, the limit is {most}"
        for key, most in limits.items()
        if counted[key] > most
    ]


def check_budget(claims: Sequence[Claimed]) -> None:
    """No interval of the log took more from the metered class than it may give."""
    taken = sorted((c.at_ms, c.weight) for c in claims if c.rate_class == "metered")
    for first, (start_ms, _) in enumerate(taken):
        total = 0
        for at_ms, weight in taken[first:]:
            total += weight
            for budget in METERED.budgets:
                gained = budget.limit * (at_ms - start_ms) / budget.window_ms
                assert total <= budget.burst + gained, (at_ms - start_ms, budget)


def check_fences(claims: Sequence[Claimed]) -> None:
    """Each claim raised the fence by one, and none was handed out twice."""
    fences = defaultdict(list)
    for claim in claims:
        fences[claim.job].append(claim.fence)
    for job, seen in fences.items():
        assert sorted(seen) == list(range(1, len(seen) + 1)), (job, seen)


class Member:
    """One thread or process: makes random calls and keeps a log of its claims."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.luck = random.Random(name)
        self.worker = f"w{self.luck.randint(1, 2)}"
        self.held: list[Claim] = []
        self.log: list[Claimed] = []
        self.jobs = 0
        self.slowest_s = 0.0

    def act(self) -> None:
        """One call of a random kind, in time."""
        call = self.luck.choices(
            [self.enqueue, self.admit, self.settle, self.renew, self.sweep, self.steer],
            [4, 8, 8, 1, 1, 1],
        )[0]
        started = time.monotonic()
        call()
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)

    def enqueue(self) -> None:
        pick = self.luck.choice
        batch = []
        for _ in range(pick([1, 5, 20])):
            self.jobs += 1
            batch.append(
                envelope(
                    f"{self.name}-{self.jobs}",
                    queue=pick(QUEUES),
                    partition_key=pick("xyz"),
                    rate_class=pick(CLASSES),
                    weight=pick([1, 1, 2, 5]),
                    sticky_worker=pick(["", "", "", "w1"]),
                    fingerprint="",
                    max_attempts=1_000,
                    retention_ms=DAY_MS,
                )
            )
        self.store.enqueue(batch)

    def admit(self) -> None:
        queues = self.luck.sample(QUEUES, self.luck.randint(1, 3))
        batch = admit(
            self.store,
            worker=self.worker,
            queues=queues,
            capacity=self.luck.choice([1, 4, 16]),
            quantum=self.luck.choice([0, 0, 1, 5]),
        )
        for claim in batch.claims:
            job = claim.envelope
            assert job.queue in queues
            assert job.sticky_worker in ("", self.worker)
            self.log.append(
                Claimed(
                    job.id,
                    claim.fence,
                    claim.claimed_at_ms,
                    job.rate_class,
                    job.weight,
                )
            )
        self.held += batch.claims

    def settle(self) -> None:
        """Ack what is held, in batches and alone; it may be lost by now."""
        self.luck.shuffle(self.held)
        chosen = [self.held.pop() for _ in range(self.luck.randint(0, len(self.held)))]
        acks = []
        for claim in chosen:
            outcome = self.luck.choice(OUTCOMES)
            later = outcome in {Outcome.RETRY, Outcome.SNOOZE}
            metered = claim.envelope.rate_class == "metered"
            acks.append(
                Ack(
                    lease=claim.lease_ref,
                    outcome=outcome,
                    delay_ms=500 if later else None,
                    actual_weight=None if metered else self.luck.choice([None, 0, 9]),
                )
            )
        for error in self.store.ack_batch(acks):
            assert error is None or isinstance(error, LeaseRejected), error

    def renew(self) -> None:
        self.store.renew([c.lease_ref for c in self.held], lease_ms=60_000)

    def sweep(self) -> None:
        self.store.promote_due(50)
        self.store.reclaim_expired(50)
        if self.store.maintenance is not None:
            self.store.maintenance.gate_fold(256)
            self.store.maintenance.gate_reconcile(20)

    def steer(self) -> None:
        """Change whatever does not move the limits of the log."""
        inspect, queue = steer(self.store), self.luck.choice(QUEUES)
        inspect.set_queue_weight(queue, self.luck.randint(1, 5))
        inspect.set_partition_quantum(queue, "x", self.luck.choice([None, 3]))
        inspect.pause_rate_class("metered", self.luck.choice([1, 20]))
        inspect.upsert_concurrency_limit(self.luck.choice(CEILINGS))
        inspect.set_queue_paused(queue, self.luck.random() < 0.3)
        id = f"{self.name}-{self.luck.randint(1, self.jobs + 1)}"
        inspect.explain_admission(id)
        with suppress(InvalidRequest, NotFound):
            inspect.operator_cancel(id)
