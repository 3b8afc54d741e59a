"""Threads that belong to one attempt and end with it."""

from __future__ import annotations

import contextvars
import decimal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headgate_sync.attempt import AttemptFault, LiveAttempt
from headgate_sync.callables import check_ran
from headgate_sync.cancel import exception_for
from headgate_sync.errors import AttemptCancelled, InvalidRequest, TrackedClosed
from headgate_sync.forks import ForksEndHere
from headgate_sync.loggers import guarded

logger = guarded(__name__)

MAX_TRACKED = 32


class Tracked:
    """The threads that one handler started through its context.

    The attempt ends after all of them. The first error of one fails the attempt and
    asks the others, and the handler, to stop. When the attempt is cancelled, one that
    stops for it, or does not stop, has not finished its work: then neither has a
    handler that returned.
    """

    def __init__(self, attempt: LiveAttempt) -> None:
        self._attempt = attempt
        # Guards every field below; notified when a thread ends or the attempt stops.
        self._changed = threading.Condition()
        self._running: dict[threading.Thread, Future[Any]] = {}
        self._made = 0
        self._closed = False
        self._error: BaseException | None = None
        self._cut: AttemptCancelled | None = None  # what one that obeyed raised
        attempt.token.on_cancel(self._wake)

    def spawn(self, function: Callable[[], Any]) -> Future[Any]:
        """Start a thread with a copy of the caller's context variables.

        Raises:
            TrackedClosed: the handler has returned.
            InvalidRequest: 32 threads of the attempt are running.
        """
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        with self._changed:
            if self._closed:
                raise TrackedClosed(
                    f"job {self._attempt.lease.job_id}: its handler has returned"
                )
            if sum(not each.done() for each in self._running.values()) >= MAX_TRACKED:
                raise InvalidRequest(
                    f"spawn: {MAX_TRACKED} threads of this attempt are running, "
                    "which is the limit"
                )
            self._made += 1
            thread = threading.Thread(
                target=context.run,
                args=(self._run, function, future),
                name=f"{threading.current_thread().name}-tracked-{self._made}",
                daemon=True,
            )
            self._running[thread] = future
            try:
                thread.start()
            except BaseException:
                del self._running[thread]
                raise
        return future

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Wait for the threads of a handler that has ended.

        Args:
            failed: it raised; its threads are asked to stop.
            patience_s: how long threads that should stop are waited for.

        Raises:
            BaseException: the first error of a thread, of a handler that did not fail.
            AttemptCancelled: of such a handler, a thread did not finish.
        """
        with self._changed:
            self._closed = True
        if failed:
            self._attempt.token.fail()
        self._join(patience_s)
        error, cut = self._error, self._cut
        self._error = self._cut = None
        if failed:
            return
        try:
            if error is None:
                if cut is not None:
                    raise cut
                return
            if isinstance(error, Exception):
                raise error
            raise AttemptFault(
                f"panic in tracked task: {type(error).__qualname__}: {error}"
            ) from error
        finally:
            del error, cut  # they and this frame would keep each other

    def _join(self, patience_s: float) -> None:
        now_s, token = self._attempt.now_s, self._attempt.token
        until_s: float | None = None
        with self._changed:
            while self._running:
                if until_s is None and token.stopped:
                    until_s = now_s() + min(patience_s, threading.TIMEOUT_MAX)
                left_s = None if until_s is None else until_s - now_s()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            left = [thread.name for thread in self._running]
            if left and (reason := token.reason) is not None:
                self._cut = exception_for(reason, self._attempt.lease.job_id)
        if left:
            logger.error(
                "job %s (queue %s): tracked threads do not stop and are left behind: "
                "%s",
                self._attempt.lease.job_id,
                self._attempt.claim.envelope.queue,
                ", ".join(left),
            )

    def _run(self, function: Callable[[], Any], future: Future[Any]) -> None:
        # A context variable too, but of a mutable object, which the copy shares.
        decimal.setcontext(decimal.getcontext().copy())
        future.set_running_or_notify_cancel()
        try:
            with ForksEndHere():
                value = check_ran("spawn", function())
        except BaseException as error:  # the top of a thread; told by `close`
            self._failed(error)
            future.set_exception(error)
        else:
            future.set_result(value)
        finally:
            with self._changed:
                del self._running[threading.current_thread()]
                self._changed.notify_all()
            # Else the exception, its frames and the future keep each other.
            del future, function

    def _failed(self, error: BaseException) -> None:
        token = self._attempt.token
        with self._changed:
            if isinstance(error, AttemptCancelled) and token.stopped:
                self._cut = error
                return
            if self._error is None:
                self._error = error
        token.fail()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
