"""An exception raised inside of a handler's thread, for handlers that opted in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

from headgate_sync.errors import AttemptCancelled

T = TypeVar("T")

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Interrupt:
    """Strikes one attempt at most once, and only between the two ends of its handler.

    The interpreter delivers such an exception when the thread runs Python code next: a
    loop stops at once, a call that blocks in C finishes first. It can strike in a
    `finally` or while a lock is held.
    """

    __slots__ = ("_armed", "_kind", "_lock", "_shields", "_struck", "_thread_id")

    def __init__(self) -> None:
        # Guards every field: while it is held, `_armed` proves that the thread is still
        # inside of this attempt's handler.
        self._lock = threading.Lock()
        self._armed = False
        self._thread_id = 0
        self._shields = 0
        self._kind: type[AttemptCancelled] | None = None
        self._struck = False

    def guard(self, function: Callable[[], T]) -> T:
        """Call a function that may be struck; nothing strikes after this returns.

        A value that the function has returned is kept.
        """
        returned: list[T] = []
        try:
            try:
                self._arm()
                returned.append(function())
            finally:
                self._disarm()
        except AttemptCancelled:
            if not returned:
                raise
        return returned.pop()

    def strike(self, kind: type[AttemptCancelled]) -> None:
        """Raise in the handler's thread, now or when it leaves its last shield."""
        with self._lock:
            if not self._armed or self._struck:
                return
            self._kind = kind
            if self._shields == 0:
                self._send(kind)

    @property
    def struck(self) -> bool:
        """The exception was sent."""
        return self._struck

    def shield(self) -> AbstractContextManager[None]:
        """A block in which nothing strikes."""
        return _Shield(self, +1)

    def exposed(self) -> AbstractContextManager[None]:
        """A block inside of a shield in which the handler's own code runs."""
        return _Shield(self, -1)

    def _arm(self) -> None:
        with self._lock:
            self._thread_id = threading.get_ident()
            self._armed = True

    def _disarm(self) -> None:
        while True:
            try:
                with self._lock:
                    self._armed = False
                    self._kind = None
                    # What was sent and not delivered yet must not hit the next job.
                    _set_exception(ctypes.c_ulong(self._thread_id), None)
                return
            except AttemptCancelled:
                continue

    def _send(self, kind: type[AttemptCancelled]) -> None:
        self._struck = True
        thread_id = ctypes.c_ulong(self._thread_id)
        if _set_exception(thread_id, ctypes.py_object(kind)) > 1:
            _set_exception(thread_id, None)

    def _shift(self, by: int) -> None:
        if threading.get_ident() != self._thread_id:
            return  # a tracked thread, which nothing strikes
        with self._lock:
            self._shields += by
            kind = self._kind
            if kind is None or self._struck or self._shields > 0:
                return
            self._struck = True
        raise kind("the attempt ignored its cancellation")


class _Shield:
    """Counts in at its begin and out at its end."""

    __slots__ = ("_by", "_interrupt")

    def __init__(self, interrupt: Interrupt, by: int) -> None:
        self._interrupt = interrupt
        self._by = by

    def __enter__(self) -> None:
        self._interrupt._shift(self._by)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._interrupt._shift(-self._by)
