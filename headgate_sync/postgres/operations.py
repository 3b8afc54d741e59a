"""Operations over many jobs in the database, one transaction per step."""

from __future__ import annotations

from headgate_sync.backlog import MAX_SAMPLE
from headgate_sync.envelope import MAX_INT64
from headgate_sync.errors import BackendError, InvalidRequest
from headgate_sync.lifecycle import STORED
from headgate_sync.loggers import guarded
from headgate_sync.operations import (
    OPERATIONS_PER_RUN,
    QUEUE_NOT_EMPTY,
    BulkRequest,
    OperationStatus,
    check_batch,
    queue_deletion_id,
)
from headgate_sync.postgres.backlog import PgBacklog
from headgate_sync.postgres.database import (
    CONFLICT_TRIES,
    UNIQUE_VIOLATION,
    LookedTooLong,
    Session,
)
from headgate_sync.validation import check_name, check_type

logger = guarded(__name__)

UNSELECTIVE = "selector is not selective enough to estimate; add queue or state"


class PgOperations(PgBacklog):
    """Many jobs at a time."""

    def create_operation(self, request: BulkRequest) -> None:
        """Note a verb for many jobs."""
        check_type("request", request, BulkRequest)
        states = sorted(state.value for state in request.states())
        total = self._estimate(request, states)
        created = self._db.rows(
            "create_operation",
            **_selection(request, states),
            id=request.id,
            action=request.action,
            older_than_ms=request.older_than_ms or 0,
            dry_run=request.dry_run,
            total_estimated=total,
        )
        if not created:
            raise InvalidRequest(f"operation {request.id} exists")

    def get_operation(self, operation_id: str) -> OperationStatus | None:
        """How far an operation has come, or None."""
        check_name("id", operation_id)
        rows = self._db.look("get_operation", id=operation_id)
        if not rows:
            return None
        status, affected, total_estimated, dry_run, error = rows[0]
        return OperationStatus(
            id=operation_id,
            status=status,
            affected=affected,
            total_estimated=total_estimated,
            dry_run=dry_run,
            error=error,
        )

    def run_pending_operations(self, batch: int) -> int:
        """Carry the 5 oldest open operations on."""
        check_batch(batch)
        found = self._db.rows("open_operations", max_operations=OPERATIONS_PER_RUN)
        return sum(self._step(operation_id, batch) for (operation_id,) in found)

    def delete_queue(self, queue: str, force: bool = False) -> str | None:
        """Remove what is kept of a queue."""
        check_name("queue", queue)
        check_type("force", force, bool)

        def remove(session: Session) -> str | None:
            if session.rows("forget_queue", queue=queue)[0][0]:
                return None
            if not force:
                raise InvalidRequest(QUEUE_NOT_EMPTY)
            now_ms = session.rows("store_now")[0][0]
            operation_id = queue_deletion_id(queue, now_ms)
            session.rows("set_enqueue_limit", queue=queue, max_unfinished_jobs=0)
            total = session.rows(
                "estimate_operation",
                queue=queue,
                states=sorted(STORED),
                kind=None,
                partition_key=None,
                older_than_ms=0,
                max_sample=MAX_SAMPLE,
            )[0][0]
            session.rows(
                "create_queue_deletion",
                id=operation_id,
                queue=queue,
                states=sorted(STORED),
                total_estimated=total,
                for_ever=MAX_INT64,
            )
            return operation_id

        return self._db.run(remove)

    def _estimate(self, request: BulkRequest, states: list[str]) -> int:
        """How many jobs it would be; 0 where hardly any fits and all are looked at."""
        try:
            rows = self._db.look(
                "estimate_operation",
                **_selection(request, states),
                older_than_ms=request.older_than_ms or 0,
                max_sample=MAX_SAMPLE,
            )
        except LookedTooLong as error:
            if request.dry_run:
                raise InvalidRequest(UNSELECTIVE) from error
            return 0  # the operation itself goes by small steps and needs no figure
        return int(rows[0][0])

    def _step(self, operation_id: str, batch: int) -> int:
        """One step; a fault of its statement ends the operation with the reason."""
        for attempt in range(CONFLICT_TRIES):
            try:
                rows = self._db.rows(
                    "run_operation",
                    id=operation_id,
                    batch=batch,
                    window=max(batch, MAX_SAMPLE),
                )
            except BackendError as error:
                taken = error.sqlstate == UNIQUE_VIOLATION
                if taken and attempt < CONFLICT_TRIES - 1:
                    continue
                logger.warning("operation %s failed: %s", operation_id, error)
                self._db.rows("fail_operation", id=operation_id, error=str(error))
                return 0
            else:
                return int(rows[0][0])
        raise AssertionError("unreachable")


def _selection(request: BulkRequest, states: list[str]) -> dict[str, object]:
    return {
        "queue": request.queue,
        "states": states,
        "kind": request.kind,
        "partition_key": request.partition_key,
    }
