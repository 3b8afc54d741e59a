"""Jobs of one kind that wait for each other and then share one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from headgate_sync.attempt import AttemptFault, LiveAttempt
from headgate_sync.binding import BatchJob, Binding
from headgate_sync.cancel import exception_for
from headgate_sync.context import JobContext
from headgate_sync.injection import Dependencies
from headgate_sync.loggers import guarded
from headgate_sync.worker.around import enter_around

if TYPE_CHECKING:
    from headgate_sync.worker.runner import Runner

logger = guarded(__name__)


@frozen(eq=False)
class Member:
    """One job that waits or runs with others; its payload is decoded."""

    attempt: LiveAttempt
    context: JobContext
    args: Any


@frozen(eq=False)
class Chunk:
    """Jobs for one call."""

    binding: Binding
    members: Sequence[Member]


@define(eq=False)
class _Pending:
    """What waits for one handler; `due_s` is set by the first that came."""

    binding: Binding
    due_s: float
    members: list[Member] = field(factory=list)


class Batches:
    """Puts jobs together, and runs what is together.

    A waiting job has a slot and no thread. The thread that brings the last job of a
    full chunk runs it; a chunk whose time is up is handed out by the watchdog.

    Args:
        opened: called, outside of the lock, when a chunk begins to wait.

    Attributes:
        opened: as above; set by the worker, which makes the watchdog later.
    """

    def __init__(
        self, runner: Runner, *, capacity: int, now_s: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._capacity = capacity
        self._now_s = now_s
        self._lock = threading.Lock()  # guards the two fields below
        self._pending: dict[str, _Pending] = {}  # by main kind
        self._closed = False
        self.opened: Callable[[], None] = lambda: None

    def take(self, binding: Binding, attempt: LiveAttempt) -> bool:
        """Let a claim wait, or run the chunk that it makes full.

        Returns:
            Whether the caller must let the ack box fly.
        """
        context = self._runner.open_context(binding, attempt)
        try:
            arguments = self._runner.within(
                context, binding.decode, attempt.claim.envelope
            )
        except BaseException as error:  # the boundary around user code
            self._runner.leave(attempt, context)
            self._runner.reraise(error)
            return self._runner.settle(
                attempt, self._runner.judge_raised(binding, attempt, error)
            )
        (args,) = arguments.values()
        attempt.thread_id = None  # until the call
        chunk, opened = self._add(binding, Member(attempt, context, args))
        if opened:
            self.opened()
        return chunk is not None and self.run(chunk)

    def _add(self, binding: Binding, member: Member) -> tuple[Chunk | None, bool]:
        assert binding.batch is not None
        size = min(binding.batch.max_size, self._capacity)
        with self._lock:
            waiting = self._pending.get(binding.kind)
            opened = waiting is None
            if waiting is None:
                due_s = self._now_s() + binding.batch.max_delay_ms / 1000
                waiting = self._pending[binding.kind] = _Pending(binding, due_s)
            waiting.members.append(member)
            if len(waiting.members) < size and not self._closed:
                return None, opened
            del self._pending[binding.kind]
        return Chunk(binding, waiting.members), False

    def due(self) -> tuple[list[Chunk], float]:
        """Chunks that must not wait longer, and when the next one is due.

        Jobs that were cancelled meanwhile leave those they waited with.
        """
        now_s, due_s = self._now_s(), float("inf")
        chunks: list[Chunk] = []
        with self._lock:
            for kind, waiting in list(self._pending.items()):
                if waiting.due_s <= now_s:
                    del self._pending[kind]
                    chunks.append(Chunk(waiting.binding, waiting.members))
                    continue
                over = [m for m in waiting.members if m.attempt.token.stopped]
                if over:
                    chunks.append(Chunk(waiting.binding, over))
                    waiting.members = [m for m in waiting.members if m not in over]
                if waiting.members:
                    due_s = min(due_s, waiting.due_s)
                else:
                    del self._pending[kind]
        return chunks, due_s

    def close(self) -> list[Chunk]:
        """Let nothing wait any more; returns what did."""
        with self._lock:
            self._closed = True
            waiting, self._pending = [*self._pending.values()], {}
        return [Chunk(each.binding, each.members) for each in waiting]

    def run(self, chunk: Chunk) -> bool:
        """Call the handler for those that still want it, and leave their acks.

        Returns:
            Whether the caller must let the ack box fly.

        Raises:
            BaseException: what the handler raised, if that ends the thread.
        """
        must_fly: list[bool] = []
        try:
            self._run(chunk, must_fly)
        except BaseException:
            # Whoever brought the last job does not know the others; and acks that were
            # left here would wait for ever.
            self.forget(chunk.members)
            if any(must_fly):
                self._runner.fly()
            raise
        return any(must_fly)

    def _run(self, chunk: Chunk, must_fly: list[bool]) -> None:
        binding = chunk.binding
        running: list[Member] = []
        for member in chunk.members:
            member.attempt.thread_id = threading.get_ident()
            reason = member.attempt.token.reason
            if reason is None:
                running.append(member)
            else:
                error = exception_for(reason, member.attempt.lease.job_id)
                must_fly.append(self._end(binding, member, error))
        if not running:
            return
        try:
            values = self._call(binding, running)
        except BaseException as error:  # the boundary around user code
            self._runner.reraise(error)
            values = [error] * len(running)
        # Taken out one by one: an exception and the frame that keeps it would else keep
        # each other, and all that the handler held, for the collector.
        for member in running:
            flies = self._end(binding, member, values.pop(0))
            must_fly.append(flies)

    def forget(self, members: Sequence[Member]) -> None:
        """Leave jobs that are not settled to the reclaimer."""
        for member in members:
            member.context.end_tracked(failed=True, patience_s=self._runner.patience_s)
            self._runner.leave(member.attempt, member.context)
            self._runner.abandon(member.attempt)

    def decline(self, chunk: Chunk) -> None:
        """Hand jobs back that found no thread, from one that must not wait."""
        for member in chunk.members:
            self._runner.leave(member.attempt, member.context)
        self._runner.decline(member.attempt for member in chunk.members)

    def _call(self, binding: Binding, members: Sequence[Member]) -> list[Any]:
        jobs = [
            BatchJob(member.context, member.attempt.claim.envelope, member.args)
            for member in members
        ]
        contexts = tuple(job.ctx for job in jobs)
        return self._runner.within(contexts, self._enter, binding, jobs)

    def _enter(self, binding: Binding, jobs: list[BatchJob[Any]]) -> list[Any]:
        entered = Dependencies()
        envelopes = [job.envelope for job in jobs]
        try:
            enter_around(self._runner.around, entered)
            values = _entries(binding.call_batch(jobs), len(jobs))
        except BaseException as error:
            entered.close(error, envelopes)
            raise
        try:
            entered.close(None, envelopes)
            return values
        finally:
            del values  # an exception among them would keep this frame, and it that

    def _end(self, binding: Binding, member: Member, value: object) -> bool:
        """Settle one job by its entry."""
        attempt, context = member.attempt, member.context
        try:
            context.end_tracked(
                failed=isinstance(value, BaseException),
                patience_s=self._runner.patience_s,
            )
            if not isinstance(value, BaseException):
                value = self._runner.result_of(binding, attempt, context, value)
        except BaseException as error:  # a tracked thread's, or of the result's codec
            value = error
        self._runner.leave(attempt, context)
        verdict = self._runner.judge(binding, attempt, value)
        value = None  # see `run`
        return self._runner.settle(attempt, verdict)


def _entries(values: object, count: int) -> list[Any]:
    """One entry per job, or the fault that there is not."""
    if isinstance(values, list | tuple):
        if len(values) == count:
            return [*values]
        got = f"{len(values)} results"
    else:
        got = type(values).__name__
    raise AttemptFault(f"batch handler returned {got} for {count} jobs")
