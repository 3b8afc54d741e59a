"""Ending attempts: acks under the fence, and leases that ran out."""

from __future__ import annotations

from headgate_sync.envelope import MAX_INT32
from headgate_sync.errors import LeaseRejected
from headgate_sync.inspection import (
    CRASH_LIMIT_REASON,
    LEASE_EXPIRED,
    LEASE_LOST_ERROR,
    AttemptEntry,
)
from headgate_sync.lease import Ack, LeaseRef, Reclaimed
from headgate_sync.lifecycle import Event, Outcome, State, next_state
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.state import Job, QuarantineRow, Rows
from headgate_sync.retry import backoff_ms, crash_backoff_ms

_EVENTS = {outcome: outcome.event for outcome in Outcome}


def held_job(rows: Rows, lease: LeaseRef) -> Job:
    """The running job behind a lease that still holds it.

    Raises:
        LeaseRejected: the caller does not hold the job.
    """
    job = rows.jobs.get(lease.job_id)
    if job is None or not _holds(job, lease):
        raise LeaseRejected(lease.job_id, missing=job is None)
    return job


def _holds(job: Job, lease: LeaseRef) -> bool:
    return (
        job.state is State.RUNNING
        and job.lease_id == lease.lease_id
        and job.fence == lease.fence
    )


def settle(rows: Rows, gate: Gate, ack: Ack) -> None:
    """Apply one ack, or recognise it as a repetition; the caller holds the lock.

    Raises:
        LeaseRejected: the caller does not hold the job; nothing was changed.
    """
    lease, outcome = ack.lease, ack.outcome
    job = rows.jobs.get(lease.job_id)
    if job is None:
        raise LeaseRejected(lease.job_id, missing=True)
    if not _holds(job, lease):
        if (job.settled_lease_id, job.fence) != (lease.lease_id, lease.fence) or (
            job.settled_outcome != outcome
        ):
            raise LeaseRejected(lease.job_id)
        return
    now_ms = rows.clock.now_ms()
    if ack.actual_weight is not None and job.rate_charge:
        gate.settle(job, ack.actual_weight, now_ms)
    scheduled_at_ms = None
    if outcome is not Outcome.SUCCESS or ack.logs:
        scheduled_at_ms = _next_start(rows, job, ack, now_ms)
        _remember(job, ack, now_ms)
    job.error_code = ack.error_code
    job.latency_ms = ack.latency_ms
    rate_class = job.rate_class
    target = rows.move(
        job,
        _EVENTS[outcome],
        now_ms,
        scheduled_at_ms=scheduled_at_ms,
        reason_code=ack.reason_code,
    )
    if target is State.COMPLETED:
        job.result = ack.result
    if target is not State.DELETED:
        job.settled_lease_id = lease.lease_id
        job.settled_outcome = outcome
    if outcome is Outcome.RATE_LIMITED and ack.delay_ms and rate_class:
        gate.pause(rate_class, ack.delay_ms)


def _next_start(rows: Rows, job: Job, ack: Ack, now_ms: int) -> int | None:
    """When the job may run again; None leaves its schedule."""
    if ack.outcome is Outcome.SNOOZE:
        assert ack.delay_ms is not None
        return now_ms + ack.delay_ms
    if ack.outcome is not Outcome.RETRY:
        return None
    if next_state(job.state, Event.RETRY, job) is not State.RETRYABLE:
        return None
    options = rows.options
    return now_ms + (
        ack.delay_ms
        or backoff_ms(
            job.attempt + 1,
            base_ms=options.retry_base_ms,
            cap_ms=options.retry_cap_ms,
        )
        + options.retry_jitter(options.retry_base_ms)
    )


def _remember(job: Job, ack: Ack, now_ms: int) -> None:
    """Write the history entry, where the outcome leaves one."""
    outcome = ack.outcome
    gave_up = outcome in (Outcome.SKIP, Outcome.UNDECODABLE)
    attempt, error = None, ack.error
    if outcome is Outcome.RETRY:
        attempt = job.attempt + 1
    elif outcome is Outcome.SUCCESS and ack.logs:
        attempt, error = job.attempt, None
    elif not (gave_up and (ack.logs or error is not None)):
        return
    assert job.claimed_by is not None
    job.remember(
        AttemptEntry(
            at_ms=now_ms,
            outcome=State.ARCHIVED.value if outcome is Outcome.SKIP else outcome.value,
            attempt=attempt,
            error=error,
            logs=ack.logs,
            latency_ms=ack.latency_ms,
            error_code=ack.error_code,
            worker=job.claimed_by,
            fence=job.fence,
        )
    )


def reclaim(rows: Rows, job: Job, now_ms: int, before: int) -> Reclaimed:
    """Take a job back from a lease that ran out, and charge the crash to it.

    Args:
        before: see `crash_backoff_ms`.
    """
    assert job.claimed_by is not None
    assert job.claimed_at_ms is not None
    worker = job.claimed_by
    crashes = job.crash_attempt + 1
    options = rows.options
    returns = next_state(job.state, Event.LEASE_LOST, job) is State.RETRYABLE
    job.error_code = LEASE_EXPIRED
    job.latency_ms = min(max(0, now_ms - job.claimed_at_ms), MAX_INT32)
    job.remember(
        AttemptEntry(
            at_ms=now_ms,
            outcome=Outcome.LEASE_LOST.value,
            crash_attempt=crashes,
            error=LEASE_LOST_ERROR,
            latency_ms=job.latency_ms,
            error_code=job.error_code,
            worker=worker,
            fence=job.fence,
        )
    )
    job.checkpoint = job.checkpoint.with_crash()
    backoff = crash_backoff_ms(
        crashes,
        before,
        crash_limit=options.crash_limit,
        base_ms=options.retry_base_ms,
        cap_ms=options.retry_cap_ms,
    )
    rows.move(
        job,
        Event.LEASE_LOST,
        now_ms,
        scheduled_at_ms=now_ms + backoff if returns else None,
    )
    if not returns and job.fingerprint:
        _register_crash(rows, job, now_ms)
    return Reclaimed(
        job_id=job.id,
        fingerprint=job.fingerprint,
        crash_attempt=job.crash_attempt,
        quarantined=not returns,
        kind=job.kind,
        queue=job.queue,
        worker=worker,
    )


def _register_crash(rows: Rows, job: Job, now_ms: int) -> None:
    known = rows.quarantine.get(job.fingerprint)
    rows.register(
        job.fingerprint,
        QuarantineRow(
            kind=job.kind if known is None else known.kind,
            crash_count=max(
                job.crash_attempt, 0 if known is None else known.crash_count
            ),
            quarantined_at_ms=now_ms if known is None else known.quarantined_at_ms,
            sample_payload=job.payload if known is None else known.sample_payload,
            reason=CRASH_LIMIT_REASON if known is None else known.reason,
        ),
    )
