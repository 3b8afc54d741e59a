"""One random history on both stores: the same decisions in the same order.

Every explanation is equal too, and the next admission does what it said.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from attrs import evolve

from headgate_sync.errors import (
    FingerprintQuarantined,
    InvalidRequest,
    LeaseRejected,
    NotFound,
)
from headgate_sync.explanation import AdmissionExplain
from headgate_sync.inspection import Inspect
from headgate_sync.lease import MAX_CAPACITY, MAX_QUANTUM, AdmissionBatch, Claim
from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import (
    BudgetConfig,
    Ceiling,
    RateClassConfig,
    Scope,
    window_size,
)
from headgate_sync.store import Store
from tests.backends import Backend, MemoryBackend, PostgresBackend
from tests.builders import DAY_MS, admit, beat, envelope, steer
from tests.observe import Snapshot, differences
from tests.scenarios.gate import ids

QUEUES = ("qa", "qb", "qc")
CLASSES = ("", "c1", "c2", "c3")
WORKERS = ("w", "v", "", "x")
LIMITS = ("x1", "x2", "x3")
PRINTS = ("", "", "", "f1", "f2")
DAYS_49_MS = 49 * DAY_MS
# Reasons that no other job can lift within the same call.
FIRM = ("pending", "schedule", "quarantine", "queue_paused")


class History:
    """Makes up calls and gives each to both stores."""

    classes = CLASSES
    pinned_to: tuple[str, ...] = ("", "", "", "w", "v")
    limits = (0, 1, 5, 100)
    bursts = (1, 3, 20)
    occupancies = (1, 2, 3, 8)

    def __init__(self, seed: int, backends: tuple[Backend, Backend]) -> None:
        self.random = random.Random(seed)
        self.backends = backends
        crash_limit = self.random.choice([1, 3])
        self.stores: list[Store] = [
            backend.make_store(crash_limit=crash_limit) for backend in backends
        ]
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
            [
                self.enqueue,
                self.admit,
                self.settle,
                self.wait,
                self.steer,
                self.cancel,
                self.crash,
                self.explain_some,
            ],
            [4, 6, 3, 2, 3, 0.5, 0.5, 1],
        )
        choice[0]()

    def enqueue(self) -> None:
        pick, batch = self.random.choice, []
        for _ in range(pick([1, 3, 10, 40])):
            self.jobs += 1
            partition = pick(self.partitions)
            batch.append(
                envelope(
                    f"j{self.jobs}",
                    queue=self._queue(),
                    partition_key=partition,
                    rate_class=self._class_in(partition),
                    sticky_worker=pick(self.pinned_to),
                    weight=pick([1, 1, 1, 2, 4, 9]),
                    fingerprint=pick(PRINTS),
                    priority=pick([0, 0, 0, 1, 5]),
                    scheduled_at_ms=pick([1000, 1000, 1001, 1002]),
                    retention_ms=pick([0, DAY_MS]),
                )
            )
        self.on_both("enqueue", batch)

    def _queue(self) -> str:
        return self.random.choice(self.queues)

    def _class_in(self, partition: str) -> str:
        return self.random.choice(self.classes)

    def on_both(self, name: str, *arguments: Any) -> Any:
        """Make a call on each store; both have to answer, or refuse, alike."""
        told = []
        for store in self.stores:
            owner = store if hasattr(store, name) else steer(store)
            try:
                told.append(getattr(owner, name)(*arguments))
            except (InvalidRequest, FingerprintQuarantined, NotFound) as error:
                told.append(str(error))
        assert told[0] == told[1], (name, arguments)
        return told[0]

    def admit(self) -> None:
        pick = self.random.choice
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
        self.admit_alike(request)

    def admit_alike(self, request: dict[str, Any]) -> AdmissionBatch:
        """Admit on both stores, and check the laws that hold for every call."""
        self.calls += 1
        before = self.backends[0].snapshot()
        said = {
            id: self.inspects[0].explain_admission(id)
            for id, row in before.jobs.items()
            if row["state"] == "available" and row["queue"] in request["queues"]
        }
        left, right = (
            admit(store, f"lease-{self.calls}", **request) for store in self.stores
        )
        told = [
            (
                ids(batch),
                self.hint(batch, request),
                dict(batch.refused),
                batch.sent_away,
            )
            for batch in (left, right)
        ]
        assert told[0] == told[1], request
        for pair in zip(left.claims, right.claims, strict=True):
            self.running[pair[0].envelope.id] = list(pair)
        after = self.backends[0].snapshot()
        self._check_ceilings(before, after)
        self._check_ledger(before, after, request)
        displaced = any(
            row["state"] == "running" and after.jobs[id]["state"] == "cancelled"
            for id, row in before.jobs.items()
        )
        for id in ids(left):
            explanation = said[id]
            assert explanation is not None
            assert explanation.blocked_by not in FIRM, (id, explanation)
            if not displaced:
                assert explanation.blocked_by != "concurrency_limit", (id, explanation)
            if explanation.blocked_by == "rate_class":
                # Only what stood before it can have left the tokens to it.
                assert int(explanation.detail["tokens_ahead_in_class"]) > 0
        return left

    def hint(self, batch: AdmissionBatch, request: dict[str, Any]) -> int | None:
        """When to come back, as the batch says."""
        return batch.retry_after_ms

    def _check_ceilings(self, before: Snapshot, after: Snapshot) -> None:
        """No call fills a ceiling above its limit."""
        for limit in after.ceilings.values():
            was, now = (_under(limit, held) for held in (before, after))
            for key, running in now.items():
                assert running <= max(limit.max_concurrent, was.get(key, 0)), limit

    def _check_ledger(
        self, before: Snapshot, after: Snapshot, request: dict[str, Any]
    ) -> None:
        """The ledger of a queue that is asked for alone moves by its decisions."""
        if len(request["queues"]) > 1:
            return
        [queue] = request["queues"]
        decided = sum(
            before.jobs[id]["state"] == "available" and row["state"] != "available"
            for id, row in after.jobs.items()
        ) + len(before.jobs.keys() - after.jobs.keys())
        was, now = (
            held.queues.get(queue, (False, 1, 0, 0)) for held in (before, after)
        )
        assert now[2] - was[2] == decided
        assert now[3] - was[3] == (decided > 0)

    def explain_some(self) -> None:
        """Both stores explain a few jobs alike."""
        jobs = list(self.backends[0].snapshot().jobs)
        self.explain_alike(self.random.sample(jobs, min(len(jobs), 12)))

    def explain_alike(self, jobs: list[str]) -> dict[str, AdmissionExplain]:
        for worker in ("w", "v"):  # they come for what is pinned to them
            for store in self.stores:
                beat(store, worker)
        found = {}
        for id in jobs:
            left, right = (inspect.explain_admission(id) for inspect in self.inspects)
            assert left == right, id
            assert left is not None
            found[id] = left
        return found

    def admit_what_was_explained(self, worker: str) -> bool:
        """Without ceilings a call with room admits what is admissible, nothing else.

        False when there are more lanes than one call looks at.
        """
        queue = self.random.choice(self.queues)
        for name in LIMITS:
            self.on_both("delete_concurrency_limit", name)
        for partition in self.partitions:
            self.on_both("set_partition_quantum", queue, partition, None)
        available = [
            row
            for row in self.backends[0].snapshot().jobs.values()
            if row["state"] == "available"
            and row["queue"] == queue
            and row["sticky_worker"] in ("", worker)
        ]
        lanes = {
            (row["partition_key"], row["rate_class"], row["sticky_worker"])
            for row in available
        }
        if len(lanes) > window_size(MAX_CAPACITY, MAX_QUANTUM):
            return False
        # Others pinned to this worker may come before an unpinned job.
        judged = [row["id"] for row in available if row["sticky_worker"] == worker]
        said = self.explain_alike(judged)
        batch = self.admit_alike(
            {
                "worker": worker,
                "queues": (queue,),
                "capacity": MAX_CAPACITY,
                "quantum": MAX_QUANTUM,
            }
        )
        admissible = {id for id, found in said.items() if found.admissible}
        assert set(ids(batch)) & set(judged) == admissible
        return True

    def settle(self) -> None:
        if not self.running:
            return
        names = sorted(self.running)
        outcome = self.random.choice(
            [Outcome.SUCCESS, Outcome.SUCCESS, Outcome.RATE_LIMITED, Outcome.RETRY]
        )
        weight = self.random.choice([None, None, 0, 1, 12])
        # A job of a class that gives up with a delay pauses the class.
        delay_ms = self.random.choice([None, None, 700, 5000])
        for name in self.random.sample(names, self.random.randint(1, len(names))):
            for store, claim in zip(self.stores, self.running.pop(name), strict=True):
                # A ceiling may have displaced it.
                with suppress(LeaseRejected):
                    store.ack(
                        claim.lease_ref,
                        outcome,
                        actual_weight=weight,
                        delay_ms=delay_ms if outcome is not Outcome.SUCCESS else None,
                    )

    def wait(self) -> None:
        step_ms = self.random.choice(
            [1, 1, 10, 200, 1000, 5000, 60_000, DAY_MS, DAYS_49_MS]
        )
        for backend in self.backends:
            backend.clock.advance_ms(step_ms)
        self.on_both("promote_due", 1000)
        maintenance = self.stores[1].maintenance
        assert maintenance is not None
        if self.random.random() < 0.3:
            maintenance.gate_fold(self.random.choice([1, 5, 1000]))

    def crash(self) -> None:
        """Let leases run out; some of it quarantines, and somebody lifts that again."""
        if self.running:
            for backend in self.backends:
                backend.clock.advance_ms(30_000)
            for record in self.on_both("reclaim_expired", 5):
                self.running.pop(record.job_id, None)
        self.on_both("quarantine_sweep", self.random.choice([1, 1000]))
        self.on_both("quarantine_release", self.random.choice(PRINTS[3:]))

    def cancel(self) -> None:
        waiting = [
            row["id"]
            for row in self.backends[0].snapshot().jobs.values()
            if row["state"] == "available"
        ]
        for name in self.random.sample(waiting, min(len(waiting), 3)):
            self.on_both("operator_cancel", name)

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
        self.on_both(name, *arguments)

    def _rate_class(self) -> RateClassConfig:
        pick = self.random.choice
        budgets = [
            BudgetConfig(
                pick(self.limits), pick([700, 1000, 60_000]), pick(self.bursts)
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
            max_concurrent=pick(self.occupancies),
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
        # The counters of minutes are none of the gate's, and a database forgets them.
        snapshots = [
            evolve(backend.snapshot(), minutes={}) for backend in self.backends
        ]
        assert not differences(*snapshots)
        maintenance = self.stores[1].maintenance
        assert maintenance is not None
        assert sum(maintenance.gate_reconcile(100) for _ in range(6)) == 0
        left, right = self.inspects
        assert left.rate_classes() == right.rate_classes()
        assert left.concurrency_limits() == right.concurrency_limits()


class PlainHistory(History):
    """No policy but fairness, which most queues are and which has a road of its own."""

    classes = ("",)

    def __init__(self, seed: int, backends: tuple[Backend, Backend]) -> None:
        super().__init__(seed, backends)
        self.queues = QUEUES[:1]

    def steer(self) -> None:
        arguments = (
            self.random.choice(self.queues),
            self.random.choice(self.partitions),
            self.random.choice([None, 1, 4]),
        )
        for inspect in self.inspects:
            inspect.set_partition_quantum(*arguments)


class RoomyHistory(History):
    """Policies of which few bind; one queue is busy, and the others hardly are.

    Where none binds, the short road decides, and it must notice when one does.
    """

    pinned_to = ("",) * 40 + ("w",)
    limits = (5, 100, 1000)
    bursts = (3, 20, 100, 1000)
    occupancies = (3, 8, 20, 50, 50)

    def __init__(self, seed: int, backends: tuple[Backend, Backend]) -> None:
        super().__init__(seed, backends)
        self.queues = QUEUES[: self.random.choice([1, 3])]
        self.kinds = self.random.sample(CLASSES, self.random.randint(1, 4))
        self.strays = self.random.choice([0.02, 0.5])

    def _queue(self) -> str:
        return self.random.choices(self.queues, [40, 1, 1][: len(self.queues)])[0]

    def _class_in(self, partition: str) -> str:
        if self.random.random() < self.strays:
            return super()._class_in(partition)
        return self.kinds[int(partition[1:]) % len(self.kinds)]


class CrowdedHistory(History):
    """Few partitions with work of more classes than an admission looks at."""

    classes = (*CLASSES, *(f"d{n:02}" for n in range(40)))

    def __init__(self, seed: int, backends: tuple[Backend, Backend]) -> None:
        super().__init__(seed, backends)
        self.partitions = self.partitions[:3]

    def hint(self, batch: AdmissionBatch, request: dict[str, Any]) -> int | None:
        """A full call need not have met a paused class behind its window."""
        if len(batch.claims) == request["capacity"]:
            return None
        return super().hint(batch, request)


class LanedHistory(PlainHistory):
    """Fewer classes than the short road takes, in more lanes than fit."""

    classes = tuple(f"d{n:02}" for n in range(15))
    pinned_to = ("",)

    def __init__(self, seed: int, backends: tuple[Backend, Backend]) -> None:
        super().__init__(seed, backends)
        self.partitions = [f"p{n}" for n in range(self.random.choice([2, 4, 8]))]


def _under(limit: Ceiling, held: Snapshot) -> dict[str, int]:
    """Running jobs by what the ceiling counts."""
    found: dict[str, int] = {}
    for row in held.jobs.values():
        applies = (
            row["rate_class"] == limit.rate_class
            if limit.scope is Scope.CLASS
            else row["queue"] == limit.queue
        )
        if row["state"] == "running" and applies:
            key = row["partition_key"] if limit.scope is Scope.PARTITION else ""
            found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "kind", [History, RoomyHistory, PlainHistory, LanedHistory, CrowdedHistory]
)
def test_both_stores_decide_alike(
    memory: MemoryBackend, postgres: PostgresBackend, kind: type[History], seed: int
):
    history = kind(seed, (memory, postgres))
    for _ in range(40):
        history.step()
    history.compare()


@pytest.mark.parametrize("seed", range(100, 116))
def test_what_is_explained_is_what_happens(
    memory: MemoryBackend, postgres: PostgresBackend, seed: int
):
    history = History(seed, (memory, postgres))
    history.partitions = history.partitions[:3]
    judged = 0
    for _ in range(6):
        for _ in range(6):
            history.step()
        history.explain_alike(list(memory.snapshot().jobs)[:40])
        judged += history.admit_what_was_explained(history.random.choice(WORKERS))
    history.compare()
    assert judged
