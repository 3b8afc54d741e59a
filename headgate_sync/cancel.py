"""Asking one attempt to stop."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from enum import StrEnum

from headgate_sync.errors import (
    AttemptCancelled,
    AttemptTimeout,
    InvalidRequest,
    LeaseLost,
    ShutdownRequested,
)
from headgate_sync.loggers import guarded

logger = guarded(__name__)

CALLBACK_PATIENCE_S = 1.0


class CancelReason(StrEnum):
    """Why a running attempt has to stop."""

    LEASE_LOST = "lease_lost"
    LEASE_EXPIRED = "lease_expired"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"


_EXCEPTIONS: dict[CancelReason, type[AttemptCancelled]] = {
    CancelReason.LEASE_LOST: LeaseLost,
    CancelReason.LEASE_EXPIRED: LeaseLost,
    CancelReason.TIMEOUT: AttemptTimeout,
    CancelReason.SHUTDOWN: ShutdownRequested,
}


def exception_for(reason: CancelReason, job_id: str) -> AttemptCancelled:
    """What a handler gets raised when it looks."""
    return class_for(reason)(f"job {job_id}: {reason.value}")


def class_for(reason: CancelReason) -> type[AttemptCancelled]:
    """The class of that."""
    return _EXCEPTIONS[reason]


class CancelToken:
    """Tells one attempt to stop: set at most once, never after the attempt has ended.

    A token that failed stops the attempt as well, without a reason from outside: one of
    the attempt's own threads raised. A reason may still follow.

    Callbacks run on a thread of their own, because the threads that set tokens guard
    every other attempt of the worker and must not wait for user code.
    """

    __slots__ = (
        "_callbacks",
        "_closed",
        "_event",
        "_failed",
        "_idle",
        "_lock",
        "_reason",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards every field below
        self._reason: CancelReason | None = None
        self._closed = self._failed = False
        self._event: threading.Event | None = None  # made by the first waiter
        self._idle: threading.Event | None = None  # set when the callbacks are through
        self._callbacks: list[Callable[[], object]] = []

    @property
    def reason(self) -> CancelReason | None:
        """The reason, once set."""
        return self._reason

    @property
    def stopped(self) -> bool:
        """Whether the attempt should stop, for whatever reason."""
        return self._reason is not None or self._failed

    def set(self, reason: CancelReason) -> bool:
        """Ask the attempt to stop; False when it was asked before or has ended."""
        with self._lock:
            if self._closed or self._reason is not None:
                return False
            self._reason = reason
            tell = self._stop()
        tell()
        return True

    def fail(self) -> None:
        """Stop the attempt because a part of it failed."""
        with self._lock:
            if self._closed or self._failed:
                return
            self._failed = True
            tell = self._stop()
        tell()

    def _stop(self) -> Callable[[], None]:
        """Take what is to be told; under the lock. The rest is done without it."""
        callbacks, self._callbacks = self._callbacks[::-1], []
        if callbacks:
            self._idle = threading.Event()
        event, idle = self._event, self._idle

        def tell() -> None:
            if event is not None:
                event.set()
            if idle is not None and callbacks:
                self._call_apart(callbacks, idle)

        return tell

    def wait(self, seconds: float) -> bool:
        """Wait until set, at most so long; True when it is.

        Raises:
            InvalidRequest: no number of seconds.
        """
        if not isinstance(seconds, int | float) or math.isnan(seconds):
            raise InvalidRequest(f"seconds must be a number, got {seconds!r}")
        with self._lock:
            if self.stopped:
                return True
            if self._event is None:
                self._event = threading.Event()
        self._event.wait(min(seconds, threading.TIMEOUT_MAX))
        return self.stopped

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Run the callback when the token is set, or at once when it already is."""
        with self._lock:
            if not self.stopped:
                self._callbacks.append(callback)
                return
        _call(callback)

    def close(self) -> CancelReason | None:
        """End the attempt: forget the callbacks, so that none can hit the next job.

        Waits for callbacks that are under way; each has one second.
        """
        with self._lock:
            self._closed = True
            self._callbacks = []
            idle = self._idle
        if idle is not None:
            idle.wait()
        return self._reason

    def _call_apart(
        self, callbacks: list[Callable[[], object]], idle: threading.Event
    ) -> None:
        try:
            threading.Thread(
                target=self._run,
                args=(callbacks, idle),
                name="headgate-cancel",
                daemon=True,
            ).start()
        except RuntimeError as error:
            # The attempt must still come to its end, and the caller to its others.
            logger.error("%d cancel callbacks are left out: %s", len(callbacks), error)
            idle.set()

    def _run(
        self, callbacks: list[Callable[[], object]], idle: threading.Event
    ) -> None:
        try:
            for callback in callbacks:
                thread = threading.Thread(
                    target=_call, args=(callback,), name="headgate-cancel", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    _call(callback)  # no other thread: without a limit, but called
                    continue
                thread.join(CALLBACK_PATIENCE_S)
                if thread.is_alive():
                    logger.warning("cancel callback %s takes over 1 s", _name(callback))
        finally:
            idle.set()


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:  # the boundary around user code
        logger.exception("cancel callback %s failed", _name(callback))


def _name(callback: Callable[[], object]) -> str:
    """How a log line calls user code, whose own `repr` may fail."""
    return getattr(callback, "__qualname__", type(callback).__qualname__)
