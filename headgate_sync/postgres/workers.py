"""The worker registry in the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.types.numeric import Int8

from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.errors import NotFound
from headgate_sync.postgres.database import Database
from headgate_sync.postgres.heartbeat import Heartbeat
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


class PgWorkers:
    """`Workers` on the table of workers.

    Attributes:
        heartbeat: carries the beats beside the pool; None without such a connection.
    """

    _db: Database
    heartbeat: Heartbeat | None = None

    def heartbeat_worker(self, meta: WorkerMeta) -> str | None:
        """Note that a worker lives; returns the command that waits for it.

        On the heartbeat connection a call takes one beat at most.
        """
        check_type("meta", meta, WorkerMeta)
        params: dict[str, Any] = {
            "worker_id": meta.worker_id,
            "host": meta.host,
            "pid": meta.pid,
            "queues": list(meta.queues),
            "concurrency": meta.concurrency,
            "started_at_ms": meta.started_at_ms,
            "inflight": meta.inflight,
            "polls": meta.polls,
            "empty_polls": meta.empty_polls,
            "status": meta.status,
            "duties_active": meta.duties_active,
            "beat_ms": meta.beat_ms,
            "applied": meta.applied,
            "forgotten_ms": FORGOTTEN_MS,
            "max_forgotten": MAX_FORGOTTEN,
        }
        if self.heartbeat is None:
            [(command,)] = self._db.rows("heartbeat_worker", **params)
        else:
            [(command,)] = self.heartbeat.rows(
                "heartbeat_worker", meta.beat_ms, **params
            )
        return None if command is None else str(command)

    def forget_worker(self, worker_id: str, started_at_ms: int) -> None:
        """Take a worker that ends out of the list; not its successor of that name."""
        check_name("worker_id", worker_id)
        check_int("started_at_ms", started_at_ms, 0, MAX_INT64)
        self._db.rows("forget_worker", worker_id=worker_id, started_at_ms=started_at_ms)

    def signal_worker(self, worker_id: str, command: str | None) -> None:
        """Ask a worker to do something; None takes it back."""
        check_name("worker_id", worker_id)
        check_command(command)
        if not self._db.rows("signal_worker", worker_id=worker_id, command=command):
            raise NotFound.worker(worker_id)

    def list_workers(self, stale_after_ms: int = LIVE_MS) -> list[WorkerState]:
        """Workers that have beaten within the time, by id."""
        check_int("stale_after_ms", stale_after_ms, 0, MAX_INT64)
        return self._workers(stale_after_ms)[0]

    def get_worker(self, worker_id: str) -> WorkerState | None:
        """One worker, however long it has been silent; None when it is not known."""
        check_name("worker_id", worker_id)
        rows = self._db.look("get_worker", worker_id=worker_id)
        return _worker(rows[0]) if rows else None

    def cluster(self) -> ClusterView:
        """The fleet as a whole, and which queue is served by how many workers."""
        queues = self._db.look("queue_names", after="", max_queues=MAX_NAMED_QUEUES)
        workers, now_ms = self._workers(MAX_INT64)
        return cluster_of(workers, [queue for (queue,) in queues], now_ms)

    def _workers(self, stale_after_ms: int) -> tuple[list[WorkerState], int]:
        rows = self._db.look(
            "list_workers",
            stale_after_ms=Int8(stale_after_ms),
            max_workers=MAX_WORKERS,
        )
        # Without any worker there is one row, for the clock's sake.
        found = [_worker(row[1:]) for row in rows if row[1] is not None]
        return found, int(rows[0][0])


def _worker(row: Sequence[Any]) -> WorkerState:
    (
        worker_id,
        host,
        pid,
        queues,
        concurrency,
        started_at_ms,
        heartbeat_at_ms,
        inflight,
        polls,
        empty_polls,
        status,
        duties_active,
        beat_ms,
        pending_command,
    ) = row
    return WorkerState(
        worker_id=worker_id,
        host=host,
        pid=pid,
        queues=tuple(queues),
        concurrency=concurrency,
        started_at_ms=started_at_ms,
        heartbeat_at_ms=heartbeat_at_ms,
        inflight=inflight,
        polls=polls,
        empty_polls=empty_polls,
        status=status,
        duties_active=duties_active,
        beat_ms=beat_ms,
        pending_command=pending_command,
    )
