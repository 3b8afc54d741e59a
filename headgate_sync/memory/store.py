"""`MemStore`: the whole port in one process, for tests and for trying things out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from headgate_sync.envelope import Envelope
from headgate_sync.errors import LeaseRejected
from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import (
    Ack,
    AdmissionBatch,
    AdmitRequest,
    Checkpoint,
    LeaseRef,
    Reclaimed,
    check_lease_ms,
)
from headgate_sync.lifecycle import Event, Outcome, State
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.idempotency import MemIdempotency
from headgate_sync.memory.inspection import MemInspect
from headgate_sync.memory.intake import Intake
from headgate_sync.memory.rows import envelope_of, rendered, snapshot_of
from headgate_sync.memory.settle import held_job, reclaim, settle
from headgate_sync.memory.state import Options, Rows
from headgate_sync.memory.values import MemOutputs, MemProgress, MemResults
from headgate_sync.policy import BudgetConfig
from headgate_sync.retry import (
    DEFAULT_CRASH_LIMIT,
    DEFAULT_RETRY_BASE_MS,
    DEFAULT_RETRY_CAP_MS,
    has_one_chance,
)
from headgate_sync.store import AckError, Caps, derived_caps
from headgate_sync.validation import (
    MAX_ACKS,
    check_count,
    check_duty,
    check_limit,
    check_name,
    check_sequence,
    check_texts,
    check_type,
    validate_enqueue,
)


def no_jitter(base_ms: int) -> int:
    """Add nothing to a backoff, so that tests can name the instant of a retry."""
    return 0


class MemStore:
    """A store in the memory of one process, which decides exactly like `PgStore`.

    It holds jobs for as long as the object lives and offers no transactions and no
    wake-ups. One lock is held throughout each method; values are immutable or copied,
    so nothing that a caller holds changes with the store.

    Its clock can be frozen and stepped: delays, leases and limits are then tested
    without waiting for them.

    Args:
        crash_limit: lost leases after which a job is quarantined.
        retry_base_ms: backoff after the first failure or lost lease.
        retry_cap_ms: upper bound of the backoff.
        retry_jitter: called with `retry_base_ms`; its answer is added to the backoff of
            a returned failure.
    """

    def __init__(
        self,
        *,
        crash_limit: int = DEFAULT_CRASH_LIMIT,
        retry_base_ms: int = DEFAULT_RETRY_BASE_MS,
        retry_cap_ms: int = DEFAULT_RETRY_CAP_MS,
        retry_jitter: Callable[[int], int] = no_jitter,
    ) -> None:
        options = Options(
            crash_limit=crash_limit,
            retry_base_ms=retry_base_ms,
            retry_cap_ms=retry_cap_ms,
            retry_jitter=retry_jitter,
        )
        self._rows = rows = Rows(options=options)
        self._gate = gate = Gate(rows)
        self._intake = Intake(rows)
        self._results = MemResults(rows, gate)
        self._outputs = MemOutputs(rows)
        self._progress = MemProgress(rows)
        self._inspect = MemInspect(rows, gate, self._intake)
        self._idempotency = MemIdempotency(rows)

    # The port.

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take in up to 1,000 jobs, all or none; see `Store.enqueue`."""
        validate_enqueue(batch)
        with self._rows.lock:
            self._intake.enqueue(batch)

    def admit(self, request: AdmitRequest) -> AdmissionBatch:
        """Decide what the worker may run; see `Store.admit`."""
        check_type("request", request, AdmitRequest)
        with self._rows.lock:
            return self._gate.admit(request)

    def ack(
        self,
        lease: LeaseRef,
        outcome: Outcome,
        *,
        error: str | None = None,
        delay_ms: int | None = None,
        logs: Sequence[str] = (),
        actual_weight: int | None = None,
        latency_ms: int | None = None,
        error_code: str = "",
        reason_code: str = "",
    ) -> None:
        """Settle an attempt; see `Store.ack`."""
        ack = Ack(
            lease=lease,
            outcome=outcome,
            error=error,
            delay_ms=delay_ms,
            logs=logs,
            actual_weight=actual_weight,
            latency_ms=latency_ms,
            error_code=error_code,
            reason_code=reason_code,
        )
        with self._rows.lock:
            settle(self._rows, self._gate, ack)

    def ack_batch(self, acks: Sequence[Ack]) -> list[AckError | None]:
        """Settle up to 1,000 attempts, each judged alone; see `Store.ack_batch`."""
        check_sequence("acks", acks, Ack)
        check_count("acks", len(acks), MAX_ACKS)
        answers: list[AckError | None] = []
        with self._rows.lock:
            for ack in acks:
                try:
                    settle(self._rows, self._gate, ack)
                except LeaseRejected as error:
                    answers.append(error)
                else:
                    answers.append(None)
        return answers

    def renew(self, leases: Sequence[LeaseRef], *, lease_ms: int) -> list[LeaseRef]:
        """Extend leases and report the ones that are lost; see `Store.renew`."""
        check_sequence("leases", leases, LeaseRef)
        check_lease_ms(lease_ms)
        lost = []
        with self._rows.lock:
            expires_at_ms = self._rows.clock.now_ms() + lease_ms
            for lease in leases:
                try:
                    job = held_job(self._rows, lease)
                except LeaseRejected:
                    lost.append(lease)
                else:
                    self._rows.renew(job, expires_at_ms)
        return lost

    def checkpoint(self, lease: LeaseRef, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint under the lease; see `Store.checkpoint`."""
        check_type("lease", lease, LeaseRef)
        check_type("checkpoint", checkpoint, Checkpoint)
        with self._rows.lock:
            job = held_job(self._rows, lease)
            job.charge_weight = checkpoint.remaining_weight
            job.checkpoint = checkpoint
            if checkpoint.remaining_weight is not None:
                job.checkpoint = evolve(checkpoint, remaining_weight=None)

    def reclaim_expired(self, limit: int) -> list[Reclaimed]:
        """Take back leases that ran out, oldest first; see `Store.reclaim_expired`."""
        check_limit(limit)
        rows = self._rows
        taken: list[Reclaimed] = []
        lost: Counter[str | None] = Counter()  # with one chance left, by worker
        with rows.lock:
            now_ms = rows.clock.now_ms()
            while len(taken) < limit and (job := rows.leases.first(until=now_ms)):
                worker = job.claimed_by
                taken.append(reclaim(rows, job, now_ms, lost[worker]))
                lost[worker] += has_one_chance(job.crash_attempt, self.crash_limit)
        return taken

    def promote_due(self, limit: int) -> int:
        """Make due jobs available, earliest first; see `Store.promote_due`."""
        check_limit(limit)
        rows, moved = self._rows, 0
        with rows.lock:
            now_ms = rows.clock.now_ms()
            while moved < limit and (job := rows.due.first(until=now_ms)):
                scheduled = job.state is State.SCHEDULED
                event = Event.SCHEDULE_DUE if scheduled else Event.BACKOFF_DUE
                rows.move(job, event, now_ms)
                moved += 1
        return moved

    def evict_retained(self, limit: int) -> int:
        """Delete finished jobs past their retention; see `Store.evict_retained`."""
        check_limit(limit)
        rows, gone = self._rows, 0
        with rows.lock:
            now_ms = rows.clock.now_ms()
            while gone < limit and (job := rows.lapsing.first(until=now_ms)):
                rows.move(job, Event.RETENTION_LAPSED, now_ms)
                gone += 1
        return gone

    def claim_duty(self, name: str, holder: str, lease_ms: int) -> bool:
        """Take or renew a duty for a time; see `Store.claim_duty`."""
        check_duty(name, holder, lease_ms)
        with self._rows.lock:
            return self._take_duty(name, holder, lease_ms)

    def release_duty(self, name: str, holder: str) -> None:
        """Give a duty up, if held; see `Store.release_duty`."""
        check_name("name", name)
        check_name("holder", holder)
        with self._rows.lock:
            if self._rows.duties.get(name, ("", 0))[0] == holder:
                self._rows.duties[name] = (holder, self._rows.clock.now_ms())

    def duty_tick(
        self, holder: str, names: Sequence[str], lease_ms: int
    ) -> dict[str, bool]:
        """`claim_duty` for many names; see `Store.duty_tick`."""
        check_texts("names", names)
        for name in names:
            check_duty(name, holder, lease_ms)
        with self._rows.lock:
            taken = [
                n for n in sorted(set(names)) if self._take_duty(n, holder, lease_ms)
            ]
            return {name: self._is_due(name) for name in taken}

    def health_check(self) -> None:
        """There is nothing that could be down."""

    def caps(self) -> Caps:
        """The capabilities as a number."""
        return derived_caps(self)

    @property
    def results(self) -> MemResults:
        """Results of successful jobs."""
        return self._results

    @property
    def outputs(self) -> MemOutputs:
        """Bytes that handlers publish while they run."""
        return self._outputs

    @property
    def progress(self) -> MemProgress:
        """Progress that handlers report."""
        return self._progress

    @property
    def transactional(self) -> None:
        """Absent: there is no transaction to join in memory."""
        return

    @property
    def inspect(self) -> MemInspect:
        """Looking at jobs and steering them."""
        return self._inspect

    @property
    def notifying(self) -> None:
        """Absent: workers poll."""
        return

    @property
    def idempotency(self) -> MemIdempotency:
        """Answers kept under the caller's keys."""
        return self._idempotency

    @property
    def maintenance(self) -> None:
        """Absent: there is nothing to fold or to vacuum."""
        return

    # Duties.

    def _take_duty(self, name: str, holder: str, lease_ms: int) -> bool:
        now_ms = self._rows.clock.now_ms()
        owner, expires_at_ms = self._rows.duties.get(name, (holder, 0))
        if owner != holder and now_ms < expires_at_ms:
            return False
        self._rows.duties[name] = (holder, now_ms + lease_ms)
        return True

    def _is_due(self, name: str) -> bool:
        """Whether a duty would find work; true where only its worker can know."""
        rows = self._rows
        now_ms = rows.clock.now_ms()
        if name == "reclaimer":
            return rows.leases.first(until=now_ms) is not None
        if name == "promoter":
            return rows.due.first(until=now_ms) is not None
        if name == "retention":
            return rows.lapsing.first(until=now_ms) is not None
        if name == "quarantine":
            return any(rows.suspects.values())
        if name == "operations":
            return self._inspect.has_open_operations()
        if name == "scheduler":
            return bool(self._inspect.due_schedules(1)[0])
        return True

    # For tests.

    @property
    def crash_limit(self) -> int:
        """Lost leases after which a job is quarantined; may be set at any time."""
        return self._rows.options.crash_limit

    @crash_limit.setter
    def crash_limit(self, limit: int) -> None:
        self._rows.options.crash_limit = limit

    @property
    def retry_base_ms(self) -> int:
        """Backoff after the first failure; may be set at any time."""
        return self._rows.options.retry_base_ms

    @retry_base_ms.setter
    def retry_base_ms(self, base_ms: int) -> None:
        self._rows.options.retry_base_ms = base_ms

    @property
    def retry_cap_ms(self) -> int:
        """Upper bound of the backoff; may be set at any time."""
        return self._rows.options.retry_cap_ms

    @retry_cap_ms.setter
    def retry_cap_ms(self, cap_ms: int) -> None:
        self._rows.options.retry_cap_ms = cap_ms

    @property
    def retry_jitter(self) -> Callable[[int], int]:
        """Adds to the backoff of a returned failure; may be set at any time."""
        return self._rows.options.retry_jitter

    @retry_jitter.setter
    def retry_jitter(self, jitter: Callable[[int], int]) -> None:
        self._rows.options.retry_jitter = jitter

    def freeze_clock_at(self, at_ms: int) -> None:
        """Let store time stand still at an instant."""
        with self._rows.lock:
            self._rows.clock.freeze_at(at_ms)

    def advance_clock(self, by_ms: int) -> None:
        """Step the frozen store time; a live clock freezes at the present first."""
        with self._rows.lock:
            self._rows.clock.advance(by_ms)

    def unfreeze_clock(self) -> None:
        """Follow the system's clock again."""
        with self._rows.lock:
            self._rows.clock.unfreeze()

    def job_state(self, job_id: str) -> tuple[Envelope, State] | None:
        """The job with its present counters and schedule, and its state."""
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            return None if job is None else (envelope_of(job), job.state)

    def attempts(self, job_id: str) -> list[AttemptEntry]:
        """The history of a job, oldest first; empty for an unknown id."""
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            return [] if job is None else list(job.errors)

    def errors(self, job_id: str) -> list[str]:
        """The history of a job as lines of text; empty for an unknown id."""
        return [line for entry in self.attempts(job_id) for line in rendered(entry)]

    def counts(self, queue: str | None = None) -> dict[str, int]:
        """Jobs by state; states without a job are absent."""
        with self._rows.lock:
            jobs = self._rows.jobs.values()
            return dict(
                Counter(
                    j.state.value for j in jobs if queue is None or j.queue == queue
                )
            )

    def set_queue_paused(self, queue: str, paused: bool) -> None:
        """Let admission skip the queue, or not."""
        self._inspect.set_queue_paused(queue, paused)

    def set_rate_limit(self, name: str, limit: int, window_ms: int, burst: int) -> None:
        """Give a rate class one new, full budget, whatever it had before.

        Args:
            name: of the class.
            limit: tokens per window; 0 never refills.
            window_ms: length of the window.
            burst: tokens at most, and now.
        """
        check_name("name", name)
        budget = BudgetConfig(limit=limit, window_ms=window_ms, burst=burst)
        with self._rows.lock:
            self._gate.delete_rate_class(name)
            self._gate.upsert_rate_class(name, [budget], paused=False, replace_all=True)

    def set_enqueue_limit(self, queue: str, limit: int | None) -> None:
        """Bound the unfinished jobs of a queue; None lifts the bound."""
        self._inspect.set_enqueue_limit(queue, limit)

    def all_enqueued(self) -> list[Envelope]:
        """Every job the store holds now, finished ones too, by id."""
        with self._rows.lock:
            return [envelope_of(job) for _, job in sorted(self._rows.jobs.items())]

    def enqueue_without_uniqueness(self, batch: Sequence[Envelope]) -> None:
        """Enqueue as if no job named a unique key; ids stay strict."""
        self.enqueue(
            [
                evolve(
                    envelope,
                    unique_key=None,
                    unique_window_ms=0,
                    unique_replace=0,
                    unique_debounce_ms=0,
                )
                for envelope in batch
            ]
        )

    def snapshot(self) -> dict[str, Any]:
        """A copy of everything that a call can change, to compare before and after."""
        with self._rows.lock:
            return snapshot_of(self._rows) | self._gate.snapshot()
