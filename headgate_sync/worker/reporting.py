"""What follows the end of an attempt: telemetry, the event bus, death handlers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from headgate_sync.attempt import LiveAttempt, Settlement
from headgate_sync.events import (
    DeathHandler,
    DeathReason,
    EventBus,
    EventKind,
    JobDeath,
    JobEvent,
)
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State, next_state
from headgate_sync.loggers import guarded
from headgate_sync.loglines import MAX_LOG_LINES
from headgate_sync.retry import DEFAULT_CRASH_LIMIT
from headgate_sync.telemetry import (
    AckFailed,
    AttemptBegun,
    Completed,
    JobSpan,
    LogDropped,
    Rejected,
    Telemetry,
    TelemetryEvent,
    Unhandled,
)
from headgate_sync.tracing import trace_of
from headgate_sync.worker.outcomes import CODE_UNKNOWN_KIND, REASON_DEADLINE

logger = guarded(__name__)

REPEAT_LOG_S = 60.0
RATE_CLASS = "rate_class"

_KINDS = {
    Outcome.SUCCESS: EventKind.COMPLETED,
    Outcome.RETRY: EventKind.FAILED,
    Outcome.SKIP: EventKind.FAILED,
    Outcome.UNDECODABLE: EventKind.FAILED,
    Outcome.REVOKE: EventKind.CANCELLED,
}
_DEADLY = (Outcome.RETRY, Outcome.SKIP)


class Emitter:
    """Hands events to sinks that may fail without disturbing anything."""

    def __init__(
        self, *sinks: Telemetry, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._sinks = sinks
        self._begins = [getattr(sink, "begin_attempt", None) for sink in sinks]
        self._now_s = now_s
        self._lock = threading.Lock()  # guards the two fields below
        self._logged_s = float("-inf")
        self._unlogged = 0

    @property
    def follows(self) -> bool:
        """Whether a sink wants to hear of the beginning of attempts."""
        return any(self._begins)

    def __call__(
        self, event: TelemetryEvent, lives: Sequence[object] = ()
    ) -> BaseException | None:
        """Hand over one event; returns what a sink raised.

        Args:
            lives: by sink, what it keeps for the attempt that a `JobSpan` is about.
        """
        raised: BaseException | None = None
        for number, sink in enumerate(self._sinks):
            own = event
            if lives and isinstance(event, JobSpan):
                own = evolve(event, live=lives[number])
            try:
                sink.on_event(own)
            except BaseException as error:  # a sink is not part of the job
                self._failed(error)
                raised = error
        return raised

    def begin(self, begun: AttemptBegun) -> tuple[object, ...]:
        """Announce an attempt; returns what the sinks keep for it, by sink."""
        lives: list[object] = []
        for begin in self._begins:
            live: object = None
            if begin is not None:
                try:
                    live = begin(begun)
                except BaseException as error:  # a sink is not part of the job
                    self._failed(error)
            lives.append(live)
        return tuple(lives)

    def _failed(self, error: BaseException) -> None:
        now_s = self._now_s()
        with self._lock:
            self._unlogged += 1
            if now_s - self._logged_s < REPEAT_LOG_S:
                return
            count, self._unlogged, self._logged_s = self._unlogged, 0, now_s
        logger.error(
            "the telemetry sink failed (%d times since the last report)",
            count,
            exc_info=error,
        )


class Report:
    """Tells everybody who asked for it how attempts ended.

    Made only where a sink, a bus or a handler is configured, so that without them an
    attempt costs nothing here. Called on the threads that settle attempts.

    Args:
        call: runs a function on a handler thread, where user code belongs.
        keep: takes the slot of an attempt back for that time.
        conclude: frees it.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        emit: Emitter | None,
        bus: EventBus | None,
        death_handlers: Sequence[DeathHandler],
        call: Callable[[Callable[[], None]], None],
        keep: Callable[[LiveAttempt], None],
        conclude: Callable[[Sequence[LiveAttempt]], None],
    ) -> None:
        self._worker_id = worker_id
        self._emit = emit
        self._bus = bus
        self._death_handlers = tuple(death_handlers)
        self._call = call
        self._keep = keep
        self._conclude = conclude

    @property
    def follows(self) -> bool:
        """Whether `begun` is to be called."""
        return self._emit is not None and self._emit.follows

    def begun(self, attempt: LiveAttempt) -> None:
        """A handler is about to be called, on this thread and with its variables."""
        if self._emit is None:
            return
        envelope = attempt.claim.envelope
        attempt.span = self._emit.begin(
            AttemptBegun(
                job_id=envelope.id,
                kind=envelope.kind,
                queue=envelope.queue,
                attempt=envelope.attempt,
                started_at_ms=attempt.begun_at_ms,
                trace=trace_of(envelope.headers),
            )
        )

    def accepted(self, attempt: LiveAttempt, ack: Ack) -> bool:
        """The store has taken an ack.

        Returns:
            Whether the slot must be kept: a handler thread frees it later.
        """
        self._publish(attempt, ack.outcome, ack.error)
        if self._death_handlers and ack.outcome in _DEADLY:
            state = _state(attempt, ack.outcome)
            if state is State.ARCHIVED:
                self._keep(attempt)
                self._call(lambda: self._die(attempt, ack))
                return True
        self._settled(attempt, ack)
        return False

    def released(self, attempt: LiveAttempt, ack: Ack) -> None:
        """The store has taken a job back because the worker ends."""
        self._settled(attempt, ack)

    def lost(self, attempt: LiveAttempt) -> None:
        """The store did not take the outcome: somebody else decides about the job."""
        self._span(attempt, Outcome.LEASE_LOST.value, _passed_ms(attempt))

    def ended(self, attempt: LiveAttempt) -> None:
        """An attempt ended without an ack of the worker."""
        if attempt.finished is Settlement.COMPLETED:
            self._publish(attempt, Outcome.SUCCESS, None)
            self._completed(attempt, _passed_ms(attempt))
        elif attempt.finished is Settlement.RELEASED:
            self._span(attempt, Outcome.RATE_LIMITED.value, _passed_ms(attempt))
        else:
            self.lost(attempt)

    def failed(self, attempt: LiveAttempt | None, error: BaseException) -> None:
        """An ack call failed and is repeated, or the outcome of a job is given up."""
        if self._emit is not None:
            job_id = "" if attempt is None else attempt.lease.job_id
            self._emit(
                AckFailed(worker=self._worker_id, job_id=job_id, detail=str(error))
            )
        if attempt is not None:
            self.lost(attempt)

    def _die(self, attempt: LiveAttempt, ack: Ack) -> None:
        death = JobDeath(
            envelope=attempt.claim.envelope, reason=_reason(ack), error=ack.error
        )
        try:
            for handler in self._death_handlers:
                try:
                    handler(death)
                except BaseException:  # user code, also one that exits
                    logger.exception(
                        "job %s (queue %s): death handler %r failed",
                        death.envelope.id,
                        death.envelope.queue,
                        handler,
                    )
            self._settled(attempt, ack)
        finally:
            self._conclude([attempt])

    def _settled(self, attempt: LiveAttempt, ack: Ack) -> None:
        if self._emit is None:
            return
        ms = _passed_ms(attempt) if ack.latency_ms is None else ack.latency_ms
        if ack.outcome is Outcome.SUCCESS:
            self._completed(attempt, ms)
            return
        if ack.error_code == CODE_UNKNOWN_KIND and attempt.capture is None:
            # No handler's own code: an attempt without a handler captures nothing.
            envelope = attempt.claim.envelope
            self._emit(Unhandled(queue=envelope.queue, kind=envelope.kind))
        if ack.outcome is Outcome.RATE_LIMITED and not ack.error:
            # With a text the job was handed back for a reason of the worker's own.
            queue = attempt.claim.envelope.queue
            self._emit(Rejected(queue=queue, policy=RATE_CLASS))
        self._span(attempt, ack.outcome.value, ms)

    def _completed(self, attempt: LiveAttempt, ms: int) -> None:
        if self._emit is not None:
            self._emit(Completed(kind=attempt.claim.envelope.kind, ms=ms))
            self._span(attempt, Outcome.SUCCESS.value, ms)

    def _span(self, attempt: LiveAttempt, outcome: str, ms: int) -> None:
        if self._emit is None:
            return
        envelope = attempt.claim.envelope
        if attempt.logs is not None and (dropped := attempt.logs.dropped):
            self._emit(
                LogDropped(
                    worker=self._worker_id,
                    job_id=envelope.id,
                    detail=f"{dropped} lines beyond {MAX_LOG_LINES}",
                    count=dropped,
                )
            )
        lives, attempt.span = attempt.span, ()
        self._emit(
            JobSpan(
                job_id=envelope.id,
                kind=envelope.kind,
                queue=envelope.queue,
                attempt=envelope.attempt,
                outcome=outcome,
                started_at_ms=attempt.begun_at_ms,
                ms=ms,
                trace=trace_of(envelope.headers),
                worker=self._worker_id,
            ),
            lives,
        )

    def _publish(
        self, attempt: LiveAttempt, outcome: Outcome, error: str | None
    ) -> None:
        kind = _KINDS.get(outcome)
        if kind is None or self._bus is None or not self._bus.has_subscribers:
            return
        envelope = attempt.claim.envelope
        self._bus.publish(
            JobEvent(
                kind=kind,
                job_id=envelope.id,
                job_kind=envelope.kind,
                queue=envelope.queue,
                attempt=envelope.attempt,
                state=_state(attempt, outcome),
                error=error,
                at_ms=attempt.store_now_ms(),
            )
        )


@frozen
class _Claimed:
    """What guards of the table read of a claimed job."""

    attempt: int
    max_attempts: int
    crash_attempt: int
    retention_ms: int
    crash_limit: int = DEFAULT_CRASH_LIMIT  # the store's own; no outcome depends on it


def _state(attempt: LiveAttempt, outcome: Outcome) -> State:
    """Where the accepted outcome has led, by the table that the store follows."""
    envelope = attempt.claim.envelope
    job = _Claimed(
        envelope.attempt,
        envelope.max_attempts,
        envelope.crash_attempt,
        envelope.retention_ms,
    )
    return next_state(State.RUNNING, outcome.event, job)


def _reason(ack: Ack) -> DeathReason:
    if ack.outcome is Outcome.RETRY:
        return DeathReason.ATTEMPTS_EXHAUSTED
    if ack.reason_code == REASON_DEADLINE:
        return DeathReason.DEADLINE_EXCEEDED
    return DeathReason.SKIPPED


def _passed_ms(attempt: LiveAttempt) -> int:
    return int((attempt.now_s() - attempt.begun_s) * 1000)
