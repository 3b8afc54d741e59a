"""The worker registry of a MemStore."""

from __future__ import annotations

from attrs import evolve

from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.errors import NotFound
from headgate_sync.memory.backlog import is_known
from headgate_sync.memory.state import Rows
from headgate_sync.validation import check_name, check_type
from headgate_sync.workers import (
    FORGOTTEN_MS,
    LIVE_MS,
    MAX_FORGOTTEN,
    MAX_NAMED_QUEUES,
    MAX_WORKERS,
    ClusterView,
    WorkerMeta,
    WorkerState,
    check_command,
    cluster_of,
)


class MemWorkers:
    """`Workers` over the rows."""

    _rows: Rows

    def heartbeat_worker(self, meta: WorkerMeta) -> str | None:
        """Note that a worker lives; returns the command that waits for it."""
        check_type("meta", meta, WorkerMeta)
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            known = self._rows.workers.get(meta.worker_id)
            if known is None:
                self._forget_silent(now_ms)
            pending = None
            if (
                known is not None
                and (known.started_at_ms, known.pid) == (meta.started_at_ms, meta.pid)
                and known.pending_command != meta.applied
            ):
                pending = known.pending_command
            self._rows.workers[meta.worker_id] = WorkerState(
                worker_id=meta.worker_id,
                host=meta.host,
                pid=meta.pid,
                queues=meta.queues,
                concurrency=meta.concurrency,
                started_at_ms=meta.started_at_ms,
                heartbeat_at_ms=now_ms,
                inflight=meta.inflight,
                polls=meta.polls,
                empty_polls=meta.empty_polls,
                status=meta.status,
                duties_active=meta.duties_active,
                beat_ms=meta.beat_ms,
                pending_command=pending,
            )
            return pending

    def forget_worker(self, worker_id: str, started_at_ms: int) -> None:
        """Take a worker that ends out of the list; not its successor of that name."""
        check_name("worker_id", worker_id)
        check_int("started_at_ms", started_at_ms, 0, MAX_INT64)
        with self._rows.lock:
            known = self._rows.workers.get(worker_id)
            if known is not None and known.started_at_ms == started_at_ms:
                del self._rows.workers[worker_id]

    def signal_worker(self, worker_id: str, command: str | None) -> None:
        """Ask a worker to do something; None takes it back."""
        check_name("worker_id", worker_id)
        check_command(command)
        with self._rows.lock:
            known = self._rows.workers.get(worker_id)
            if known is None:
                raise NotFound.worker(worker_id)
            self._rows.workers[worker_id] = evolve(known, pending_command=command)

    def list_workers(self, stale_after_ms: int = LIVE_MS) -> list[WorkerState]:
        """Workers that have beaten within the time, by id."""
        check_int("stale_after_ms", stale_after_ms, 0, MAX_INT64)
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            found = [
                worker
                for _, worker in sorted(self._rows.workers.items())
                if now_ms - worker.heartbeat_at_ms < stale_after_ms
            ]
        return found[:MAX_WORKERS]

    def get_worker(self, worker_id: str) -> WorkerState | None:
        """One worker, however long it has been silent; None when it is not known."""
        check_name("worker_id", worker_id)
        with self._rows.lock:
            return self._rows.workers.get(worker_id)

    def cluster(self) -> ClusterView:
        """The fleet as a whole, and which queue is served by how many workers."""
        with self._rows.lock:
            workers = [worker for _, worker in sorted(self._rows.workers.items())]
            now_ms = self._rows.clock.now_ms()
            known = sorted(q.name for q in self._rows.queues.values() if is_known(q))
            return cluster_of(workers[:MAX_WORKERS], known[:MAX_NAMED_QUEUES], now_ms)

    def _forget_silent(self, now_ms: int) -> None:
        silent = [
            worker_id
            for worker_id, worker in sorted(self._rows.workers.items())
            if now_ms - worker.heartbeat_at_ms >= FORGOTTEN_MS
        ]
        for worker_id in silent[:MAX_FORGOTTEN]:
            del self._rows.workers[worker_id]
