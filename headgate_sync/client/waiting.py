"""Waiting for the end of jobs: one reader for all threads that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import field, frozen

from headgate_sync.errors import (
    JobFailed,
    StoreUnavailable,
    Unsupported,
    may_pass,
)
from headgate_sync.events import EventBus, JobEvent
from headgate_sync.inspection import MAX_JOBS, Inspect, JobSummary
from headgate_sync.lease import JobResult
from headgate_sync.lifecycle import TERMINAL, State
from headgate_sync.store import Store
from headgate_sync.task import FunctionTask, Task

if TYPE_CHECKING:
    from headgate_sync.registry import Registry

READ_INTERVAL_S = 0.1

Reader = Callable[[JobResult], Any]
R = TypeVar("R")


def as_bytes(result: JobResult) -> object:
    """The result as it is stored, where nobody here knows how to read it."""
    return result.data


@frozen(kw_only=True)
class Completion(Generic[R]):
    """How a job ended.

    Attributes:
        state: a terminal state, or `deleted` for a job whose row is gone: it succeeded
            with a retention of 0, was revoked, or was deleted.
        error: of the newest attempt, unless the job succeeded.
    """

    job_id: str
    state: State
    error: str | None = None
    _load: Callable[[], JobResult | None] = field(
        default=lambda: None, repr=False, eq=False
    )
    _read: Reader = field(default=as_bytes, repr=False, eq=False)

    @property
    def result(self) -> JobResult | None:
        """The stored result; None without one."""
        return self._load()

    @property
    def value(self) -> R | None:
        """What the handler returned; None without a result.

        Bytes as they are stored, where this program declares no handler of the kind.

        Raises:
            MalformedPayload: the stored bytes are none of the handler's results.
        """
        result = self._load()
        if result is None:
            return None
        value: R = self._read(result)
        return value

    @property
    def succeeded(self) -> bool:
        """Whether the job is `completed`, or its row is gone."""
        return self.state in (State.COMPLETED, State.DELETED)

    def unwrap(self) -> R | None:
        """The value.

        Raises:
            JobFailed: the job did not succeed.
        """
        if not self.succeeded:
            raise JobFailed(self)
        return self.value

    def loaded(self) -> Completion[R]:
        """The same with its result read now, before retention can take it away."""
        result = self._load()
        return Completion(
            job_id=self.job_id,
            state=self.state,
            error=self.error,
            load=lambda: result,
            read=self._read,
        )

    def __reduce__(self) -> tuple[object, ...]:
        # A failure that names it must reach another process, where no store is open.
        return _arrived, (self.job_id, self.state, self.error)


def _arrived(job_id: str, state: State, error: str | None) -> Completion[Any]:
    return Completion(job_id=job_id, state=state, error=error)


def reader_of(kind: str, task: Task | None, registry: Registry | None) -> Reader:
    """How results of a kind are read: as its handler here says."""
    from headgate_sync.binder import bind

    binding = None if registry is None else registry.resolve(kind)
    if binding is None and isinstance(task, FunctionTask):
        binding = bind(task, task.handler)
    return as_bytes if binding is None else binding.decode_result


def completion_of(
    store: Store, job_id: str, found: JobSummary | None, read: Reader
) -> Completion[Any]:
    """The completion of a job that was read after its insert; None is a deleted row.

    The result is read when it is asked for.
    """
    if found is None:
        return Completion(job_id=job_id, state=State.DELETED)
    state = State(found.state)
    if state is not State.COMPLETED:
        error = found.errors[-1].error if found.errors else None
        return Completion(job_id=job_id, state=state, error=error)

    def load() -> JobResult | None:
        return None if store.results is None else store.results.read_result(job_id)

    return Completion(job_id=job_id, state=state, load=load, read=read)


def inspection_of(store: Store) -> Inspect:
    """What jobs are read through.

    Raises:
        Unsupported: this store cannot be inspected.
    """
    if store.inspect is None:
        raise Unsupported("inspect")
    return store.inspect


def is_over(found: JobSummary | None) -> bool:
    """Whether nothing more will happen to the job by itself."""
    return found is None or State(found.state) in TERMINAL


class Pace:
    """The time that waits are made of; tests step another one."""

    def now_s(self) -> float:
        """Seconds that never step back."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait on a condition that the caller holds."""
        changed.wait(min(seconds, threading.TIMEOUT_MAX))

    def sit_out(self, read: Callable[[], R], until_s: float) -> R:
        """What a call that only reads gives, as soon as an outage lets it.

        Raises:
            StoreUnavailable: the newest, at `until_s`; of a closed store at once.
        """
        rest = threading.Condition()
        while True:
            try:
                return read()
            except StoreUnavailable as fault:
                left_s = until_s - self.now_s()
                if not may_pass(fault) or left_s <= 0:
                    raise
            with rest:
                self.wait(rest, min(READ_INTERVAL_S, left_s))


class Watch:
    """Finds out when jobs are over.

    Each waiting thread reads its own job once. From then on one of them, whoever comes
    first, reads all the jobs that are waited for together, every 100 ms: the database
    is asked as often for many waiters as for one. The jobs of which the bus of this
    process tells that they ended are read at once.

    Args:
        inspect: reads jobs.
        pace: the time.
        bus: finds what tells about workers of this process, if anything does.
    """

    def __init__(
        self,
        inspect: Inspect,
        *,
        pace: Pace | None = None,
        bus: Callable[[], EventBus | None] = lambda: None,
    ) -> None:
        self._inspect = inspect
        self.pace = pace or Pace()
        self._bus = bus
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: dict[str, int] = {}  # threads by the job they wait for
        self._over: dict[str, JobSummary | None] = {}  # of jobs that are waited for
        self._told: set[str] = set()  # waited for, and ended as the bus says
        self._heard: EventBus | None = None  # listened to while anybody waits
        self._led = False  # one of the waiting threads reads for all
        self._read_due_s = 0.0
        self._fault: StoreUnavailable | None = None  # of the newest read

    def now_s(self) -> float:
        """The clock of `until_s`."""
        return self.pace.now_s()

    def wait(
        self, job_id: str, until_s: float, check: Callable[[], None] = lambda: None
    ) -> JobSummary | None:
        """Wait until a stored job is over.

        An outage is waited out, as far as the time goes.

        Args:
            job_id: of a job that was stored.
            until_s: the end of the wait.
            check: called after each read; what it raises ends the wait.

        Returns:
            The job, or None when its row is gone.

        Raises:
            TimeoutError: it is not over at `until_s`; the cause is an outage, if one
                kept it from being read.
            StoreClosed: nobody will read any more.
        """
        self._enter(job_id)
        try:
            self._read([job_id])
            while True:
                check()
                with self._changed:
                    if job_id in self._over:
                        return self._over[job_id]
                    left_s = until_s - self.pace.now_s()
                    if left_s <= 0:
                        raise TimeoutError(job_id) from self._fault
                    if self._led:
                        self.pace.wait(self._changed, left_s)
                        continue
                    self._led = True
                self._lead(until_s)
        finally:
            self._leave(job_id)

    def _enter(self, job_id: str) -> None:
        with self._changed:
            if not self._waiting:
                # The own read that follows is the first of this series.
                self._read_due_s = self.pace.now_s() + READ_INTERVAL_S
                self._heard = self._bus()
                if self._heard is not None:
                    self._heard.attach(self._hear)
            self._waiting[job_id] = self._waiting.get(job_id, 0) + 1

    def _leave(self, job_id: str) -> None:
        with self._changed:
            self._waiting[job_id] -= 1
            if not self._waiting[job_id]:
                del self._waiting[job_id]
                self._over.pop(job_id, None)
                self._told.discard(job_id)
            if not self._waiting and self._heard is not None:
                self._heard.detach(self._hear)

    def _hear(self, event: JobEvent) -> None:
        if event.state not in TERMINAL and event.state is not State.DELETED:
            return
        with self._changed:
            if event.job_id in self._waiting:
                self._told.add(event.job_id)
                self._changed.notify_all()

    def _lead(self, until_s: float) -> None:
        """Wait for the next read, and make it for all who wait by then."""
        try:
            with self._changed:
                end_s = min(self._read_due_s, until_s)
                while not self._told and (left_s := end_s - self.pace.now_s()) > 0:
                    self.pace.wait(self._changed, left_s)
                if self.pace.now_s() < end_s:
                    wanted = iter([*self._told])
                elif end_s == until_s and not self._told:
                    return
                else:
                    wanted = iter([*self._waiting])
                    self._read_due_s = self.pace.now_s() + READ_INTERVAL_S
                self._told.clear()
            while ids := list(islice(wanted, MAX_JOBS)):
                self._read(ids)
        finally:
            with self._changed:
                self._led = False
                self._changed.notify_all()

    def _read(self, ids: list[str]) -> None:
        # Every id was stored before it came here, so an absent row is a deleted one.
        try:
            found = {job.id: job for job in self._inspect.get_jobs(ids)}
        except StoreUnavailable as fault:
            if not may_pass(fault):
                raise
            with self._changed:
                self._fault = fault
            return
        with self._changed:
            self._fault = None
            for job_id in ids:
                if job_id in self._waiting and is_over(found.get(job_id)):
                    self._over[job_id] = found.get(job_id)
            self._changed.notify_all()
