"""Operations over many jobs of a MemStore, in the steps that the port promises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from attrs import define

from headgate_sync.backlog import MAX_SAMPLE
from headgate_sync.envelope import MAX_INT64
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import STORED, Event, State
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.backlog import MemBacklog
from headgate_sync.memory.state import Job, Rows
from headgate_sync.operations import (
    OPERATIONS_PER_RUN,
    QUEUE_NOT_EMPTY,
    BulkAction,
    BulkRequest,
    OperationState,
    OperationStatus,
    check_batch,
    queue_deletion_id,
)
from headgate_sync.validation import check_name, check_type


@define(eq=False)
class Operation:
    """A noted operation and how far it has come."""

    request: BulkRequest
    states: frozenset[State]
    until_ms: int
    last_seq: int
    total_estimated: int
    empties: bool = False
    status: OperationState = OperationState.PENDING
    place: int = 0
    has_found: bool = False
    affected: int = 0

    def wants(self, job: Job) -> bool:
        """Whether the operation touches the job in its present state."""
        asked = self.request
        return (
            job.seq <= self.last_seq
            and job.state in self.states
            and asked.queue in (None, job.queue)
            and asked.kind in (None, job.kind)
            and asked.partition_key in (None, job.partition_key)
            and job.enqueued_at_ms <= self.until_ms
        )


class MemOperations(MemBacklog):
    """Many jobs at a time."""

    def __init__(self, rows: Rows, gate: Gate) -> None:
        super().__init__(rows, gate)
        self._operations: dict[str, Operation] = {}  # in the order of their creation

    def create_operation(self, request: BulkRequest) -> None:
        """Note a verb for many jobs."""
        check_type("request", request, BulkRequest)
        with self._rows.lock:
            self._create(request, frozenset(request.states()))

    def get_operation(self, operation_id: str) -> OperationStatus | None:
        """How far an operation has come, or None."""
        check_name("id", operation_id)
        with self._rows.lock:
            op = self._operations.get(operation_id)
            if op is None:
                return None
            return OperationStatus(
                id=operation_id,
                status=op.status.value,
                affected=op.affected,
                total_estimated=op.total_estimated,
                dry_run=op.request.dry_run,
            )

    def has_open_operations(self) -> bool:
        """Whether an operation is not at its end."""
        return bool(self._open())

    def run_pending_operations(self, batch: int) -> int:
        """Carry the 5 oldest open operations on."""
        check_batch(batch)
        with self._rows.lock:
            found = self._open()[:OPERATIONS_PER_RUN]
            return sum(self._step(op, batch) for op in found)

    def delete_queue(self, queue: str, force: bool = False) -> str | None:
        """Remove what is kept of a queue."""
        check_name("queue", queue)
        check_type("force", force, bool)
        with self._rows.lock:
            if self._forget(queue):
                return None
            if not force:
                raise InvalidRequest(QUEUE_NOT_EMPTY)
            self._rows.queue(queue).max_unfinished_jobs = 0
            name = queue_deletion_id(queue, self._rows.clock.now_ms())
            if name not in self._operations:
                request = BulkRequest(id=name, action="delete", queue=queue)
                op = self._create(request, STORED)
                op.empties = True
                op.last_seq = op.until_ms = MAX_INT64
            return name

    def _open(self) -> list[Operation]:
        done = OperationState.COMPLETED
        return [op for op in self._operations.values() if op.status is not done]

    def _create(self, request: BulkRequest, states: frozenset[State]) -> Operation:
        if request.id in self._operations:
            raise InvalidRequest(f"operation {request.id} exists")
        op = Operation(
            request=request,
            states=states,
            until_ms=self._rows.clock.now_ms() - (request.older_than_ms or 0),
            last_seq=max((j.seq for j in self._rows.jobs.values()), default=0),
            total_estimated=0,
        )
        matching = (job for job in self._rows.jobs.values() if op.wants(job))
        op.total_estimated = sum(1 for _ in islice(matching, MAX_SAMPLE))
        if request.dry_run:
            op.status = OperationState.COMPLETED
        self._operations[request.id] = op
        return op

    def _step(self, op: Operation, batch: int) -> int:
        jobs = list(islice(self._left(op), batch))
        touched = 0
        for job in jobs:
            if op.request.action == BulkAction.RETRY and self._is_taken(job):
                continue  # one of several that share a lifecycle key
            touched += 1
            if op.request.action == BulkAction.DELETE and job.state is State.RUNNING:
                self._touch(job, Event.OPERATOR_CANCEL)
            else:
                op.affected += 1
                self._touch(job, BulkAction(op.request.action).event)
        op.has_found = op.has_found or bool(jobs)
        op.status = OperationState.RUNNING
        if len(jobs) == batch:
            op.place = jobs[-1].seq
        elif op.has_found or (op.empties and not self._forget(op.request.queue or "")):
            op.place, op.has_found = 0, False
        else:
            op.status = OperationState.COMPLETED
        return touched

    def _left(self, op: Operation) -> Iterator[Job]:
        """Jobs behind the place of the operation that it can touch."""
        for job in self._rows.jobs.values():
            if job.seq > op.place and op.wants(job):
                if op.request.action == BulkAction.RETRY and self._is_taken(job):
                    continue
                yield job

    def _is_taken(self, job: Job) -> bool:
        return job.unique_key is not None and job.unique_key in self._rows.holders

    def _touch(self, job: Job, event: Event) -> None:
        now_ms = self._rows.clock.now_ms()
        if event is Event.OPERATOR_RETRY:
            job.charge_weight = None
            self._rows.move(job, event, now_ms, scheduled_at_ms=now_ms)
        else:
            self._rows.move(job, event, now_ms)

    def _forget(self, queue: str) -> bool:
        """Remove what is kept of a queue, unless it has jobs."""
        if any(job.queue == queue for job in self._rows.jobs.values()):
            return False
        self._gate.forget_queue(queue)
        self._rows.queues.pop(queue, None)
        return True
