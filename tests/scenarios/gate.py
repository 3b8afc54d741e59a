"""Short ways to fill queues and to read what an admission decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from headgate_sync.lease import AdmissionBatch
from headgate_sync.lifecycle import Outcome
from headgate_sync.policies import Policies
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.store import Store
from tests import builders
from tests.backends import Backend
from tests.builders import QUEUE, envelope, steer

BATCH = 1000


def fill(store: Store, name: str, count: int, **fields: Any) -> list[str]:
    """Enqueue jobs `name-1`, `name-2`, ... in one partition of that name."""
    values = {"partition_key": name, "fingerprint": "", **fields}
    jobs = [envelope(f"{name}-{n}", **values) for n in range(1, count + 1)]
    for start in range(0, count, BATCH):
        store.enqueue(jobs[start : start + BATCH])
    return [job.id for job in jobs]


def admit(store: Store, capacity: int = 100, **request: Any) -> AdmissionBatch:
    """Admit with an explicit quantum that never binds, unless told otherwise."""
    return builders.admit(store, **{"capacity": capacity, "quantum": 1000, **request})


def ids(batch: AdmissionBatch) -> list[str]:
    """The ids of the claims, in the order of the decisions."""
    return [claim.envelope.id for claim in batch.claims]


def served(batch: AdmissionBatch) -> dict[str, int]:
    """Claims by partition."""
    return dict(Counter(claim.envelope.partition_key for claim in batch.claims))


def queues(batch: AdmissionBatch) -> dict[str, int]:
    """Claims by queue."""
    return dict(Counter(claim.envelope.queue for claim in batch.claims))


def deficits(backend: Backend, *partitions: str, queue: str = QUEUE) -> list[int]:
    """What partitions carry into the next call."""
    stored = backend.snapshot().partitions
    return [stored.get((queue, name), (0, 0, 0, None))[0] for name in partitions]


def inflight(backend: Backend, partition: str = "", queue: str = QUEUE) -> int:
    """Running jobs of a partition, from its counter."""
    running: int = backend.snapshot().partitions.get(
        (queue, partition), (0, 0, 0, None)
    )[1]
    return running


def dispatched(backend: Backend, *names: str) -> list[int]:
    """Decisions booked for queues."""
    stored = backend.snapshot().queues
    return [stored[name][2] for name in names]


def policies(store: Store) -> Policies:
    """The limits that admission reads."""
    return steer(store)


def rate_class(store: Store, name: str, rate: str, burst: int, **fields: Any) -> None:
    """Configure a class; the rate is written `5/1000`: tokens per milliseconds."""
    limit, window_ms = rate.split("/")
    policies(store).upsert_rate_class(
        RateClassConfig(
            name=name, limit=int(limit), window_ms=int(window_ms), burst=burst, **fields
        )
    )


def tokens(store: Store, name: str, slot: int = 0) -> int:
    """Whole tokens of a budget now."""
    [state] = [s for s in policies(store).rate_classes() if s.name == name]
    return state.budgets[slot].tokens_available


def ceiling(
    store: Store, max_concurrent: int, on_saturated: str, **fields: Any
) -> None:
    """Put a ceiling named `limit` on queue `q`, or on what the fields say."""
    values: dict[str, Any] = {"name": "limit", "queue": QUEUE, **fields}
    policies(store).upsert_concurrency_limit(
        Ceiling(max_concurrent=max_concurrent, on_saturated=on_saturated, **values)
    )


def ack_all(store: Store, batch: AdmissionBatch, only: Iterable[str] = ()) -> None:
    """Ack claims as successful; all of them, or those with the ids given."""
    wanted = set(only) or set(ids(batch))
    for claim in batch.claims:
        if claim.envelope.id in wanted:
            store.ack(claim.lease_ref, Outcome.SUCCESS)
