"""Turns rows of the database into the values that callers see."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from headgate_sync.envelope import Envelope, unique_key_of
from headgate_sync.inspection import AttemptEntry, JobSummary
from headgate_sync.lease import (
    AdmissionBatch,
    AdmissionUnit,
    Checkpoint,
    Claim,
    SentAway,
)
from headgate_sync.schedule import OnMissed, Schedule

Row = Sequence[Any]

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NO_CHECKPOINT = Checkpoint()
# Where a row of an admission turns from the facts of the call to the columns of a job.
_FACTS = 7
# Of a row that says how many jobs a full ceiling sent away, whose ordinal says how.
_SENT_AWAY = {-2: "cancel_incoming", -3: "discard"}
_CEILINGS, _QUEUE = 3, _FACTS + 4


def admission_batch(rows: Sequence[Row], lease_id: str) -> AdmissionBatch:
    """The answer of an admission: numbered rows, then one row of facts."""
    *told, facts = rows
    told.sort(key=itemgetter(0))
    sent = bisect_left(told, 0, key=itemgetter(0))
    refused = {
        name: count
        for name, count in zip(
            ("rate_class", "concurrency_limit", "fairness", "quarantine"),
            facts[2:6],
            strict=True,
        )
        if count
    }
    return AdmissionBatch(
        units=tuple(AdmissionUnit((claim(row, lease_id),)) for row in told[sent:]),
        retry_after_ms=facts[1],
        refused=refused,
        sent_away=tuple(
            SentAway(row[_QUEUE], _SENT_AWAY[row[0]], row[_CEILINGS])
            for row in sorted(told[:sent], key=lambda row: (row[_QUEUE], -row[0]))
        ),
    )


def claim(row: Row, lease_id: str) -> Claim:
    """One claim from a row of an admission."""
    (
        job_id, kind, schema_version, payload, queue, partition_key, rate_class, weight,
        fingerprint, priority, attempt, crash_attempt, max_attempts, scheduled_at_ms,
        timeout_ms, deadline_ms, retention_ms, unique_key, unique_states,
        periodic_schedule_id, periodic_tick_ms, headers, tags, sticky_worker, fence,
        expires_at_ms, claimed_at_ms, checkpoint, cursor, charge_weight,
    ) = row[_FACTS:]  # fmt: skip
    envelope = Envelope.from_stored(
        (
            job_id, kind, schema_version, payload, queue, partition_key, rate_class,
            weight, fingerprint, priority, attempt, crash_attempt, max_attempts,
            scheduled_at_ms, timeout_ms, deadline_ms, retention_ms,
            None if unique_key is None else unique_key_of(kind, unique_key)[0],
            unique_states,
            0,  # unique_window_ms
            0,  # unique_replace
            0,  # unique_debounce_ms
            False,  # unique_exclude_kind
            periodic_schedule_id, periodic_tick_ms,
            _headers(headers),
            tuple(tags) if tags else (),
            False,  # pending
            sticky_worker,
            0,  # delay_ms
            0,  # deadline_in_ms
        )
    )  # fmt: skip
    return Claim(
        envelope=envelope,
        lease_id=lease_id,
        fence=fence,
        expires_at_ms=expires_at_ms,
        claimed_at_ms=claimed_at_ms,
        checkpoint=read_checkpoint(checkpoint, cursor, charge_weight),
    )


def read_checkpoint(
    text: str | None, cursor: bytes | None, charge_weight: int | None
) -> Checkpoint:
    """The checkpoint from its three columns."""
    if text is None and cursor is None and charge_weight is None:
        return _NO_CHECKPOINT
    return Checkpoint.from_json(text, cursor=cursor, remaining_weight=charge_weight)


def job_summary(row: Row) -> JobSummary:
    """A job as an operator sees it."""
    (
        job_id, kind, queue, state, schema_version, priority, attempt, crash_attempt,
        max_attempts, weight, partition_key, rate_class, fingerprint, sticky_worker,
        enqueued_at_ms, scheduled_at_ms, claimed_at_ms, finalized_at_ms, timeout_ms,
        deadline_ms, retention_ms, periodic_schedule_id, periodic_tick_ms, payload,
        headers, errors, tags, fence, lease_expires_at_ms, claimed_by, reason_code,
        error_code, latency_ms, replay_of,
    ) = row  # fmt: skip
    return JobSummary(
        id=job_id,
        kind=kind,
        queue=queue,
        state=state,
        schema_version=schema_version,
        priority=priority,
        attempt=attempt,
        crash_attempt=crash_attempt,
        max_attempts=max_attempts,
        weight=weight,
        partition_key=partition_key,
        rate_class=rate_class,
        fingerprint=fingerprint,
        sticky_worker=sticky_worker,
        enqueued_at_ms=enqueued_at_ms,
        scheduled_at_ms=scheduled_at_ms,
        claimed_at_ms=claimed_at_ms,
        finalized_at_ms=finalized_at_ms,
        timeout_ms=timeout_ms,
        deadline_ms=deadline_ms,
        retention_ms=retention_ms,
        periodic_schedule_id=periodic_schedule_id,
        periodic_tick_ms=periodic_tick_ms,
        payload=payload,
        headers=None if headers is None else _headers(headers),
        errors=tuple(AttemptEntry.from_dict(entry) for entry in json.loads(errors)),
        tags=tuple(tags),
        fence=fence,
        lease_expires_at_ms=lease_expires_at_ms,
        claimed_by=claimed_by,
        reason_code=reason_code,
        error_code=error_code,
        latency_ms=latency_ms,
        replay_of=replay_of,
    )


def _headers(text: str) -> Mapping[str, str]:
    """Headers as they were sent; a value that is no text came from elsewhere."""
    if text == "{}":
        return _NO_HEADERS
    stored = json.loads(text)
    if not isinstance(stored, dict):
        return _NO_HEADERS
    return MappingProxyType({k: v for k, v in stored.items() if isinstance(v, str)})


def schedule_of(row: Row) -> Schedule:
    """A schedule from its row, also one that no constructor would let pass."""
    head, headers, tags, sticky, on_missed, tail = (
        row[:12], row[12], row[13], row[14], row[15], row[16:],
    )  # fmt: skip
    values = (
        *head, MappingProxyType(headers) if headers else _NO_HEADERS, tuple(tags),
        sticky, OnMissed(on_missed), *tail,
    )  # fmt: skip
    return Schedule.from_stored(values)
