"""Taking jobs in: replays, quarantine, backpressure, uniqueness, replacement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
)
from headgate_sync.lifecycle import Event, State, sources_of
from headgate_sync.memory.state import Job, Rows

# Who may still be changed by a duplicate: neither a job that waits for an operator nor
# one that a worker has read already.
_CHANGEABLE = frozenset(sources_of(Event.DEBOUNCED))


class Intake:
    """Decides about one batch, in the order of checks that the port names."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take in a batch whose own rules hold; the caller holds the lock."""
        now_ms = self._rows.clock.now_ms()
        fresh = self._without_replays(batch)
        self._refuse_quarantined(fresh)
        self._refuse_overflow(fresh)
        keys = [envelope.effective_unique_key for envelope in fresh]
        self._refuse_duplicates(fresh, keys, now_ms)
        for envelope, key in zip(fresh, keys, strict=True):
            self._insert(envelope, key, now_ms)

    def _without_replays(self, batch: Sequence[Envelope]) -> list[Envelope]:
        fresh = []
        for envelope in batch:
            job = self._rows.jobs.get(envelope.id)
            if job is None:
                fresh.append(envelope)
            elif (
                job.kind != envelope.kind
                or job.fingerprint != envelope.fingerprint
                or job.queue != envelope.queue
            ):
                raise IdConflict(envelope.id)
        return fresh

    def _refuse_quarantined(self, fresh: Sequence[Envelope]) -> None:
        registered = self._rows.quarantine
        for envelope in fresh if registered else ():
            if envelope.fingerprint in registered:
                raise FingerprintQuarantined(envelope.fingerprint)

    def _refuse_overflow(self, fresh: Sequence[Envelope]) -> None:
        incoming = Counter(envelope.queue for envelope in fresh)
        for name in sorted(incoming):
            queue = self._rows.queues.get(name)
            if queue is None or queue.max_unfinished_jobs is None:
                continue
            if queue.unfinished + incoming[name] > queue.max_unfinished_jobs:
                raise Backpressure(
                    name,
                    limit=queue.max_unfinished_jobs,
                    current=queue.unfinished,
                    incoming=incoming[name],
                )

    def _refuse_duplicates(
        self, fresh: Sequence[Envelope], keys: Sequence[bytes | None], now_ms: int
    ) -> None:
        taken: dict[tuple[bool, bytes], str] = {}
        for envelope, key in zip(fresh, keys, strict=True):
            if key is None:
                continue
            throttled = envelope.unique_window_ms > 0
            holder_id = self._holder(key, now_ms, throttled=throttled)
            if holder_id is not None:
                replaced = self._replace(holder_id, envelope, now_ms)
                raise DuplicateJob(holder_id, replaced=replaced)
            if (throttled, key) in taken:
                raise DuplicateJob(taken[throttled, key])
            taken[throttled, key] = envelope.id

    def _holder(self, key: bytes, now_ms: int, *, throttled: bool) -> str | None:
        """The id behind a key; the two modes are separate namespaces."""
        if not throttled:
            job = self._rows.holders.get(key)
            return None if job is None else job.id
        job_id, expires_at_ms = self._rows.throttle.get(key, ("", 0))
        return job_id if now_ms < expires_at_ms else None

    def _replace(self, holder_id: str, envelope: Envelope, now_ms: int) -> bool:
        """Change the holder as the request asks; says whether a field was written."""
        job = self._rows.jobs.get(holder_id)
        if job is None or job.state not in _CHANGEABLE:
            return False
        if envelope.unique_debounce_ms:
            self._debounce(job, envelope, now_ms)
            return True
        mask = envelope.unique_replace
        if job.state is not State.SCHEDULED:
            mask &= ~UNIQUE_REPLACE_SCHEDULED_AT
        if mask:
            self._rows.rewrite(job, lambda job: _write(job, envelope, mask, now_ms))
        return mask != 0

    def _debounce(self, job: Job, envelope: Envelope, now_ms: int) -> None:
        mask = envelope.unique_replace & ~UNIQUE_REPLACE_SCHEDULED_AT

        def change(job: Job) -> None:
            _write(job, envelope, mask | UNIQUE_REPLACE_PAYLOAD, now_ms)
            job.tags = envelope.tags

        self._rows.move(
            job,
            Event.DEBOUNCED,
            now_ms,
            scheduled_at_ms=now_ms + envelope.unique_debounce_ms,
            change=change,
        )

    def _insert(self, envelope: Envelope, key: bytes | None, now_ms: int) -> None:
        rows = self._rows
        if key is not None and envelope.unique_window_ms:
            rows.throttle[key] = (envelope.id, now_ms + envelope.unique_window_ms)
            key = None
        scheduled_at_ms = _scheduled_at_ms(envelope, now_ms)
        if envelope.pending:
            state = State.PENDING
        elif scheduled_at_ms > now_ms:
            state = State.SCHEDULED
        else:
            state = State.AVAILABLE
        deadline_in_ms = envelope.deadline_in_ms
        rows.add(
            Job(
                seq=rows.take_seq(),
                lane=rows.lane(
                    envelope.queue,
                    envelope.partition_key,
                    envelope.rate_class,
                    envelope.sticky_worker,
                ),
                options=rows.options,
                id=envelope.id,
                kind=envelope.kind,
                schema_version=envelope.schema_version,
                payload=envelope.payload,
                queue=envelope.queue,
                partition_key=envelope.partition_key,
                rate_class=envelope.rate_class,
                sticky_worker=envelope.sticky_worker,
                weight=envelope.weight,
                fingerprint=envelope.fingerprint,
                priority=envelope.priority,
                state=state,
                max_attempts=envelope.max_attempts,
                enqueued_at_ms=now_ms,
                scheduled_at_ms=scheduled_at_ms,
                timeout_ms=envelope.timeout_ms,
                deadline_ms=now_ms + deadline_in_ms
                if deadline_in_ms
                else envelope.deadline_ms,
                retention_ms=envelope.retention_ms,
                unique_key=key,
                unique_states=envelope.unique_states,
                periodic_schedule_id=envelope.periodic_schedule_id,
                periodic_tick_ms=envelope.periodic_tick_ms,
                headers=envelope.headers,
                tags=envelope.tags,
            )
        )


def _scheduled_at_ms(envelope: Envelope, now_ms: int) -> int:
    """The schedule on store time: relative forms count from the decision, 0 is now."""
    relative_ms = envelope.unique_debounce_ms or envelope.delay_ms
    return now_ms + relative_ms if relative_ms else envelope.scheduled_at_ms or now_ms


def _write(job: Job, envelope: Envelope, mask: int, now_ms: int) -> None:
    """Copy the fields that the bits name."""
    if mask & UNIQUE_REPLACE_PAYLOAD:
        job.schema_version = envelope.schema_version
        job.payload = envelope.payload
        job.fingerprint = envelope.fingerprint
    if mask & UNIQUE_REPLACE_SCHEDULED_AT:
        job.scheduled_at_ms = _scheduled_at_ms(envelope, now_ms)
    if mask & UNIQUE_REPLACE_PRIORITY:
        job.priority = envelope.priority
    if mask & UNIQUE_REPLACE_MAX_ATTEMPTS:
        job.max_attempts = envelope.max_attempts
