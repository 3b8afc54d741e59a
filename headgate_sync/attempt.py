"""The record of one running claim, shared by the threads of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headgate_sync.cancel import CancelReason, CancelToken
from headgate_sync.errors import LeaseLost
from headgate_sync.lease import Claim
from headgate_sync.store import Store

if TYPE_CHECKING:
    from headgate_sync.binding import RetryPolicy
    from headgate_sync.context import JobContext
    from headgate_sync.interrupt import Interrupt
    from headgate_sync.loglines import LogBuffer

_OPEN = nullcontext()


class AttemptFault(Exception):
    """What the worker itself finds wrong with an attempt; its text says it all."""


class Settlement(StrEnum):
    """How a handler itself settled its job, so that the worker sends no ack."""

    COMPLETED = "completed"
    RELEASED = "released"


class LiveAttempt:
    """One claim while this worker holds it; the record that all its threads share.

    Plain fields are written by one thread at a time: the admission loop before hand-
    over, then the handler thread. What other threads write is guarded by the in-flight
    table's lock: `lease_due_s`, `doubtful`, `renewing`, `settled`, `returned`,
    `airborne`, `concluded`.

    Attributes:
        returned_s: local instant at which the admit returned; with `claimed_at_ms` of
            the claim it gives store time without asking the store.
        begun_s: local instant from which its time counts: the same, unless it waited
            for a thread.
        timeout_ms: limit of this attempt, 0 for none; `timeout_due_s` is its local end.
        deadline_cut: the limit comes from the job's deadline, not from its timeout.
        lease_due_s: when the lease runs out unless it is confirmed before.
        extended_due_s: until when the handler asked to keep the lease.
        completing: a transaction that completes the job is being committed.
        in_once: its handler is inside of `once`.
        in_doubt: the reply to that commit was lost.
        finished: the handler settled the job itself.
        retry: the handler's own policy, known once it runs.
        capture: collects log records for this attempt into `logs`; None does not.
        span: what telemetry sinks keep for the attempt until its end.
        interrupt: of a handler that may be struck by an exception.
        kill: ends the process that runs the handler at once, from any thread; None
            where there is none, or none any more.
        renewing: the heartbeat extends the lease.
        settled: somebody decided the outcome; later results are dropped.
        returned: the handler's thread is free again.
        airborne: its ack is on its way and its slot is free.
        concluded: no ack is under way.
    """

    __slots__ = (
        "actual_weight",
        "airborne",
        "begun_s",
        "capture",
        "claim",
        "completing",
        "concluded",
        "context",
        "deadline_cut",
        "doubtful",
        "extended_due_s",
        "finished",
        "in_doubt",
        "in_once",
        "interrupt",
        "kill",
        "lease",
        "lease_due_s",
        "logs",
        "now_s",
        "producer",
        "renewing",
        "retry",
        "returned",
        "returned_s",
        "settled",
        "span",
        "store",
        "stuck_reported",
        "thread_id",
        "timeout_due_s",
        "timeout_ms",
        "token",
        "token_set_s",
    )

    def __init__(
        self,
        claim: Claim,
        store: Store,
        *,
        lease_due_s: float,
        returned_s: float,
        now_s: Callable[[], float] = time.monotonic,
        producer: Callable[[], Any] | None = None,
    ) -> None:
        self.claim = claim
        self.lease = claim.lease_ref
        self.store = store
        self.now_s = now_s
        self.producer = producer
        self.token = CancelToken()
        self.returned_s = self.begun_s = returned_s
        self.lease_due_s = lease_due_s
        self.extended_due_s = 0.0
        self.token_set_s: float | None = None
        self.actual_weight: int | None = None
        self.context: JobContext | None = None
        self.capture: object | None = None
        self.logs: LogBuffer | None = None
        self.span: tuple[object, ...] = ()
        self.interrupt: Interrupt | None = None
        self.kill: Callable[[], None] | None = None
        self.thread_id: int | None = None
        self.retry: RetryPolicy | None = None
        self.finished: Settlement | None = None
        self.completing = self.in_once = self.in_doubt = self.doubtful = False
        self.settled = self.returned = self.concluded = self.stuck_reported = False
        self.airborne = False
        self.renewing = True
        self._set_limit()

    def wait(self) -> None:
        """No thread is free for it: its time does not count before it begins."""
        self.timeout_due_s = float("inf")

    def begin(self) -> None:
        """It waited, and has a thread from now on."""
        self.begun_s = self.now_s()
        self._set_limit()

    def never_begin(self) -> None:
        """No handler will run it: no rate is used, and nothing of its time passed."""
        self.actual_weight = 0
        self.begun_s = self.now_s()

    def store_now_ms(self) -> int:
        """Store time, from the claim's instant and the time since it arrived."""
        return self._store_ms(self.now_s())

    @property
    def begun_at_ms(self) -> int:
        """Store time at which its time began."""
        return self._store_ms(self.begun_s)

    def _store_ms(self, local_s: float) -> int:
        return self.claim.claimed_at_ms + int((local_s - self.returned_s) * 1000)

    def _set_limit(self) -> None:
        self.timeout_ms, self.deadline_cut = self._limit()
        self.timeout_due_s = (
            self.begun_s + self.timeout_ms / 1000 if self.timeout_ms else float("inf")
        )

    def _limit(self) -> tuple[int, bool]:
        envelope = self.claim.envelope
        if not envelope.deadline_ms:
            return envelope.timeout_ms, False
        left_ms = envelope.deadline_ms - self.begun_at_ms
        if left_ms <= 0 or 0 < envelope.timeout_ms <= left_ms:
            return envelope.timeout_ms, False
        return left_ms, True

    def shielded(self) -> AbstractContextManager[None]:
        """A block that no exception from outside interrupts."""
        return _OPEN if self.interrupt is None else self.interrupt.shield()

    def exposed(self) -> AbstractContextManager[None]:
        """A block inside of that which one may interrupt: the handler's own code."""
        return _OPEN if self.interrupt is None else self.interrupt.exposed()

    def cancel(self, reason: CancelReason) -> bool:
        """Set the token and note when, for the watch on stuck handlers."""
        if not self.token.set(reason):
            return False
        self.token_set_s = self.now_s()
        return True

    def lose(self) -> LeaseLost:
        """Note that the store refused a write; returns what to raise."""
        self.renewing = False
        self.cancel(CancelReason.LEASE_LOST)
        return LeaseLost(f"job {self.lease.job_id} is held by nobody here any more")
