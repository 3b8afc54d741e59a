"""Results, outputs and progress of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from headgate_sync.errors import LeaseRejected
from headgate_sync.lease import (
    Ack,
    JobOutput,
    JobProgress,
    JobResult,
    LeaseRef,
    ProgressUpdate,
)
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.acks import Acker
from headgate_sync.postgres.database import Database, Row
from headgate_sync.validation import check_job_id, check_type


class PgResults:
    """`ResultStore` on the job rows."""

    def __init__(self, db: Database, acker: Acker) -> None:
        self._db = db
        self._acker = acker

    def ack_success_with_result(
        self,
        lease: LeaseRef,
        result: JobResult,
        *,
        logs: Sequence[str] = (),
        actual_weight: int | None = None,
    ) -> None:
        """Ack success and store the result in the same write."""
        check_type("result", result, JobResult)
        self._acker.ack(
            Ack(
                lease=lease,
                outcome=Outcome.SUCCESS,
                logs=logs,
                actual_weight=actual_weight,
                result=result,
            )
        )

    def read_result(self, job_id: str) -> JobResult | None:
        """The result, or None without the job or a result."""
        check_job_id(job_id)
        rows = self._db.rows("read_result", job_id=job_id)
        return JobResult(*rows[0]) if rows else None


class PgOutputs:
    """`OutputStore` on the job rows."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def write_job_output(self, lease: LeaseRef, output: JobResult) -> JobOutput:
        """Publish under the lease."""
        check_type("lease", lease, LeaseRef)
        check_type("output", output, JobResult)
        rows = self._db.rows(
            "write_output",
            job_id=lease.job_id,
            lease_id=lease.lease_id,
            fence=lease.fence,
            schema_version=output.schema_version,
            data=output.data,
        )
        return JobOutput(
            schema_version=output.schema_version,
            data=output.data,
            fence=lease.fence,
            updated_at_ms=_written_at_ms(rows, lease),
        )

    def read_output(self, job_id: str) -> JobOutput | None:
        """The newest output, or None."""
        check_job_id(job_id)
        rows = self._db.rows("read_output", job_id=job_id)
        return JobOutput(*rows[0]) if rows else None


class PgProgress:
    """`ProgressStore` on the job rows."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def write_job_progress(
        self, lease: LeaseRef, progress: ProgressUpdate
    ) -> JobProgress:
        """Report under the lease."""
        check_type("lease", lease, LeaseRef)
        check_type("progress", progress, ProgressUpdate)
        rows = self._db.rows(
            "write_progress",
            job_id=lease.job_id,
            lease_id=lease.lease_id,
            fence=lease.fence,
            current=progress.current,
            total=progress.total,
            message=progress.message,
        )
        return JobProgress(
            current=progress.current,
            total=progress.total,
            message=progress.message,
            fence=lease.fence,
            updated_at_ms=_written_at_ms(rows, lease),
        )

    def read_progress(self, job_id: str) -> JobProgress | None:
        """The newest progress, or None."""
        check_job_id(job_id)
        rows = self._db.rows("read_progress", job_id=job_id)
        return JobProgress(*rows[0]) if rows else None


def _written_at_ms(rows: Sequence[Row], lease: LeaseRef) -> int:
    """The instant of a fenced write.

    Raises:
        LeaseRejected: nothing was written.
    """
    [(written_at_ms, exists)] = rows
    if written_at_ms is None:
        raise LeaseRejected(lease.job_id, missing=not exists)
    return int(written_at_ms)
