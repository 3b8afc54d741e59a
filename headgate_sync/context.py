"""What a handler sees of its attempt: who it is, when to stop, and fenced writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from headgate_sync.attempt import LiveAttempt, Settlement
from headgate_sync.cancel import exception_for
from headgate_sync.codec import JSON, Codec
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import MAX_INT32, check_int
from headgate_sync.errors import (
    AttemptCancelled,
    InvalidRequest,
    LeaseRejected,
    StoreError,
    TrackedClosed,
    Unsupported,
)
from headgate_sync.extensions import Extensions
from headgate_sync.lease import (
    Checkpoint,
    JobResult,
    LeaseRef,
    ProgressUpdate,
    check_blob,
    check_lease_ms,
)
from headgate_sync.lifecycle import Outcome
from headgate_sync.progress_reports import ProgressReports
from headgate_sync.schedule import PeriodicOrigin
from headgate_sync.steps import NO_PLAN, CursorStep, StepBlock, StepPlan, Steps
from headgate_sync.store import TxHandle
from headgate_sync.tracing import TraceContext, trace_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from headgate_sync.client.bound import JobClient
    from headgate_sync.injection import Dependencies
    from headgate_sync.tracked import Tracked

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

RELEASED_BY_HANDLER = "released by handler"
JOB_LOGGER = "headgate.job"
ATTEMPT_KEY = "headgate_attempt"  # of a log record, names the attempt it belongs to

# Of a batch handler's call all of them.
_current: ContextVar[JobContext | tuple[JobContext, ...]] = ContextVar(
    "headgate_sync_job"
)
_making = threading.Lock()


def current_job() -> JobContext:
    """The context of the attempt that runs on this thread.

    Raises:
        LookupError: no attempt runs here, or a batch handler does, which has many.
    """
    found = _current.get()
    if isinstance(found, tuple):
        raise LookupError("a batch handler runs here; current_jobs() has its jobs")
    return found


def current_jobs() -> tuple[JobContext, ...]:
    """The contexts of all attempts whose handler runs on this thread.

    One, or those of a batch handler's call; none where no handler runs.
    """
    found = _current.get(())
    return found if isinstance(found, tuple) else (found,)


def make_current(found: JobContext | tuple[JobContext, ...]) -> None:
    """Let these functions answer so with the running variables; for the worker."""
    _current.set(found)


def running_attempt() -> LiveAttempt | None:
    """The record of the one attempt that runs on this thread, if one does."""
    found = _current.get(None)
    return found._attempt if isinstance(found, JobContext) else None


class JobLog(_Adapter):
    """The logger of one attempt; `extra` adds fields to a line."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Name the attempt, so that the line finds it from any thread."""
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


class JobContext:
    """The running attempt, for its handler.

    Every write goes through the lease: when the worker does not hold the job any more
    it changes nothing and raises `LeaseLost`. `LeaseLost` and its kin derive from
    `BaseException`, so `except Exception` lets them pass.
    """

    __slots__ = (
        "_attempt",
        "_checkpoint",
        "_client",
        "_closed",
        "_data",
        "_dependencies",
        "_extensions",
        "_log",
        "_plan",
        "_progress",
        "_result",
        "_returned",
        "_steps",
        "_tracked",
    )

    def __init__(
        self,
        attempt: LiveAttempt,
        plan: StepPlan = NO_PLAN,
        extensions: Extensions | None = None,
    ) -> None:
        self._attempt = attempt
        self._plan = plan
        self._extensions = extensions
        self._checkpoint = attempt.claim.checkpoint
        # Made by their first use: most handlers need none of them.
        self._client: JobClient | None = None
        self._data: Extensions | None = None
        self._dependencies: Dependencies | None = None
        self._log: JobLog | None = None
        self._progress: ProgressReports | None = None
        self._steps: Steps | None = None
        self._tracked: Tracked | None = None
        self._returned = self._closed = False
        self._result: JobResult | None = None

    @property
    def job_id(self) -> str:
        """The caller's id of the job."""
        return self._attempt.claim.envelope.id

    @property
    def kind(self) -> str:
        """The kind under which the job was enqueued."""
        return self._attempt.claim.envelope.kind

    @property
    def queue(self) -> str:
        """The job's queue."""
        return self._attempt.claim.envelope.queue

    @property
    def attempt(self) -> int:
        """Failures that were returned before this run; 0 at the first."""
        return self._attempt.claim.envelope.attempt

    @property
    def crash_attempt(self) -> int:
        """Leases of this job that were lost before this run."""
        return self._attempt.claim.envelope.crash_attempt

    @property
    def max_attempts(self) -> int:
        """Failures after which the job is archived."""
        return self._attempt.claim.envelope.max_attempts

    @property
    def weight(self) -> int:
        """Estimated cost in units of the rate class."""
        return self._attempt.claim.envelope.weight

    @property
    def lease(self) -> LeaseRef:
        """The proof of the claim."""
        return self._attempt.lease

    @property
    def deadline(self) -> datetime | None:
        """The job's absolute limit over all attempts, on the store's clock."""
        at_ms = self._attempt.claim.envelope.deadline_ms
        if not at_ms:
            return None
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=at_ms)

    @property
    def periodic(self) -> PeriodicOrigin | None:
        """The schedule and tick of a scheduled job; None for other jobs."""
        envelope = self._attempt.claim.envelope
        return PeriodicOrigin.of(
            envelope.periodic_schedule_id, envelope.periodic_tick_ms
        )

    @property
    def trace(self) -> TraceContext | None:
        """The producer's trace context, if it sent a valid one."""
        return trace_of(self._attempt.claim.envelope.headers)

    @property
    def client(self) -> JobClient:
        """A client for follow-up jobs, which ends with the attempt."""
        if self._client is None:
            from headgate_sync.client.bound import JobClient

            assert self._attempt.producer is not None
            self._client = JobClient(
                self._attempt.producer(),
                check=self.check,
                headers=self._attempt.claim.envelope.headers,
            )
            if self._closed:
                self._client.close()
        return self._client

    @property
    def log(self) -> JobLog:
        """A logger whose lines are kept with the attempt; `extra` adds fields.

        Lines of every other logger are kept as well, when they come from the handler's
        thread or a tracked one.
        """
        if self._log is None:
            envelope = self._attempt.claim.envelope
            self._log = JobLog(
                logging.getLogger(JOB_LOGGER),
                {
                    ATTEMPT_KEY: self._attempt,
                    "headgate_job_id": envelope.id,
                    "headgate_queue": envelope.queue,
                },
            )
        return self._log

    # Cancellation.

    @property
    def cancelled(self) -> bool:
        """Whether the attempt should stop."""
        return self._attempt.token.stopped

    @property
    def cancel_reason(self) -> str | None:
        """`lease_lost`, `lease_expired`, `timeout`, `shutdown`; None while going on.

        None too when a tracked thread failed, which cancels the attempt from inside.
        """
        reason = self._attempt.token.reason
        return None if reason is None else reason.value

    @property
    def lease_doubtful(self) -> bool:
        """The lease was not confirmed in time; somebody else may run the job."""
        return self._attempt.doubtful

    def check(self) -> None:
        """Raise the `AttemptCancelled` that says why, when the attempt should stop."""
        reason = self._attempt.token.reason
        if reason is not None:
            raise exception_for(reason, self.job_id)
        if self._attempt.token.stopped:
            raise AttemptCancelled(f"job {self.job_id}: a tracked thread failed")

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the attempt should stop; True when it should."""
        return self._attempt.token.wait(seconds)

    def sleep(self, seconds: float) -> None:
        """Like `wait`, but raise as `check` does."""
        if self._attempt.token.wait(seconds):
            self.check()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call back once when the attempt should stop; the newest callback first.

        Made for calls that interrupt a blocked thread, such as
        `connection.cancel_safe`. It runs on another thread, or at once when the attempt
        should already stop.
        """
        self._attempt.token.on_cancel(callback)

    def shield(self) -> AbstractContextManager[None]:
        """A block that the exception of `async_cancel` does not interrupt.

        It is raised at the end of the block instead. The token is set either way.
        """
        return self._attempt.shielded()

    def spawn(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Start a thread that belongs to the attempt, and ends before it is settled.

        When the handler has returned, the worker waits for it. An exception in it fails
        the attempt and asks the handler and the other threads to stop.

        Raises:
            TrackedClosed: the handler has returned.
            InvalidRequest: 32 threads of the attempt are running.
        """
        if self._tracked is None:
            if self._returned:
                raise TrackedClosed(f"job {self.job_id}: its handler has returned")
            from headgate_sync.tracked import Tracked

            self._tracked = Tracked(self._attempt)
        return self._tracked.spawn(partial(function, *args, **kwargs))

    # The lease.

    def extend_lease(self, to: timedelta | str) -> None:
        """Keep the lease so long from now, for work that starves the heartbeat.

        Raises:
            LeaseLost: the job is not held any more.
            StoreUnavailable: not extended; the heartbeat goes on as before.
        """
        lease_ms = duration_ms("to", to)
        check_lease_ms(lease_ms)
        attempt = self._attempt
        until_s = attempt.now_s() + lease_ms / 1000
        # Set before the call: a beat that comes right after it must not shorten it.
        before_s, attempt.extended_due_s = attempt.extended_due_s, until_s
        try:
            with attempt.shielded():
                lost = attempt.store.renew([attempt.lease], lease_ms=lease_ms)
        except StoreError:
            attempt.extended_due_s = before_s
            raise
        if lost:
            raise attempt.lose()
        # Also where that is sooner than before: so it is for the store.
        attempt.lease_due_s = until_s
        attempt.doubtful = False

    def release(self) -> None:
        """Hand the job back now and count no attempt; then return from the handler.

        Raises:
            LeaseLost: the job is not held any more.
            StoreUnavailable: not released.
        """
        attempt = self._attempt
        with attempt.shielded():
            try:
                attempt.store.ack(
                    attempt.lease,
                    Outcome.RATE_LIMITED,
                    error=RELEASED_BY_HANDLER,
                    actual_weight=attempt.actual_weight,
                )
            except LeaseRejected as error:
                raise attempt.lose() from error
            attempt.finished = Settlement.RELEASED
            attempt.renewing = False

    def report_actual_weight(self, weight: int) -> None:
        """Say what the work really cost; the last call counts, 0 gives all back."""
        self._attempt.actual_weight = check_int("weight", weight, 0, MAX_INT32)

    # Results, output, progress, checkpoints.

    def record_result(self, data: bytes, version: int = 1) -> None:
        """Store bytes together with the success of this attempt; the last call counts.

        Raises:
            InvalidRequest: version or size is out of range, or the job is already
                completed by `once`.
            Unsupported: the store keeps no results.
        """
        if self._attempt.store.results is None:
            raise Unsupported("results")
        if self._attempt.finished is not None:
            raise InvalidRequest(
                "record_result after once: the job is already completed"
            )
        self._result = JobResult(version, data)

    @property
    def recorded_result(self) -> JobResult | None:
        """What `record_result` got last."""
        return self._result

    def persist_output(self, data: bytes, version: int = 1) -> None:
        """Publish bytes now, readable while the job runs; each call replaces the last.

        Raises:
            InvalidRequest: version or size is out of range.
            LeaseLost: the job is not held any more.
            Unsupported: the store keeps no outputs.
        """
        outputs = self._attempt.store.outputs
        if outputs is None:
            raise Unsupported("outputs")
        check_blob("output", version, data)
        output = JobResult(version, data)
        self.check()
        try:
            with self._attempt.shielded():
                outputs.write_job_output(self._attempt.lease, output)
        except LeaseRejected as error:
            raise self._attempt.lose() from error

    def report_progress(
        self,
        current: int,
        total: int,
        message: str | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Report `current` of `total`.

        At most one value per 500 ms is written at once, unless it is the last or
        forced; the newest of the others follows with the next heartbeat or at the end.

        Raises:
            InvalidRequest: the numbers or the message are out of range.
            LeaseLost: the job is not held any more.
            StoreUnavailable: not written now; it follows like one that was held back.
            Unsupported: the store keeps no progress.
        """
        if self._attempt.store.progress is None:
            raise Unsupported("progress")
        update = ProgressUpdate(current, total, message)
        self.check()
        if self._progress is None:
            with _making:  # threads of one attempt must agree on it
                self._progress = self._progress or ProgressReports(self._attempt)
        self._progress.report(update, at_once=force or current == total)

    @property
    def progress_waits(self) -> bool:
        """A reported value was not written yet."""
        return self._progress is not None and self._progress.waits

    def flush_progress(self) -> None:
        """Write the newest value that was held back; for the worker.

        Raises:
            LeaseLost: the job is not held any more.
            StoreUnavailable: still held back.
        """
        if self._progress is not None:
            self._progress.flush()

    @property
    def last_checkpoint(self) -> Checkpoint:
        """The newest durable checkpoint: the claim's, or what this attempt saved."""
        return self._checkpoint

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the job's checkpoint; the next attempt starts with it.

        Raises:
            LeaseLost: the job is not held any more.
        """
        self.check()
        self.write_checkpoint(checkpoint)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Like `checkpoint`, also when the attempt has to stop."""
        with self._attempt.shielded():
            try:
                self._attempt.store.checkpoint(self._attempt.lease, checkpoint)
            except LeaseRejected as error:
                raise self._attempt.lose() from error
            self._checkpoint = checkpoint

    def note_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Note what a committed transaction wrote."""
        self._checkpoint = checkpoint

    # Steps.

    @overload
    def step(self, name: str, /) -> StepBlock: ...

    @overload
    def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R | None: ...

    def step(
        self,
        name: str,
        function: Callable[..., Any] | None = None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do a part of the work that later attempts need not do again.

        With a function: call it, or return None when an earlier attempt completed the
        step; its value is not kept. Without one this is a block, which no context
        manager can skip, so that it has to ask:
        `with ctx.step("upload") as run:`, `if run: ...`

        Steps follow each other in the same order in every attempt, one at a time. What
        stands outside of them runs in every attempt. While the store is away, a step
        waits for it as long as the lease lasts.

        Raises:
            InvalidRequest: the name was used in this attempt, is not declared, the step
                begins inside of another one, or follows one that failed; the function
                gave a coroutine or a generator, so that it has not run.
            StaleCheckpoint: an earlier attempt completed another step at this point;
                the job becomes undecodable.
            LeaseLost: the job is not held any more.
            StoreUnavailable: the store did not come back in time.
        """
        if function is None:
            return StepBlock(self._opened_steps(), name)
        return self._opened_steps().call(name, function, *args, **kwargs)

    def step_cursor(self, name: str, *, codec: Codec = JSON) -> CursorStep:
        """A step, as a block, that remembers a position while it runs.

        `with ctx.step_cursor("pages") as cur:` gives the last position saved as
        `cur.value`, None at first; `cur.set(value)` saves one. `if cur:` is false when
        an earlier attempt completed the step.

        Args:
            codec: turns positions into at most 1 MiB of bytes.

        Raises:
            MalformedPayload: the saved position cannot be read.
            InvalidRequest, StaleCheckpoint, LeaseLost, StoreUnavailable: as for `step`.
        """
        return CursorStep(self._opened_steps(), name, codec)

    def iterate(
        self,
        name: str,
        source: Callable[[Any], Iterable[T]],
        *,
        cursor: Callable[[T], object],
        every: int = 1,
        codec: Codec = JSON,
    ) -> Iterator[T]:
        """Go through items as one step that goes on where the last attempt stopped.

        The position is saved after every `every` items, after 5 s, and when the attempt
        has to stop; a crash repeats the items since then. The loop has to run to its
        end: after a `break` the step is not completed and no other can follow.

        Args:
            source: gets the saved position, None at first, and returns the items after
                it.
            cursor: the position of an item.

        Raises:
            InvalidRequest, StaleCheckpoint, LeaseLost, StoreUnavailable: as for `step`.
        """
        check_int("every", every, 1, MAX_INT32)
        return self._opened_steps().iterate(
            name, source, cursor=cursor, every=every, codec=codec
        )

    def step_once(
        self, name: str, work: Callable[[TxHandle], object], *, tx: Any = None
    ) -> bool:
        """A step whose work and completion are one commit; see `once`.

        Returns:
            False when an earlier attempt did it.

        Raises:
            InvalidRequest: the job's id holds a slash; or as for `once` and `step`.
            Unsupported: the store has no transactions.
            StaleCheckpoint, LeaseLost, StoreUnavailable: as for `step`.
        """
        if self._attempt.store.transactional is None:
            from headgate_sync.once import without_transactions

            raise without_transactions("step_once", self._attempt.store)
        return self._opened_steps().once(name, work, tx)

    def resume_steps(self) -> None:
        """Read the checkpoint of an earlier attempt; for the worker.

        Raises:
            StaleCheckpoint: its steps are not those of the present code.
        """
        self._checkpoint = self._plan.resumed(self._checkpoint)
        self._opened_steps()

    def _opened_steps(self) -> Steps:
        if self._steps is None:
            self._steps = Steps(self, self._attempt, self._plan)
        return self._steps

    # Data.

    def set_data(self, value: object, as_type: type | None = None) -> None:
        """Keep a value for this attempt under its type."""
        if self._data is None:
            self._data = Extensions()
        self._data.set(value, as_type)

    def data(self, kind: type[T]) -> T:
        """The attempt's value of exactly this type, else the worker's.

        Raises:
            LookupError: there is neither.
        """
        found = None if self._data is None else self._data.get(kind)
        return self.worker_data(kind) if found is None else found

    def job_data(self, kind: type[T]) -> T:
        """The attempt's value of exactly this type; raises `LookupError` without."""
        found = None if self._data is None else self._data.get(kind)
        if found is None:
            raise LookupError(f"no data of type {_name_of(kind)} in this attempt")
        return found

    def worker_data(self, kind: type[T]) -> T:
        """The worker's value of exactly this type; raises `LookupError` without."""
        found = None if self._extensions is None else self._extensions.get(kind)
        if found is None:
            raise LookupError(f"no data of type {_name_of(kind)}")
        return found

    def dependencies(self) -> Dependencies:
        """What is opened for the handler; for the worker."""
        if self._dependencies is None:
            from headgate_sync.injection import Dependencies

            self._dependencies = Dependencies()
        return self._dependencies

    # Exactly-once effects.

    def once(self, work: Callable[[TxHandle], object], *, tx: Any = None) -> bool:
        """Run `work` in one transaction with the completion of the job.

        Either both are committed or neither. Another call to the store inside `work`
        would take a second connection and wait for it while holding one.

        Args:
            work: gets the transaction; its `connection` is the driver's.
            tx: None for a connection of the store's pool. A SQLAlchemy session,
                `scoped_session` or connection, or a Django alias, that is in no
                transaction: body and completion then run in a transaction of that
                handle, which this call commits or rolls back.

        Returns:
            False when an earlier delivery of this job did the work; it is not run
            again.

        Raises:
            LeaseLost: the job is not held any more; nothing was committed.
            Unsupported: the store has no transactions.
            InvalidRequest: a result was recorded, which could not be stored in the same
                commit; `tx` has a transaction or pending changes; or the work gave a
                coroutine or a generator, so that it has not run.
            StoreUnavailable: the reply to the commit was lost; the worker finds out.
        """
        if self._result is not None:
            raise InvalidRequest("once after record_result: the result would be lost")
        self.check()
        from headgate_sync.once import run_once

        return run_once(self._attempt, work, tx)

    def note_return(self) -> bool:
        """Note that the handler has returned; for the worker.

        Returns:
            Whether something that it used has to be ended.
        """
        self._returned = True
        return self._tracked is not None or self._dependencies is not None

    def end_tracked(self, *, failed: bool, patience_s: float) -> None:
        """Wait for tracked threads; for the worker. Raises the first error of one."""
        self._returned = True
        if self._tracked is not None:
            self._tracked.close(failed=failed, patience_s=patience_s)

    def end_dependencies(self, error: BaseException | None) -> None:
        """Leave what was opened for the handler; for the worker.

        Raises:
            BaseException: a part of it failed, after a handler that did not.
        """
        if self._dependencies is not None:
            self._dependencies.close(error, (self._attempt.claim.envelope,))

    def close(self) -> None:
        """End what the handler must not use after it returned."""
        self._closed = True
        if self._client is not None:
            self._client.close()
        if self._attempt.logs is not None:
            self._attempt.logs.close()
        # These and the context would keep each other for the collector.
        self._steps = self._tracked = self._dependencies = self._log = None


def _name_of(kind: object) -> str:
    return getattr(kind, "__qualname__", None) or repr(kind)
