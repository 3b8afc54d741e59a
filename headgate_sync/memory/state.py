"""Rows of MemStore: jobs with their indexes, the one lock and the store's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from attrs import Attribute, Factory, define, field, frozen

from headgate_sync.idempotency import StoredAnswer
from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import (
    MAX_HISTORY,
    Checkpoint,
    JobOutput,
    JobProgress,
    JobResult,
)
from headgate_sync.lifecycle import (
    TERMINAL,
    UNFINISHED,
    WAITING,
    Event,
    State,
    find_transition,
)
from headgate_sync.memory.ordered import Ordered
from headgate_sync.retry import (
    DEFAULT_CRASH_LIMIT,
    DEFAULT_RETRY_BASE_MS,
    DEFAULT_RETRY_CAP_MS,
    check_option,
)
from headgate_sync.schedule import Schedule, ScheduleEvent
from headgate_sync.workers import WorkerState

MINUTE_MS = 60_000
HOLD_QUARANTINE = "quarantine"
HOLD_OVERSIZE = "oversize"


class Clock:
    """Store time in milliseconds: the system's, or frozen and stepped by a test."""

    def __init__(self) -> None:
        self._frozen_at_ms: int | None = None

    def now_ms(self) -> int:
        """The present instant."""
        if self._frozen_at_ms is not None:
            return self._frozen_at_ms
        return time.time_ns() // 1_000_000

    def freeze_at(self, at_ms: int) -> None:
        """Stand still at an instant."""
        self._frozen_at_ms = at_ms

    def advance(self, by_ms: int) -> None:
        """Step a frozen clock; a live one freezes at the present instant first."""
        self._frozen_at_ms = self.now_ms() + by_ms

    def unfreeze(self) -> None:
        """Follow the system's clock again."""
        self._frozen_at_ms = None


def _is_allowed(_: object, option: Attribute[int], value: int) -> None:
    check_option(option.name, value)


@define
class Options:
    """Settings of a store that may change while it lives.

    Attributes:
        crash_limit: lost leases after which a job is quarantined.
        retry_base_ms, retry_cap_ms: backoff after the first failure, and its bound.
        retry_jitter: adds to the backoff of a returned failure; gets `retry_base_ms`.
    """

    crash_limit: int = field(default=DEFAULT_CRASH_LIMIT, validator=_is_allowed)
    retry_base_ms: int = field(default=DEFAULT_RETRY_BASE_MS, validator=_is_allowed)
    retry_cap_ms: int = field(default=DEFAULT_RETRY_CAP_MS, validator=_is_allowed)
    retry_jitter: Callable[[int], int] = lambda base_ms: 0


@define(eq=False)
class Queue:
    """A queue: its policy, its service ledger and its counters."""

    name: str
    paused: bool = False
    weight: int = 1
    dispatch_count: int = 0
    round: int = 0
    inflight: int = 0
    unfinished: int = 0
    max_unfinished_jobs: int | None = None
    is_configured: bool = False
    memory_bytes: int | None = None
    memory_sampled: int = 0
    partitions: dict[str, Partition] = Factory(dict)
    lanes: dict[tuple[str, str, str], Lane] = Factory(dict)


@define
class Minute:
    """What happened to the jobs of a partition in a minute."""

    arrived: int = 0
    completed: int = 0
    failed: int = 0
    retried: int = 0
    rejected: int = 0
    latency_ms_sum: int = 0
    latency_count: int = 0


@define(eq=False)
class Partition:
    """A fairness group of a queue; `minutes` is by the start of the minute."""

    queue: Queue
    key: str
    deficit: int = 0
    inflight: int = 0
    last_round: int = 0
    quantum_override: int | None = None
    minutes: dict[int, Minute] = Factory(dict)

    def minute(self, now_ms: int) -> Minute:
        """The counters of the minute."""
        at_ms = now_ms - now_ms % MINUTE_MS
        minute = self.minutes.get(at_ms)
        if minute is None:
            minute = self.minutes[at_ms] = Minute()
        return minute


@define(eq=False)
class Lane:
    """Jobs that share queue, partition, rate class and sticky worker.

    `ready` holds the available ones without a hold mark, in the order of the gate:
    `(-priority, scheduled_at_ms, seq)`. `served_round` is the round of the queue in
    which one of them was decided last.
    """

    queue: Queue
    partition: Partition
    rate_class: str
    sticky_worker: str
    served_round: int = 0
    ready: Ordered[Job] = Factory(Ordered)


@frozen
class LeaseStamp:
    """What one admit writes on every job it claims."""

    lease_id: str
    worker: str
    expires_at_ms: int


@frozen
class QuarantineRow:
    """A registered fingerprint."""

    kind: str
    crash_count: int
    quarantined_at_ms: int
    sample_payload: bytes
    reason: str


NO_CHECKPOINT = Checkpoint()


@define(eq=False)
class Job:
    """One row; the names are the columns of the job table.

    `checkpoint` holds all but the remaining weight, which is `charge_weight`.
    """

    seq: int
    lane: Lane
    options: Options
    id: str
    kind: str
    schema_version: int
    payload: bytes
    queue: str
    partition_key: str
    rate_class: str
    sticky_worker: str
    weight: int
    fingerprint: str
    priority: int
    state: State
    max_attempts: int
    enqueued_at_ms: int
    scheduled_at_ms: int
    timeout_ms: int
    deadline_ms: int
    retention_ms: int
    unique_key: bytes | None
    unique_states: int
    periodic_schedule_id: str
    periodic_tick_ms: int
    headers: Mapping[str, str]
    tags: tuple[str, ...]
    gate_hold: str | None = None
    attempt: int = 0
    crash_attempt: int = 0
    finalized_at_ms: int | None = None
    fence: int = 0
    lease_id: str | None = None
    lease_expires_at_ms: int | None = None
    claimed_by: str | None = None
    claimed_at_ms: int | None = None
    rate_charge: int = 0
    settled_lease_id: str | None = None
    settled_outcome: str | None = None
    reason_code: str = ""
    error_code: str = ""
    latency_ms: int | None = None
    replay_of: str = ""
    checkpoint: Checkpoint = NO_CHECKPOINT
    charge_weight: int | None = None
    errors: tuple[AttemptEntry, ...] = ()
    result: JobResult | None = None
    output: JobOutput | None = None
    progress: JobProgress | None = None

    @property
    def crash_limit(self) -> int:
        """The store's option, under the name that the guards of the table read."""
        return self.options.crash_limit

    @property
    def effective_weight(self) -> int:
        """What an admission charges."""
        return self.weight if self.charge_weight is None else self.charge_weight

    def remember(self, entry: AttemptEntry) -> None:
        """Append to the history, which keeps the newest entries."""
        self.errors = (*self.errors, entry)[-MAX_HISTORY:]


# Why a job became terminal, where the event alone says it.
_REASONS: Mapping[Event, str] = {
    Event.RETRY: "attempts_exhausted",
    Event.SKIP: "skipped",
    Event.UNDECODABLE: "undecodable",
    Event.LEASE_LOST: "crash_limit",
    Event.QUARANTINE_SWEEP: "quarantine_sweep",
    Event.SATURATION_DISCARD: "saturation_discard",
    Event.SATURATION_CANCEL: "saturation_cancel",
    Event.DISPLACED: "saturation_cancel",
    Event.OPERATOR_CANCEL: "cancelled",
}
# After these events an ack of the old holder is no repetition but a lost lease.
_FORGETS_SETTLED = frozenset(
    {Event.ADMITTED, Event.LEASE_LOST, Event.OPERATOR_CANCEL, Event.DISPLACED}
)
_REJECTING = frozenset({Event.SATURATION_DISCARD, Event.SATURATION_CANCEL})
_COUNTED = _REJECTING | {
    Event.SUCCESS,
    Event.RETRY,
    Event.SKIP,
    Event.REVOKE,
    Event.UNDECODABLE,
}


@define(eq=False)
class KeyRow:
    """An idempotency key; without an answer its request is running."""

    request_sha256: str
    created_at_ms: int
    claimed_at_ms: int
    expires_at_ms: int
    answer: StoredAnswer | None = None


@define(eq=False)
class Rows:
    """Everything a MemStore holds.

    `lock` guards every field here and in the gate; a store method holds it throughout.

    Attributes:
        jobs: by id, in the order of `seq`.
        leases: running jobs by the end of their lease.
        due: scheduled and retryable jobs by their instant.
        lapsing: evictable jobs by the end of their retention.
        held: available jobs that the gate set aside, by `seq`.
        quarantine: registered fingerprints.
        suspects: waiting jobs by registered fingerprint and `seq`.
        quarantined: quarantined jobs by fingerprint and `seq`.
        holders: live jobs by lifecycle key.
        throttle: effective key -> (job id, end of the window).
        duties: name -> (holder, end of the lease).
        workers: by id, whoever has beaten.
        class_inflight: running jobs by rate class.
        schedules: by id.
        schedule_events: by schedule id, oldest first.
        idempotency: by route and key, in the order of their claims.
        lane_filled: called when a lane got its first ready job.
    """

    options: Options = field(factory=Options)
    clock: Clock = field(factory=Clock)
    lock: threading.RLock = field(factory=threading.RLock)
    jobs: dict[str, Job] = Factory(dict)
    leases: Ordered[Job] = Factory(Ordered)
    due: Ordered[Job] = Factory(Ordered)
    lapsing: Ordered[Job] = Factory(Ordered)
    held: dict[int, Job] = Factory(dict)
    holders: dict[bytes, Job] = Factory(dict)
    throttle: dict[bytes, tuple[str, int]] = Factory(dict)
    quarantine: dict[str, QuarantineRow] = Factory(dict)
    suspects: dict[str, dict[int, Job]] = Factory(dict)
    quarantined: dict[str, dict[int, Job]] = Factory(dict)
    duties: dict[str, tuple[str, int]] = Factory(dict)
    workers: dict[str, WorkerState] = Factory(dict)
    queues: dict[str, Queue] = Factory(dict)
    class_inflight: dict[str, int] = Factory(dict)
    schedules: dict[str, Schedule] = Factory(dict)
    schedule_events: dict[str, list[ScheduleEvent]] = Factory(dict)
    newest_event_id: int = 0
    idempotency: dict[tuple[str, str], KeyRow] = Factory(dict)
    lane_filled: Callable[[Lane], None] = lambda lane: None
    _next_seq: int = 1

    def queue(self, name: str) -> Queue:
        """The queue of that name, with default policy where none was set."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name)
        return queue

    def partition(self, queue: Queue, key: str) -> Partition:
        """The partition of that key."""
        partition = queue.partitions.get(key)
        if partition is None:
            partition = queue.partitions[key] = Partition(queue, key)
        return partition

    def lane(
        self, queue_name: str, partition_key: str, rate_class: str, sticky_worker: str
    ) -> Lane:
        """The lane of these four names."""
        queue = self.queue(queue_name)
        key = (partition_key, rate_class, sticky_worker)
        lane = queue.lanes.get(key)
        if lane is None:
            partition = self.partition(queue, partition_key)
            lane = queue.lanes[key] = Lane(queue, partition, rate_class, sticky_worker)
        return lane

    def take_seq(self) -> int:
        """The next insertion number."""
        seq = self._next_seq
        self._next_seq = seq + 1
        return seq

    def add(self, job: Job) -> None:
        """Insert a new job in its first state."""
        self.jobs[job.id] = job
        job.lane.queue.unfinished += 1
        job.lane.partition.minute(job.enqueued_at_ms).arrived += 1
        if job.unique_key is not None:
            self.holders[job.unique_key] = job
        self._enter(job)

    def move(
        self,
        job: Job,
        event: Event,
        now_ms: int,
        *,
        scheduled_at_ms: int | None = None,
        stamp: LeaseStamp | None = None,
        rate_charge: int = 0,
        reason_code: str = "",
        change: Callable[[Job], None] | None = None,
    ) -> State:
        """Take a job along the edge of an event; the only place that changes a state.

        Counters, lease, fence, keys, occupancy, hold mark and indexes follow here.

        Args:
            job: its `state` is where the edge starts.
            event: looked up in the table of transitions.
            now_ms: the instant of the decision.
            scheduled_at_ms: the new schedule; None keeps it.
            stamp: the lease, needed for an admission.
            rate_charge: what an admission took from the budgets.
            reason_code: replaces the usual reason of a terminal state.
            change: writes what only the caller knows, such as a new payload.

        Returns:
            The state reached.

        Raises:
            InvalidRequest: the table has no such edge; nothing was changed.
        """
        source = job.state
        target = find_transition(source, event, job).target
        self._leave(job)
        if event is Event.RETRY:
            job.attempt += 1
        elif event is Event.LEASE_LOST:
            job.crash_attempt += 1
        self._count_event(job, event, target, now_ms)
        if event in _FORGETS_SETTLED:
            job.settled_lease_id = job.settled_outcome = None
        if change is not None:
            change(job)
        if scheduled_at_ms is not None:
            job.scheduled_at_ms = scheduled_at_ms
        job.state = target
        self._count_unfinished(job, source)
        if target is State.DELETED:
            del self.jobs[job.id]
            return target
        if target is State.RUNNING:
            assert stamp is not None
            job.fence += 1
            job.lease_id = stamp.lease_id
            job.claimed_by = stamp.worker
            job.claimed_at_ms = now_ms
            job.lease_expires_at_ms = stamp.expires_at_ms
            job.rate_charge = rate_charge
        elif target in TERMINAL:
            if source not in TERMINAL:
                job.finalized_at_ms = now_ms
                job.reason_code = reason_code or _REASONS.get(event, "")
        elif source in TERMINAL:
            job.finalized_at_ms = None
            job.reason_code = ""
        self._enter(job)
        return target

    def rewrite(self, job: Job, change: Callable[[Job], None]) -> None:
        """Change fields of a waiting job that indexes may order by; the state stays.

        A mark of quarantine goes with the fingerprint that is its reason.
        """
        hold, fingerprint = job.gate_hold, job.fingerprint
        self._leave(job)
        change(job)
        if hold != HOLD_QUARANTINE or job.fingerprint == fingerprint:
            job.gate_hold = hold
        self._enter(job)

    def renew(self, job: Job, expires_at_ms: int) -> None:
        """Set the end of a running job's lease."""
        job.lease_expires_at_ms = expires_at_ms
        self.leases.put((expires_at_ms, job.seq, job))

    def hold(self, job: Job, reason: str) -> None:
        """Set an available job aside until `unhold`, or until it leaves the state."""
        job.lane.ready.discard(job.seq)
        job.gate_hold = reason
        self.held[job.seq] = job

    def unhold(self, job: Job) -> None:
        """Clear a hold mark and list the job again."""
        if job.gate_hold is not None:
            del self.held[job.seq]
            job.gate_hold = None
            self._list(job)

    def register(self, fingerprint: str, row: QuarantineRow) -> None:
        """Put a fingerprint under quarantine, or change its row."""
        if fingerprint not in self.quarantine:
            self.suspects[fingerprint] = {
                job.seq: job
                for job in self.jobs.values()
                if job.fingerprint == fingerprint and job.state in WAITING
            }
        self.quarantine[fingerprint] = row

    def unregister(self, fingerprint: str) -> None:
        """Lift the quarantine of a fingerprint, and the marks it caused."""
        self.quarantine.pop(fingerprint, None)
        for job in self.suspects.pop(fingerprint, {}).values():
            if job.gate_hold == HOLD_QUARANTINE:
                self.unhold(job)

    def _count_event(self, job: Job, event: Event, target: State, now_ms: int) -> None:
        """Tell the minute of the partition how a run ended, or never began."""
        if event not in _COUNTED:
            return
        minute = job.lane.partition.minute(now_ms)
        if event is Event.SUCCESS:
            minute.completed += 1
        elif event in _REJECTING:
            minute.rejected += 1
            return
        elif target is State.RETRYABLE:
            minute.retried += 1
        elif target is not State.DELETED:
            minute.failed += 1
        if job.latency_ms is not None:
            minute.latency_ms_sum += job.latency_ms
            minute.latency_count += 1

    def _count_unfinished(self, job: Job, source: State) -> None:
        """Keep the queue's depth and the lifecycle key with the change of state."""
        was, becomes = source in UNFINISHED, job.state in UNFINISHED
        if was == becomes:
            return
        job.lane.queue.unfinished += becomes - was
        if job.unique_key is not None:
            if becomes:
                self.holders[job.unique_key] = job
            else:
                del self.holders[job.unique_key]

    def _leave(self, job: Job) -> None:
        """Undo what belongs to the present state alone."""
        state, seq = job.state, job.seq
        if state is State.RUNNING:
            self.leases.discard(seq)
            job.lease_id = job.claimed_by = None
            job.lease_expires_at_ms = job.claimed_at_ms = None
            job.rate_charge = 0
            self._occupy(job, -1)
            return
        if state in TERMINAL:
            self.lapsing.discard(seq)
            if state is State.QUARANTINED:
                self.quarantined[job.fingerprint].pop(seq, None)
            return
        if state is not State.AVAILABLE:
            self.due.discard(seq)
        elif job.gate_hold is None:
            job.lane.ready.discard(seq)
        else:
            del self.held[seq]
            job.gate_hold = None
        if job.fingerprint in self.suspects:
            self.suspects[job.fingerprint].pop(seq, None)

    def _enter(self, job: Job) -> None:
        """List the job where its state is looked for."""
        state, seq = job.state, job.seq
        if state is State.RUNNING:
            self.leases.put((job.lease_expires_at_ms, seq, job))
            self._occupy(job, 1)
            return
        if state in TERMINAL:
            if state is State.QUARANTINED:
                self.quarantined.setdefault(job.fingerprint, {})[seq] = job
            elif job.retention_ms > 0:
                assert job.finalized_at_ms is not None
                self.lapsing.put((job.finalized_at_ms + job.retention_ms, seq, job))
            return
        if state is State.SCHEDULED or state is State.RETRYABLE:
            self.due.put((job.scheduled_at_ms, seq, job))
        elif state is State.AVAILABLE and job.gate_hold is None:
            self._list(job)
        elif state is State.AVAILABLE:
            self.held[seq] = job
        if job.fingerprint in self.suspects:
            self.suspects[job.fingerprint][seq] = job

    def _list(self, job: Job) -> None:
        ready = job.lane.ready
        ready.put((-job.priority, job.scheduled_at_ms, job.seq, job))
        if len(ready) == 1:
            self.lane_filled(job.lane)

    def _occupy(self, job: Job, by: int) -> None:
        partition = job.lane.partition
        partition.inflight += by
        partition.queue.inflight += by
        if job.rate_class:
            counts = self.class_inflight
            counts[job.rate_class] = counts.get(job.rate_class, 0) + by
