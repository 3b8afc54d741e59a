"""Making, sweeping and weighing jobs of a MemStore on an operator's word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from headgate_sync.backlog import MAX_MEMORY_JOBS, MAX_QUEUES
from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.errors import IdConflict, NotFound
from headgate_sync.ids import UlidGenerator
from headgate_sync.inspection import (
    check_replay,
    check_sweep,
    replayed,
    terminal_states,
)
from headgate_sync.lifecycle import Event, State
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.backlog import is_known
from headgate_sync.memory.intake import Intake
from headgate_sync.memory.operations import MemOperations
from headgate_sync.memory.rows import summary_of
from headgate_sync.memory.state import Job, Rows

# What a row takes beside its texts and bytes.
ROW_BYTES = 400
_new_id = UlidGenerator()


class MemUpkeep(MemOperations):
    """Replays, sweeps by age and memory samples."""

    def __init__(self, rows: Rows, gate: Gate, intake: Intake) -> None:
        super().__init__(rows, gate)
        self._intake = intake
        self._samples = 0  # numbers the samples, so that the oldest is known

    def replay_job(
        self,
        job_id: str,
        *,
        queue: str | None = None,
        run_at_ms: int | None = None,
        new_id: str | None = None,
    ) -> str:
        """Enqueue a new job like one that is there."""
        check_replay(job_id, queue=queue, run_at_ms=run_at_ms, new_id=new_id)
        with self._rows.lock:
            source = self._rows.jobs.get(job_id)
            if source is None:
                raise NotFound.job(job_id)
            envelope = replayed(
                summary_of(source, include_payload=True),
                new_id=new_id or _new_id(),
                queue=queue,
                run_at_ms=run_at_ms,
            )
            there = self._rows.jobs.get(envelope.id)
            if there is None:
                self._intake.enqueue([envelope])
                self._rows.jobs[envelope.id].replay_of = job_id
            elif (there.replay_of, there.queue) != (job_id, envelope.queue):
                raise IdConflict(envelope.id)
            return envelope.id

    def archive_completed_older_than(self, cutoff_ms: int, limit: int) -> int:
        """Delete jobs that succeeded before an instant."""
        return self.delete_terminal([State.COMPLETED], cutoff_ms, limit)

    def trim_history(self, cutoff_ms: int, limit: int) -> tuple[int, int]:
        """Forget the attempts of jobs that succeeded before an instant."""
        check_sweep(cutoff_ms, limit)
        with self._rows.lock:
            told = (job for job in self._rows.jobs.values() if job.errors)
            found = _ended(told, [State.COMPLETED], cutoff_ms, limit)
            entries = sum(len(job.errors) for job in found)
            for job in found:
                job.errors = ()
        return entries, 0

    def delete_terminal(self, states: Sequence[str], cutoff_ms: int, limit: int) -> int:
        """Delete jobs of terminal states that ended before an instant."""
        check_sweep(cutoff_ms, limit)
        wanted = terminal_states(states)
        with self._rows.lock:
            found = _ended(self._rows.jobs.values(), wanted, cutoff_ms, limit)
            now_ms = self._rows.clock.now_ms()
            for job in found:
                self._rows.move(job, Event.OPERATOR_DELETE, now_ms)
        return len(found)

    def sample_queue_memory(self, limit: int = MAX_MEMORY_JOBS) -> int:
        """Estimate the stored bytes of up to 200 queues."""
        check_int("limit", limit, -MAX_INT64, MAX_INT64)
        with self._rows.lock:
            known = [queue for queue in self._rows.queues.values() if is_known(queue)]
            known.sort(key=lambda q: (q.memory_sampled, q.name.encode()))
            for queue in known[:MAX_QUEUES]:
                jobs = self._jobs_of(queue.name)
                queue.memory_bytes = sum(map(_bytes_of, jobs))
                self._samples += 1
                queue.memory_sampled = self._samples
        return len(known[:MAX_QUEUES])


def _ended(
    jobs: Iterable[Job], states: Sequence[str], cutoff_ms: int, limit: int
) -> list[Job]:
    """Jobs that ended before an instant, the earliest first."""
    ended = [
        (job.finalized_at_ms, job.seq, job)
        for job in jobs
        if job.state in states
        and job.finalized_at_ms is not None
        and job.finalized_at_ms < cutoff_ms
    ]
    return [job for _, _, job in nsmallest(limit, ended)]


def _bytes_of(job: Job) -> int:
    texts = (job.id, job.kind, job.queue, job.partition_key, job.fingerprint)
    output = job.output.data if job.output else b""
    result = job.result.data if job.result else b""
    headers = sum(len(name) + len(value) for name, value in job.headers.items())
    return (
        ROW_BYTES
        + sum(map(len, texts))
        + len(job.payload)
        + len(output)
        + len(result)
        + headers
        + 100 * len(job.errors)
    )
