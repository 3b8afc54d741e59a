"""What every store must do under load, for those who run or write one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import Backpressure
from headgate_sync.ids import UlidGenerator
from headgate_sync.lease import AdmissionBatch, AdmitRequest
from headgate_sync.lifecycle import Outcome
from headgate_sync.store import Store
from headgate_sync.testing.target import inspect_of, store_of

PRODUCERS = 64
BOUND = 25
FOREIGN_JOBS = 5_000
FOREIGN_PRIORITY = 10_000
CHUNK = 500
LEASE_MS = 30_000
KIND = "headgate:check"
WORKER = "worker-a"

_new_id = UlidGenerator()


def assert_sticky_routing(store_or_hg: Any) -> None:
    """Assert that jobs of another worker do not hide the ones that may run.

    5,000 jobs of priority 10,000 are pinned to `worker-b`; one is pinned to `worker-a`
    and one is free, of low priority. `worker-a` must get exactly those two. The jobs
    stay, in a queue of their own.

    Raises:
        AssertionError: it got others.
    """
    store, queue = store_of(store_or_hg), f"sticky-{_new_id()}"
    for start in range(0, FOREIGN_JOBS, CHUNK):
        store.enqueue(
            [
                _job(
                    queue, f"{start + n}", sticky="worker-b", priority=FOREIGN_PRIORITY
                )
                for n in range(CHUNK)
            ]
        )
    pinned = _job(queue, "pinned", sticky=WORKER, priority=50)
    free = _job(queue, "free", priority=1)
    store.enqueue([pinned, free])
    got = {claim.envelope.id for claim in _admit(store, queue, 2).claims}
    assert got == {pinned.id, free.id}, (
        f"{WORKER} must get {sorted([pinned.id, free.id])}, got {sorted(got)}"
    )


def assert_enqueue_backpressure(store_or_hg: Any) -> None:
    """Assert that a bounded queue takes as many jobs as its bound says, and no more.

    64 producers enqueue one job each at the same time into a queue with room for 25:
    25 succeed, 39 get `Backpressure` with the figures. A batch is refused as a whole,
    an admitted job still counts, a finished one makes room, and without a bound
    everything is taken. The jobs stay, in a queue of their own.

    Raises:
        AssertionError: one of this did not hold.
    """
    store, queue = store_of(store_or_hg), f"bound-{_new_id()}"
    inspect = inspect_of(store_or_hg)
    inspect.set_enqueue_limit(queue, BOUND)
    with ThreadPoolExecutor(PRODUCERS) as producers:
        answers = list(
            producers.map(
                lambda n: _refusal(store, [_job(queue, str(n))]), range(PRODUCERS)
            )
        )
    refusals = [answer for answer in answers if answer is not None]
    _equal("jobs refused", len(refusals), PRODUCERS - BOUND)
    for refusal in refusals:
        figures = (refusal.queue, refusal.limit, refusal.current, refusal.incoming)
        _equal("figures of a refusal", figures, (queue, BOUND, BOUND, 1))
    _equal("unfinished jobs", inspect.unfinished(queue), BOUND)

    (claim,) = _admit(store, queue, 1).claims
    _refused(store, [_job(queue, "beside a running job")])
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    _refused(store, [_job(queue, "one"), _job(queue, "two")])
    _equal("unfinished jobs", inspect.unfinished(queue), BOUND - 1)
    store.enqueue([_job(queue, "into the room of the finished one")])
    _refused(store, [_job(queue, "beyond")])
    inspect.set_enqueue_limit(queue, None)
    store.enqueue([_job(queue, f"unbounded {n}") for n in range(2)])
    _equal("unfinished jobs", inspect.unfinished(queue), BOUND + 2)


def _job(queue: str, text: str, *, sticky: str = "", priority: int = 0) -> Envelope:
    payload = text.encode()
    return Envelope(
        id=_new_id(),
        kind=KIND,
        queue=queue,
        payload=payload,
        fingerprint=fingerprint(KIND, payload),
        sticky_worker=sticky,
        priority=priority,
    )


def _admit(store: Store, queue: str, capacity: int) -> AdmissionBatch:
    return store.admit(
        AdmitRequest(
            worker=WORKER,
            lease_id=_new_id(),
            queues=(queue,),
            capacity=capacity,
            lease_ms=LEASE_MS,
        )
    )


def _refusal(store: Store, batch: list[Envelope]) -> Backpressure | None:
    try:
        store.enqueue(batch)
    except Backpressure as refusal:
        return refusal
    return None


def _refused(store: Store, batch: list[Envelope]) -> None:
    assert _refusal(store, batch) is not None, (
        f"{len(batch)} jobs were taken although the queue had no room for them"
    )


def _equal(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what}: {found}, expected {expected}"
