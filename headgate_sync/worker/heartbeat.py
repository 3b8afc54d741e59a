"""The beat: one renewal for all leases, and what follows from its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headgate_sync.attempt import LiveAttempt
from headgate_sync.context import JobContext
from headgate_sync.errors import LeaseLost, StoreError
from headgate_sync.loggers import guarded
from headgate_sync.store import Store
from headgate_sync.telemetry import RenewFailed
from headgate_sync.worker.health import Pulse
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.reporting import Emitter

logger = guarded(__name__)

SHORTEST_BEAT_S = 0.01


class Heartbeat:
    """Renews what the worker holds, three times per lease, and shows that it lives.

    Args:
        show: one beat in the registry of workers, after the renewal; False when the
            store did not answer.
    """

    def __init__(
        self,
        store: Store,
        inflight: InFlight,
        *,
        lease_ms: int,
        now_s: Callable[[], float],
        pulse: Pulse | None = None,
        show: Callable[[], bool] = lambda: True,
        emit: Emitter | None = None,
        worker_id: str = "",
    ) -> None:
        self._store = store
        self._inflight = inflight
        self._lease_ms = lease_ms
        self._now_s = now_s
        self._beat_s = max(lease_ms / 3000, SHORTEST_BEAT_S)
        self._pulse = pulse or Pulse(self._beat_s)
        self._show = show
        self._emit = emit
        self._worker_id = worker_id
        self._progress: threading.Thread | None = None

    def step(self) -> float:
        """Beat once; returns the local instant of the next beat."""
        sent_s = self._now_s()
        renewed = self._renew_held(sent_s)
        # Leases come first: what the fleet thinks of this worker can wait.
        shown = self._show()
        return sent_s + (self._beat_s if renewed and shown else self._beat_s / 3)

    def _renew_held(self, sent_s: float) -> bool:
        held = [attempt for attempt in self._inflight.attempts() if attempt.renewing]
        if not held:
            self._pulse.rest()
            return True
        self._pulse.expect(sent_s)
        usual_due_s = sent_s + self._lease_ms / 1000
        usual = [a for a in held if a.extended_due_s <= usual_due_s]
        longer = [a for a in held if a.extended_due_s > usual_due_s]
        try:
            self._renew(usual, sent_s, self._lease_ms)
            if longer:
                until_s = max(attempt.extended_due_s for attempt in longer)
                self._renew(longer, sent_s, int((until_s - sent_s) * 1000))
        except StoreError as error:
            # Nothing is known to be lost. The watchdog stops the handlers if this lasts
            # until their leases have run out.
            logger.warning("renewing %d leases failed: %s", len(held), error)
            self._pulse.failed(error)
            if self._emit is not None:
                self._emit(
                    RenewFailed(worker=self._worker_id, job_id="", detail=str(error))
                )
            return False
        self._pulse.good(self._now_s())
        self._send_progress(held)
        return True

    def _renew(
        self, attempts: Sequence[LiveAttempt], sent_s: float, lease_ms: int
    ) -> None:
        if not attempts:
            return
        refs = self._store.renew([a.lease for a in attempts], lease_ms=lease_ms)
        lost_refs = set(refs)
        lost = [a for a in attempts if a.lease in lost_refs]
        kept = [a for a in attempts if a.lease not in lost_refs]
        self._inflight.confirm(kept, sent_s + lease_ms / 1000)
        for attempt in self._inflight.lose(lost):
            logger.warning(
                "job %s (queue %s): lease lost, or cancelled by an operator; "
                "its handler was told to stop",
                attempt.lease.job_id,
                attempt.claim.envelope.queue,
            )

    def _send_progress(self, attempts: Sequence[LiveAttempt]) -> None:
        """Let a thread write held-back progress: a beat must not wait for the pool."""
        if self._progress is not None and self._progress.is_alive():
            return
        waiting = [
            (attempt, context)
            for attempt in attempts
            if (context := attempt.context) is not None and context.progress_waits
        ]
        if waiting:
            self._progress = threading.Thread(
                target=_flush, args=(waiting,), name="headgate-progress", daemon=True
            )
            self._progress.start()


def _flush(waiting: Sequence[tuple[LiveAttempt, JobContext]]) -> None:
    for attempt, context in waiting:
        try:
            if not attempt.settled:
                context.flush_progress()
        except LeaseLost:
            pass  # the handler's token is set now
        except StoreError as error:
            logger.warning(
                "job %s (queue %s): progress not written: %s",
                attempt.lease.job_id,
                attempt.claim.envelope.queue,
                error,
            )
