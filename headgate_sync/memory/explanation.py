"""What the gate of MemStore knows about one job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice

from attrs import evolve

from headgate_sync.explanation import (
    MAX_AHEAD,
    ClassFacts,
    GateFacts,
    PartitionFacts,
    WorkerFacts,
)
from headgate_sync.lifecycle import State
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.state import Job, Lane, Partition, Rows
from headgate_sync.policy import WINDOW_MAX, Ceiling, OnSaturated, Scope


def facts_of(rows: Rows, gate: Gate, job: Job) -> GateFacts:
    """Look at a job; the caller holds the lock of the rows. Nothing is written."""
    registered = rows.quarantine.get(job.fingerprint)
    facts = GateFacts(
        now_ms=rows.clock.now_ms(),
        state=job.state,
        queue=job.queue,
        rate_class=job.rate_class,
        sticky_worker=job.sticky_worker,
        weight=job.effective_weight,
        fingerprint=job.fingerprint,
        scheduled_at_ms=job.scheduled_at_ms,
        claimed_by=job.claimed_by,
        lease_expires_at_ms=job.lease_expires_at_ms,
        crash_attempt=job.crash_attempt,
        crash_count=None if registered is None else registered.crash_count,
    )
    if job.state is not State.AVAILABLE:
        return facts
    return evolve(
        facts,
        hold=job.gate_hold,
        queue_paused=job.lane.queue.paused,
        sticky_worker_facts=_worker_facts(rows, job.sticky_worker),
        rate_class_facts=_class_facts(rows, gate, job),
        partition=_partition_facts(job),
        ceilings=_ceilings(rows, gate, job),
    )


def _worker_facts(rows: Rows, worker_id: str) -> WorkerFacts | None:
    known = rows.workers.get(worker_id)
    if known is None:
        return None
    return WorkerFacts(heartbeat_at_ms=known.heartbeat_at_ms, beat_ms=known.beat_ms)


def _class_facts(rows: Rows, gate: Gate, job: Job) -> ClassFacts:
    row = gate.classes.get(job.rate_class)
    if row is None:
        return ClassFacts()
    key = (job.queue, job.rate_class)
    ahead = _ahead_in_class(gate, job) if row.budgets else []
    bursts = [budget.burst for budget in row.budgets]
    return ClassFacts(
        paused=row.paused,
        paused_until_ms=row.paused_until_ms,
        pause_reason=row.pause_reason,
        closed=key in gate.closed,
        closed_until_ms=gate.closed.get(key),
        budgets=tuple(row.budgets),
        weight_ahead=sum(
            other.effective_weight
            for other in ahead
            if other.fingerprint not in rows.quarantine
            and other.effective_weight <= min(bursts)
        ),
        rows_ahead=len(ahead),
    )


def _ahead_in_class(gate: Gate, job: Job) -> list[Job]:
    """Jobs of the class and queue that the gate meets first.

    Partitions served longer ago come before all others, and one that a ceiling keeps
    from claiming comes not at all.
    """
    own = job.lane.partition
    lanes = [
        lane
        for lane in job.lane.queue.lanes.values()
        if lane.rate_class == job.rate_class
        and lane.sticky_worker in ("", job.sticky_worker)
        and lane.partition.last_round <= own.last_round
        and not _cannot_claim(gate, lane.partition)
    ]
    lanes.sort(key=lambda lane: (lane.partition.last_round, lane.partition.key))
    return _ready(
        lanes,
        lambda lane, other: (
            lane.partition.last_round < own.last_round or _place(other) < _place(job)
        ),
    )


def _cannot_claim(gate: Gate, partition: Partition) -> bool:
    return any(
        ceiling.scope is Scope.PARTITION
        and ceiling.queue == partition.queue.name
        and ceiling.on_saturated is not OnSaturated.CANCEL_RUNNING
        and partition.inflight >= ceiling.max_concurrent
        for ceiling in gate.ceilings.values()
    )


def _partition_facts(job: Job) -> PartitionFacts:
    own = job.lane.partition
    drawable = [
        lane
        for lane in job.lane.queue.lanes.values()
        if lane.sticky_worker in ("", job.sticky_worker)
    ]
    siblings = [lane for lane in drawable if lane.partition is own]
    ahead = _ready(siblings, lambda _, other: _place(other) < _place(job))
    drawable.sort(key=lambda lane: (lane.partition.key, lane.rate_class))
    peers = {own.key: own} | {
        lane.partition.key: lane.partition
        for lane in islice((lane for lane in drawable if len(lane.ready)), WINDOW_MAX)
    }
    return PartitionFacts(
        deficit=own.deficit,
        inflight=own.inflight,
        last_round=own.last_round,
        quantum_override=own.quantum_override,
        position=len(ahead),
        peers=len(peers),
        peers_inflight=sum(peer.inflight for peer in peers.values()),
    )


def _ceilings(rows: Rows, gate: Gate, job: Job) -> tuple[tuple[Ceiling, int], ...]:
    partition = job.lane.partition
    running = {
        Scope.PARTITION: partition.inflight,
        Scope.QUEUE: partition.queue.inflight,
        Scope.CLASS: rows.class_inflight.get(job.rate_class, 0),
    }
    return tuple(
        (ceiling, running[ceiling.scope])
        for _, ceiling in sorted(gate.ceilings.items())
        if (
            ceiling.rate_class == job.rate_class
            if ceiling.scope is Scope.CLASS
            else ceiling.queue == job.queue
        )
    )


def _place(job: Job) -> tuple[int, int, int]:
    return -job.priority, job.scheduled_at_ms, job.seq


def _ready(lanes: Iterable[Lane], comes: Callable[[Lane, Job], bool]) -> list[Job]:
    """Ready jobs of the lanes that come first, up to the bound."""
    found = chain.from_iterable(
        (other for other in lane.ready if comes(lane, other)) for lane in lanes
    )
    return list(islice(found, MAX_AHEAD))
