"""When to ask for work, and the asking."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from typing import Any

from headgate_sync.attempt import LiveAttempt
from headgate_sync.errors import StoreClosed, StoreError
from headgate_sync.lease import AdmissionBatch, AdmitRequest
from headgate_sync.loggers import guarded
from headgate_sync.policy import next_delay
from headgate_sync.store import Store
from headgate_sync.telemetry import AdmissionMade, Admitted, Rejected
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.health import Pulse
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.reporting import Emitter

logger = guarded(__name__)

NEVER_S = float("inf")
GATHER_MS = 5  # after a wake-up that brought work; what comes meanwhile is one question
POLL_WINDOW = 128
_WINDOW_BITS = (1 << POLL_WINDOW) - 1


class Admission:
    """Decides when the next admit is due, and turns its answer into attempts.

    Used by one thread; `notice`, `slot_freed` and `quiet` may be used by any, which
    then has to nudge that thread. The due instant is absolute: being woken for
    something else never postpones it.

    Attributes:
        quiet: set to ask for nothing.
        due_s: local instant of the next admit.
        answered: the store has answered an admit.

    Args:
        hand_over: gets fresh claims; takes their slots and gives them to threads.
        invite: how many claims to ask for when that many slots are free.
        notified: the store sends wake-ups, and only to workers that it knows to sleep.
        uniform: chance in [0, 1).
    """

    def __init__(
        self,
        store: Store,
        config: WorkerConfig,
        inflight: InFlight,
        worker_id: str,
        hand_over: Callable[[list[LiveAttempt]], None],
        *,
        now_s: Callable[[], float],
        producer: Callable[[], Any] | None = None,
        invite: Callable[[int], int] = lambda slots: slots,
        notified: bool = False,
        pulse: Pulse | None = None,
        emit: Emitter | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._inflight = inflight
        self._worker_id = worker_id
        self._hand_over = hand_over
        self._queues = config.queues
        self._lease_ms = config.lease_ms
        self._quantum = config.quantum
        self._poll = config.poll
        self._now_s = now_s
        self._producer = producer
        self._invite = invite
        self._notified = notified
        self._pulse = pulse or Pulse(config.poll.ceiling_ms / 1000)
        self._emit = emit
        self._uniform = uniform
        # Fresh per process, so that a restarted worker that keeps its id never repeats
        # a lease id of its former life.
        self._nonce = secrets.token_hex(4)
        self._calls = 0
        self._empty = 0  # one bit for each of the last admits, set where it was empty
        self._delay_ms = self._poll.floor_ms
        self._noticed = False
        self._deaf_until_s = float("-inf")
        self._freed = False
        self._asleep = False
        self._was_quiet = False
        self.quiet = False
        self.answered = False
        self.due_s = now_s()

    def notice(self) -> None:
        """A queue may have got work: a hint, whose loss or repetition costs no job."""
        self._noticed = True

    def slot_freed(self) -> None:
        """A slot became free, or an ack was taken that may let other work run."""
        self._freed = True

    def step(self) -> float:
        """Ask if it is time; returns the local instant of the next question."""
        if self.due() <= self._now_s():
            self.poll()
        if self.due_s == NEVER_S:
            self._pulse.rest()
        else:
            self._pulse.expect(self._now_s())
        return self.due_s

    def polled(self) -> tuple[int, int]:
        """How many of the last 128 admits there were, and how many brought nothing."""
        return min(self._calls, POLL_WINDOW), self._empty.bit_count()

    def due(self) -> float:
        """The local instant of the next question, with what was heard until now."""
        if self.quiet:
            self._was_quiet, self.due_s = True, NEVER_S
            return self.due_s
        if self._was_quiet:
            self._was_quiet, self.due_s = False, self._now_s()
        if self._freed:
            self._freed = False
            if self._inflight.hungry:
                self.due_s = self._now_s()
            elif self._inflight.unfilled:
                # The store may have held jobs back until this one was over.
                self.due_s = min(self.due_s, self._gather())
        if self._noticed:
            self.due_s = min(self.due_s, self._gather())
        return self.due_s

    def _gather(self) -> float:
        return max(self._now_s(), self._deaf_until_s)

    def poll(self) -> None:
        """Ask once, unless no claim is wanted, and hand over what was admitted.

        An error of the store is logged and counts as an empty answer.

        Raises:
            StoreClosed: no question will be answered any more.
        """
        # Set before the slots are counted: one that is freed in between is heard of.
        self._inflight.hungry = True
        free = self._invite(self._inflight.free)
        if free <= 0:
            self.due_s = NEVER_S
            return
        self._inflight.hungry = False
        self._inflight.unfilled = True  # an ack that lands meanwhile is heard of, too
        woke, self._noticed = self._noticed, False
        asked_s = self._now_s()
        try:
            batch, attempts = self.ask(free)
        except StoreClosed:
            raise
        except StoreError as error:
            logger.warning("admit failed, tried again later: %s", error)
            self._pulse.failed(error)
            self._count(empty=True)
            self._wait(0, woke=False)
            return
        self.answered = True
        answered_s = self._now_s()
        self._pulse.good(answered_s)
        # Handed over before anything else: a claim that got lost here would keep its
        # lease and never run.
        if attempts:
            self._hand_over(attempts)
        if self._emit is not None:
            for attempt in attempts:
                self._emit(Admitted(queue=attempt.claim.envelope.queue))
            for gone in batch.sent_away:
                self._emit(
                    Rejected(queue=gone.queue, policy=gone.policy, count=gone.count)
                )
            self._emit(
                AdmissionMade(
                    worker=self._worker_id,
                    asked=free,
                    admitted=len(attempts),
                    refused=batch.refused,
                    ms=1000 * (answered_s - asked_s),
                )
            )
        self._count(empty=not attempts)
        self._wait(len(attempts), woke=woke, retry_after_ms=batch.retry_after_ms)
        if len(attempts) >= free:
            self.due_s = self._now_s()  # there is probably more
            self._asleep = self._inflight.unfilled = False
        elif not self._asleep and batch.retry_after_ms is None:
            # This answer made the store note that the worker waits for work. What was
            # committed just before was signalled to nobody: one more look. (An answer
            # with an instant may come from a store too busy to note anything.)
            self._asleep = True
            if self._notified:
                self.due_s = self._now_s()

    def _count(self, *, empty: bool) -> None:
        self._empty = ((self._empty << 1) | empty) & _WINDOW_BITS

    def ask(self, free: int) -> tuple[AdmissionBatch, list[LiveAttempt]]:
        """Ask the store once; returns its answer, and the attempts of its claims.

        Raises:
            StoreError: as `Store.admit`.
        """
        self._calls += 1
        sent_s = self._now_s()
        batch = self._store.admit(
            AdmitRequest(
                worker=self._worker_id,
                lease_id=f"{self._worker_id}:{self._nonce}:{self._calls}",
                queues=self._queues,
                capacity=free,
                lease_ms=self._lease_ms,
                quantum=self._quantum,
            )
        )
        return batch, self._attempts(batch, sent_s)

    def _attempts(self, batch: AdmissionBatch, sent_s: float) -> list[LiveAttempt]:
        returned_s = self._now_s()
        # Counted from the sending: the store may have set the lease right then.
        lease_due_s = sent_s + self._lease_ms / 1000
        return [
            LiveAttempt(
                claim,
                self._store,
                lease_due_s=lease_due_s,
                returned_s=returned_s,
                now_s=self._now_s,
                producer=self._producer,
            )
            for unit in batch.units
            for claim in unit.claims
        ]

    def _wait(
        self, admitted: int, *, woke: bool, retry_after_ms: int | None = None
    ) -> None:
        """Set the next due instant after an answer."""
        now_s = self._now_s()
        delay = next_delay(
            admitted,
            woke,
            self._delay_ms,
            self._poll,
            draw=self._uniform(),
            retry_after_ms=retry_after_ms,
        )
        self._delay_ms = delay.base_ms
        self.due_s = now_s + delay.wait_ms / 1000
        if woke:
            # What is signalled in the next moments is looked at once, at their end.
            pause_ms: float = GATHER_MS
            if not admitted:
                # The wake-up went to every idle worker and the work to another one.
                pause_ms = self._poll.floor_ms * (0.5 + 0.5 * self._uniform())
            self._deaf_until_s = now_s + pause_ms / 1000
