"""Turns rows into the values that callers see."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from attrs import astuple, evolve, fields

from headgate_sync.envelope import Envelope, field_names, unique_key_of
from headgate_sync.inspection import AttemptEntry, JobSummary, QuarantineEntry
from headgate_sync.lease import Checkpoint, Claim
from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.state import Job, QuarantineRow, Rows

_NAMES = field_names()
_up_to_key = attrgetter(*_NAMES[: _NAMES.index("unique_key")])
_SUMMARY = [
    attribute.name
    for attribute in fields(JobSummary)
    if attribute.name not in ("state", "payload", "headers", "errors")
]
_COLUMNS = [
    attribute.name
    for attribute in fields(Job)
    if attribute.name not in ("seq", "lane", "options", "charge_weight")
]


def envelope_of(job: Job) -> Envelope:
    """The job as a claim hands it out: what only the request carried is gone."""
    key = job.unique_key
    return Envelope.from_stored(
        (
            *_up_to_key(job),
            None if key is None else unique_key_of(job.kind, key)[0],
            job.unique_states,
            0,  # unique_window_ms
            0,  # unique_replace
            0,  # unique_debounce_ms
            False,  # unique_exclude_kind
            job.periodic_schedule_id,
            job.periodic_tick_ms,
            job.headers,
            job.tags,
            False,  # pending
            job.sticky_worker,
            0,  # delay_ms
            0,  # deadline_in_ms
        )
    )


def checkpoint_of(job: Job) -> Checkpoint:
    """The newest checkpoint with the remaining weight."""
    if job.charge_weight is None:
        return job.checkpoint
    return evolve(job.checkpoint, remaining_weight=job.charge_weight)


def claim_of(job: Job) -> Claim:
    """The claim of a running job."""
    assert job.lease_id is not None
    assert job.lease_expires_at_ms is not None
    assert job.claimed_at_ms is not None
    return Claim(
        envelope=envelope_of(job),
        lease_id=job.lease_id,
        fence=job.fence,
        expires_at_ms=job.lease_expires_at_ms,
        claimed_at_ms=job.claimed_at_ms,
        checkpoint=checkpoint_of(job),
    )


def summary_of(
    job: Job, *, include_payload: bool = False, newest_only: bool = False
) -> JobSummary:
    """The job as an operator sees it."""
    return JobSummary(
        **{name: getattr(job, name) for name in _SUMMARY},
        state=job.state.value,
        payload=job.payload if include_payload else None,
        headers=job.headers if include_payload else None,
        errors=job.errors[-1:] if newest_only else job.errors,
    )


def quarantine_entry(fingerprint: str, row: QuarantineRow) -> QuarantineEntry:
    """The registered fingerprint as an operator sees it."""
    return QuarantineEntry(
        fingerprint=fingerprint,
        kind=row.kind,
        crash_count=row.crash_count,
        quarantined_at_ms=row.quarantined_at_ms,
        reason=row.reason,
    )


def rendered(entry: AttemptEntry) -> list[str]:
    """A line of the history as text; logs follow on a line of their own."""
    logs = [f"logs: {' | '.join(entry.logs)}"] if entry.logs else []
    if entry.outcome == Outcome.LEASE_LOST:
        return [f"lease_lost (crash {entry.crash_attempt})"]
    if entry.outcome == Outcome.SUCCESS:
        return [f"success {line}" for line in logs]
    if entry.outcome == Outcome.RETRY:
        return [f"retry (attempt {entry.attempt}): {entry.error or ''}", *logs]
    if entry.error is None:
        return logs
    return [f"{entry.outcome}: {entry.error}", *logs]


def _job_columns(job: Job) -> dict[str, Any]:
    columns = {name: getattr(job, name) for name in _COLUMNS}
    columns |= {
        "state": str(job.state),
        "checkpoint": checkpoint_of(job),
        "errors": list(job.errors),
        "headers": dict(job.headers),
    }
    return columns


def snapshot_of(rows: Rows) -> dict[str, Any]:
    """A copy of everything that a call could have changed, as comparable values."""
    queues = list(rows.queues.values())
    partitions = [group for queue in queues for group in queue.partitions.values()]
    policies = {q.name: (q.paused, q.weight, q.dispatch_count, q.round) for q in queues}
    shares = {
        (group.queue.name, group.key): (
            group.deficit,
            group.inflight,
            group.last_round,
            group.quantum_override,
        )
        for group in partitions
    }
    return {
        "jobs": [_job_columns(job) for job in rows.jobs.values()],
        "throttle": dict(rows.throttle),
        "quarantine": {
            fingerprint: (
                row.kind,
                row.crash_count,
                row.quarantined_at_ms,
                row.sample_payload,
                row.reason,
            )
            for fingerprint, row in rows.quarantine.items()
        },
        "duties": dict(rows.duties),
        "workers": dict(rows.workers),
        "enqueue_limits": {
            queue.name: queue.max_unfinished_jobs
            for queue in queues
            if queue.max_unfinished_jobs is not None
        },
        "unfinished": {q.name: q.unfinished for q in queues if q.unfinished},
        "minutes": {
            (group.queue.name, group.key, at_ms): (minute.arrived, minute.completed)
            for group in partitions
            for at_ms, minute in group.minutes.items()
            if minute.arrived or minute.completed
        },
        "queues": {k: v for k, v in policies.items() if v != (False, 1, 0, 0)},
        "partitions": {k: v for k, v in shares.items() if v != (0, 0, 0, None)},
        "schedules": dict(rows.schedules),
        "schedule_events": {k: list(v) for k, v in rows.schedule_events.items()},
        "idempotency": {name: astuple(row) for name, row in rows.idempotency.items()},
        "class_inflight": {k: v for k, v in rows.class_inflight.items() if v},
    }
