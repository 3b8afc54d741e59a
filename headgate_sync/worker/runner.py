"""One claim on one handler thread: from the hand-over to the ack."""

from __future__ import annotations

import contextvars
import decimal
import logging
import threading
from collections.abc import Callable

from headgate_sync.attempt import LiveAttempt, Settlement
from headgate_sync.binding import Binding, Given, WorkerInfo
from headgate_sync.context import JobContext
from headgate_sync.errors import AttemptCancelled, LeaseLost, StoreError, Unsupported
from headgate_sync.lease import JobResult
from headgate_sync.lifecycle import Outcome
from headgate_sync.registry import Registry
from headgate_sync.signals import Control
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.outcomes import (
    DEADLINE_PASSED,
    NO_HANDLER,
    Judge,
    SpinWatch,
    Verdict,
    ack_of,
)

logger = logging.getLogger(__name__)


class Runner:
    """Runs claims on the calling thread and settles them.

    Args:
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
        ended: Callable[[LiveAttempt], None] | None = None,
    ) -> None:
        self._registry = registry
        self._unknown_kind = config.unknown_kind
        self._catches_all = config.catch_base_exceptions
        self._inflight = inflight
        self._acks = acks
        self._worker = worker
        self._ended = ended
        self._judge = Judge(retry=config.retry, is_failure=config.is_failure)
        self._spin = SpinWatch(now_s)
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
        elif envelope.deadline_ms and attempt.store_now_ms() >= envelope.deadline_ms:
            verdict = DEADLINE_PASSED
        else:
            verdict = self._attempt(binding, attempt)
        if verdict is None:
            self.leave(attempt)
            return False
        ack = ack_of(attempt, verdict)
        if not self._inflight.finish(attempt, acks=True):
            logger.info(
                "job %s (queue %s): settled before its handler returned; its result is "
                "dropped",
                envelope.id,
                envelope.queue,
            )
            return False
        return self._acks.submit(attempt, ack)

    def leave(self, attempt: LiveAttempt) -> None:
        """End an attempt without an ack, on its handler's thread."""
        if self._inflight.finish(attempt, acks=False) and self._ended is not None:
            self._ended(attempt)

    def _attempt(self, binding: Binding, attempt: LiveAttempt) -> Verdict | None:
        context = attempt.context = JobContext(attempt)
        attempt.retry = binding.retry
        try:
            value = self._context.copy().run(self._enter, binding, context, attempt)
        except BaseException as error:  # the boundary around user code
            self._leave(attempt, context)
            if not (
                self._catches_all or isinstance(error, Exception | AttemptCancelled)
            ):
                raise
            return self._judge_raised(binding, attempt, error)
        self._leave(attempt, context)
        if isinstance(value, Control):
            return self._judge_raised(binding, attempt, value)
        return self._judge.returned(attempt, value)

    def _enter(
        self, binding: Binding, context: JobContext, attempt: LiveAttempt
    ) -> Control | JobResult | None:
        context.make_current()
        # A context variable too, but of a mutable object, which a copy would share.
        decimal.setcontext(decimal.getcontext().copy())
        envelope = attempt.claim.envelope
        arguments = binding.decode(envelope)
        given = Given(context=context, envelope=envelope, worker=self._worker)
        value = binding.call(arguments, binding.inject(given))
        if value is None:
            return context.recorded_result
        if isinstance(value, Control):
            return value
        if attempt.finished is Settlement.COMPLETED:
            logger.error(
                "job %s (queue %s): the value returned after once is dropped",
                envelope.id,
                envelope.queue,
            )
            return None
        if attempt.store.results is None:
            raise Unsupported("results")
        return binding.encode_result(value)

    def _leave(self, attempt: LiveAttempt, context: JobContext) -> None:
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

    def _judge_raised(
        self, binding: Binding, attempt: LiveAttempt, error: BaseException
    ) -> Verdict | None:
        verdict = self._judge.raised(
            attempt, error, retry=binding.retry, is_failure=binding.is_failure
        )
        if verdict is None:
            return None
        envelope = attempt.claim.envelope
        if verdict.outcome in (Outcome.RETRY, Outcome.UNDECODABLE):
            logger.warning(
                "job %s (queue %s, kind %s): %s: %s",
                envelope.id,
                envelope.queue,
                envelope.kind,
                verdict.outcome.value,
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
            )
        return Verdict(
            outcome=Outcome.SNOOZE, error=NO_HANDLER, delay_ms=policy.delay_ms
        )
