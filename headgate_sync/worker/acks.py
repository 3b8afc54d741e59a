"""Acks on their way to the store, coalesced without a timer and without a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, evolve
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_when_event_set,
)

from headgate_sync.attempt import LiveAttempt
from headgate_sync.errors import (
    LeaseRejected,
    StoreError,
    StoreUnavailable,
    may_pass,
)
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.loggers import guarded
from headgate_sync.store import Store
from headgate_sync.validation import MAX_ACKS, MAX_BATCH_BYTES
from headgate_sync.worker.inflight import InFlight

logger = guarded(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
RESULT_NOT_STORED = "result could not be stored"
_REMOVING = (Outcome.SUCCESS, Outcome.REVOKE)  # may delete the row they settle


@define(eq=False)
class Outgoing:
    """An ack that is not settled yet.

    Attributes:
        tries: calls that carried it without an answer, after which it is undecided.
        plain: it is sent again without what the store refused.
    """

    attempt: LiveAttempt
    ack: Ack
    tries: int = 0
    plain: bool = False

    @property
    def size_bytes(self) -> int:
        """What it counts towards the size of a call."""
        ack = self.ack
        size = sum(map(len, ack.logs))
        if ack.result is not None:
            size += len(ack.result.data)
        if ack.error is not None:
            size += len(ack.error)
        return size


class AckBox:
    """Sends acks; those that get ready while a call is under way share the next one.

    The thread that finds no call under way becomes the pilot: it sends what waits, its
    own ack included, until nothing waits any more. The others leave their ack here and
    go on. So an ack waits at most for the call that is under way. The slots of a call
    are free as soon as it is sent: the next claims are fetched while the acks are on
    their way.

    While the store does not answer, the undecided acks are sent again until the lease
    of each has run out locally; then the reclaimer decides. So are those whose rows
    another transaction holds locked, but apart from the others.

    Args:
        accepted: called with each attempt and ack that the store took; true when the
            caller frees the slot later.
        lost: called with each attempt whose ack the store refused for good.
        failed: called with each attempt whose ack is given up, or with None when a
            call is repeated, and with the error.
    """

    def __init__(
        self,
        store: Store,
        inflight: InFlight,
        *,
        now_s: Callable[[], float],
        accepted: Callable[[LiveAttempt, Ack], bool | None] = lambda attempt, ack: None,
        lost: Callable[[LiveAttempt], None] | None = None,
        failed: Callable[[LiveAttempt | None, BaseException], None] | None = None,
    ) -> None:
        self._store = store
        self._inflight = inflight
        self._now_s = now_s
        self._accepted = accepted
        self._lost = lost
        self._failed = failed
        self._lock = threading.Lock()  # guards the two fields below
        self._waiting: deque[Outgoing] = deque()
        self._flying = False
        self._aboard: list[Outgoing] = []  # the pilot's alone: not judged yet
        self._outages = 0  # the pilot's too: calls in a row without an answer
        self._insists = False  # a box for acks whose rows are locked
        self._given_up = threading.Event()
        self._retrying = Retrying(
            retry=retry_if_exception(may_pass),
            wait=self._pause_s,
            stop=stop_when_event_set(self._given_up),
            sleep=sleep_using_event(self._given_up),
            reraise=True,
        )

    def submit(self, attempt: LiveAttempt, ack: Ack) -> bool:
        """Leave an ack; True when the caller must see to it that `fly` is called."""
        with self._lock:
            self._waiting.append(Outgoing(attempt, ack))
            if self._flying:
                return False
            self._flying = True
            return True

    def submit_apart(self, attempt: LiveAttempt, ack: Ack) -> None:
        """Leave an ack from a thread that should not wait for the store."""
        if not self.submit(attempt, ack):
            return
        try:
            threading.Thread(target=self.fly, name="headgate-ack", daemon=True).start()
        except RuntimeError as error:
            # All others rely on this flight: a late watchdog is the smaller evil.
            logger.error("acks are sent without a thread of their own: %s", error)
            self.fly()

    def give_up(self) -> None:
        """Send nothing again that stays unanswered; for the end of the worker."""
        self._given_up.set()

    def fly(self) -> None:
        """Send everything that waits; called once for each `submit` that says so."""
        try:
            try:
                self._fly()
            except StoreUnavailable:
                self._retrying(self._fly)
        except BaseException as error:
            with self._lock:
                # Before another thread takes off: this flight's list is not its own.
                left = [*self._aboard, *self._waiting]
                self._aboard = []
                self._waiting.clear()
                self._flying = False
            self._abandon(left, error)
            if not isinstance(error, StoreUnavailable):
                raise

    def _pause_s(self, state: RetryCallState) -> float:
        # One flight may go on for as long as acks come, and meet many an outage: what
        # was answered meanwhile begins the pauses anew.
        doublings = min(max(self._outages - 2, 0), 10)
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)

    def _fly(self) -> None:
        while flight := self._next_flight():
            self._aboard = flight
            try:
                answers = self._send(flight)
            except StoreUnavailable as error:
                if self._wait_again(flight, error):
                    raise
            else:
                self._land(flight, answers)

    def _send(self, flight: list[Outgoing]) -> Sequence[Exception | None]:
        self._inflight.take_off(out.attempt for out in flight)
        try:
            return self._store.ack_batch([out.ack for out in flight])
        except StoreUnavailable:
            raise
        except Exception as error:
            # Refused as a whole, which the port does not foresee: each on its own.
            return [error] * len(flight)

    def _next_flight(self) -> list[Outgoing]:
        flight: list[Outgoing] = []
        self._aboard = []
        size_bytes = 0
        with self._lock:
            waiting = self._waiting
            while waiting and len(flight) < MAX_ACKS:
                size_bytes += waiting[0].size_bytes
                if flight and size_bytes > MAX_BATCH_BYTES:
                    break
                flight.append(waiting.popleft())
            if not flight:
                self._flying = False
        return flight

    def _wait_again(self, flight: list[Outgoing], error: StoreUnavailable) -> bool:
        """Put undecided acks back in front, but for those whose lease has run out."""
        self._outages += 1
        now_s = self._now_s()
        kept: list[Outgoing] = []
        expired: list[Outgoing] = []
        for out in flight:
            out.tries += 1
            over = out.tries > 1 and now_s >= out.attempt.lease_due_s
            (expired if over else kept).append(out)
        self._aboard = []
        with self._lock:
            self._waiting.extendleft(reversed(kept))
        logger.warning("%d acks are undecided: %s", len(kept), error)
        if self._failed is not None:
            self._failed(None, error)
        self._abandon(expired, error)
        return bool(kept)

    def _land(
        self, flight: list[Outgoing], answers: Sequence[Exception | None]
    ) -> None:
        refused: list[tuple[Outgoing, Exception]] = []
        undecided: list[Outgoing] = []
        conflict: StoreUnavailable | None = None
        over: list[LiveAttempt] = []
        for out, answer in zip(flight, answers, strict=True):
            if answer is None or self._was_done_before(out, answer):
                if self._accepted(out.attempt, out.ack):
                    continue
            elif isinstance(answer, LeaseRejected):
                self._log_lost(out, answer)
                if self._lost is not None:
                    self._lost(out.attempt)
            elif isinstance(answer, StoreUnavailable):
                undecided.append(out)
                conflict = answer
                continue
            else:
                refused.append((out, answer))
                continue
            over.append(out.attempt)
        self._inflight.conclude(over)
        if refused:
            self._send_plain(refused)
        if conflict is None or not self._insists:
            self._outages = 0
        if conflict is None:
            return
        if self._insists:
            if self._wait_again(undecided, conflict):
                raise conflict
        else:
            self._insist(undecided)

    def _insist(self, undecided: list[Outgoing]) -> None:
        """Try acks whose rows are locked elsewhere apart, so that no other waits."""
        apart = AckBox(
            self._store,
            self._inflight,
            now_s=self._now_s,
            accepted=self._accepted,
            lost=self._lost,
            failed=self._failed,
        )
        apart._given_up, apart._insists = self._given_up, True
        apart._retrying = self._retrying.copy(wait=apart._pause_s)
        apart._waiting.extend(undecided)
        apart._flying = True
        try:
            threading.Thread(target=apart.fly, name="headgate-ack", daemon=True).start()
        except RuntimeError as error:
            self._abandon(undecided, error)

    def _was_done_before(self, out: Outgoing, answer: Exception) -> bool:
        """The store refuses what it did take before, or the handler's own commit."""
        if not isinstance(answer, LeaseRejected):
            return False
        if out.attempt.in_doubt and (answer.missing or self._is_completed(out)):
            # What the handler raised was only the lost reply, or came after it.
            out.ack = Ack(
                lease=out.ack.lease,
                outcome=Outcome.SUCCESS,
                latency_ms=out.ack.latency_ms,
            )
            return True
        return bool(out.tries and answer.missing and out.ack.outcome in _REMOVING)

    def _is_completed(self, out: Outgoing) -> bool:
        """Whether the commit in doubt settled the job, or nobody can tell."""
        lease, inspect = out.ack.lease, self._store.inspect
        if inspect is None:
            return True
        try:
            found = inspect.get_jobs([lease.job_id])
        except StoreError:
            return True
        return all(
            job.state == State.COMPLETED and job.fence == lease.fence for job in found
        )

    def _log_lost(self, out: Outgoing, answer: LeaseRejected) -> None:
        logger.warning(
            "job %s (queue %s): outcome %s dropped: %s",
            out.ack.lease.job_id,
            out.attempt.claim.envelope.queue,
            out.ack.outcome.value,
            answer,
        )

    def _send_plain(self, refused: list[tuple[Outgoing, Exception]]) -> None:
        """Try once more without logs, with a short error and without the result."""
        for out, error in refused:
            if out.plain:
                self._abandon([out], error)
                continue
            logger.warning(
                "job %s (queue %s): ack refused, sent again in short: %s",
                out.ack.lease.job_id,
                out.attempt.claim.envelope.queue,
                error,
            )
            out.plain = True
            out.ack = _in_short(out.ack)
            with self._lock:
                self._waiting.append(out)

    def _abandon(self, left: list[Outgoing], error: BaseException) -> None:
        for out in left:
            logger.error(
                "job %s (queue %s): outcome %s could not be stored, its lease runs out",
                out.ack.lease.job_id,
                out.attempt.claim.envelope.queue,
                out.ack.outcome.value,
                exc_info=error,
            )
            if self._failed is not None:
                self._failed(out.attempt, error)
        self._inflight.conclude([out.attempt for out in left])


def _in_short(ack: Ack) -> Ack:
    if ack.result is not None:
        return evolve(
            ack, outcome=Outcome.RETRY, error=RESULT_NOT_STORED, result=None, logs=()
        )
    error = None if ack.error is None else ack.error.partition("\n")[0]
    return evolve(ack, error=error, logs=())
