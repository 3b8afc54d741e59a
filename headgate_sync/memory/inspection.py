"""Looking at jobs in memory and steering them."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from itertools import chain, islice

from headgate_sync.backlog import MAX_SAMPLE
from headgate_sync.envelope import (
    MAX_INT32,
    MAX_INT64,
    check_int,
    check_payload,
    check_text,
)
from headgate_sync.errors import DuplicateJob, NotFound
from headgate_sync.explanation import AdmissionExplain, explained
from headgate_sync.inspection import (
    MAX_JOBS,
    MAX_PAGE,
    JobPage,
    JobSummary,
    QuarantineEntry,
    clamped,
    read_quarantine_cursor,
)
from headgate_sync.lease import Checkpoint
from headgate_sync.lifecycle import WAITING, Event, refused, sources_of
from headgate_sync.memory.explanation import facts_of
from headgate_sync.memory.rows import checkpoint_of, quarantine_entry, summary_of
from headgate_sync.memory.schedules import MemSchedules
from headgate_sync.memory.state import Job
from headgate_sync.memory.upkeep import MemUpkeep
from headgate_sync.memory.workers import MemWorkers
from headgate_sync.search import JobFilter, read_cursor
from headgate_sync.validation import (
    check_count,
    check_job_id,
    check_limit,
    check_name,
    check_texts,
    check_type,
)


class MemInspect(MemUpkeep, MemSchedules, MemWorkers):
    """`Inspect` over the rows."""

    def get_job(
        self, job_id: str, *, include_payload: bool = False
    ) -> JobSummary | None:
        """One job with its whole history, or None."""
        check_job_id(job_id)
        check_type("include_payload", include_payload, bool)
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            if job is None:
                return None
            return summary_of(job, include_payload=include_payload)

    def get_jobs(self, ids: Sequence[str]) -> list[JobSummary]:
        """Jobs in the order of at most 1,000 ids, missing ones left out."""
        check_texts("ids", ids)
        check_count("ids", len(ids), MAX_JOBS)
        with self._rows.lock:
            found = [self._rows.jobs.get(job_id) for job_id in ids]
            return [
                summary_of(job, newest_only=True) for job in found if job is not None
            ]

    def explain_admission(self, job_id: str) -> AdmissionExplain | None:
        """Why a job runs or waits; None without it."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            if job is None:
                return None
            return explained(facts_of(self._rows, self._gate, job))

    def list_jobs(
        self,
        filter: JobFilter | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """The newest jobs that a filter asks for."""
        if filter is not None:
            check_type("filter", filter, JobFilter)
        before, most = read_cursor(cursor, MAX_INT64), clamped(limit)
        wanted = filter or JobFilter()
        with self._rows.lock:
            jobs = reversed(self._rows.jobs.values())
            fitting = (j for j in jobs if j.seq < before and _fits(j, wanted))
            found = list(islice(fitting, most))
            return JobPage(
                jobs=tuple(summary_of(job, newest_only=True) for job in found),
                next_cursor=str(found[-1].seq) if len(found) == most else None,
            )

    def unfinished(self, queue: str) -> int:
        """Jobs of the queue that are in no terminal state."""
        check_text("queue", queue)
        with self._rows.lock:
            found = self._rows.queues.get(queue)
            return 0 if found is None else found.unfinished

    def distinct_kinds(
        self, limit: int, *, queues: Sequence[str] | None = None
    ) -> list[str]:
        """Kinds among up to `limit` waiting jobs, sorted."""
        check_limit(limit)
        if queues is not None:
            check_texts("queues", queues)
        with self._rows.lock:
            waiting = (j for j in self._rows.jobs.values() if j.state in WAITING)
            if queues is not None:
                waiting = (
                    j for j in islice(waiting, MAX_SAMPLE) if j.queue in set(queues)
                )
            return sorted({job.kind for job in islice(waiting, limit)})

    def store_now_ms(self) -> int:
        """The store's clock."""
        with self._rows.lock:
            return self._rows.clock.now_ms()

    def read_checkpoint(self, job_id: str) -> Checkpoint | None:
        """The newest checkpoint; None without the job."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            return None if job is None else checkpoint_of(job)

    def promote_job(self, job_id: str) -> None:
        """Make a pending job available now."""
        check_job_id(job_id)
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            job = self._job(job_id)
            self._rows.move(job, Event.OPERATOR_PROMOTE, now_ms, scheduled_at_ms=now_ms)

    def operator_retry(self, job_id: str) -> None:
        """Give a finished job one more run, now; the whole weight is charged again."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._job(job_id)
            if job.state not in sources_of(Event.OPERATOR_RETRY):
                raise refused(Event.OPERATOR_RETRY, job.state)
            holder = self._key_holder(job)
            if holder is not None:
                raise DuplicateJob(holder.id)
            job.charge_weight = None
            self._revive(job, Event.OPERATOR_RETRY)

    def operator_cancel(self, job_id: str) -> None:
        """Cancel an unfinished job; the holder of a lease loses it."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._job(job_id)
            self._rows.move(job, Event.OPERATOR_CANCEL, self._rows.clock.now_ms())

    def cancel_jobs(self, ids: Sequence[str]) -> int:
        """Cancel those of at most 1,000 jobs that are unfinished."""
        check_texts("ids", ids)
        check_count("ids", len(ids), MAX_JOBS)
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            found = [self._rows.jobs.get(job_id) for job_id in dict.fromkeys(ids)]
            event = Event.OPERATOR_CANCEL
            going = [job for job in found if job and job.state in sources_of(event)]
            for job in going:
                self._rows.move(job, event, now_ms)
            return len(going)

    def delete_job(self, job_id: str) -> None:
        """Remove a job that is not running."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._job(job_id)
            self._rows.move(job, Event.OPERATOR_DELETE, self._rows.clock.now_ms())

    def reschedule_job(self, job_id: str, at_ms: int) -> None:
        """Move a scheduled or retryable job to another instant."""
        check_job_id(job_id)
        self._reschedule(job_id, Event.OPERATOR_RESCHEDULE, at_ms)

    def schedule_pending(self, job_id: str, at_ms: int) -> None:
        """Turn a pending job into one that becomes available at an instant."""
        check_job_id(job_id)
        self._reschedule(job_id, Event.SCHEDULE_PENDING, at_ms)

    def edit_payload(
        self, job_id: str, payload: bytes, *, schema_version: int, fingerprint: str
    ) -> None:
        """Replace payload, version and fingerprint of a job that is not running."""
        check_job_id(job_id)
        check_payload(payload, schema_version, fingerprint)

        def change(job: Job) -> None:
            job.payload = payload
            job.schema_version = schema_version
            job.fingerprint = fingerprint
            job.charge_weight = None

        with self._rows.lock:
            job = self._job(job_id)
            now_ms = self._rows.clock.now_ms()
            self._rows.move(job, Event.EDIT_PAYLOAD, now_ms, change=change)

    def quarantine_list(
        self, limit: int = MAX_PAGE, cursor: str | None = None
    ) -> list[QuarantineEntry]:
        """Registered fingerprints, newest first; `cursor` is the last one seen."""
        check_int("limit", limit, 1, MAX_PAGE)
        before_ms, after = read_quarantine_cursor(cursor)
        with self._rows.lock:
            entries = [
                quarantine_entry(fingerprint, row)
                for fingerprint, row in self._rows.quarantine.items()
                if row.quarantined_at_ms < before_ms
                or (row.quarantined_at_ms == before_ms and fingerprint > after)
            ]
        entries.sort(key=lambda entry: (-entry.quarantined_at_ms, entry.fingerprint))
        return entries[:limit]

    def quarantine_release(self, fingerprint: str) -> int:
        """Unregister a fingerprint and make its quarantined jobs available."""
        check_text("fingerprint", fingerprint)
        with self._rows.lock:
            registered = fingerprint in self._rows.quarantine
            parked = self._rows.quarantined.get(fingerprint)
            if not registered and not parked:
                raise NotFound.quarantine(fingerprint)
            self._rows.unregister(fingerprint)
            moved = 0
            for _, job in sorted((parked or {}).items()):
                if self._key_holder(job) is None:
                    self._revive(job, Event.OPERATOR_RELEASE)
                    moved += 1
            return moved

    def quarantine_sweep(self, limit: int) -> int:
        """Move waiting jobs of registered fingerprints to quarantine."""
        check_limit(limit)
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            waiting = chain.from_iterable(
                jobs.items() for jobs in self._rows.suspects.values()
            )
            found = nsmallest(limit, waiting)
            for _, job in found:
                self._rows.move(job, Event.QUARANTINE_SWEEP, now_ms)
            return len(found)

    def set_queue_paused(self, queue: str, paused: bool) -> None:
        """Let admission skip the queue, or not."""
        check_name("queue", queue)
        check_type("paused", paused, bool)
        with self._rows.lock:
            found = self._rows.queue(queue)
            found.paused, found.is_configured = paused, True

    def set_queue_weight(self, queue: str, weight: int) -> None:
        """Set the queue's share of admissions; its position is kept."""
        check_name("queue", queue)
        check_int("weight", weight, 1, MAX_INT32)
        with self._rows.lock:
            self._gate.set_queue_weight(queue, weight)
            self._rows.queue(queue).is_configured = True

    def set_enqueue_limit(self, queue: str, limit: int | None) -> None:
        """Bound the unfinished jobs of a queue; None lifts the bound."""
        check_name("queue", queue)
        if limit is not None:
            check_int("limit", limit, 0, MAX_INT64)
        with self._rows.lock:
            self._rows.queue(queue).max_unfinished_jobs = limit

    def _job(self, job_id: str) -> Job:
        job = self._rows.jobs.get(job_id)
        if job is None:
            raise NotFound.job(job_id)
        return job

    def _key_holder(self, job: Job) -> Job | None:
        """Who holds the job's lifecycle key by now."""
        key = job.unique_key
        return None if key is None else self._rows.holders.get(key)

    def _revive(self, job: Job, event: Event) -> None:
        now_ms = self._rows.clock.now_ms()
        self._rows.move(job, event, now_ms, scheduled_at_ms=now_ms)

    def _reschedule(self, job_id: str, event: Event, at_ms: int) -> None:
        check_int("at_ms", at_ms, 0, MAX_INT64)
        with self._rows.lock:
            job = self._job(job_id)
            now_ms = self._rows.clock.now_ms()
            self._rows.move(job, event, now_ms, scheduled_at_ms=at_ms)


def _fits(job: Job, wanted: JobFilter) -> bool:
    """Whether a job is what a filter asks for."""
    return (
        wanted.queue in (None, job.queue)
        and wanted.state in (None, job.state.value)
        and wanted.kind in (None, job.kind)
        and (wanted.kind_prefix is None or job.kind.startswith(wanted.kind_prefix))
        and wanted.partition_key in (None, job.partition_key)
        and wanted.id in (None, job.id)
        and wanted.fingerprint in (None, job.fingerprint)
        and wanted.rate_class in (None, job.rate_class)
        and wanted.priority in (None, job.priority)
        and set(wanted.tags_all) <= set(job.tags)
        and (not wanted.tags_any or not set(wanted.tags_any).isdisjoint(job.tags))
    )
