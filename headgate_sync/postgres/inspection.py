"""Looking at jobs in the database and steering them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict

from headgate_sync.backlog import MAX_SAMPLE, SAMPLE_ORDER
from headgate_sync.envelope import (
    MAX_INT32,
    MAX_INT64,
    check_int,
    check_payload,
    check_text,
)
from headgate_sync.errors import (
    BackendError,
    DuplicateJob,
    InvalidRequest,
    NotFound,
    StoreConflict,
)
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
from headgate_sync.lifecycle import Event, State, refused, sources_of
from headgate_sync.postgres.database import (
    CONFLICT_TRIES,
    UNIQUE_VIOLATION,
    LookedTooLong,
    Row,
    Session,
)
from headgate_sync.postgres.explanation import facts_of
from headgate_sync.postgres.rows import job_summary, read_checkpoint
from headgate_sync.postgres.schedules import PgSchedules
from headgate_sync.postgres.upkeep import PgUpkeep
from headgate_sync.postgres.workers import PgWorkers
from headgate_sync.search import JobFilter, read_cursor
from headgate_sync.validation import (
    check_count,
    check_job_id,
    check_limit,
    check_name,
    check_texts,
    check_type,
)

UNSELECTIVE = "filter is not selective enough; add queue or state"


class PgInspect(PgUpkeep, PgSchedules, PgWorkers):
    """`Inspect` on the job rows."""

    def get_job(
        self, job_id: str, *, include_payload: bool = False
    ) -> JobSummary | None:
        """One job with its whole history, or None."""
        check_job_id(job_id)
        check_type("include_payload", include_payload, bool)
        name = "get_job_payload" if include_payload else "get_job"
        rows = self._db.look(name, job_id=job_id)
        return job_summary(rows[0]) if rows else None

    def get_jobs(self, ids: Sequence[str]) -> list[JobSummary]:
        """Jobs in the order of at most 1,000 ids, missing ones left out."""
        check_texts("ids", ids)
        check_count("ids", len(ids), MAX_JOBS)
        if not ids:
            return []
        rows = self._db.look("get_jobs", job_ids=list(ids))
        return [job_summary(row) for row in rows]

    def explain_admission(self, job_id: str) -> AdmissionExplain | None:
        """Why a job runs or waits; None without it."""
        check_job_id(job_id)
        facts = facts_of(self._db, job_id)
        return None if facts is None else explained(facts)

    def list_jobs(
        self,
        filter: JobFilter | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """The newest jobs that a filter asks for."""
        if filter is not None:
            check_type("filter", filter, JobFilter)
        wanted, most = filter or JobFilter(), clamped(limit)
        params = asdict(wanted) | {
            "tags_all": list(wanted.tags_all),
            "tags_any": list(wanted.tags_any),
            "path": _path(wanted),
            "before": read_cursor(cursor, MAX_INT64),
            "max_jobs": most,
            "states": [wanted.state] if wanted.state else list(SAMPLE_ORDER),
            "plain": wanted == JobFilter(state=wanted.state),
        }

        def read(session: Session) -> tuple[list[Row], list[Row]]:
            page = session.rows("list_jobs", **params)
            ids = [job_id for _, job_id in page]
            return page, session.rows("get_jobs", job_ids=ids) if ids else []

        try:
            page, rows = self._db.looking(read)
        except LookedTooLong as error:
            raise InvalidRequest(UNSELECTIVE) from error
        return JobPage(
            jobs=tuple(job_summary(row) for row in rows),
            next_cursor=str(page[-1][0]) if len(page) == most else None,
        )

    def unfinished(self, queue: str) -> int:
        """Jobs of the queue that are in no terminal state, from the counters."""
        check_text("queue", queue)
        return int(self._db.look("unfinished", queue=queue)[0][0])

    def distinct_kinds(
        self, limit: int, *, queues: Sequence[str] | None = None
    ) -> list[str]:
        """Kinds among up to `limit` waiting jobs, sorted."""
        check_limit(limit)
        if queues is not None:
            check_texts("queues", queues)
        rows = self._db.look(
            "distinct_kinds",
            max_jobs=limit,
            max_sample=limit if queues is None else MAX_SAMPLE,
            queues=None if queues is None else list(queues),
        )
        return [kind for (kind,) in rows]

    def store_now_ms(self) -> int:
        """The store's clock."""
        return int(self._db.rows("store_now")[0][0])

    def read_checkpoint(self, job_id: str) -> Checkpoint | None:
        """The newest checkpoint; None without the job."""
        check_job_id(job_id)
        rows = self._db.look("read_checkpoint", job_id=job_id)
        return read_checkpoint(*rows[0]) if rows else None

    def promote_job(self, job_id: str) -> None:
        """Make a pending job available now."""
        check_job_id(job_id)
        self._steer(Event.OPERATOR_PROMOTE, "promote_job", job_id)

    def operator_retry(self, job_id: str) -> None:
        """Give a finished job one more run, now; the whole weight is charged again."""
        check_job_id(job_id)
        for _ in range(CONFLICT_TRIES):
            try:
                holder = self._steer(Event.OPERATOR_RETRY, "operator_retry", job_id)[1]
            except BackendError as error:
                if error.sqlstate != UNIQUE_VIOLATION:
                    raise
            else:
                if holder is not None:
                    raise DuplicateJob(holder)
                return
        raise StoreConflict(f"the holder of the unique key of {job_id} keeps changing")

    def operator_cancel(self, job_id: str) -> None:
        """Cancel an unfinished job; the holder of a lease loses it."""
        check_job_id(job_id)
        self._steer(Event.OPERATOR_CANCEL, "operator_cancel", job_id)

    def cancel_jobs(self, ids: Sequence[str]) -> int:
        """Cancel those of at most 1,000 jobs that are unfinished."""
        check_texts("ids", ids)
        check_count("ids", len(ids), MAX_JOBS)
        if not ids:
            return 0
        return int(self._db.rows("cancel_jobs", job_ids=list(ids))[0][0])

    def delete_job(self, job_id: str) -> None:
        """Remove a job that is not running, with all that belongs to it."""
        check_job_id(job_id)
        self._steer(Event.OPERATOR_DELETE, "delete_job", job_id)

    def reschedule_job(self, job_id: str, at_ms: int) -> None:
        """Move a scheduled or retryable job to another instant; the past means now."""
        check_job_id(job_id)
        check_int("at_ms", at_ms, 0, MAX_INT64)
        self._steer(Event.OPERATOR_RESCHEDULE, "reschedule_job", job_id, at_ms=at_ms)

    def schedule_pending(self, job_id: str, at_ms: int) -> None:
        """Turn a pending job into one that becomes available at an instant."""
        check_job_id(job_id)
        check_int("at_ms", at_ms, 0, MAX_INT64)
        self._steer(Event.SCHEDULE_PENDING, "schedule_pending", job_id, at_ms=at_ms)

    def edit_payload(
        self, job_id: str, payload: bytes, *, schema_version: int, fingerprint: str
    ) -> None:
        """Replace payload, version and fingerprint of a job that is not running."""
        check_job_id(job_id)
        check_payload(payload, schema_version, fingerprint)
        self._steer(
            Event.EDIT_PAYLOAD,
            "edit_payload",
            job_id,
            payload=payload,
            schema_version=schema_version,
            fingerprint=fingerprint,
        )

    def quarantine_list(
        self, limit: int = MAX_PAGE, cursor: str | None = None
    ) -> list[QuarantineEntry]:
        """Registered fingerprints, newest first; `cursor` is the last one seen."""
        check_int("limit", limit, 1, MAX_PAGE)
        before_ms, after = read_quarantine_cursor(cursor)
        rows = self._db.look(
            "quarantine_list", before_ms=before_ms, after=after, max_entries=limit
        )
        return [
            QuarantineEntry(
                fingerprint=fingerprint,
                kind=kind,
                crash_count=crash_count,
                quarantined_at_ms=quarantined_at_ms,
                reason=reason,
            )
            for fingerprint, kind, crash_count, quarantined_at_ms, reason in rows
        ]

    def quarantine_release(self, fingerprint: str) -> int:
        """Unregister a fingerprint and make its quarantined jobs available."""
        check_text("fingerprint", fingerprint)
        for _ in range(CONFLICT_TRIES):
            try:
                [(moved,)] = self._db.rows(
                    "quarantine_release", fingerprint=fingerprint
                )
            except BackendError as error:
                if error.sqlstate != UNIQUE_VIOLATION:
                    raise
            else:
                if moved is None:
                    raise NotFound.quarantine(fingerprint)
                return int(moved)
        raise StoreConflict(f"unique keys of jobs of {fingerprint} keep being taken")

    def quarantine_sweep(self, limit: int) -> int:
        """Move waiting jobs of registered fingerprints to quarantine."""
        check_limit(limit)
        return int(self._db.rows("quarantine_sweep", max_jobs=limit)[0][0])

    def set_queue_paused(self, queue: str, paused: bool) -> None:
        """Let admission skip the queue, or not."""
        check_name("queue", queue)
        check_type("paused", paused, bool)
        self._db.rows("set_queue_paused", queue=queue, paused=paused)

    def set_queue_weight(self, queue: str, weight: int) -> None:
        """Set the queue's share of admissions; its position is kept."""
        check_name("queue", queue)
        check_int("weight", weight, 1, MAX_INT32)
        self._db.rows("set_queue_weight", queue=queue, weight=weight)

    def set_enqueue_limit(self, queue: str, limit: int | None) -> None:
        """Bound the unfinished jobs of a queue; None lifts the bound."""
        check_name("queue", queue)
        if limit is None:
            self._db.rows("clear_enqueue_limit", queue=queue)
            return
        check_int("limit", limit, 0, MAX_INT64)
        self._db.rows("set_enqueue_limit", queue=queue, max_unfinished_jobs=limit)

    def _steer(self, event: Event, name: str, job_id: str, **params: Any) -> Row:
        """Run a verb on one job.

        Raises:
            NotFound: there is no such job.
            InvalidRequest: the table has no such edge; nothing was changed.
        """
        rows = self._db.rows(name, job_id=job_id, **params)
        if not rows:
            raise NotFound.job(job_id)
        found = State(rows[0][0])
        if found not in sources_of(event):
            raise refused(event, found)
        return rows[0]


def _path(wanted: JobFilter) -> str:
    """Which index a list walks: the one that leaves the fewest rows to look at."""
    if wanted.id is not None:
        return "id"
    if wanted.tags_all:
        return "tags_all"
    if wanted.tags_any:
        return "tags_any"
    if wanted.queue is not None:
        return "queue"
    if wanted.state is None:
        return "seq"
    return "running" if wanted.state == State.RUNNING else "state"
