"""`Inspect`, the port for looking at jobs and steering them, and its values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from headgate_sync.backlog import (
    MAX_MEMORY_JOBS,
    MAX_QUEUES,
    HistoryBucket,
    PartitionState,
    QueueStats,
    StateCounts,
)
from headgate_sync.envelope import MAX_INT64, Envelope, check_int, check_text
from headgate_sync.errors import InvalidRequest
from headgate_sync.explanation import AdmissionExplain
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import TERMINAL
from headgate_sync.operations import BulkRequest, OperationStatus
from headgate_sync.policies import Policies
from headgate_sync.schedule import PeriodicOrigin
from headgate_sync.schedules import ScheduleRecords
from headgate_sync.search import JobFilter
from headgate_sync.validation import check_name, check_sequence
from headgate_sync.workers import Workers

MAX_JOBS = 1_000
MAX_PAGE = 200
MAX_SWEPT = 10_000
_INSTANT = re.compile(r"[0-9]{1,19}", re.ASCII)

# What a reclaim writes into the history and into the registry.
LEASE_LOST_ERROR = "the lease ran out without an ack"
LEASE_EXPIRED = "LEASE_EXPIRED"
CRASH_LIMIT_REASON = "crash limit reached"


def _lines(logs: Iterable[str]) -> tuple[str, ...]:
    return tuple(logs)


@frozen(kw_only=True)
class AttemptEntry:
    """One line of a job's history; what does not apply is None or empty.

    Attributes:
        at_ms: store time of the ack or the reclaim.
        outcome: "retry", "archived", "undecodable", "success" or "lease_lost".
        attempt: count after a retry, unchanged count at a success.
        crash_attempt: count after a lost lease.
        error, logs: what the worker told.
        latency_ms: length of the attempt.
        error_code: short upper-case code of the failure.
        worker, fence: who held the lease, and which claim it was.
    """

    at_ms: int
    outcome: str
    attempt: int | None = None
    crash_attempt: int | None = None
    error: str | None = None
    logs: tuple[str, ...] = field(default=(), converter=_lines)
    latency_ms: int | None = None
    error_code: str = ""
    worker: str = ""
    fence: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The stored JSON object: only the keys that carry something.

        `error` is kept as null for an attempt that was given up without a text.
        """
        stored: dict[str, Any] = {"at_ms": self.at_ms, "outcome": self.outcome}
        if self.error is not None or self.outcome not in ("success", "lease_lost"):
            stored["error"] = self.error
        for name in ("attempt", "crash_attempt", "latency_ms"):
            if getattr(self, name) is not None:
                stored[name] = getattr(self, name)
        if self.logs:
            stored["logs"] = list(self.logs)
        if self.error_code:
            stored["error_code"] = self.error_code
        stored["worker"] = self.worker
        stored["fence"] = self.fence
        return stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> AttemptEntry:
        """Read the stored JSON object."""
        return cls(**stored)


@frozen(kw_only=True)
class JobSummary:
    """A job as an operator sees it; payload and headers only when asked for.

    Attributes:
        orphaned: some claim of this job was lost; derived from `crash_attempt`.
        reason_code: how a terminal state was reached.
        error_code, latency_ms: of the newest attempt.
        replay_of: the job that this one was made from; "" for none.
    """

    id: str
    kind: str
    queue: str
    state: str
    schema_version: int
    priority: int
    attempt: int
    crash_attempt: int
    max_attempts: int
    weight: int
    partition_key: str
    rate_class: str
    fingerprint: str
    sticky_worker: str
    enqueued_at_ms: int
    scheduled_at_ms: int
    claimed_at_ms: int | None
    finalized_at_ms: int | None
    timeout_ms: int
    deadline_ms: int
    retention_ms: int
    periodic_schedule_id: str
    periodic_tick_ms: int
    payload: bytes | None
    headers: Mapping[str, str] | None
    errors: tuple[AttemptEntry, ...]
    tags: tuple[str, ...]
    fence: int
    lease_expires_at_ms: int | None
    claimed_by: str | None
    reason_code: str
    error_code: str
    latency_ms: int | None
    replay_of: str

    @property
    def periodic_origin(self) -> PeriodicOrigin | None:
        """The schedule and tick that made the job; None for other jobs."""
        return PeriodicOrigin.of(self.periodic_schedule_id, self.periodic_tick_ms)

    @property
    def orphaned(self) -> bool:
        """Whether a lease of this job was ever lost."""
        return self.crash_attempt > 0


@frozen(kw_only=True)
class JobPage:
    """A page of a list, newest job first.

    Attributes:
        jobs: without payloads, the history cut to its newest entry.
        next_cursor: for the next page; None when there is none. A page that ends with
            the last job of all is followed by an empty one.
    """

    jobs: tuple[JobSummary, ...]
    next_cursor: str | None


@frozen(kw_only=True)
class QuarantineEntry:
    """A fingerprint whose jobs killed their workers."""

    fingerprint: str
    kind: str
    crash_count: int
    quarantined_at_ms: int
    reason: str

    @property
    def cursor(self) -> str:
        """Where a list goes on behind this entry."""
        return f"{self.quarantined_at_ms}:{self.fingerprint}"


def replayed(
    job: JobSummary, *, new_id: str, queue: str | None, run_at_ms: int | None
) -> Envelope:
    """The job that a replay enqueues; the summary brings payload and headers."""
    assert job.payload is not None
    assert job.headers is not None
    return Envelope(
        id=new_id,
        kind=job.kind,
        schema_version=job.schema_version,
        payload=job.payload,
        queue=job.queue if queue is None else queue,
        partition_key=job.partition_key,
        rate_class=job.rate_class,
        weight=job.weight,
        fingerprint=job.fingerprint,
        priority=job.priority,
        max_attempts=job.max_attempts,
        scheduled_at_ms=run_at_ms or 0,
        timeout_ms=job.timeout_ms,
        retention_ms=job.retention_ms,
        headers=job.headers,
        tags=job.tags,
        sticky_worker=job.sticky_worker,
    )


def check_replay(
    job_id: str, *, queue: str | None, run_at_ms: int | None, new_id: str | None
) -> None:
    """Check the arguments of `replay_job`.

    Raises:
        InvalidRequest: an impossible name or instant.
    """
    check_name("job_id", job_id)
    if queue is not None:
        check_name("queue", queue)
    if new_id is not None:
        check_name("new_id", new_id)
    if run_at_ms is not None:
        check_int("run_at_ms", run_at_ms, 0, MAX_INT64)


def check_sweep(cutoff_ms: int, limit: int) -> None:
    """Check the arguments of a sweep by age.

    Raises:
        InvalidRequest: a negative instant, or not 1 to 10,000 jobs.
    """
    check_int("cutoff_ms", cutoff_ms, 0, MAX_INT64)
    check_int("limit", limit, 1, MAX_SWEPT)


def terminal_states(states: Sequence[str]) -> list[str]:
    """States that a sweep by age may delete, as texts without repeats.

    Raises:
        InvalidRequest: none, or one that is not terminal.
    """
    check_sequence("states", states, str)
    if not states:
        raise InvalidRequest("states must name at least one terminal state")
    for state in states:
        if state not in TERMINAL:
            allowed = ", ".join(sorted(TERMINAL))
            raise InvalidRequest(f"state `{state}` is not one of {allowed}")
    return sorted({str(state) for state in states})


def clamped(limit: int) -> int:
    """The size of a page: 1 to 200, whatever was asked for."""
    check_int("limit", limit, -MAX_INT64, MAX_INT64)
    return min(max(limit, 1), MAX_PAGE)


def read_quarantine_cursor(cursor: str | None) -> tuple[int, str]:
    """Instant and fingerprint of the last entry seen; what is behind all without one.

    Raises:
        InvalidRequest: not the cursor of an entry.
    """
    if cursor is None:
        return MAX_INT64, ""
    at_ms, colon, fingerprint = check_text("cursor", cursor).partition(":")
    if not colon or not _INSTANT.fullmatch(at_ms) or int(at_ms) > MAX_INT64:
        raise InvalidRequest("bad cursor")
    return int(at_ms), fingerprint


class Inspect(Policies, ScheduleRecords, Workers, Protocol):
    """Looking and steering. Every method blocks; any thread may call it.

    Looking waits for nobody, makes nobody wait, and is bounded: what a call reads does
    not grow with the tables. On PostgreSQL a statement that only looks is stopped after
    5 seconds with `StoreUnavailable`.

    Verbs on one job take its id. They raise `NotFound` for a missing job, and
    `InvalidRequest` naming the state where the table of transitions has no such edge.
    """

    def get_job(
        self, job_id: str, *, include_payload: bool = False
    ) -> JobSummary | None:
        """One job with its whole history, or None."""
        ...

    def get_jobs(self, ids: Sequence[str]) -> list[JobSummary]:
        """Jobs in the order of at most 1,000 ids, missing ones left out.

        No payloads; the history is cut to its newest entry.
        """
        ...

    def explain_admission(self, job_id: str) -> AdmissionExplain | None:
        """Why a job runs or waits, by the gate's own counters; None without the job.

        Reads only, and a bounded number of rows. The answer holds for this moment, for
        a worker that serves the queue and has room.
        """
        ...

    def list_jobs(
        self,
        filter: JobFilter | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """The newest jobs that a filter asks for, in the order of their insertion.

        Jobs that come while a list is paged through appear on none of its later pages.

        Args:
            filter: None lists all.
            cursor: of the page before; it is a place and fits every filter.
            limit: taken as 1 or 200 when it is less or more.

        Raises:
            InvalidRequest: no cursor of a page, or a filter that matches so rarely, and
                names neither queue nor state, that looking took too long.
        """
        ...

    def counts(self, queue: str | None = None) -> StateCounts:
        """Jobs by state, from a sample of at most 50,000 rows.

        States with few jobs are counted first, so that their figures are exact however
        many jobs the others have.
        """
        ...

    def queue_stats(
        self,
        limit: int = MAX_QUEUES,
        cursor: str | None = None,
        *,
        queues: Sequence[str] | None = None,
    ) -> list[QueueStats]:
        """Queues by name, with their backlog.

        Args:
            limit: 1 to 200 queues.
            cursor: the last queue seen; None starts.
            queues: up to 200 names to look at instead, in this order; a name that was
                never used is an empty queue.
        """
        ...

    def history(
        self, queue: str, since_ms: int, bucket_ms: int = 60_000
    ) -> list[HistoryBucket]:
        """What happened to a queue since an instant, by stretches of 60,000 ms or more.

        Ascending, without empty ones, 10,000 at most. Counters are kept for 31 days.
        """
        ...

    def partitions(self, queue: str) -> list[PartitionState]:
        """Up to 1,000 partitions of a queue, the most waiting jobs first, then by key.

        Those with available jobs, running jobs, credit or a quantum of their own.
        """
        ...

    def create_operation(self, request: BulkRequest) -> None:
        """Note a verb for many jobs; `run_pending_operations` carries it out.

        Jobs that are enqueued later are not touched. A dry run is completed at once.

        Raises:
            InvalidRequest: an operation of this id exists, or a dry run whose selector
                matches so rarely that looking took too long.
        """
        ...

    def get_operation(self, operation_id: str) -> OperationStatus | None:
        """How far an operation has come, or None."""
        ...

    def run_pending_operations(self, batch: int) -> int:
        """Carry the 5 oldest open operations on, by 1 to 10,000 jobs each.

        Each step is one transaction; an operation that fails keeps what it did and says
        why. Several callers do not disturb each other.

        Returns:
            Jobs touched. An operation may be open after a step that touched none: it
            ends when a whole pass over its jobs found nothing to do.
        """
        ...

    def replay_job(
        self,
        job_id: str,
        *,
        queue: str | None = None,
        run_at_ms: int | None = None,
        new_id: str | None = None,
    ) -> str:
        """Enqueue a new job like one that is there, in whatever state it is.

        Content, partition, class, weight, priority, limits, headers and tags are
        copied; unique key, deadline, schedule, counters and history are not.

        Args:
            queue: another queue; None keeps it.
            run_at_ms: when it may run; None is now.
            new_id: names the new job, so that a repeated call makes no second one; None
                makes an id up.

        Returns:
            The id of the new job, whose `replay_of` is `job_id`.

        Raises:
            NotFound: no such job.
            IdConflict: `new_id` belongs to a job that this call would not have made.
            FingerprintQuarantined, Backpressure: as for any enqueue.
        """
        ...

    def archive_completed_older_than(self, cutoff_ms: int, limit: int) -> int:
        """Delete up to `limit` (1 to 10,000) jobs that succeeded before an instant.

        The earliest first; those of a queue with an archive policy are archived. Safe
        to call from many places at once: the sum of the answers is the number of jobs
        that are gone.
        """
        ...

    def trim_history(self, cutoff_ms: int, limit: int) -> tuple[int, int]:
        """Forget the attempts of up to 10,000 jobs that succeeded before an instant.

        The jobs stay.

        Returns:
            Entries removed, and rows of a decision log, of which there are none.
        """
        ...

    def delete_terminal(self, states: Sequence[str], cutoff_ms: int, limit: int) -> int:
        """Delete up to 10,000 jobs of terminal states that ended before an instant.

        Raises:
            InvalidRequest: no state, or one that is not terminal.
        """
        ...

    def sample_queue_memory(self, limit: int = MAX_MEMORY_JOBS) -> int:
        """Estimate the stored bytes of up to 200 queues, the least recently sampled.

        Args:
            limit: jobs looked at per queue, taken as 1 or 1,000 when less or more.

        Returns:
            Queues sampled; `queue_stats` shows the figures.
        """
        ...

    def delete_queue(self, queue: str, force: bool = False) -> str | None:
        """Remove what is kept of a queue: settings, limit, counters, ledger.

        With `force` a queue that has jobs is closed to producers, and an operation
        cancels and deletes its jobs before it removes the queue.

        Returns:
            The id of that operation; None when the queue is gone.

        Raises:
            InvalidRequest: the queue has jobs, and `force` is false.
        """
        ...

    def unfinished(self, queue: str) -> int:
        """Jobs of the queue that are in no terminal state, from the counters."""
        ...

    def distinct_kinds(
        self, limit: int, *, queues: Sequence[str] | None = None
    ) -> list[str]:
        """Kinds among up to `limit` waiting jobs, sorted.

        Args:
            limit: 1 to 1,000,000.
            queues: only jobs of these; None is all. Looked for among 50,000 waiting
                jobs, so a queue behind a long backlog of others may be missed.
        """
        ...

    def store_now_ms(self) -> int:
        """The store's clock."""
        ...

    def read_checkpoint(self, job_id: str) -> Checkpoint | None:
        """The newest checkpoint, empty for a job without steps; None without a job."""
        ...

    def promote_job(self, job_id: str) -> None:
        """Make a pending job available now."""
        ...

    def operator_retry(self, job_id: str) -> None:
        """Give an archived, cancelled or undecodable job one more run, now.

        Counters and history stay. Raises `DuplicateJob` when another job holds the
        lifecycle key by now.
        """
        ...

    def operator_cancel(self, job_id: str) -> None:
        """Cancel an unfinished job; the holder of a lease loses it."""
        ...

    def cancel_jobs(self, ids: Sequence[str]) -> int:
        """Cancel at most 1,000 jobs in one transaction, those that are unfinished.

        Returns:
            How many were cancelled; the finished and the missing are left out.
        """
        ...

    def delete_job(self, job_id: str) -> None:
        """Remove a job that is not running, with all that belongs to it."""
        ...

    def reschedule_job(self, job_id: str, at_ms: int) -> None:
        """Move a scheduled or retryable job to another instant; the past means now."""
        ...

    def schedule_pending(self, job_id: str, at_ms: int) -> None:
        """Let a pending job become available at an instant."""
        ...

    def edit_payload(
        self, job_id: str, payload: bytes, *, schema_version: int, fingerprint: str
    ) -> None:
        """Replace payload, version and fingerprint of a job that is not running."""
        ...

    def quarantine_list(
        self, limit: int = MAX_PAGE, cursor: str | None = None
    ) -> list[QuarantineEntry]:
        """Registered fingerprints, newest first, behind the entry of a cursor."""
        ...

    def quarantine_release(self, fingerprint: str) -> int:
        """Unregister a fingerprint and make its quarantined jobs available.

        Jobs whose lifecycle key is taken stay quarantined; a later call takes them. ""
        moves the quarantined jobs that have no fingerprint.

        Returns:
            Number of jobs moved.

        Raises:
            NotFound: neither a registered fingerprint nor a quarantined job.
        """
        ...

    def quarantine_sweep(self, limit: int) -> int:
        """Quarantine waiting jobs of registered fingerprints; returns how many."""
        ...

    def set_queue_paused(self, queue: str, paused: bool) -> None:
        """Let admission skip the queue, or not; intake and running jobs go on."""
        ...

    def set_queue_weight(self, queue: str, weight: int) -> None:
        """Set the queue's share of admissions, 1 or more; its position is kept."""
        ...

    def set_enqueue_limit(self, queue: str, limit: int | None) -> None:
        """Bound the unfinished jobs of a queue; 0 closes it, None lifts the bound."""
        ...
