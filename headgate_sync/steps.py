"""Steps: the finished parts of a job are not run again by its next attempt."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, field, frozen

from headgate_sync.attempt import LiveAttempt
from headgate_sync.callables import check_ran
from headgate_sync.codec import JSON, Codec
from headgate_sync.envelope import MAX_INT32, check_identifier, check_int, check_text
from headgate_sync.errors import (
    InvalidRequest,
    StaleCheckpoint,
    StoreUnavailable,
    may_pass,
)
from headgate_sync.lease import MAX_STEPS, Checkpoint, Resumability, step_set_hash
from headgate_sync.loggers import guarded
from headgate_sync.store import TxHandle

if TYPE_CHECKING:
    from tenacity import RetryCallState

    from headgate_sync.context import JobContext

logger = guarded(__name__)

CURSOR_INTERVAL_S = 5.0
IDLE_BEFORE_STEPS_S = 0.1

Item = TypeVar("Item")


def _declared(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"steps must be a sequence of names, got {value!r}")
    return tuple(value)


@frozen(kw_only=True)
class StepPlan:
    """What a task says about its steps; without a word any step may be entered.

    Attributes:
        version: of the task, stored with every checkpoint.
        names: the declared steps; empty leaves them free.
        weights: cost of each declared step; None charges the job's weight every time.
        renames: by older version of the task, new names of its steps.
    """

    version: int = 1
    names: tuple[str, ...] = field(default=(), converter=_declared)
    weights: Mapping[str, int] | None = None
    renames: Mapping[int, Mapping[str, str]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if len(self.names) > MAX_STEPS:
            raise InvalidRequest(
                f"steps has {len(self.names)} names, the limit is {MAX_STEPS}"
            )
        for name in self.names:
            _check_name("steps", name)
        if len(set(self.names)) != len(self.names):
            raise InvalidRequest("steps names one step twice")
        for name, weight in (self.weights or {}).items():
            check_int(f"weight of step {name}", weight, 0, MAX_INT32)
        for version, names in self.renames.items():
            self._check_renames(version, names)

    def _check_renames(self, version: int, names: Mapping[str, str]) -> None:
        check_int("step_map version", version, 1, MAX_INT32)
        if version == self.version:
            raise InvalidRequest(f"step_map: {version} is the present version")
        if not isinstance(names, Mapping):
            raise InvalidRequest("step_map must hold a mapping of names by version")
        for name in (*names.keys(), *names.values()):
            _check_name("step_map", name)
        if len(set(names.values())) != len(names):
            raise InvalidRequest(f"step_map: version {version} maps two steps to one")
        for name in names.values():
            self.check_declared(name)

    @cached_property
    def hash(self) -> str:
        """Identity of the declared steps."""
        return step_set_hash(self.names)

    def check_declared(self, name: str) -> None:
        """Refuse a step that the task did not declare.

        Raises:
            InvalidRequest: the text lists the declared ones.
        """
        if self.names and name not in self.names:
            raise InvalidRequest(
                f"step {name} is not declared; declared are {', '.join(self.names)}"
            )

    def remaining_weight(self, completed: Iterable[str]) -> int | None:
        """What the next admission has to charge."""
        if self.weights is None:
            return None
        done = set(completed)
        left = sum(weight for name, weight in self.weights.items() if name not in done)
        return min(left, MAX_INT32)

    def resumed(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint of an earlier attempt in the names of the present code.

        Raises:
            StaleCheckpoint: the declared steps changed and the version did not.
        """
        by_declaration = checkpoint.step_set_hash and (
            checkpoint.step_set_hash != step_set_hash(checkpoint.completed_steps)
        )
        if self.names and by_declaration:
            answer = checkpoint.resumability(self.version, self.hash)
            if answer is Resumability.UNDECODABLE:
                raise StaleCheckpoint(
                    checkpoint.step_set_hash,
                    self.hash,
                    detail=f"the declared steps of version {self.version} are not "
                    "those of the checkpoint; a change of steps needs a new version",
                )
        renames = self.renames.get(checkpoint.schema_version, {})
        if checkpoint.schema_version == self.version or not renames:
            return checkpoint

        def new(name: str | None) -> str | None:
            return None if name is None else renames.get(name, name)

        crashes: dict[str, int] = {}
        for name, count in checkpoint.crashes_by_step.items():
            known = renames.get(name, name)
            crashes[known] = min(crashes.get(known, 0) + count, MAX_INT32)
        return evolve(
            checkpoint,
            completed_steps=[renames.get(n, n) for n in checkpoint.completed_steps],
            in_progress_step=new(checkpoint.in_progress_step),
            cursor_step=new(checkpoint.cursor_step),
            crashes_by_step=crashes,
        )


NO_PLAN = StepPlan()


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str):
        raise InvalidRequest(f"{what} must hold str, got {type(name).__name__}")
    check_identifier(what, check_text(what, name))
    if not name:
        raise InvalidRequest(f"{what} must not hold an empty name")


class Steps:
    """The steps of one attempt.

    A step is written down before it begins and after it has ended. The first write
    proves that the job is still held, and names the step that a crash is charged to;
    the second one keeps later attempts from running it again.
    """

    def __init__(
        self, context: JobContext, attempt: LiveAttempt, plan: StepPlan
    ) -> None:
        self._context = context
        self._attempt = attempt
        self._plan = plan
        self._completed = context.last_checkpoint.completed_steps
        self._resumed = len(self._completed)
        self._began_s = attempt.now_s()
        self._entered: dict[str, None] = {}
        self._unfinished: str | None = None
        # Taken while a step is open, by whatever thread: a second step inside of it
        # could not be replayed in the order of completion.
        self._open = threading.Lock()

    # The forms that a handler uses.

    def call(
        self, name: str, function: Callable[..., Any], /, *args: Any, **kw: Any
    ) -> Any:
        """Run a function as a step; None when it was completed before."""
        if not self.enter(name):
            return None
        with self._closing(name):
            return check_ran(f"step {name}", function(*args, **kw))

    def iterate(
        self,
        name: str,
        source: Callable[[Any], Iterable[Item]],
        *,
        cursor: Callable[[Item], object],
        every: int,
        codec: Codec,
    ) -> Iterator[Item]:
        """See `JobContext.iterate`."""
        step = CursorStep(self, name, codec)
        with step:
            if not step:
                return
            unsaved, position = 0, None
            saved_s = self._attempt.now_s()
            for item in source(step.value):
                if unsaved and self._context.cancelled:
                    self._keep(step, position)
                self._context.check()
                ahead = cursor(item)
                yield item
                # Here the body of the loop is through with the item.
                unsaved, position = unsaved + 1, ahead
                now_s = self._attempt.now_s()
                if unsaved >= every or now_s - saved_s >= CURSOR_INTERVAL_S:
                    step.set(position)
                    unsaved, saved_s = 0, now_s

    def _keep(self, step: CursorStep, position: object) -> None:
        """Save what is done before a cancelled attempt ends, if it may still write."""
        if self._attempt.renewing:
            step.save(position)

    def once(self, name: str, work: Callable[[TxHandle], object], tx: Any) -> bool:
        """See `JobContext.step_once`."""
        from headgate_sync.once import run_effect

        job_id = self._attempt.lease.job_id
        if "/" in job_id:
            raise InvalidRequest(
                f"step_once: job id {job_id!r} holds a slash, so that its effect could "
                "be taken for that of another job"
            )
        if not self.enter(name):
            return False
        with self._closing(name, writes=False):
            done = self._done(name)
            ran = run_effect(
                self._attempt,
                work,
                tx,
                key=f"{job_id}/{name}",
                settle=lambda transactional, handle: transactional.checkpoint_tx(
                    handle, self._attempt.lease, done
                ),
            )
            if ran:
                self._context.note_checkpoint(done)
            else:
                self.save(done)
            return ran

    # What they are made of.

    def enter(self, name: str, *, cursor: bool = False) -> bool:
        """Begin a step; False when an earlier attempt completed it.

        Raises:
            InvalidRequest: the name was used in this attempt, another step is open or
                failed, or it is not declared.
            StaleCheckpoint: an earlier attempt completed another step at this point.
            LeaseLost: the job is not held any more.
        """
        context = self._context
        context.check()
        _check_name("step", name)
        if name in self._entered:
            raise InvalidRequest(f"step {name} was entered before in this attempt")
        if self._unfinished is not None:
            raise InvalidRequest(
                f"step {name} cannot follow step {self._unfinished}, "
                "which did not finish in this attempt"
            )
        self._plan.check_declared(name)
        if not self._open.acquire(blocking=False):
            raise InvalidRequest(f"step {name} cannot begin inside of another step")
        try:
            position = len(self._entered)
            if position < len(self._completed):
                expected = self._completed[position]
                if name != expected:
                    raise StaleCheckpoint(expected, name)
                self._entered[name] = None
                self._open.release()
                return False
            self._begin(name, cursor)
        except BaseException:
            self._open.release()
            raise
        return True

    def _begin(self, name: str, cursor: bool) -> None:
        if len(self._completed) >= MAX_STEPS:
            raise InvalidRequest(f"step {name}: the limit is {MAX_STEPS} steps")
        if self._resumed and len(self._entered) == self._resumed:
            self._warn_of_time_before()
        last = self._context.last_checkpoint
        keeps = cursor and last.cursor_step == name
        self.save(
            evolve(
                last,
                in_progress_step=name,
                cursor_step=name if cursor else None,
                cursor=last.cursor if keeps else None,
                **self._about(self._completed),
            )
        )
        self._entered[name] = None

    def _about(self, completed: tuple[str, ...]) -> dict[str, Any]:
        plan = self._plan
        return {
            "schema_version": plan.version,
            "step_set_hash": plan.hash if plan.names else step_set_hash(completed),
            "remaining_weight": plan.remaining_weight(completed),
        }

    def _done(self, name: str) -> Checkpoint:
        completed = (*self._completed, name)
        return evolve(
            self._context.last_checkpoint,
            completed_steps=completed,
            in_progress_step=None,
            cursor_step=None,
            cursor=None,
            **self._about(completed),
        )

    def close(self, name: str, *, failed: bool, writes: bool = True) -> None:
        """End the open step: completed, or left for the next attempt.

        Also when the attempt is asked to stop by now: the work is done.
        """
        try:
            if failed:
                self._unfinished = name
            elif self._attempt.finished is None:  # else the job itself is over
                if writes:
                    self._unfinished = name
                    self.save(self._done(name))
                    self._unfinished = None
                self._completed = (*self._completed, name)
        finally:
            self._open.release()

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; an outage is waited out while the lease lasts.

        Raises:
            LeaseLost: the job is not held any more.
            StoreUnavailable: the attempt has to stop, or its lease ran out.
        """
        try:
            self._context.write_checkpoint(checkpoint)
        except StoreUnavailable as error:
            if not may_pass(error):
                raise
            # Loaded here: producers import this module too, and need none of it.
            from tenacity import Retrying, retry_if_exception, wait_exponential

            attempt = self._attempt
            logger.warning(
                "job %s (queue %s): checkpoint not written, tried again: %s",
                attempt.lease.job_id,
                attempt.claim.envelope.queue,
                error,
            )
            Retrying(
                retry=retry_if_exception(may_pass),
                wait=wait_exponential(multiplier=0.1, max=2),
                sleep=self._pause,
                stop=self._gives_up,
                reraise=True,
            )(self._context.write_checkpoint, checkpoint)

    def _pause(self, seconds: float) -> None:
        self._attempt.token.wait(seconds)

    def _gives_up(self, state: RetryCallState) -> bool:
        attempt = self._attempt
        return attempt.token.stopped or attempt.now_s() >= attempt.lease_due_s

    def _closing(self, name: str, *, writes: bool = True) -> _Closing:
        return _Closing(self, name, writes=writes)

    def _warn_of_time_before(self) -> None:
        """In debug mode, point at work that every attempt repeats."""
        passed_s = self._attempt.now_s() - self._began_s
        if os.environ.get("HEADGATE_DEBUG") == "1" and passed_s > IDLE_BEFORE_STEPS_S:
            logger.warning(
                "job %s (queue %s): %d ms passed outside of steps before the first "
                "step that runs; every attempt repeats that",
                self._attempt.lease.job_id,
                self._attempt.claim.envelope.queue,
                int(passed_s * 1000),
            )


class _Closing:
    """Ends an open step by how its block ends."""

    def __init__(self, steps: Steps, name: str, *, writes: bool = True) -> None:
        self._steps = steps
        self._name = name
        self._writes = writes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._steps.close(self._name, failed=kind is not None, writes=self._writes)


class StepBlock:
    """A step as a block; the block runs either way, so it asks: `if run: ...`."""

    def __init__(self, steps: Steps, name: str) -> None:
        self._steps = steps
        self._name = name
        self._runs = False

    def __enter__(self) -> bool:
        self._runs = self._steps.enter(self._name)
        return self._runs

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._runs:
            self._runs = False
            self._steps.close(self._name, failed=kind is not None)


class CursorStep:
    """A step that remembers how far it has come.

    True inside its block unless an earlier attempt completed the step.

    Attributes:
        value: the position that was saved last; None at the beginning.
    """

    def __init__(self, steps: Steps, name: str, codec: Codec = JSON) -> None:
        self._steps = steps
        self._name = name
        self._codec = codec
        self._runs = False
        self.value: Any = None

    def __bool__(self) -> bool:
        return self._runs

    def __enter__(self) -> CursorStep:
        self._runs = self._steps.enter(self._name, cursor=True)
        if self._runs:
            try:
                data = self._steps._context.last_checkpoint.cursor
                self.value = None if data is None else self._codec.decode(data)
            except BaseException:
                self._end(failed=True)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._runs:
            self._end(failed=kind is not None)

    def _end(self, *, failed: bool) -> None:
        self._runs = False
        self._steps.close(self._name, failed=failed)

    def set(self, value: Any) -> None:
        """Save a position, durable when this returns.

        Raises:
            InvalidRequest: the codec cannot write the value, it is over 1 MiB, or the
                block is not running.
            LeaseLost: the job is not held any more.
        """
        self._steps._context.check()
        self.save(value)

    def save(self, value: Any) -> None:
        """Like `set`, also when the attempt has to stop."""
        if not self._runs:
            raise InvalidRequest(f"step {self._name} does not run: no position to save")
        try:
            data = self._codec.encode(value)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"step {self._name}: cursor: {error.message}"
            ) from error
        last = self._steps._context.last_checkpoint
        self._steps.save(evolve(last, cursor_step=self._name, cursor=data))
        self.value = value
