"""What the end of an attempt means: outcome, error text and delay."""

from __future__ import annotations

import re
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from attrs import frozen
from tenacity import Future, RetryCallState
from tenacity.wait import wait_base

from headgate_sync.attempt import AttemptFault, LiveAttempt
from headgate_sync.binding import RetryPolicy
from headgate_sync.cancel import CancelReason
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import Envelope
from headgate_sync.errors import AttemptCancelled, CodecError, StaleCheckpoint
from headgate_sync.lease import MAX_ERROR_BYTES, Ack, JobResult, cut_text, storable_text
from headgate_sync.lifecycle import Outcome
from headgate_sync.loggers import guarded
from headgate_sync.signals import Control, RateLimited, Revoke, Skip, Snooze

logger = guarded(__name__)

MAX_SUMMARY_BYTES = 2048
MAX_POLICY_DELAY_MS = 86_400_000
RELEASED_AT_SHUTDOWN = "released: worker shutdown"
RELEASED_UNBEGUN = "released: no thread was free"
RELEASED_IN_DOUBT = "released: lease not confirmed"
DEADLINE_EXCEEDED = "deadline exceeded"
REASON_DEADLINE = "deadline_exceeded"
NO_HANDLER = "no handler registered"
SNOOZE_BUG = "handler bug: snooze duration rounds to zero"
TIMED_OUT = "attempt timed out after {}ms"
STILL_RUNNING = "; handler still running"
SPIN_LIMIT = 10
SPIN_WINDOW_S = 60.0
SPIN_JOBS = 1000

CODE_TIMEOUT = "TIMEOUT"
CODE_DEADLINE = "DEADLINE_EXCEEDED"
CODE_BAD_PAYLOAD = "BAD_PAYLOAD"
CODE_UNKNOWN_KIND = "UNKNOWN_JOB_TYPE"
CODE_HANDLER = "HANDLER_ERROR"
_CODE = re.compile(r"[A-Z0-9_]{1,64}", re.ASCII)
_CODED_TEXT = re.compile(r"([A-Z][A-Z0-9_]{0,63}): ", re.ASCII)
# The others leave no entry in the history.
_KEEPS_LOGS = (Outcome.SUCCESS, Outcome.RETRY, Outcome.SKIP, Outcome.UNDECODABLE)

_PACKAGE = str(Path(__file__).parents[1])


@frozen(kw_only=True)
class RetryInfo:
    """What a retry policy may look at.

    Attributes:
        attempt: failures so far, this one included; 1 for the first.
        error: the exception that failed the attempt.
    """

    job_id: str
    kind: str
    queue: str
    attempt: int
    crash_attempt: int
    max_attempts: int
    error: BaseException


@frozen(kw_only=True)
class Verdict:
    """An outcome with what goes into its ack."""

    outcome: Outcome
    error: str | None = None
    delay_ms: int | None = None
    error_code: str = ""
    reason_code: str = ""
    result: JobResult | None = None

    @property
    def hot(self) -> bool:
        """The job may run again at once because its handler asked for it."""
        return self.outcome is Outcome.RATE_LIMITED and not (
            self.delay_ms or self.error
        )


SUCCESS = Verdict(outcome=Outcome.SUCCESS)
UNBEGUN = Verdict(outcome=Outcome.RATE_LIMITED, error=RELEASED_UNBEGUN)
DEADLINE_PASSED = Verdict(
    outcome=Outcome.SKIP,
    error=DEADLINE_EXCEEDED,
    error_code=CODE_DEADLINE,
    reason_code=REASON_DEADLINE,
)


def ack_of(attempt: LiveAttempt, verdict: Verdict) -> Ack:
    """The ack that carries a verdict, with weight, length and log of the attempt."""
    buffer = attempt.logs if verdict.outcome in _KEEPS_LOGS else None
    latency_ms = int((attempt.now_s() - attempt.begun_s) * 1000)
    return Ack(
        lease=attempt.lease,
        outcome=verdict.outcome,
        error=verdict.error,
        delay_ms=verdict.delay_ms,
        logs=() if buffer is None else buffer.lines(),
        error_code=verdict.error_code,
        reason_code=verdict.reason_code,
        result=verdict.result,
        actual_weight=attempt.actual_weight,
        latency_ms=latency_ms,
    )


@frozen(kw_only=True)
class Judge:
    """Maps how a handler ended to a verdict.

    Attributes:
        retry, is_failure: the worker's, for handlers without their own.
    """

    retry: RetryPolicy | None
    is_failure: Callable[[Exception], bool]

    def returned(
        self, attempt: LiveAttempt, result: JobResult | None
    ) -> Verdict | None:
        """The handler returned; None means that no ack is to be sent."""
        if (
            attempt.finished is not None
            or attempt.token.reason is CancelReason.LEASE_LOST
        ):
            return None
        return (
            SUCCESS
            if result is None
            else Verdict(outcome=Outcome.SUCCESS, result=result)
        )

    def raised(
        self,
        attempt: LiveAttempt,
        error: BaseException,
        *,
        retry: RetryPolicy | None = None,
        is_failure: Callable[[Exception], bool] | None = None,
    ) -> Verdict | None:
        """The handler raised; a signal counts, whether raised or returned."""
        reason = attempt.token.reason
        if attempt.finished is not None or reason is CancelReason.LEASE_LOST:
            return None
        if reason is CancelReason.LEASE_EXPIRED:
            return Verdict(outcome=Outcome.RATE_LIMITED, error=RELEASED_IN_DOUBT)
        retry = retry or self.retry
        if isinstance(error, Control):
            return self._signalled(attempt, error, retry)
        if isinstance(error, CodecError | StaleCheckpoint):
            return Verdict(
                outcome=Outcome.UNDECODABLE,
                error=error_text(error),
                error_code=error_code(error, CODE_BAD_PAYLOAD),
            )
        if reason is CancelReason.SHUTDOWN:
            return Verdict(outcome=Outcome.RATE_LIMITED, error=RELEASED_AT_SHUTDOWN)
        if reason is CancelReason.TIMEOUT:
            return self.timed_out(attempt, error, retry=retry)
        if isinstance(error, Exception) and not self._fails(error, is_failure):
            return Verdict(outcome=Outcome.RATE_LIMITED)
        return Verdict(
            outcome=Outcome.RETRY,
            error=error_text(error),
            error_code=error_code(error, CODE_HANDLER),
            delay_ms=retry_delay_ms(attempt.claim.envelope, error, retry),
        )

    def timed_out(
        self,
        attempt: LiveAttempt,
        error: BaseException | None,
        *,
        retry: RetryPolicy | None = None,
        tail: str = "",
    ) -> Verdict:
        """The attempt's time is over; a job past its deadline is not tried again."""
        summary = TIMED_OUT.format(attempt.timeout_ms) + tail
        text = summary if error is None else error_text(error, summary=summary)
        if attempt.deadline_cut:
            return Verdict(
                outcome=Outcome.SKIP,
                error=text,
                error_code=CODE_DEADLINE,
                reason_code=REASON_DEADLINE,
            )
        cause = error if error is not None else TimeoutError(summary)
        delay_ms = retry_delay_ms(attempt.claim.envelope, cause, retry or self.retry)
        return Verdict(
            outcome=Outcome.RETRY,
            error=text,
            error_code=CODE_TIMEOUT,
            delay_ms=delay_ms,
        )

    def _signalled(
        self, attempt: LiveAttempt, signal: Control, retry: RetryPolicy | None
    ) -> Verdict:
        envelope = attempt.claim.envelope
        if isinstance(signal, Skip):
            return Verdict(
                outcome=Outcome.SKIP,
                error=signal.reason,
                error_code=error_code(signal, ""),
            )
        if isinstance(signal, Revoke):
            return Verdict(outcome=Outcome.REVOKE)
        if isinstance(signal, Snooze):
            if signal.delay_ms:
                return Verdict(outcome=Outcome.SNOOZE, delay_ms=signal.delay_ms)
            delay_ms = retry_delay_ms(envelope, signal, retry)
            return Verdict(
                outcome=Outcome.RETRY,
                error=SNOOZE_BUG,
                error_code=CODE_HANDLER,
                delay_ms=delay_ms,
            )
        if isinstance(signal, RateLimited):
            if signal.retry_after_ms is None or envelope.rate_class:
                return Verdict(
                    outcome=Outcome.RATE_LIMITED, delay_ms=signal.retry_after_ms
                )
            return Verdict(outcome=Outcome.SNOOZE, delay_ms=signal.retry_after_ms)
        return Verdict(
            outcome=Outcome.RETRY,
            error=error_text(signal),
            error_code=error_code(signal, CODE_HANDLER),
            delay_ms=retry_delay_ms(envelope, signal, retry),
        )

    def _fails(
        self, error: Exception, is_failure: Callable[[Exception], bool] | None
    ) -> bool:
        try:
            return bool((is_failure or self.is_failure)(error))
        except BaseException:  # user code
            logger.exception("is_failure failed; the attempt counts as failed")
            return True


def error_text(error: BaseException, *, summary: str | None = None) -> str:
    """The text for the job's history: one line that says it, then the traceback.

    Frames of this package are left out, causes are kept, values of variables are not
    included. At most 8,192 bytes; the traceback is shortened from the top.
    """
    first = cut_text(storable_text(summary or _summary(error)), MAX_SUMMARY_BYTES)
    first = first.replace("\n", " ") if summary is None else first
    trace = storable_text(_trace(error))
    left = MAX_ERROR_BYTES - len(first.encode()) - 2
    raw = trace.encode()
    if len(raw) > left:
        mark = "...\n"
        trace = mark + raw[len(raw) - left + len(mark) :].decode(errors="ignore")
    return f"{first}\n\n{trace}" if trace else first


def error_code(error: BaseException, default: str) -> str:
    """The short code of an exception: its `code`, or what its text begins with.

    It is kept for operators and changes nothing about the outcome.
    """
    try:
        code = getattr(error, "code", None)
    except BaseException:  # a property of the user's exception
        code = None
    if isinstance(code, str) and _CODE.fullmatch(code):
        return code
    found = _CODED_TEXT.match(_text(error))
    return default if found is None else found[1]


def _text(error: BaseException) -> str:
    try:
        # A copy: `__str__` may return a subclass with methods of its own.
        return str.__str__(str(error))
    except BaseException as broken:  # user code, too
        return f"(no text: {type(broken).__name__})"


def _summary(error: BaseException) -> str:
    if isinstance(error, AttemptFault):
        return str(error)
    cls = type(error)
    name = cls.__qualname__
    if cls.__module__ != "builtins":
        name = f"{cls.__module__}.{name}"
    text = _text(error)
    panics = isinstance(error, MemoryError | RecursionError) or not isinstance(
        error, Exception | AttemptCancelled
    )
    return f"{'panic: ' if panics else ''}{name}: {text}"


def _trace(error: BaseException) -> str:
    try:
        report = traceback.TracebackException.from_exception(error, compact=True)
        _leave_out_own_frames(report)
        return "".join(report.format()).rstrip("\n")
    except BaseException as broken:
        return f"(no traceback: {type(broken).__name__})"


def _leave_out_own_frames(report: traceback.TracebackException) -> None:
    seen: set[int] = set()
    waiting: list[traceback.TracebackException | None] = [report]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        frames = [f for f in part.stack if not f.filename.startswith(_PACKAGE)]
        part.stack = traceback.StackSummary.from_list(frames)
        waiting += [part.__cause__, part.__context__, *(part.exceptions or ())]


def retry_delay_ms(
    envelope: Envelope, error: BaseException, policy: RetryPolicy | None
) -> int | None:
    """The delay that the policy or the exception asks for; None is the store's."""
    try:
        after = getattr(error, "retry_after", None)
        if isinstance(after, timedelta) and after >= timedelta(milliseconds=1):
            return _capped_ms("retry_after", after)
    except BaseException:  # a property of the user's exception
        logger.warning(
            "job %s (queue %s): retry_after cannot be read",
            envelope.id,
            envelope.queue,
            exc_info=True,
        )
    if policy is None:
        return None
    info = RetryInfo(
        job_id=envelope.id,
        kind=envelope.kind,
        queue=envelope.queue,
        attempt=envelope.attempt + 1,
        crash_attempt=envelope.crash_attempt,
        max_attempts=envelope.max_attempts,
        error=error,
    )
    try:
        return policy_delay_ms(policy, info)
    except BaseException:  # user code
        logger.warning(
            "job %s (queue %s): the retry policy failed, the store's delay is used",
            envelope.id,
            envelope.queue,
            exc_info=True,
        )
        return None


def policy_delay_ms(policy: RetryPolicy, info: RetryInfo) -> int:
    """Ask a policy: a callable that returns a duration, or one of tenacity's waits.

    Of a wait object only what depends on the number of the attempt and on the exception
    works here; nothing else of its call state exists.

    Raises:
        InvalidRequest: the policy returned something else, or less than 1 ms.
    """
    if not isinstance(policy, wait_base):
        return _capped_ms("retry delay", policy(info))
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    state.attempt_number = info.attempt
    outcome: Future = Future(info.attempt)
    outcome.set_exception(info.error)
    state.outcome = outcome
    seconds = min(policy(state), MAX_POLICY_DELAY_MS / 1000)
    return _capped_ms("retry delay", timedelta(seconds=seconds))


def _capped_ms(name: str, delay: object) -> int:
    """At most a day, also of what grew beyond the durations that there are."""
    if isinstance(delay, timedelta):
        delay = min(delay, timedelta(milliseconds=MAX_POLICY_DELAY_MS))
    return min(duration_ms(name, delay), MAX_POLICY_DELAY_MS)


class SpinWatch:
    """Warns when one job is handed back again and again without a delay."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()  # guards the counts
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def handed_back(self, envelope: Envelope) -> None:
        """Count one return; the window of a job opens with its first."""
        now_s = self._now_s()
        with self._lock:
            start_s, count = self._counts.pop(envelope.id, (now_s, 0))
            if now_s - start_s > SPIN_WINDOW_S:
                start_s, count = now_s, 0
            self._counts[envelope.id] = (start_s, count + 1)
            if len(self._counts) > SPIN_JOBS:
                self._counts.popitem(last=False)
        if count == SPIN_LIMIT:
            logger.warning(
                "job %s (queue %s, kind %s) was handed back over %d times within a "
                "minute; raise RateLimited(retry_after) or Snooze",
                envelope.id,
                envelope.queue,
                envelope.kind,
                SPIN_LIMIT,
            )
