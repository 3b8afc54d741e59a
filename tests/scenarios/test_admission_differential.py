"""One random history on both stores: the same decisions in the same order."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.inspection import Inspect
from headgate_sync.lease import Claim
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import BudgetConfig, Ceiling, RateClassConfig
from headgate_sync.store import Store
from tests.backends import Backend, MemoryBackend, PostgresBackend
from tests.builders import DAY_MS, admit, envelope, steer
from tests.observe import differences
from tests.scenarios.gate import ids

QUEUES = ("qa", "qb", "qc")
CLASSES = ("", "c1", "c2", "c3")
WORKERS = ("w", "v", "", "x")
LIMITS = ("x1", "x2", "x3")


class History:
    """Makes up calls and gives each to both stores."""

    classes = CLASSES

    def __init__(self, seed: int, backends: tuple[Backend, Backend]) -> None:
        self.random = random.Random(seed)
        self.backends = backends
        self.stores: list[Store] = [backend.make_store() for backend in backends]
        self.queues = QUEUES[: self.random.choice([1, 1, 2, 3])]
        self.partitions = [f"p{n}" for n in range(self.random.choice([1, 3, 8, 60]))]
        self.jobs = 0
        self.calls = 0
        self.running: dict[str, list[Claim]] = {}

    @property
    def inspects(self) -> list[Inspect]:
        return [steer(store) for store in self.stores]

    def step(self) -> None:
        """One call of a random kind."""
        choice = self.random.choices(
            [self.enqueue, self.admit, self.settle, self.wait, self.steer, self.cancel],
            [4, 6, 3, 2, 3, 0.5],
        )
        choice[0]()

    def enqueue(self) -> None:
        pick, batch = self.random.choice, []
        for _ in range(pick([1, 3, 10, 40])):
            self.jobs += 1
            batch.append(
                envelope(
                    f"j{self.jobs}",
                    queue=pick(self.queues),
                    partition_key=pick(self.partitions),
                    rate_class=pick(self.classes),
                    sticky_worker=pick(["", "", "", "w", "v"]),
                    weight=pick([1, 1, 1, 2, 4, 9]),
                    fingerprint="",
                    priority=pick([0, 0, 0, 1, 5]),
                    scheduled_at_ms=pick([1000, 1000, 1001, 1002]),
                    retention_ms=pick([0, DAY_MS]),
                )
            )
        for store in self.stores:
            store.enqueue(batch)

    def admit(self) -> None:
        pick = self.random.choice
        self.calls += 1
        request = {
            "worker": pick(WORKERS),
            "queues": tuple(
                self.random.sample(
                    self.queues, self.random.randint(1, len(self.queues))
                )
            ),
            "capacity": pick([1, 2, 5, 16, 50]),
            "quantum": pick([0, 0, 0, 1, 2, 5, 1000]),
        }
        left, right = (
            admit(store, f"lease-{self.calls}", **request) for store in self.stores
        )
        told = [
            (ids(batch), batch.retry_after_ms, dict(batch.refused))
            for batch in (left, right)
        ]
        assert told[0] == told[1], request
        for pair in zip(left.claims, right.claims, strict=True):
            self.running[pair[0].envelope.id] = list(pair)

    def settle(self) -> None:
        if not self.running:
            return
        names = sorted(self.running)
        outcome = self.random.choice(
            [Outcome.SUCCESS, Outcome.SUCCESS, Outcome.RATE_LIMITED, Outcome.RETRY]
        )
        weight = self.random.choice([None, None, 0, 1, 12])
        for name in self.random.sample(names, self.random.randint(1, len(names))):
            for store, claim in zip(self.stores, self.running.pop(name), strict=True):
                # A ceiling may have displaced it.
                with suppress(LeaseRejected):
                    store.ack(
                        claim.lease_ref,
                        outcome,
                        actual_weight=weight,
                        delay_ms=5000 if outcome is Outcome.RETRY else None,
                    )

    def wait(self) -> None:
        step_ms = self.random.choice([1, 10, 200, 1000, 5000])
        for backend, store in zip(self.backends, self.stores, strict=True):
            backend.clock.advance_ms(step_ms)
            store.promote_due(1000)

    def cancel(self) -> None:
        waiting = [
            row["id"]
            for row in self.backends[0].snapshot().jobs.values()
            if row["state"] == "available"
        ]
        for name in self.random.sample(waiting, min(len(waiting), 3)):
            for inspect in self.inspects:
                inspect.operator_cancel(name)

    def steer(self) -> None:
        pick = self.random.choice
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("upsert_rate_class", (self._rate_class(),)),
            ("upsert_rate_class", (self._rate_class(),)),
            ("delete_rate_class", (pick(CLASSES[1:]),)),
            ("pause_rate_class", (pick(CLASSES[1:]), pick([100, 3000]))),
            ("resume_rate_class", (pick(CLASSES[1:]),)),
            ("upsert_concurrency_limit", (self._ceiling(),)),
            ("delete_concurrency_limit", (pick(LIMITS),)),
            ("set_queue_paused", (pick(self.queues), self.random.random() < 0.3)),
            ("set_queue_weight", (pick(self.queues), pick([1, 2, 3, 7]))),
            (
                "set_partition_quantum",
                (pick(self.queues), pick(self.partitions), pick([None, 1, 4])),
            ),
        ]
        name, arguments = pick(calls)
        told = []
        for inspect in self.inspects:
            try:
                told.append(getattr(inspect, name)(*arguments))
            except InvalidRequest as error:
                told.append(str(error))
        assert told[0] == told[1], (name, arguments)

    def _rate_class(self) -> RateClassConfig:
        pick = self.random.choice
        budgets = [
            BudgetConfig(
                pick([0, 1, 5, 100]), pick([700, 1000, 60_000]), pick([1, 3, 20])
            )
            for _ in range(pick([1, 1, 2]))
        ]
        return RateClassConfig(
            name=pick(CLASSES[1:]),
            limit=budgets[0].limit,
            window_ms=budgets[0].window_ms,
            burst=budgets[0].burst,
            paused=self.random.random() < 0.15,
            further=pick([None, tuple(budgets[1:])]),
        )

    def _ceiling(self) -> Ceiling:
        pick = self.random.choice
        scope = pick(["partition", "partition", "queue", "class"])
        names = {"queue": pick(self.queues), "rate_class": pick(CLASSES[1:])}
        return Ceiling(
            name=pick(LIMITS),
            scope=scope,
            max_concurrent=pick([1, 2, 3, 8]),
            on_saturated=pick(
                ["queue", "queue", "discard", "cancel_incoming", "cancel_running"]
            ),
            **{
                key: "" if (key == "queue") == (scope == "class") else name
                for key, name in names.items()
            },
        )

    def compare(self) -> None:
        """Both stores must hold the same, and show the same limits."""
        snapshots = [backend.snapshot() for backend in self.backends]
        assert not differences(*snapshots)
        left, right = self.inspects
        assert left.rate_classes() == right.rate_classes()
        assert left.concurrency_limits() == right.concurrency_limits()


class PlainHistory(History):
    """No policy but fairness, which most queues are and which has a road of its own."""

    classes = ("",)

    def steer(self) -> None:
        arguments = (
            self.random.choice(self.queues),
            self.random.choice(self.partitions),
            self.random.choice([None, 1, 4]),
        )
        for inspect in self.inspects:
            inspect.set_partition_quantum(*arguments)


@pytest.mark.parametrize("seed", range(20))
def test_both_stores_decide_alike_without_policies(
    memory: MemoryBackend, postgres: PostgresBackend, seed: int
):
    history = PlainHistory(seed, (memory, postgres))
    history.queues = history.queues[:1]
    for _ in range(40):
        history.step()
    history.compare()


@pytest.mark.parametrize("seed", range(20))
def test_both_stores_decide_alike(
    memory: MemoryBackend, postgres: PostgresBackend, seed: int
):
    history = History(seed, (memory, postgres))
    for _ in range(40):
        history.step()
    history.compare()
