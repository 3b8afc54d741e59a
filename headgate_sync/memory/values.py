"""Results, outputs and progress of jobs in memory."""

from __future__ import annotations

from collections.abc import Sequence

from headgate_sync.lease import (
    Ack,
    JobOutput,
    JobProgress,
    JobResult,
    LeaseRef,
    ProgressUpdate,
)
from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.settle import held_job, settle
from headgate_sync.memory.state import Rows
from headgate_sync.validation import check_job_id, check_type


class MemResults:
    """`ResultStore` over the rows."""

    def __init__(self, rows: Rows, gate: Gate) -> None:
        self._rows = rows
        self._gate = gate

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
        ack = Ack(
            lease=lease,
            outcome=Outcome.SUCCESS,
            logs=logs,
            actual_weight=actual_weight,
            result=result,
        )
        with self._rows.lock:
            settle(self._rows, self._gate, ack)

    def read_result(self, job_id: str) -> JobResult | None:
        """The result, or None without the job or a result."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            return None if job is None else job.result


class MemOutputs:
    """`OutputStore` over the rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def write_job_output(self, lease: LeaseRef, output: JobResult) -> JobOutput:
        """Publish under the lease."""
        check_type("lease", lease, LeaseRef)
        check_type("output", output, JobResult)
        with self._rows.lock:
            job = held_job(self._rows, lease)
            job.output = JobOutput(
                schema_version=output.schema_version,
                data=output.data,
                fence=job.fence,
                updated_at_ms=self._rows.clock.now_ms(),
            )
            return job.output

    def read_output(self, job_id: str) -> JobOutput | None:
        """The newest output, or None."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            return None if job is None else job.output


class MemProgress:
    """`ProgressStore` over the rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def write_job_progress(
        self, lease: LeaseRef, progress: ProgressUpdate
    ) -> JobProgress:
        """Report under the lease."""
        check_type("lease", lease, LeaseRef)
        check_type("progress", progress, ProgressUpdate)
        with self._rows.lock:
            job = held_job(self._rows, lease)
            job.progress = JobProgress(
                current=progress.current,
                total=progress.total,
                message=progress.message,
                fence=job.fence,
                updated_at_ms=self._rows.clock.now_ms(),
            )
            return job.progress

    def read_progress(self, job_id: str) -> JobProgress | None:
        """The newest progress, or None."""
        check_job_id(job_id)
        with self._rows.lock:
            job = self._rows.jobs.get(job_id)
            return None if job is None else job.progress
