"""Deadlines that must hold whatever the store and the handlers do."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from headgate_sync.attempt import LiveAttempt
from headgate_sync.cancel import CancelReason, class_for
from headgate_sync.events import StuckCallback, StuckHandler
from headgate_sync.interrupt import Interrupt
from headgate_sync.loggers import guarded
from headgate_sync.telemetry import Stuck
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.loops import ServiceLoop
from headgate_sync.worker.outcomes import STILL_RUNNING, Judge, ack_of
from headgate_sync.worker.reporting import Emitter

logger = guarded(__name__)

LOOK_AT_LOOPS_S = 5.0


class Watchdog:
    """Ends attempts whose time or lease is over, and reports handlers that ignore it.

    It makes no store call of its own, so that a database that hangs cannot hide a lease
    that ran out.

    Args:
        died: called with the name of a loop whose thread has ended.
        flush: hands out batches, and hands back claims, that must not wait longer;
            returns when the next ones are due.
    """

    def __init__(
        self,
        config: WorkerConfig,
        inflight: InFlight,
        acks: AckBox,
        *,
        now_s: Callable[[], float],
        died: Callable[[str], None],
        emit: Emitter | None = None,
        worker_id: str = "",
        flush: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self._stuck_handler = config.stuck_handler
        self._emit = emit
        self._worker_id = worker_id
        self._inflight = inflight
        self._acks = acks
        self._now_s = now_s
        self._died = died
        self._flush = flush
        self._grace_s = config.cancel_grace_ms / 1000
        self._threshold_s = config.stuck_threshold_ms / 1000
        self._abandons = config.on_stuck == "abandon"
        self._cancels_expired = config.lease_expiry == "cancel"
        self._judge = Judge(retry=config.retry, is_failure=config.is_failure)
        self._watched: Sequence[ServiceLoop] = ()
        self._due_s = float("-inf")

    def watch(self, loops: Sequence[ServiceLoop]) -> None:
        """Look after the threads of these loops too."""
        self._watched = loops

    def must_wake(
        self, attempts: Sequence[LiveAttempt], due_s: float = float("inf")
    ) -> bool:
        """Whether this instant or a deadline of these comes before the next look."""
        first_s = min(min(a.timeout_due_s, a.lease_due_s) for a in attempts)
        return min(first_s, due_s) < self._due_s

    def step(self) -> float:
        """Look at everything once; returns the local instant of the next look."""
        # Until the new instant is known every fresh attempt wakes the watchdog: one
        # that is added after the list was taken would be missed else.
        self._due_s = float("inf")
        now_s = self._now_s()
        due_s = now_s + min(LOOK_AT_LOOPS_S, self._threshold_s)
        for attempt in self._inflight.attempts():
            if not attempt.returned:
                due_s = min(due_s, self._look(attempt, now_s))
        due_s = min(due_s, self._flush())
        for loop in self._watched:
            if loop.ended:
                self._died(loop.name)
        self._due_s = due_s
        return due_s

    def _look(self, attempt: LiveAttempt, now_s: float) -> float:
        due_s = float("inf")
        if not attempt.settled and attempt.token.reason is None:
            if attempt.timeout_due_s <= now_s:
                attempt.cancel(CancelReason.TIMEOUT)
            else:
                due_s = attempt.timeout_due_s
        if attempt.renewing and not attempt.settled and not attempt.doubtful:
            if self._expires(attempt, now_s):
                self._expired(attempt)
            else:
                due_s = min(due_s, attempt.lease_due_s)
        if attempt.interrupt is not None:
            due_s = min(due_s, self._interrupt(attempt, attempt.interrupt, now_s))
        if attempt.token_set_s is not None and not attempt.stuck_reported:
            stuck_s = attempt.token_set_s + self._threshold_s
            if stuck_s > now_s:
                return min(due_s, stuck_s)
            attempt.stuck_reported = True
            self._stuck(attempt)
        return due_s

    def _interrupt(
        self, attempt: LiveAttempt, interrupt: Interrupt, now_s: float
    ) -> float:
        """Strike a handler that opted in and has not reacted."""
        reason = attempt.token.reason
        if reason is None or attempt.token_set_s is None:
            return now_s + self._grace_s  # others set tokens too, and wake nobody
        strike_s = attempt.token_set_s + self._grace_s
        if strike_s > now_s:
            return strike_s
        if not interrupt.struck:
            interrupt.strike(class_for(reason))
        return float("inf")

    def _expires(self, attempt: LiveAttempt, now_s: float) -> bool:
        with self._inflight.lock:
            if attempt.lease_due_s > now_s:
                return False
            attempt.doubtful = True
            return True

    def _expired(self, attempt: LiveAttempt) -> None:
        logger.error(
            "job %s (queue %s): its lease was not confirmed in time; another worker "
            "may run it now",
            attempt.lease.job_id,
            attempt.claim.envelope.queue,
        )
        # Where no handler runs yet, none is begun: whoever may hold the job now begins
        # it anyway.
        if self._cancels_expired or attempt.thread_id is None:
            attempt.cancel(CancelReason.LEASE_EXPIRED)

    def _stuck(self, attempt: LiveAttempt) -> None:
        reason = attempt.token.reason
        frame = sys._current_frames().get(attempt.thread_id or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        logger.warning(
            "job %s (queue %s): stuck, its handler ignores %s since %d ms\n%s",
            attempt.lease.job_id,
            attempt.claim.envelope.queue,
            reason,
            int(self._threshold_s * 1000),
            stack,
        )
        self._tell_of_stuck(attempt, stack)
        if reason is not CancelReason.TIMEOUT or not self._abandons:
            return
        if attempt.completing:
            return  # its row is locked by its own commit; an ack would wait for that
        verdict = self._judge.timed_out(
            attempt, None, retry=attempt.retry, tail=STILL_RUNNING
        )
        ack = ack_of(attempt, verdict)
        if self._inflight.settle(attempt):
            self._acks.submit_apart(attempt, ack)

    def _tell_of_stuck(self, attempt: LiveAttempt, stack: str) -> None:
        reason = attempt.token.reason
        if self._emit is not None:
            self._emit(
                Stuck(
                    worker=self._worker_id,
                    job_id=attempt.lease.job_id,
                    detail=str(reason),
                )
            )
        if self._stuck_handler is not None:
            timed_out = reason is CancelReason.TIMEOUT
            told = StuckHandler(
                envelope=attempt.claim.envelope,
                reason="timeout" if timed_out else "cancellation",
                threshold_ms=int(self._threshold_s * 1000),
                stack=stack,
            )
            # User code never runs on a service thread: it could stop every timeout.
            thread = threading.Thread(
                target=_call,
                args=(self._stuck_handler, told),
                name="headgate-stuck",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                logger.error(
                    "job %s (queue %s): the stuck handler is left out: %s",
                    attempt.lease.job_id,
                    attempt.claim.envelope.queue,
                    error,
                )


def _call(handler: StuckCallback, told: StuckHandler) -> None:
    try:
        handler(told)
    except Exception:
        logger.exception(
            "job %s (queue %s): stuck handler %r failed",
            told.envelope.id,
            told.envelope.queue,
            handler,
        )
