"""Short ways to say what a test needs: a job, a claim, a job in some state."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.inspection import Inspect, JobSummary
from headgate_sync.lease import AdmissionBatch, AdmitRequest, Claim
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.policy import RateClassConfig
from headgate_sync.retry import DEFAULT_RETRY_CAP_MS
from headgate_sync.search import JobFilter
from headgate_sync.store import Store
from headgate_sync.workers import WorkerMeta

START_MS = 1_000_000
KIND = "tk:msg"
PAYLOAD = b"ok"
QUEUE = "q"
WORKER = "w"
LEASE_MS = 30_000
DAY_MS = 86_400_000

_lease_numbers = itertools.count(1)


def envelope(id: str, **fields: Any) -> Envelope:
    """A due job of kind `tk:msg` in queue `q` that is kept for a day when finished."""
    values: dict[str, Any] = {
        "kind": KIND,
        "payload": PAYLOAD,
        "queue": QUEUE,
        "retention_ms": DAY_MS,
        "scheduled_at_ms": 1,
        **fields,
    }
    if fields.get("pending") or fields.get("delay_ms"):
        values["scheduled_at_ms"] = fields.get("scheduled_at_ms", 0)
    if "fingerprint" not in fields and isinstance(values["payload"], bytes):
        values["fingerprint"] = fingerprint(values["kind"], values["payload"])
    return Envelope(id=id, **values)


def envelopes(*ids: str, **fields: Any) -> list[Envelope]:
    """Several jobs that differ in nothing but the id."""
    return [envelope(id, **fields) for id in ids]


def enqueue(store: Store, *ids: str, **fields: Any) -> None:
    """Enqueue one batch of jobs that differ in nothing but the id."""
    store.enqueue(envelopes(*ids, **fields))


def admit(
    store: Store,
    lease_id: str | None = None,
    *,
    capacity: int = 10,
    lease_ms: int = LEASE_MS,
    worker: str = WORKER,
    queues: Iterable[str] = (QUEUE,),
    quantum: int = 0,
) -> AdmissionBatch:
    """Ask the store for work on queue `q`, under a lease id of its own unless given."""
    return store.admit(
        AdmitRequest(
            worker=worker,
            lease_id=lease_id or f"lease-{next(_lease_numbers)}",
            queues=tuple(queues),
            capacity=capacity,
            lease_ms=lease_ms,
            quantum=quantum,
        )
    )


def claim_one(store: Store, lease_id: str | None = None, **request: Any) -> Claim:
    """Admit exactly one job."""
    claims = admit(store, lease_id, **{"capacity": 1, **request}).claims
    assert len(claims) == 1, f"expected one claim, got {claims}"
    return claims[0]


def run_one(store: Store, id: str, **fields: Any) -> Claim:
    """Enqueue one job into an otherwise idle queue and claim it."""
    store.enqueue([envelope(id, **fields)])
    claim = claim_one(store, queues=(fields.get("queue", QUEUE),))
    assert claim.envelope.id == id, f"claimed {claim.envelope.id} instead of {id}"
    return claim


def steer(store: Store) -> Inspect:
    """The control surface, which both stores have."""
    assert store.inspect is not None, "this store cannot be steered"
    return store.inspect


def beat(store: Store, worker_id: str = "w", **fields: Any) -> str | None:
    """Let a worker of 8 handlers beat, of which 6 are busy; what it is asked to do."""
    values: dict[str, Any] = {
        "host": "host",
        "pid": 7,
        "queues": ("q",),
        "concurrency": 8,
        "started_at_ms": 500,
        "inflight": 6,
        "polls": 10,
        "empty_polls": 2,
        "worker_id": worker_id,
        **fields,
    }
    return steer(store).heartbeat_worker(WorkerMeta(**values))


def set_rate_limit(
    store: Store, name: str, limit: int, window_ms: int, burst: int
) -> None:
    """Give a rate class one new, full budget, whatever it had before."""
    steer(store).delete_rate_class(name)
    steer(store).upsert_rate_class(
        RateClassConfig(name=name, limit=limit, window_ms=window_ms, burst=burst)
    )


def job(store: Store, id: str) -> JobSummary:
    """A job that must exist, with its payload and headers."""
    found = steer(store).get_job(id, include_payload=True)
    assert found is not None, f"no job {id}"
    return found


def state_of(store: Store, id: str) -> State:
    """Where a job stands; `State.DELETED` when there is none."""
    found = steer(store).get_job(id)
    return State.DELETED if found is None else State(found.state)


def counts(store: Store, queue: str | None = None) -> dict[str, int]:
    """Jobs by state, one by one where the store stopped counting for want of time."""
    inspect = steer(store)
    found = inspect.counts(queue)
    if not found.approximate:
        return dict(found.counts)
    chosen, exact, cursor = JobFilter(queue=queue), Counter[str](), None
    while True:
        page = inspect.list_jobs(chosen, cursor, 200)
        exact.update(job.state for job in page.jobs)
        if page.next_cursor is None:
            return dict(exact)
        cursor = page.next_cursor


def bring_to(store: Store, clock: Any, id: str, state: State, **fields: Any) -> None:
    """Enqueue a job and lead it into a state by ordinary calls.

    The queue must hold nothing else that could be claimed. The clock moves only where
    time is what leads there.
    """
    if state is State.PENDING:
        store.enqueue([envelope(id, pending=True, **fields)])
        return
    if state is State.SCHEDULED:
        store.enqueue([envelope(id, delay_ms=60_000, **fields)])
        return
    if state is State.AVAILABLE:
        store.enqueue([envelope(id, **fields)])
        return
    claim = run_one(store, id, **fields)
    outcomes = {
        State.RETRYABLE: Outcome.RETRY,
        State.COMPLETED: Outcome.SUCCESS,
        State.ARCHIVED: Outcome.SKIP,
        State.UNDECODABLE: Outcome.UNDECODABLE,
        State.DELETED: Outcome.REVOKE,
    }
    if state in outcomes:
        delay_ms = 60_000 if state is State.RETRYABLE else None
        store.ack(claim.lease_ref, outcomes[state], delay_ms=delay_ms)
    elif state is State.CANCELLED:
        steer(store).operator_cancel(id)
    elif state is State.QUARANTINED:
        crash_until_quarantined(store, clock, claim)
    assert state_of(store, id) is state, f"{id} is {state_of(store, id)}, not {state}"


def crash(store: Store, clock: Any, claim: Claim) -> None:
    """Let the lease of a claim run out and reclaim it."""
    clock.advance_ms(max(0, claim.expires_at_ms - clock.now_ms()))
    reclaimed = store.reclaim_expired(1000)
    assert claim.envelope.id in [record.job_id for record in reclaimed]


def crash_until_quarantined(store: Store, clock: Any, claim: Claim) -> None:
    """Crash a job over and over until the crash limit takes it out."""
    for _ in range(20):
        crash(store, clock, claim)
        if state_of(store, claim.envelope.id) is State.QUARANTINED:
            return
        clock.advance_ms(DEFAULT_RETRY_CAP_MS)
        store.promote_due(1000)
        claim = claim_one(store, queues=(claim.envelope.queue,))
    raise AssertionError("the crash limit was never reached")
