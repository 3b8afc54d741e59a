"""Connections without a pool, for the last moments of a process."""

from __future__ import annotations

from typing import Any

import psycopg

CONNECT_TIMEOUT_S = 10


class Unpooled:
    """Stands where a `ConnectionPool` does, and opens a connection for each use.

    A pool needs threads of its own, and an interpreter that shuts down starts none.
    """

    max_size = 1

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        """Open a connection.

        Args:
            timeout: seconds; None is ten.

        Raises:
            psycopg.OperationalError: the server does not answer.
        """
        seconds = CONNECT_TIMEOUT_S if timeout is None else max(2, round(timeout))
        return psycopg.connect(
            self._conninfo,
            autocommit=True,
            connect_timeout=seconds,
            prepare_threshold=None,
        )

    def putconn(self, connection: psycopg.Connection[Any]) -> None:
        """Close a connection."""
        connection.close()
