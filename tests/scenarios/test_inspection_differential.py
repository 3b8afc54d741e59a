"""One random history on both stores, looked at by every call: the same answers."""

from __future__ import annotations

from typing import Any

import pytest

from headgate_sync.envelope import Envelope
from headgate_sync.errors import Backpressure, InvalidRequest
from headgate_sync.inspection import Inspect
from headgate_sync.lifecycle import STORED
from headgate_sync.operations import BulkRequest
from headgate_sync.search import JobFilter
from headgate_sync.store import Store
from tests.backends import MemoryBackend, PostgresBackend
from tests.builders import DAY_MS, START_MS, admit, envelope
from tests.scenarios.test_admission_differential import CLASSES, History

KINDS = ("k", "k:one", "kx", "other")
TAGS = ("a", "b", "c")
STATES = sorted(STORED)


class Observed(History):
    """A history of many kinds of jobs, with operators at work."""

    def step(self) -> None:
        choice = self.random.choices(
            [super().step, self.operate, self.fold, self.remove], [12, 1.5, 1, 0.3]
        )
        choice[0]()

    def enqueue(self) -> None:
        pick, batch = self.random.choice, []
        for _ in range(pick([1, 3, 10, 40])):
            self.jobs += 1
            due: dict[str, Any] = {"scheduled_at_ms": 1000}
            start = pick([due, due, due, {"delay_ms": 700}, {"pending": True}])
            batch.append(
                envelope(
                    f"j{self.jobs}",
                    kind=pick(KINDS),
                    queue=pick(self.queues),
                    partition_key=pick(self.partitions),
                    rate_class=pick(CLASSES),
                    fingerprint=pick(["", "f1", "f2"]),
                    priority=pick([0, 0, 1]),
                    tags=tuple(self.random.sample(TAGS, pick([0, 1, 2]))),
                    retention_ms=pick([0, DAY_MS]),
                    **start,
                )
            )
        refusals = [refusal_of(store, batch) for store in self.stores]
        assert refusals[0] == refusals[1]

    def operate(self) -> None:
        pick = self.random.choice
        self.calls += 1
        action = pick(["retry", "cancel", "delete"])
        selector: dict[str, Any] = {
            "queue": pick([None, *self.queues]),
            "kind": pick([None, None, *KINDS]),
            "partition_key": pick([None, None, *self.partitions]),
            "older_than_ms": pick([None, 1, 5000]),
            "dry_run": self.random.random() < 0.2,
        }
        if not any(value for name, value in selector.items() if name != "dry_run"):
            selector["queue"] = self.queues[0]
        request = BulkRequest(id=f"op-{self.calls}", action=action, **selector)
        batch = pick([1, 3, 50])
        for inspect in self.inspects:
            inspect.create_operation(request)
        for _ in range(pick([1, 4])):
            told = [inspect.run_pending_operations(batch) for inspect in self.inspects]
            assert told[0] == told[1], request
        self.same(lambda inspect: inspect.get_operation(request.id))

    def remove(self) -> None:
        queue, force = self.random.choice(self.queues), self.random.random() < 0.5
        told = []
        for inspect in self.inspects:
            try:
                told.append(inspect.delete_queue(queue, force))
            except InvalidRequest as error:
                told.append(str(error))
        assert told[0] == told[1]

    def fold(self) -> None:
        for store in self.stores:
            if store.maintenance is not None:
                store.maintenance.gate_fold(self.random.choice([1, 5, 1000]))

    def same(self, look: Any) -> None:
        left, right = (look(inspect) for inspect in self.inspects)
        assert left == right

    def filters(self) -> list[JobFilter]:
        pick = self.random.choice
        found = [JobFilter(), *(JobFilter(state=state) for state in STATES)]
        for _ in range(25):
            values: dict[str, Any] = {
                "queue": pick(self.queues),
                "state": pick(STATES),
                "kind": pick(KINDS),
                "kind_prefix": pick(["k", "k:", "o", ""]),
                "partition_key": pick(self.partitions),
                "id": f"j{pick(range(1, self.jobs + 2))}",
                "fingerprint": pick(["", "f1"]),
                "rate_class": pick(CLASSES),
                "priority": pick([0, 1]),
                "tags_all": self.random.sample(TAGS, pick([1, 2])),
                "tags_any": self.random.sample(TAGS, pick([1, 2])),
            }
            names = self.random.sample(sorted(values), pick([1, 1, 2, 2, 3]))
            found.append(JobFilter(**{name: values[name] for name in names}))
        return found

    def look(self) -> None:
        """Ask everything."""
        for wanted in self.filters():
            limit = self.random.choice([1, 2, 7, 50])
            self.same(lambda inspect, w=wanted, n=limit: pages(inspect, w, n))
        for queue in (None, *self.queues, "unknown"):
            self.same(lambda inspect, q=queue: inspect.counts(q))
            if queue is not None:
                self.same(lambda inspect, q=queue: inspect.partitions(q))
                self.same(lambda inspect, q=queue: inspect.unfinished(q))
                for bucket_ms in (60_000, 3_600_000):
                    self.same(
                        lambda inspect, q=queue, b=bucket_ms: inspect.history(
                            q, START_MS, b
                        )
                    )
        self.same(lambda inspect: inspect.queue_stats())
        self.same(lambda inspect: inspect.queue_stats(1))
        self.same(lambda inspect: inspect.queue_stats(cursor=self.queues[0]))
        self.same(lambda inspect: inspect.rate_classes())
        self.same(lambda inspect: inspect.quarantine_list())


def refusal_of(store: Store, batch: list[Envelope]) -> str | None:
    """What an enqueue raised: a queue that is being emptied is closed."""
    try:
        store.enqueue(batch)
    except Backpressure as error:
        return str(error)
    return None


def pages(inspect: Inspect, wanted: JobFilter, limit: int) -> list[Any]:
    """Three pages of a list; places differ between stores and are left out."""
    found: list[Any] = []
    cursor = None
    for _ in range(3):
        page = inspect.list_jobs(wanted, cursor, limit)
        found.append((page.jobs, page.next_cursor is None))
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


@pytest.mark.parametrize("seed", range(8))
def test_both_stores_show_the_same(
    memory: MemoryBackend, postgres: PostgresBackend, seed: int
):
    history = Observed(seed, (memory, postgres))
    for _ in range(3):
        for _ in range(15):
            history.step()
        history.look()
    history.compare()


def test_a_history_takes_every_kind_of_step(
    memory: MemoryBackend, postgres: PostgresBackend
):
    """Nothing above agrees because nothing was there."""
    history = Observed(1, (memory, postgres))
    history.enqueue()
    history.operate()
    for store in history.stores:
        admit(store, queues=history.queues)
    history.look()
    shown = history.inspects[0].queue_stats()
    assert any(queue.arrival_rate for queue in shown)
