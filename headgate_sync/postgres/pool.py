"""The pool of a store of its own: one that says why it has no connection."""

from __future__ import annotations

import threading
from typing import Any, Self

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout


class TellingPool(ConnectionPool[psycopg.Connection[Any]]):
    """A pool whose time-outs name their cause.

    The driver's pool connects on threads of its own and only logs what went wrong
    there, so that a wrong address looks like a busy pool to whoever waits.
    """

    def __init__(self, conninfo: str, **options: Any) -> None:
        fault: str | None = None
        connecting = 0  # guarded by the lock
        lock = threading.Lock()

        class Told(psycopg.Connection[Any]):
            """A connection whose last try to connect is remembered."""

            @classmethod
            def connect(cls, *args: Any, **kwargs: Any) -> Self:
                nonlocal fault, connecting
                with lock:
                    connecting += 1
                try:
                    made = super().connect(*args, **kwargs)
                except psycopg.Error as error:
                    fault = " ".join(str(error).split()) or type(error).__name__
                    raise
                finally:
                    with lock:
                        connecting -= 1
                fault = None
                return made

        def last_fault() -> str | None:
            return fault or ("the server does not answer" if connecting else None)

        self._last_fault = last_fault
        super().__init__(conninfo, connection_class=Told, **options)

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        """Take a connection.

        Raises:
            PoolTimeout: none within the time; the text says why.
        """
        try:
            return super().getconn(timeout)
        except PoolTimeout:
            seconds = self.timeout if timeout is None else timeout
            why = self._last_fault() or f"all {self.max_size} of the pool are in use"
            raise PoolTimeout(f"no connection within {seconds:g} s: {why}") from None
