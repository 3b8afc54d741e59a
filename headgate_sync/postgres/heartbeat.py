"""The connection that renews leases: beside the pool, and never waited for too long."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import psycopg
from psycopg_pool import ConnectionPool

from headgate_sync.errors import StoreError, StoreUnavailable
from headgate_sync.loggers import guarded
from headgate_sync.postgres.database import Database, Row, is_alive

logger = guarded(__name__)

MIN_LIMIT_MS = 1_000


class Heartbeat:
    """One connection of the pool's kind for one statement at a time.

    Handlers may hold every connection of the pool for as long as they like without
    costing a lease. Each use has a limit: after it the socket is shut down, so that a
    server that went silent, or a network that drops packets, cannot hang the caller.

    Args:
        db: stands in while the server accepts no further connection.
        pool: says how to connect.
    """

    def __init__(self, db: Database, pool: ConnectionPool[Any]) -> None:
        self._db = db
        self._pool = pool
        self._lock = threading.Lock()  # guards the slot; held during its use
        self._slot = _Slot(os.getpid())
        finalize(self, self._slot.empty)

    def rows(self, name: str, limit_ms: int, /, **params: Any) -> list[Row]:
        """Run a statement file in a transaction of its own within a limit.

        While the server accepts no further connection, one of the pool is used: waiting
        for that has the same limit again.

        Raises:
            StoreUnavailable: no answer within the limit; what happened is not known.
            RuntimeError: the store belongs to the parent process.
        """
        self._db.check_process()
        limit_ms = max(limit_ms, MIN_LIMIT_MS)
        if not self._lock.acquire(timeout=limit_ms / 1000):
            raise StoreUnavailable("the heartbeat connection is busy")
        try:
            connection = self._slot.connection
            if connection is None or not is_alive(connection):
                self._slot.empty()
                try:
                    connection = self._slot.connection = self._connect(limit_ms)
                except psycopg.Error as error:
                    logger.warning("no heartbeat connection, using the pool: %s", error)
                    return self._run_pooled(name, limit_ms, params)
            return self._run(connection, name, limit_ms, params)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection; a later use opens another one."""
        with self._lock:
            self._slot.empty()

    def _run(
        self,
        connection: psycopg.Connection[Any],
        name: str,
        limit_ms: int,
        params: dict[str, Any],
    ) -> list[Row]:
        try:
            with _cut_off_after(connection, limit_ms):
                return self._db.rows_on(connection, name, params)
        except BaseException:
            # Whatever became of the statement, it ends with its connection.
            self._slot.empty()
            raise

    def _run_pooled(
        self, name: str, limit_ms: int, params: dict[str, Any]
    ) -> list[Row]:
        with (
            self._db.checkout(wait_s=limit_ms / 1000) as session,
            _cut_off_after(session.connection, limit_ms),
        ):
            return self._db.rows_on(session.connection, name, params)

    def _connect(self, limit_ms: int) -> psycopg.Connection[Any]:
        pool = self._pool
        conninfo = pool.conninfo() if callable(pool.conninfo) else pool.conninfo
        given = pool.kwargs() if callable(pool.kwargs) else pool.kwargs
        limits = {
            "connect_timeout": max(2, limit_ms // 1000),
            "tcp_user_timeout": limit_ms,
        }
        kwargs = {**(given or {}), **limits, "autocommit": True}
        return psycopg.connect(conninfo or "", **kwargs)


class _Slot:
    """Holds the connection for as long as the store lives, which may not be closed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.connection: psycopg.Connection[Any] | None = None

    def empty(self) -> None:
        connection, self.connection = self.connection, None
        # In a forked child the session belongs to the parent.
        if connection is not None and os.getpid() == self._pid:
            connection.close()


@contextmanager
def _cut_off_after(
    connection: psycopg.Connection[Any], limit_ms: int
) -> Iterator[None]:
    """Shut the socket down when the block takes too long, which ends its waiting.

    The socket and not the connection, which belongs to the waiting thread alone; and a
    copy of the descriptor, whose number may be in other hands by then.
    """
    copy = socket.socket(fileno=os.dup(connection.fileno()))
    late = threading.Event()

    def shut_down() -> None:
        late.set()
        copy.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_ms / 1000, shut_down)
    timer.name = "headgate-heartbeat-limit"
    timer.daemon = True
    timer.start()
    try:
        yield
    except StoreError as error:
        if late.is_set():
            raise StoreUnavailable(f"no answer within {limit_ms} ms") from error
        raise
    finally:
        timer.cancel()
        timer.join()
        copy.close()
