"""Jobs run on the thread of the test, by the parts that a worker is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

from attrs import evolve, frozen

from headgate_sync.attempt import LiveAttempt
from headgate_sync.binding import Binding
from headgate_sync.envelope import check_int
from headgate_sync.errors import AttemptCancelled, MalformedPayload
from headgate_sync.injection import WorkerInfo
from headgate_sync.lease import MAX_CAPACITY, Ack, LeaseRef
from headgate_sync.lifecycle import Outcome
from headgate_sync.loggers import guarded
from headgate_sync.signals import Control
from headgate_sync.telemetry import JobSpan, TelemetryEvent
from headgate_sync.testing.clock import FakeClock
from headgate_sync.testing.target import Target, target_of
from headgate_sync.worker import WorkerConfig
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.admission import Admission
from headgate_sync.worker.config import make_worker_id
from headgate_sync.worker.heartbeat import Heartbeat
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.outcomes import Verdict
from headgate_sync.worker.reporting import Emitter, Report
from headgate_sync.worker.runner import Runner
from headgate_sync.worker.shutdown import release
from headgate_sync.worker.watchdog import Watchdog

logger = guarded(__name__)

DEFAULT_DRAIN_JOBS = 100
MAX_ROUNDS = 1_000
PROMOTED_PER_ROUND = 10_000


@frozen(kw_only=True)
class Performed:
    """One attempt that was run.

    Attributes:
        outcome: "success", "retry", "skip", "revoke", "snooze", "undecodable",
            "rate_limited", or "lease_lost" where the store took no outcome.
        error: what the ack says went wrong; None for a success.
        result: what the handler returned, as `Headgate.result` reads it; bytes as they
            were recorded where they are no result of its annotation.
    """

    job_id: str
    kind: str
    outcome: str
    error: str | None = None
    result: object = None


def drain(
    store_or_hg: Any,
    registry: Any = None,
    config: WorkerConfig | None = None,
    n: int = DEFAULT_DRAIN_JOBS,
    *,
    until_empty: bool = False,
    reraise: bool = False,
    clock: FakeClock | None = None,
) -> list[Performed]:
    """Run up to `n` jobs on this thread, through the real gate and the real acks.

    Due jobs are made available, one admit takes what may run, the handlers run in the
    order of the admission, and batch handlers get the jobs of their kind together. No
    thread is started: nothing interrupts a handler that stands at a breakpoint, and its
    timeout strikes only when `clock` is stepped while it runs.

    Args:
        store_or_hg: where the jobs are.
        registry: the handlers; not needed with a `Headgate`.
        config: settings of the worker that is played; its queues are looked at.
        n: jobs at most, of each admit; 1 to 10,000.
        until_empty: go on until an admit brings nothing, so that jobs which handlers
            enqueue are run too.
        reraise: once their acks are stored, raise the first exception that failed an
            attempt. Signals such as `Skip` are no failures.
        clock: the time of store and attempts.

    Returns:
        What was run, in the order in which it was admitted.

    Raises:
        AssertionError: with `until_empty`, after 1,000 admits that brought work.
        InvalidRequest: an argument, or a fault of the registry.
        StoreError: the store did not answer, or could not keep an outcome.
        BaseException: what is meant for the test and not for the worker, such as
            `KeyboardInterrupt` or a failure of pytest; the jobs that did not run are
            handed back.
    """
    check_int("n", n, 1, MAX_CAPACITY)
    target = target_of(store_or_hg, registry, config)
    return drained(
        target, n, rounds=MAX_ROUNDS if until_empty else 1, reraise=reraise, clock=clock
    )


def perform_job(
    store_or_hg: Any,
    registry: Any = None,
    config: WorkerConfig | None = None,
    *,
    reraise: bool = False,
    clock: FakeClock | None = None,
) -> Performed | None:
    """Run exactly one job, as `drain` does; None when none may run."""
    performed = drain(store_or_hg, registry, config, 1, reraise=reraise, clock=clock)
    return performed[0] if performed else None


def drained(
    target: Target, n: int, *, rounds: int, reraise: bool, clock: FakeClock | None
) -> list[Performed]:
    """Run rounds until one brings nothing; more than one must come to that end."""
    if clock is not None:
        clock.drive(target.store)
    performed: list[Performed] = []
    for _ in range(rounds):
        target.store.promote_due(PROMOTED_PER_ROUND)
        desk = Desk(target, n, clock=clock)
        done = desk.work(desk.ask(), reraise=reraise)
        if not done:
            return performed
        performed += done
    if rounds > 1:
        raise AssertionError(
            f"jobs keep coming after {rounds:,} admits; the last one ran "
            f"{done[0].kind} with outcome {done[0].outcome}"
        )
    return performed


class _Runner(Runner):
    """Notes what failed attempts, and lets out what is meant for the test."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.failures: list[BaseException] = []

    def judge_raised(
        self, binding: Binding, attempt: LiveAttempt, error: BaseException
    ) -> Verdict | None:
        """See `Runner.judge_raised`."""
        verdict = super().judge_raised(binding, attempt, error)
        if (
            verdict is not None
            and verdict.outcome in (Outcome.RETRY, Outcome.UNDECODABLE)
            and not isinstance(error, Control)
        ):
            self.failures.append(error)
        return verdict

    def reraise(self, error: BaseException) -> None:
        """Also raise an interrupt and the outcomes of pytest, which no worker meets."""
        if not isinstance(
            error, Exception | AttemptCancelled | SystemExit | GeneratorExit
        ):
            raise error
        super().reraise(error)


class _Spans:
    """A sink that keeps how attempts ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}  # by job id

    def on_event(self, event: TelemetryEvent) -> None:
        """Take one event."""
        if isinstance(event, JobSpan):
            self.outcomes[event.job_id] = event.outcome


class Desk:
    """The parts of a worker around one admit, without its threads.

    Args:
        capacity: claims of the admit, whatever the worker's own capacity is; that still
            bounds what a batch handler gets at once.
        producer: makes the client behind `ctx.client`; None is the target's.
    """

    def __init__(
        self,
        target: Target,
        capacity: int,
        *,
        clock: FakeClock | None,
        producer: Callable[[], Any] | None = None,
    ) -> None:
        target.registry.check()
        self._target = target
        self._clock = clock
        self._capacity = capacity
        config, store = target.config, target.store
        now_s = monotonic if clock is None else clock.now_s
        worker_id = config.worker_id or make_worker_id()
        self._over = threading.Event()
        self._inflight = InFlight(capacity, self._over.set)
        self._inflight.draining = True  # hear of every end
        self._spans = _Spans()
        self._taken: dict[LeaseRef, Ack] = {}
        self._errors: list[BaseException] = []
        emit = Emitter(self._spans, *config.telemetry, now_s=now_s)
        self._report = report = Report(
            worker_id,
            emit=emit,
            bus=config.event_bus,
            death_handlers=config.death_handlers,
            call=lambda work: work(),
            keep=self._inflight.touch_down,
            conclude=self._inflight.conclude,
        )
        self._acks = AckBox(
            store,
            self._inflight,
            now_s=now_s,
            accepted=self._accepted,
            lost=report.lost,
            failed=self._failed,
        )
        self._acks.give_up()  # a test is told of an outage instead of waiting it out
        info = WorkerInfo(
            worker_id=worker_id,
            queues=tuple(sorted(config.queues)),
            capacity=config.capacity,
        )
        self._runner = _Runner(
            target.registry,
            config,
            self._inflight,
            self._acks,
            info,
            now_s=now_s,
            ended=report.ended,
        )
        self._admission = Admission(
            store,
            config,
            self._inflight,
            worker_id,
            lambda attempts: None,
            now_s=now_s,
            producer=producer or (lambda: target.producer),
        )
        self._heartbeat = Heartbeat(
            store, self._inflight, lease_ms=config.lease_ms, now_s=now_s, emit=emit
        )
        self._watchdog = Watchdog(
            config,
            self._inflight,
            self._acks,
            now_s=now_s,
            died=logger.error,
            emit=emit,
        )

    def ask(self) -> list[LiveAttempt]:
        """Admit once."""
        _, attempts = self._admission.ask(self._capacity)
        return attempts

    def work(self, attempts: list[LiveAttempt], *, reraise: bool) -> list[Performed]:
        """Run claims to the end of their acks."""
        with self._listening():
            self._inflight.add(attempts)
            try:
                for attempt in attempts:
                    if self._runner.run(attempt):
                        self._acks.fly()
                for chunk in self._runner.batches.close():
                    if self._runner.batches.run(chunk):
                        self._acks.fly()
            except BaseException:
                self._hand_back(attempts)
                raise
            while len(self._inflight):  # an ack on a thread of its own
                self._over.wait()
                self._over.clear()
        if self._errors:
            raise self._errors[0]
        if reraise and self._runner.failures:
            raise self._runner.failures[0]
        return [self._performed(attempt) for attempt in attempts]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._runner.capture.install()
            stack.callback(self._runner.capture.uninstall)
            if self._clock is not None:
                stack.enter_context(self._clock.watched(self._look))
            yield

    def _look(self) -> None:
        """What a worker does while time passes; leases first, as they are not lost."""
        self._heartbeat.step()
        self._watchdog.step()

    def _hand_back(self, attempts: list[LiveAttempt]) -> None:
        """Give back what is not settled; what was lost the store refuses."""
        for chunk in self._runner.batches.close():
            for member in chunk.members:
                self._runner.leave(member.attempt, member.context)
        left = [a for a in attempts if a.lease not in self._taken and not a.finished]
        release(self._target.store, left, 0.0)

    def _accepted(self, attempt: LiveAttempt, ack: Ack) -> bool:
        self._taken[attempt.lease] = ack
        return self._report.accepted(attempt, ack)

    def _failed(self, attempt: LiveAttempt | None, error: BaseException) -> None:
        if attempt is not None:
            self._errors.append(error)
        self._report.failed(attempt, error)

    def _performed(self, attempt: LiveAttempt) -> Performed:
        envelope = attempt.claim.envelope
        ack = self._taken.get(attempt.lease)
        lost = Outcome.LEASE_LOST.value
        performed = Performed(
            job_id=envelope.id,
            kind=envelope.kind,
            outcome=self._spans.outcomes.get(envelope.id, lost),
            error=None if ack is None else ack.error,
        )
        binding = self._target.registry.resolve(envelope.kind)
        if ack is None or ack.result is None or binding is None:
            return performed
        try:
            result = binding.decode_result(ack.result)
        except MalformedPayload:
            result = ack.result.data
        return evolve(performed, result=result)
