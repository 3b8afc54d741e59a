"""One claim on one handler thread: from the hand-over to the ack."""

from __future__ import annotations

import contextvars
import decimal
import threading
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from headgate_sync.attempt import LiveAttempt, Settlement
from headgate_sync.binding import Binding
from headgate_sync.cancel import CancelReason, exception_for
from headgate_sync.context import JobContext, make_current
from headgate_sync.errors import AttemptCancelled, LeaseLost, StoreError, Unsupported
from headgate_sync.injection import Given, WorkerInfo
from headgate_sync.interrupt import Interrupt
from headgate_sync.lease import JobResult
from headgate_sync.lifecycle import Outcome
from headgate_sync.loggers import guarded
from headgate_sync.registry import Registry
from headgate_sync.signals import Control
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.around import enter_around
from headgate_sync.worker.batching import Batches
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.isolated import run_isolated
from headgate_sync.worker.logs import LogCapture
from headgate_sync.worker.outcomes import (
    CODE_UNKNOWN_KIND,
    DEADLINE_PASSED,
    NO_HANDLER,
    UNBEGUN,
    Judge,
    SpinWatch,
    Verdict,
    ack_of,
)

logger = guarded(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Runner:
    """Runs claims on the calling thread and settles them.

    Attributes:
        around: makes what each call of a handler runs inside of.
        batches: the jobs that wait for others of their kind.
        capture: collects what handlers log; it listens once it is installed.
        patience_s: how long tracked threads that should stop are waited for.

    Args:
        begun: called with each attempt inside of its context variables, before its
            handler; not for batches.
        ended: called with each attempt that ends without an ack of the worker.
    """

    def __init__(
        self,
        registry: Registry,
        config: WorkerConfig,
        inflight: InFlight,
        acks: AckBox,
        worker: WorkerInfo,
        *,
        now_s: Callable[[], float],
        begun: Callable[[LiveAttempt], None] | None = None,
        ended: Callable[[LiveAttempt], None] | None = None,
    ) -> None:
        self._registry = registry
        self._unknown_kind = config.unknown_kind
        self._catches_all = config.catch_base_exceptions
        self._async_cancel = config.async_cancel
        self.around = config.around
        self._extensions = config.extensions
        self._inflight = inflight
        self._acks = acks
        self._worker = worker
        self._begun = begun
        self._ended = ended
        self._judge = Judge(retry=config.retry, is_failure=config.is_failure)
        self._spin = SpinWatch(now_s)
        self.batches = Batches(self, capacity=config.capacity, now_s=now_s)
        self.capture = LogCapture(config.capture_log_level)
        self.patience_s = config.stuck_threshold_ms / 1000
        # What context variables hold when the worker starts. Every attempt gets a copy,
        # so that nothing an attempt sets is seen by the next one on its thread.
        self._context = contextvars.copy_context()

    def run(self, attempt: LiveAttempt) -> bool:
        """Run one claim and leave its ack.

        Returns:
            Whether the caller must let the ack box fly.

        Raises:
            BaseException: what the handler raised, if that ends the thread; the job is
                left to the reclaimer.
        """
        attempt.thread_id = threading.get_ident()
        envelope = attempt.claim.envelope
        binding = self._registry.resolve(envelope.kind)
        verdict: Verdict | None
        if binding is None:
            verdict = self._hand_back(attempt)
        elif (reason := attempt.token.reason) not in (None, CancelReason.TIMEOUT):
            # Before it began; while it waited for a thread, as a rule. A time-out that
            # short is the handler's to meet.
            attempt.never_begin()
            error = exception_for(reason, envelope.id)
            verdict = self.judge_raised(binding, attempt, error)
        elif envelope.deadline_ms and attempt.store_now_ms() >= envelope.deadline_ms:
            verdict = DEADLINE_PASSED
        elif binding.batch is not None:
            return self.batches.take(binding, attempt)
        else:
            verdict = self._attempt(binding, attempt)
        return self.settle(attempt, verdict)

    def settle(self, attempt: LiveAttempt, verdict: Verdict | None) -> bool:
        """Leave the ack of an attempt that has ended; None sends none.

        Returns:
            Whether the caller must let the ack box fly.
        """
        if verdict is None:
            self.abandon(attempt)
            return False
        ack = ack_of(attempt, verdict)
        if not self._inflight.finish(attempt, acks=True):
            logger.info(
                "job %s (queue %s): settled before its handler returned; its result is "
                "dropped",
                attempt.lease.job_id,
                attempt.claim.envelope.queue,
            )
            return False
        return self._acks.submit(attempt, ack)

    def decline(self, attempts: Iterable[LiveAttempt]) -> None:
        """Hand back claims that never began, from a thread that must not wait.

        No attempt is counted, and what they took from rate budgets is given back.
        """
        for attempt in attempts:
            attempt.never_begin()
            verdict: Verdict | None = UNBEGUN
            if (reason := attempt.token.reason) is not None:
                error = exception_for(reason, attempt.lease.job_id)
                verdict = self._judge.raised(attempt, error, retry=attempt.retry)
            if verdict is None:
                self.abandon(attempt)
            elif self._inflight.finish(attempt, acks=True):
                self._acks.submit_apart(attempt, ack_of(attempt, verdict))

    def fly(self) -> None:
        """Send the acks that were left."""
        self._acks.fly()

    def abandon(self, attempt: LiveAttempt) -> None:
        """End an attempt without an ack, on its handler's thread."""
        if self._inflight.finish(attempt, acks=False) and self._ended is not None:
            self._ended(attempt)

    def _attempt(self, binding: Binding, attempt: LiveAttempt) -> Verdict | None:
        context = self.open_context(binding, attempt)
        try:
            value = self._context.copy().run(self._enter, binding, context, attempt)
        except BaseException as error:  # the boundary around user code
            self.leave(attempt, context)
            self.reraise(error)
            return self.judge_raised(binding, attempt, error)
        self.leave(attempt, context)
        if isinstance(value, Control):
            return self.judge_raised(binding, attempt, value)
        return self._returned(attempt, value)

    def open_context(self, binding: Binding, attempt: LiveAttempt) -> JobContext:
        """What the handler will see of its attempt."""
        attempt.capture = self.capture
        attempt.retry = binding.retry
        context = JobContext(attempt, binding.steps, self._extensions)
        attempt.context = context
        return context

    def within(
        self,
        current: JobContext | tuple[JobContext, ...],
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call with context variables of its own, in one attempt or in several."""

        def enter() -> T:
            _begin(current)
            return function(*args, **kwargs)

        return self._context.copy().run(enter)

    def _enter(
        self, binding: Binding, context: JobContext, attempt: LiveAttempt
    ) -> Control | JobResult | None:
        _begin(context)
        if self._begun is not None:
            self._begun(attempt)
        envelope = attempt.claim.envelope
        if binding.isolated is not None:
            run_isolated(binding.isolated, attempt, context)
            return None
        given = Given(context=context, envelope=envelope, worker=self._worker)
        try:
            if self.around:
                enter_around(self.around, context.dependencies())
            if attempt.claim.checkpoint.step_set_hash:
                context.resume_steps()
            arguments = binding.decode(envelope)
            injected = binding.inject(given)
            if self._async_cancel or binding.async_cancel:
                value = self._guarded(binding, attempt, arguments, injected)
            else:
                value = binding.call(arguments, injected)
            if has_parts := context.note_return():
                context.end_tracked(failed=False, patience_s=self.patience_s)
            if value is None:
                result: Control | JobResult | None = context.recorded_result
            else:
                result = self.result_of(binding, attempt, context, value)
        except BaseException as error:
            context.end_tracked(failed=True, patience_s=self.patience_s)
            context.end_dependencies(error)
            raise
        if has_parts:
            context.end_dependencies(None)
        return result

    def _guarded(
        self,
        binding: Binding,
        attempt: LiveAttempt,
        arguments: dict[str, object],
        injected: dict[str, object],
    ) -> object:
        """Call a handler, which an exception may strike unless it opted out."""
        if binding.async_cancel is False:
            return binding.call(arguments, injected)
        attempt.interrupt = Interrupt()
        return attempt.interrupt.guard(lambda: binding.call(arguments, injected))

    def result_of(
        self,
        binding: Binding,
        attempt: LiveAttempt,
        context: JobContext,
        value: object,
    ) -> Control | JobResult | None:
        """What a returned value means: a signal, or what is stored with the success.

        Raises:
            Unsupported: the store keeps no results.
            InvalidRequest: the value is none of the handler's annotation.
        """
        if value is None:
            return context.recorded_result
        if isinstance(value, Control):
            return value
        if attempt.finished is Settlement.COMPLETED:
            logger.error(
                "job %s (queue %s, kind %s): the value returned after once is dropped: "
                "once has completed the job",
                attempt.lease.job_id,
                attempt.claim.envelope.queue,
                attempt.claim.envelope.kind,
            )
            return None
        if attempt.store.results is None:
            raise Unsupported("results")
        return binding.encode_result(value)

    def leave(self, attempt: LiveAttempt, context: JobContext) -> None:
        """Close what belongs to the attempt; after this nothing can cancel it."""
        if context.progress_waits and attempt.renewing:
            try:
                context.flush_progress()
            except LeaseLost:
                pass  # the token says so, and the verdict follows the token
            except StoreError as error:
                logger.warning(
                    "job %s (queue %s): last progress not written: %s",
                    attempt.lease.job_id,
                    attempt.claim.envelope.queue,
                    error,
                )
        attempt.token.close()
        context.close()
        attempt.context = None  # else the two keep each other for the collector

    def reraise(self, error: BaseException) -> None:
        """Raise what ends the thread instead of the attempt, where that is wanted."""
        if not (self._catches_all or isinstance(error, Exception | AttemptCancelled)):
            raise error

    def judge(
        self, binding: Binding, attempt: LiveAttempt, value: object
    ) -> Verdict | None:
        """The verdict on what a handler returned or raised; None sends no ack."""
        if isinstance(value, BaseException):
            return self.judge_raised(binding, attempt, value)
        assert value is None or isinstance(value, JobResult)
        return self._returned(attempt, value)

    def _returned(
        self, attempt: LiveAttempt, result: JobResult | None
    ) -> Verdict | None:
        verdict = self._judge.returned(attempt, result)
        if verdict is not None and attempt.token.reason is CancelReason.TIMEOUT:
            envelope = attempt.claim.envelope
            logger.warning(
                "job %s (queue %s, kind %s): its handler returned after its timeout of "
                "%d ms, which counts as a success",
                envelope.id,
                envelope.queue,
                envelope.kind,
                attempt.timeout_ms,
            )
        return verdict

    def judge_raised(
        self, binding: Binding, attempt: LiveAttempt, error: BaseException
    ) -> Verdict | None:
        """The verdict on an exception or a signal; None sends no ack."""
        verdict = self._judge.raised(
            attempt, error, retry=binding.retry, is_failure=binding.is_failure
        )
        envelope = attempt.claim.envelope
        if verdict is None:
            if attempt.finished is Settlement.COMPLETED and isinstance(
                error, Exception
            ):
                logger.error(
                    "job %s (queue %s): failed after once had completed it",
                    envelope.id,
                    envelope.queue,
                    exc_info=error,
                )
            return None
        if verdict.outcome in (Outcome.RETRY, Outcome.UNDECODABLE):
            what = "undecodable"
            if verdict.outcome is Outcome.RETRY:
                what = (
                    f"attempt {envelope.attempt + 1} of {envelope.max_attempts} failed"
                )
            logger.warning(
                "job %s (queue %s, kind %s): %s: %s",
                envelope.id,
                envelope.queue,
                envelope.kind,
                what,
                (verdict.error or "").partition("\n")[0],
            )
        elif verdict.hot:
            self._spin.handed_back(envelope)
        return verdict

    def _hand_back(self, attempt: LiveAttempt) -> Verdict:
        policy, claim = self._unknown_kind, attempt.claim
        logger.warning(
            "job %s (queue %s): no handler for kind %s",
            claim.envelope.id,
            claim.envelope.queue,
            claim.envelope.kind,
        )
        if policy.max_claims is not None and claim.fence >= policy.max_claims:
            return Verdict(
                outcome=Outcome.SKIP,
                error=f"{NO_HANDLER} after {policy.max_claims} claims",
                error_code=CODE_UNKNOWN_KIND,
            )
        return Verdict(
            outcome=Outcome.SNOOZE,
            error=NO_HANDLER,
            error_code=CODE_UNKNOWN_KIND,
            delay_ms=policy.delay_ms,
        )


def _begin(current: JobContext | tuple[JobContext, ...]) -> None:
    """Set the context variables of an attempt, inside of its own copy of them."""
    make_current(current)
    # A context variable too, but of a mutable object, which a copy would share.
    decimal.setcontext(decimal.getcontext().copy())
