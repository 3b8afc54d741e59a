"""What a store should hold: the rules of the port over plain rows, read slowly.

Deliberately naive: no index, no counter, every question answered by looking at all
rows. Only the choice of an admission is not foretold; it is checked and taken over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, asdict, define, evolve

from headgate_sync.envelope import (
    UNIQUE_REPLACE_MAX_ATTEMPTS,
    UNIQUE_REPLACE_PAYLOAD,
    UNIQUE_REPLACE_PRIORITY,
    UNIQUE_REPLACE_SCHEDULED_AT,
    Envelope,
)
from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    LeaseRejected,
    NotFound,
)
from headgate_sync.inspection import (
    CRASH_LIMIT_REASON,
    LEASE_EXPIRED,
    LEASE_LOST_ERROR,
    AttemptEntry,
)
from headgate_sync.lease import (
    MAX_HISTORY,
    Ack,
    AdmissionBatch,
    AdmitRequest,
    Checkpoint,
    Claim,
    JobOutput,
    JobProgress,
    JobResult,
    LeaseRef,
    ProgressUpdate,
    Reclaimed,
)
from headgate_sync.lifecycle import (
    EVICTABLE,
    TERMINAL,
    UNFINISHED,
    WAITING,
    Event,
    Outcome,
    State,
    Transition,
    find_transition,
)
from headgate_sync.policy import (
    Budget,
    Ceiling,
    OnSaturated,
    RateClassConfig,
    Scope,
)
from headgate_sync.retry import backoff_ms
from headgate_sync.validation import validate_enqueue

NO_STEPS = Checkpoint()
CHANGEABLE = (State.SCHEDULED, State.AVAILABLE, State.RETRYABLE)
REASONS = {
    Event.RETRY: "attempts_exhausted",
    Event.SKIP: "skipped",
    Event.UNDECODABLE: "undecodable",
    Event.LEASE_LOST: "crash_limit",
    Event.QUARANTINE_SWEEP: "quarantine_sweep",
    Event.OPERATOR_CANCEL: "cancelled",
    Event.SATURATION_DISCARD: "saturation_discard",
    Event.SATURATION_CANCEL: "saturation_cancel",
    Event.DISPLACED: "saturation_cancel",
}
FORGETS_SETTLED = {
    Event.ADMITTED,
    Event.LEASE_LOST,
    Event.OPERATOR_CANCEL,
    Event.DISPLACED,
}
_HIDDEN = ("seq", "crash_limit", "most_attempts", "second_chances")


@define
class Job:
    """One row; the names are those of a snapshot.

    Attributes:
        most_attempts: the largest `max_attempts` the job ever had.
        second_chances: how often an operator brought it back.
    """

    seq: int
    crash_limit: int
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
    checkpoint: Checkpoint = NO_STEPS
    errors: list[AttemptEntry] = Factory(list)
    result: JobResult | None = None
    output: JobOutput | None = None
    progress: JobProgress | None = None
    most_attempts: int = 0
    second_chances: int = 0

    @property
    def lease_ref(self) -> LeaseRef:
        """The ref that the holder shows."""
        assert self.lease_id is not None
        return LeaseRef(self.id, self.lease_id, self.fence)

    @property
    def gate_key(self) -> tuple[int, int, int]:
        """The order within a lane."""
        return (-self.priority, self.scheduled_at_ms, self.seq)

    @property
    def lane(self) -> tuple[str, str, str, str]:
        """What a job shares with those that stand in one line with it."""
        return (self.queue, self.partition_key, self.rate_class, self.sticky_worker)

    def row(self) -> dict[str, Any]:
        """The job as a snapshot shows it."""
        shown = asdict(self, recurse=False)
        for name in _HIDDEN:
            del shown[name]
        return shown | {"state": self.state.value, "headers": dict(self.headers)}

    def remember(self, entry: AttemptEntry) -> None:
        """Add to the history."""
        self.errors = [*self.errors, entry][-MAX_HISTORY:]


@define
class Model:
    """All rows, and the table rows that were taken on the way."""

    crash_limit: int = 3
    now_ms: int = 0
    jobs: dict[str, Job] = Factory(dict)
    throttle: dict[bytes, tuple[str, int]] = Factory(dict)
    quarantine: dict[str, tuple[str, int, int, bytes, str]] = Factory(dict)
    duties: dict[str, tuple[str, int]] = Factory(dict)
    limits: dict[str, int] = Factory(dict)
    paused: set[str] = Factory(set)
    weights: dict[str, int] = Factory(dict)
    budgets: dict[str, list[Budget]] = Factory(dict)
    stopped: set[str] = Factory(set)
    pauses: dict[str, tuple[int, str]] = Factory(dict)
    markers: set[str] = Factory(set)
    ceilings: dict[str, Ceiling] = Factory(dict)
    minutes: Counter[tuple[str, str, int, str]] = Factory(Counter)
    taken: Counter[str] = Factory(Counter)
    next_seq: int = 1

    # Looking

    def where(self, *states: State) -> list[Job]:
        """Jobs in any of these states, in the order of insertion."""
        return [job for job in self.jobs.values() if job.state in states]

    def unfinished(self, queue: str) -> int:
        """Jobs of a queue in no terminal state."""
        return sum(job.queue == queue for job in self.where(*UNFINISHED))

    def holder(self, key: bytes | None) -> Job | None:
        """The live job with a lifecycle key."""
        if key is None:
            return None
        found = [job for job in self.where(*UNFINISHED) if job.unique_key == key]
        assert len(found) <= 1, f"{key!r} is held by {[job.id for job in found]}"
        return found[0] if found else None

    def due_instants(self) -> list[int]:
        """When waiting jobs become due."""
        return [
            job.scheduled_at_ms for job in self.where(State.SCHEDULED, State.RETRYABLE)
        ]

    def lease_instants(self) -> list[int]:
        """When leases run out."""
        return [job.lease_expires_at_ms or 0 for job in self.where(State.RUNNING)]

    def retention_instants(self) -> list[int]:
        """When kept jobs lapse."""
        return [
            (job.finalized_at_ms or 0) + job.retention_ms
            for job in self.where(*EVICTABLE)
            if job.retention_ms
        ]

    def policies(self) -> dict[str, tuple[bool, int]]:
        """(paused, weight) of each queue that has a policy."""
        found = {
            queue: (queue in self.paused, self.weights.get(queue, 1))
            for queue in self.paused | set(self.weights)
        }
        return {
            queue: policy for queue, policy in found.items() if policy != (False, 1)
        }

    # The one way to change a state

    def move(
        self,
        job: Job,
        event: Event,
        *,
        scheduled_at_ms: int | None = None,
        reason_code: str = "",
        taken_as: Event | None = None,
    ) -> Transition:
        """Take the edge of the table, with what follows from leaving and entering."""
        row = find_transition(job.state, event, job)
        counted = find_transition(job.state, taken_as, job) if taken_as else row
        self.taken[f"{counted.source} {counted.event} {counted.target}"] += 1
        if job.state is State.RUNNING:
            job.lease_id = job.lease_expires_at_ms = None
            job.claimed_by = job.claimed_at_ms = None
            job.rate_charge = 0
        if event is Event.RETRY:
            job.attempt += 1
            self._check_attempts(job, row.target)
        if event is Event.LEASE_LOST:
            job.crash_attempt += 1
        if event in FORGETS_SETTLED:
            job.settled_lease_id = job.settled_outcome = None
        if row.target in TERMINAL and job.state not in TERMINAL:
            job.finalized_at_ms = self.now_ms
            job.reason_code = reason_code or REASONS.get(event, "")
        elif row.target not in TERMINAL:
            job.finalized_at_ms = None
            job.reason_code = ""
        if scheduled_at_ms is not None:
            job.scheduled_at_ms = scheduled_at_ms
        if row.target is State.DELETED:
            del self.jobs[job.id]
        else:
            job.state = row.target
        return row

    def _check_attempts(self, job: Job, target: State) -> None:
        assert job.attempt <= job.most_attempts + job.second_chances
        assert (target is State.RETRYABLE) == (job.attempt < job.max_attempts)

    # Intake

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take a batch in, or refuse it whole."""
        validate_enqueue(batch)
        new = self._without_replays(batch)
        if not new:
            return
        for envelope in new:
            if envelope.fingerprint and envelope.fingerprint in self.quarantine:
                raise FingerprintQuarantined(envelope.fingerprint)
        self._check_depth(new)
        self._check_keys(new)
        for envelope in new:
            self._insert(envelope)

    def _without_replays(self, batch: Sequence[Envelope]) -> list[Envelope]:
        new = []
        for envelope in batch:
            known = self.jobs.get(envelope.id)
            if known is None:
                new.append(envelope)
            elif (known.kind, known.fingerprint, known.queue) != (
                envelope.kind,
                envelope.fingerprint,
                envelope.queue,
            ):
                raise IdConflict(envelope.id)
        return new

    def _check_depth(self, new: list[Envelope]) -> None:
        incoming = Counter(envelope.queue for envelope in new)
        for queue in sorted(incoming):
            limit, current = self.limits.get(queue), self.unfinished(queue)
            if limit is not None and current + incoming[queue] > limit:
                raise Backpressure(
                    queue, limit=limit, current=current, incoming=incoming[queue]
                )

    def _check_keys(self, new: list[Envelope]) -> None:
        seen: dict[tuple[bool, bytes], str] = {}
        for envelope in new:
            key = envelope.effective_unique_key
            if key is None:
                continue
            mode = (envelope.unique_window_ms > 0, key)
            if mode in seen:
                raise DuplicateJob(seen[mode])
            held_by, winner = self._held(envelope, key)
            if held_by is not None:
                raise DuplicateJob(held_by, replaced=self._replace(winner, envelope))
            seen[mode] = envelope.id

    def _held(self, envelope: Envelope, key: bytes) -> tuple[str | None, Job | None]:
        if envelope.unique_window_ms == 0:
            winner = self.holder(key)
            return (winner.id if winner else None), winner
        job_id, expires_at_ms = self.throttle.get(key, ("", 0))
        if self.now_ms >= expires_at_ms:
            return None, None
        return job_id, self.jobs.get(job_id)

    def _replace(self, winner: Job | None, envelope: Envelope) -> bool:
        if winner is None or winner.state not in CHANGEABLE:
            return False
        bits, debounce_ms = envelope.unique_replace, envelope.unique_debounce_ms
        written = False
        if debounce_ms:
            self._take_payload(winner, envelope)
            winner.tags = envelope.tags
            self.move(
                winner, Event.DEBOUNCED, scheduled_at_ms=self.now_ms + debounce_ms
            )
            written = True
        elif bits & UNIQUE_REPLACE_PAYLOAD:
            self._take_payload(winner, envelope)
            written = True
        if (
            bits & UNIQUE_REPLACE_SCHEDULED_AT
            and not debounce_ms
            and winner.state is State.SCHEDULED
        ):
            winner.scheduled_at_ms = self._instant(envelope)
            written = True
        if bits & UNIQUE_REPLACE_PRIORITY:
            winner.priority = envelope.priority
            written = True
        if bits & UNIQUE_REPLACE_MAX_ATTEMPTS:
            winner.max_attempts = envelope.max_attempts
            winner.most_attempts = max(winner.most_attempts, envelope.max_attempts)
            written = True
        return written

    def _take_payload(self, winner: Job, envelope: Envelope) -> None:
        winner.payload = envelope.payload
        winner.schema_version = envelope.schema_version
        winner.fingerprint = envelope.fingerprint

    def _instant(self, envelope: Envelope) -> int:
        if envelope.unique_debounce_ms or envelope.delay_ms:
            return self.now_ms + (envelope.unique_debounce_ms or envelope.delay_ms)
        return envelope.scheduled_at_ms or self.now_ms

    def _insert(self, envelope: Envelope) -> None:
        scheduled_at_ms = self._instant(envelope)
        if envelope.pending:
            state = State.PENDING
        elif scheduled_at_ms > self.now_ms:
            state = State.SCHEDULED
        else:
            state = State.AVAILABLE
        key = envelope.effective_unique_key
        if envelope.unique_window_ms and key is not None:
            self.throttle[key] = (envelope.id, self.now_ms + envelope.unique_window_ms)
            key = None
        same = (
            "id", "kind", "schema_version", "payload", "queue", "partition_key",
            "rate_class", "sticky_worker", "weight", "fingerprint", "priority",
            "max_attempts", "timeout_ms", "retention_ms", "unique_states",
            "periodic_schedule_id", "periodic_tick_ms", "headers", "tags",
        )  # fmt: skip
        deadline_in_ms = envelope.deadline_in_ms
        self.jobs[envelope.id] = Job(
            seq=self.next_seq,
            crash_limit=self.crash_limit,
            state=state,
            enqueued_at_ms=self.now_ms,
            scheduled_at_ms=scheduled_at_ms,
            deadline_ms=(
                self.now_ms + deadline_in_ms if deadline_in_ms else envelope.deadline_ms
            ),
            unique_key=key,
            most_attempts=envelope.max_attempts,
            **{name: getattr(envelope, name) for name in same},
        )
        self.next_seq += 1
        self._count(envelope.queue, envelope.partition_key, "arrived")

    def _count(self, queue: str, partition_key: str, what: str) -> None:
        minute = self.now_ms - self.now_ms % 60_000
        self.minutes[queue, partition_key, minute, what] += 1

    # Admission

    def eligible(self, request: AdmitRequest) -> list[Job]:
        """Jobs that no rule keeps from this request."""
        return [
            job
            for job in self.where(State.AVAILABLE)
            if job.queue in request.queues
            and job.queue not in self.paused
            and job.sticky_worker in {"", request.worker}
            and (not job.fingerprint or job.fingerprint not in self.quarantine)
            and job.rate_class not in self.stopped
            and self.pauses.get(job.rate_class, (0, ""))[0] <= self.now_ms
            and not self._is_oversize(job)
        ]

    def _is_oversize(self, job: Job) -> bool:
        budgets = self.budgets.get(job.rate_class, ())
        return any(self.cost(job) > budget.burst for budget in budgets)

    def rate_classes(self) -> dict[str, tuple[bool, int | None, str]]:
        """(paused, paused until, reason) of each class that is paused now."""
        pauses = {
            name: pause for name, pause in self.pauses.items() if pause[0] > self.now_ms
        }
        return {
            name: (name in self.stopped, *pauses.get(name, (None, "")))
            for name in self.stopped | set(pauses)
        }

    def cost(self, job: Job) -> int:
        """What an admission charges."""
        remaining = job.checkpoint.remaining_weight
        return job.weight if remaining is None else remaining

    def over(self, job: Job) -> list[Ceiling]:
        """The ceilings that count a job."""
        return [
            ceiling
            for ceiling in self.ceilings.values()
            if (ceiling.rate_class and ceiling.rate_class == job.rate_class)
            or (ceiling.queue and ceiling.queue == job.queue)
        ]

    def reasons(self, job_id: str) -> set[str | None] | None:
        """What may keep a job from running; None alone when nothing can.

        What the gate remembers of a class that ran dry is not the model's: a job of a
        class with budgets may wait for it; nor is which workers were seen.
        """
        job = self.jobs.get(job_id)
        if job is None:
            return None
        by_state = {
            State.PENDING: "pending",
            State.SCHEDULED: "schedule",
            State.RETRYABLE: "schedule",
            State.QUARANTINED: "quarantine",
        }
        if job.state is not State.AVAILABLE:
            return {by_state.get(job.state)}
        if job.queue in self.paused:
            return {"queue_paused"}
        if job.fingerprint in self.quarantine:
            return {"quarantine"}
        pinned = {"sticky_worker"} if job.sticky_worker else set()
        budgets = [b.at(self.now_ms) for b in self.budgets.get(job.rate_class, ())]
        if (
            job.rate_class in self.stopped
            or self.pauses.get(job.rate_class, (0, ""))[0] > self.now_ms
            or self._is_oversize(job)
            or not all(budget.fits(self.cost(job)) for budget in budgets)
        ):
            return {"rate_class", *pinned}
        occupancy = self.occupancy()
        is_full = any(
            occupancy.get(
                (c.name, job.partition_key if c.scope is Scope.PARTITION else ""), 0
            )
            >= c.max_concurrent
            and c.on_saturated is not OnSaturated.CANCEL_RUNNING
            for c in self.over(job)
        )
        found: set[str | None] = {"concurrency_limit" if is_full else None, *pinned}
        return found | {"rate_class"} if budgets else found

    def occupancy(self) -> dict[tuple[str, str], int]:
        """Running jobs under each ceiling, by partition where it counts them apart."""
        found: dict[tuple[str, str], int] = {}
        for job in self.where(State.RUNNING):
            for ceiling in self.over(job):
                apart = ceiling.scope is Scope.PARTITION
                key = (ceiling.name, job.partition_key if apart else "")
                found[key] = found.get(key, 0) + 1
        return found

    def take_over(
        self,
        request: AdmitRequest,
        batch: AdmissionBatch,
        states: Mapping[str, str],
    ) -> None:
        """Check what an admission decided, and make it the model's own.

        Args:
            request: what was asked.
            batch: what was answered.
            states: where the jobs of the store stand after it.
        """
        claims = batch.claims
        eligible = {job.id: job for job in self.eligible(request)}
        claimed = [claim.envelope.id for claim in claims]
        gone = [
            id for id in eligible if states[id] in {State.ARCHIVED, State.CANCELLED}
        ]
        assert len(set(claimed)) == len(claimed)
        assert len(claimed) + len(gone) <= request.capacity
        assert set(claimed) <= set(eligible), "claimed what was not eligible"
        if request.quantum == 0 and not self.ceilings and not self._limited(eligible):
            wanted = min(request.capacity, len(eligible))
            assert len(claimed) == wanted, f"{len(claimed)} claims, {wanted} possible"
        self._check_lanes(eligible, claimed, gone)
        before = self.occupancy()
        for job in self.where(State.RUNNING):
            if states[job.id] == State.CANCELLED:
                self._give_way(job, OnSaturated.CANCEL_RUNNING, Event.DISPLACED)
        for id in gone:
            if states[id] == State.ARCHIVED:
                self._give_way(
                    eligible[id], OnSaturated.DISCARD, Event.SATURATION_DISCARD
                )
            else:
                self._give_way(
                    eligible[id], OnSaturated.CANCEL_INCOMING, Event.SATURATION_CANCEL
                )
        for claim in claims:
            self._claim(request, eligible[claim.envelope.id], claim)
        for key, running in self.occupancy().items():
            most = max(before.get(key, 0), self.ceilings[key[0]].max_concurrent)
            assert running <= most, f"{running} running jobs under ceiling {key}"

    def _limited(self, jobs: Mapping[str, Job]) -> bool:
        return any(job.rate_class in self.budgets for job in jobs.values())

    def _give_way(self, job: Job, strategy: OnSaturated, event: Event) -> None:
        strategies = [ceiling.on_saturated for ceiling in self.over(job)]
        assert strategy in strategies, f"{job.id}: {event} under {strategies}"
        self.move(job, event)

    def _check_lanes(
        self, eligible: Mapping[str, Job], claimed: list[str], gone: list[str]
    ) -> None:
        """From each lane the first jobs are taken, in their order."""
        lanes: dict[tuple[str, ...], list[Job]] = {}
        for job in eligible.values():
            lanes.setdefault(job.lane, []).append(job)
        for lane, jobs in lanes.items():
            order = [job.id for job in sorted(jobs, key=lambda job: job.gate_key)]
            taken = [id for id in claimed if eligible[id].lane == lane]
            sent = {id for id in gone if eligible[id].lane == lane}
            decided = order[: len(taken) + len(sent)]
            assert [id for id in decided if id not in sent] == taken, f"{lane}: {taken}"
            assert sent <= set(decided), f"{lane}: {sent}"

    def _claim(self, request: AdmitRequest, job: Job, claim: Claim) -> None:
        self.move(job, Event.ADMITTED)
        job.fence += 1
        job.lease_id = request.lease_id
        job.lease_expires_at_ms = self.now_ms + request.lease_ms
        job.claimed_by = request.worker
        job.claimed_at_ms = self.now_ms
        if job.rate_class in self.budgets:
            job.rate_charge = cost = self.cost(job)
            refilled = [b.at(self.now_ms) for b in self.budgets[job.rate_class]]
            assert all(b.fits(cost) for b in refilled), f"{job.id} does not fit"
            self.budgets[job.rate_class] = [b.charged(cost) for b in refilled]
        assert claim.lease_ref == job.lease_ref
        assert claim.expires_at_ms == job.lease_expires_at_ms
        assert claim.claimed_at_ms == self.now_ms
        assert claim.checkpoint == job.checkpoint
        envelope = claim.envelope
        for name in (
            "kind", "payload", "queue", "partition_key", "fingerprint", "priority",
            "attempt", "crash_attempt", "max_attempts", "scheduled_at_ms", "tags",
            "retention_ms", "schema_version", "sticky_worker", "weight",
        ):  # fmt: skip
            assert getattr(envelope, name) == getattr(job, name), name

    # The holder

    def held(self, lease: LeaseRef) -> Job:
        """The job of a live lease."""
        job = self.jobs.get(lease.job_id)
        if job is None:
            raise LeaseRejected(lease.job_id, missing=True)
        if job.state is not State.RUNNING or job.lease_ref != lease:
            raise LeaseRejected(lease.job_id)
        return job

    def ack(self, ack: Ack, *, taken_as: Event | None = None) -> None:
        """End an attempt, or recognise that it was ended so."""
        job = self.jobs.get(ack.lease.job_id)
        if job is not None and job.state is not State.RUNNING:
            told = (job.settled_lease_id, job.fence, job.settled_outcome)
            if told == (ack.lease.lease_id, ack.lease.fence, ack.outcome.value):
                return
        job = self.held(ack.lease)
        event, attempt = ack.outcome.event, job.attempt + 1
        target = find_transition(State.RUNNING, event, job).target
        scheduled_at_ms = None
        if target is State.RETRYABLE:
            scheduled_at_ms = self.now_ms + (ack.delay_ms or backoff_ms(attempt))
            assert scheduled_at_ms > self.now_ms
        elif target is State.SCHEDULED:
            assert ack.delay_ms is not None
            scheduled_at_ms = self.now_ms + ack.delay_ms
        self._remember_ack(job, ack)
        self._settle_budget(job, ack)
        job.settled_lease_id = ack.lease.lease_id
        job.settled_outcome = ack.outcome.value
        job.error_code, job.latency_ms = ack.error_code, ack.latency_ms
        if target is State.COMPLETED:
            job.result = ack.result
        if ack.outcome is Outcome.SUCCESS:
            self._count(job.queue, job.partition_key, "completed")
        self.move(
            job,
            event,
            scheduled_at_ms=scheduled_at_ms,
            reason_code=ack.reason_code,
            taken_as=taken_as,
        )

    def _settle_budget(self, job: Job, ack: Ack) -> None:
        budgets = self.budgets.get(job.rate_class, [])
        if ack.actual_weight is not None and job.rate_charge:
            self.budgets[job.rate_class] = [
                budget.at(self.now_ms).settled(job.rate_charge, ack.actual_weight)
                for budget in budgets
            ]
        if ack.outcome is Outcome.RATE_LIMITED and ack.delay_ms and job.rate_class:
            self.pause_rate_class(job.rate_class, ack.delay_ms)

    def _remember_ack(self, job: Job, ack: Ack) -> None:
        common = {
            "at_ms": self.now_ms,
            "logs": ack.logs,
            "latency_ms": ack.latency_ms,
            "error_code": ack.error_code,
            "worker": job.claimed_by,
            "fence": job.fence,
        }
        if ack.outcome is Outcome.RETRY:
            entry = {"outcome": "retry", "attempt": job.attempt + 1, "error": ack.error}
        elif ack.outcome is Outcome.SUCCESS and ack.logs:
            entry = {"outcome": "success", "attempt": job.attempt}
        elif ack.outcome in {Outcome.SKIP, Outcome.UNDECODABLE} and (
            ack.error is not None or ack.logs
        ):
            skipped = ack.outcome is Outcome.SKIP
            told = "archived" if skipped else "undecodable"
            entry = {"outcome": told, "error": ack.error}
        else:
            return
        job.remember(AttemptEntry(**common, **entry))

    def ack_batch(self, acks: Sequence[Ack]) -> list[LeaseRejected | None]:
        """End several attempts, each on its own."""
        answers: list[LeaseRejected | None] = []
        for ack in acks:
            try:
                self.ack(ack)
            except LeaseRejected as error:
                answers.append(error)
            else:
                answers.append(None)
        return answers

    def renew(self, leases: Iterable[LeaseRef], lease_ms: int) -> list[LeaseRef]:
        """Extend what is held; the rest is lost."""
        lost = []
        for lease in leases:
            try:
                self.held(lease).lease_expires_at_ms = self.now_ms + lease_ms
            except LeaseRejected:
                lost.append(lease)
        return lost

    def checkpoint(self, lease: LeaseRef, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        self.held(lease).checkpoint = checkpoint

    def output(self, lease: LeaseRef, output: JobResult) -> JobOutput:
        """Publish bytes."""
        job = self.held(lease)
        job.output = JobOutput(
            output.schema_version, output.data, job.fence, self.now_ms
        )
        return job.output

    def progress(self, lease: LeaseRef, update: ProgressUpdate) -> JobProgress:
        """Report progress."""
        job = self.held(lease)
        job.progress = JobProgress(
            update.current, update.total, update.message, job.fence, self.now_ms
        )
        return job.progress

    # Sweeps

    def reclaim_expired(self, limit: int) -> list[Reclaimed]:
        """Take back leases that ran out."""
        expired = [
            job
            for job in self.where(State.RUNNING)
            if (job.lease_expires_at_ms or 0) <= self.now_ms
        ]
        expired.sort(key=lambda job: (job.lease_expires_at_ms, job.seq))
        lost: Counter[str | None] = Counter()
        taken = []
        for job in expired[:limit]:
            worker, is_last = job.claimed_by, job.crash_attempt + 2 == self.crash_limit
            taken.append(self._reclaim(job, lost[worker] * 2_000 if is_last else 0))
            lost[worker] += is_last
        return taken

    def _reclaim(self, job: Job, apart_ms: int) -> Reclaimed:
        crashes = job.crash_attempt + 1
        job.error_code = LEASE_EXPIRED
        job.latency_ms = self.now_ms - (job.claimed_at_ms or 0)
        job.remember(
            AttemptEntry(
                at_ms=self.now_ms,
                outcome="lease_lost",
                crash_attempt=crashes,
                error=LEASE_LOST_ERROR,
                latency_ms=job.latency_ms,
                error_code=LEASE_EXPIRED,
                worker=job.claimed_by or "",
                fence=job.fence,
            )
        )
        job.checkpoint = job.checkpoint.with_crash()
        target = find_transition(State.RUNNING, Event.LEASE_LOST, job).target
        again = target is State.RETRYABLE
        later_ms = self.now_ms + backoff_ms(crashes) + apart_ms
        self.move(job, Event.LEASE_LOST, scheduled_at_ms=later_ms if again else None)
        if not again and job.fingerprint:
            self._register(job)
        return Reclaimed(
            job_id=job.id,
            fingerprint=job.fingerprint,
            crash_attempt=crashes,
            quarantined=not again,
        )

    def _register(self, job: Job) -> None:
        known = self.quarantine.get(job.fingerprint)
        if known is None:
            self.quarantine[job.fingerprint] = (
                job.kind,
                job.crash_attempt,
                self.now_ms,
                job.payload,
                CRASH_LIMIT_REASON,
            )
        else:
            kind, count, *rest = known
            most = max(count, job.crash_attempt)
            self.quarantine[job.fingerprint] = (kind, most, *rest)

    def promote_due(self, limit: int) -> int:
        """Make due jobs available."""
        due = [
            job
            for job in self.where(State.SCHEDULED, State.RETRYABLE)
            if job.scheduled_at_ms <= self.now_ms
        ]
        due.sort(key=lambda job: (job.scheduled_at_ms, job.seq))
        for job in due[:limit]:
            scheduled = job.state is State.SCHEDULED
            self.move(job, Event.SCHEDULE_DUE if scheduled else Event.BACKOFF_DUE)
        return len(due[:limit])

    def evict_retained(self, limit: int) -> int:
        """Delete what was kept long enough."""
        lapsed = [
            ((job.finalized_at_ms or 0) + job.retention_ms, job.seq, job)
            for job in self.where(*EVICTABLE)
            if job.retention_ms > 0
        ]
        lapsed = sorted(entry for entry in lapsed if entry[0] <= self.now_ms)[:limit]
        for _, _, job in lapsed:
            self.move(job, Event.RETENTION_LAPSED)
        return len(lapsed)

    # Duties

    def claim_duty(self, name: str, holder: str, lease_ms: int) -> bool:
        """Take or renew a duty."""
        owner, expires_at_ms = self.duties.get(name, (holder, 0))
        if owner != holder and expires_at_ms > self.now_ms:
            return False
        self.duties[name] = (holder, self.now_ms + lease_ms)
        return True

    def release_duty(self, name: str, holder: str) -> None:
        """Give a duty up."""
        if self.duties.get(name, ("", 0))[0] == holder:
            del self.duties[name]

    def duty_tick(
        self, holder: str, names: Sequence[str], lease_ms: int
    ) -> dict[str, bool]:
        """Take or renew many duties."""
        due: dict[str, Callable[[], bool]] = {
            "reclaimer": lambda: any(
                (job.lease_expires_at_ms or 0) <= self.now_ms
                for job in self.where(State.RUNNING)
            ),
            "promoter": lambda: any(
                job.scheduled_at_ms <= self.now_ms
                for job in self.where(State.SCHEDULED, State.RETRYABLE)
            ),
            "retention": lambda: any(
                0 < job.retention_ms <= self.now_ms - (job.finalized_at_ms or 0)
                for job in self.where(*EVICTABLE)
            ),
            "quarantine": lambda: any(
                job.fingerprint in self.quarantine for job in self.where(*WAITING)
            ),
        }
        held = [n for n in names if self.claim_duty(n, holder, lease_ms)]
        return {name: due.get(name, lambda: True)() for name in held}

    # The operator

    def _job(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise NotFound.job(job_id)
        return self.jobs[job_id]

    def promote_job(self, job_id: str) -> None:
        """Make a pending job available."""
        self.move(
            self._job(job_id), Event.OPERATOR_PROMOTE, scheduled_at_ms=self.now_ms
        )

    def operator_retry(self, job_id: str) -> None:
        """Bring a finished job back."""
        job = self._job(job_id)
        find_transition(job.state, Event.OPERATOR_RETRY, job)
        holder = self.holder(job.unique_key)
        if holder is not None:
            raise DuplicateJob(holder.id)
        job.checkpoint = evolve(job.checkpoint, remaining_weight=None)
        job.second_chances += 1
        self.move(job, Event.OPERATOR_RETRY, scheduled_at_ms=self.now_ms)

    def operator_cancel(self, job_id: str) -> None:
        """End an unfinished job."""
        self.move(self._job(job_id), Event.OPERATOR_CANCEL)

    def delete_job(self, job_id: str) -> None:
        """Remove a job."""
        self.move(self._job(job_id), Event.OPERATOR_DELETE)

    def reschedule_job(self, job_id: str, at_ms: int) -> None:
        """Move a waiting job in time."""
        self.move(self._job(job_id), Event.OPERATOR_RESCHEDULE, scheduled_at_ms=at_ms)

    def schedule_pending(self, job_id: str, at_ms: int) -> None:
        """Give a pending job its instant."""
        self.move(self._job(job_id), Event.SCHEDULE_PENDING, scheduled_at_ms=at_ms)

    def edit_payload(
        self, job_id: str, payload: bytes, *, schema_version: int, fingerprint: str
    ) -> None:
        """Replace the payload."""
        job = self._job(job_id)
        self.move(job, Event.EDIT_PAYLOAD)
        job.payload = payload
        job.schema_version = schema_version
        job.fingerprint = fingerprint
        job.checkpoint = evolve(job.checkpoint, remaining_weight=None)

    def quarantine_sweep(self, limit: int) -> int:
        """Park waiting siblings."""
        found = [
            job for job in self.where(*WAITING) if job.fingerprint in self.quarantine
        ]
        for job in found[:limit]:
            self.move(job, Event.QUARANTINE_SWEEP)
        return len(found[:limit])

    def quarantine_release(self, fingerprint: str) -> int:
        """Let the jobs of a fingerprint go."""
        found = [
            job
            for job in self.where(State.QUARANTINED)
            if job.fingerprint == fingerprint
        ]
        if not found and fingerprint not in self.quarantine:
            raise NotFound.quarantine(fingerprint)
        self.quarantine.pop(fingerprint, None)
        moved = 0
        for job in found:
            if self.holder(job.unique_key) is None:
                self.move(job, Event.OPERATOR_RELEASE, scheduled_at_ms=self.now_ms)
                moved += 1
        return moved

    def set_enqueue_limit(self, queue: str, limit: int | None) -> None:
        """Bound a queue."""
        if limit is None:
            self.limits.pop(queue, None)
        else:
            self.limits[queue] = limit

    def set_queue_paused(self, queue: str, paused: bool) -> None:
        """Stop or resume a queue."""
        (self.paused.add if paused else self.paused.discard)(queue)

    def set_queue_weight(self, queue: str, weight: int) -> None:
        """Weigh a queue."""
        self.weights[queue] = weight

    def upsert_rate_class(self, config: RateClassConfig) -> None:
        """Create or change a class."""
        stored = [
            budget.at(self.now_ms) for budget in self.budgets.get(config.name, [])
        ]
        given = config.budgets
        budgets = [
            stored[slot].resized(limit)
            if slot < len(stored)
            else limit.full(self.now_ms)
            for slot, limit in enumerate(given)
        ]
        if config.further is None:
            budgets += stored[len(given) :]
        self.budgets[config.name] = [
            budget.steered(self.now_ms, paused=config.paused) for budget in budgets
        ]
        (self.stopped.add if config.paused else self.stopped.discard)(config.name)
        self.markers.add(config.name)

    def delete_rate_class(self, name: str) -> int | None:
        """Lift the limits of a class."""
        if name not in self.markers:
            return None
        self.budgets.pop(name, None)
        self.stopped.discard(name)
        self.pauses.pop(name, None)
        if not any(ceiling.rate_class == name for ceiling in self.ceilings.values()):
            self.markers.discard(name)
        return sum(job.rate_class == name for job in self.where(State.AVAILABLE))

    def pause_rate_class(self, name: str, delay_ms: int, reason: str = "") -> None:
        """Stop a class for a time."""
        self.markers.add(name)
        until_ms = self.now_ms + delay_ms
        if until_ms > self.pauses.get(name, (0, ""))[0]:
            self.pauses[name] = (until_ms, reason)

    def resume_rate_class(self, name: str) -> bool:
        """Let a class go on."""
        self.pauses.pop(name, None)
        return name in self.markers

    def upsert_concurrency_limit(self, config: Ceiling) -> None:
        """Create or change a ceiling."""
        stored = self.ceilings.get(config.name, config)
        if (stored.scope, stored.queue, stored.rate_class) != (
            config.scope,
            config.queue,
            config.rate_class,
        ):
            raise InvalidRequest(
                f"limit {config.name} counts something else; delete it first"
            )
        self.ceilings[config.name] = config
        if config.rate_class:
            self.markers.add(config.rate_class)

    def delete_concurrency_limit(self, name: str) -> bool:
        """Remove a ceiling."""
        return self.ceilings.pop(name, None) is not None

    def set_partition_quantum(
        self, queue: str, partition_key: str, quantum: int | None
    ) -> None:
        """Shares are the gate's own business; both stores are compared in them."""
