"""Making, sweeping and weighing jobs in the database on an operator's word."""

from __future__ import annotations

from collections.abc import Sequence

from headgate_sync.backlog import (
    MAX_MEMORY_JOBS,
    MAX_QUEUES,
    MAX_SAMPLE,
    count_arguments,
)
from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.errors import IdConflict, NotFound
from headgate_sync.ids import UlidGenerator
from headgate_sync.inspection import (
    check_replay,
    check_sweep,
    replayed,
    terminal_states,
)
from headgate_sync.lifecycle import State
from headgate_sync.postgres.database import Database, Session
from headgate_sync.postgres.enqueue import Intake
from headgate_sync.postgres.operations import PgOperations
from headgate_sync.postgres.rows import job_summary

_new_id = UlidGenerator()


class PgUpkeep(PgOperations):
    """Replays, sweeps by age and memory samples."""

    def __init__(self, db: Database, intake: Intake) -> None:
        super().__init__(db)
        self._intake = intake

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
        made_id = new_id or _new_id()

        def replay(session: Session) -> None:
            if not session.rows("keep_job", job_id=job_id):
                raise NotFound.job(job_id)
            rows = session.rows("get_job_payload", job_id=job_id)
            envelope = replayed(
                job_summary(rows[0]), new_id=made_id, queue=queue, run_at_ms=run_at_ms
            )
            there = session.rows("get_job", job_id=made_id)
            if not there:
                self._intake.enqueue_in(session, [envelope])
                there = session.rows("mark_replay", job_id=made_id, replay_of=job_id)
                made = (there[0][0], there[0][1])
            else:
                found = job_summary(there[0])
                made = (found.replay_of, found.queue)
            if made != (job_id, envelope.queue):
                raise IdConflict(made_id)

        self._db.run(replay)
        return made_id

    def archive_completed_older_than(self, cutoff_ms: int, limit: int) -> int:
        """Delete jobs that succeeded before an instant, archived where they are."""
        return self._delete_ended([State.COMPLETED], cutoff_ms, limit, is_archived=True)

    def trim_history(self, cutoff_ms: int, limit: int) -> tuple[int, int]:
        """Forget the attempts of jobs that succeeded before an instant."""
        check_sweep(cutoff_ms, limit)
        rows = self._db.rows("trim_history", cutoff_ms=cutoff_ms, max_jobs=limit)
        return int(rows[0][0]), 0

    def delete_terminal(self, states: Sequence[str], cutoff_ms: int, limit: int) -> int:
        """Delete jobs of terminal states that ended before an instant."""
        return self._delete_ended(states, cutoff_ms, limit, is_archived=False)

    def _delete_ended(
        self, states: Sequence[str], cutoff_ms: int, limit: int, *, is_archived: bool
    ) -> int:
        check_sweep(cutoff_ms, limit)
        rows = self._db.rows(
            "delete_ended",
            states=terminal_states(states),
            cutoff_ms=cutoff_ms,
            max_jobs=limit,
            is_archived=is_archived,
        )
        return int(rows[0][0])

    def sample_queue_memory(self, limit: int = MAX_MEMORY_JOBS) -> int:
        """Estimate the stored bytes of up to 200 queues."""
        check_int("limit", limit, -MAX_INT64, MAX_INT64)
        params = {
            "max_jobs": min(max(limit, 1), MAX_MEMORY_JOBS),
            "max_queues": MAX_QUEUES,
            **count_arguments(MAX_SAMPLE, 10),
        }
        # Looked at first and written then, so that the looking has its time limit.
        rows = self._db.look("sample_queue_memory", **params)
        if rows:
            queues, sizes, jobs = zip(*rows, strict=True)
            self._db.rows(
                "write_queue_memory",
                queues=list(queues),
                sizes=list(sizes),
                jobs=list(jobs),
            )
        return len(rows)
