"""The end of a worker: signals, the bounded drain, and its exit status."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self
from weakref import WeakSet

from attrs import frozen
from tenacity import (
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    stop_any,
    stop_when_event_set,
    wait_exponential,
)

from headgate_sync.attempt import LiveAttempt
from headgate_sync.cancel import CancelReason
from headgate_sync.errors import StoreError, may_pass
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome
from headgate_sync.loggers import guarded
from headgate_sync.store import Store
from headgate_sync.validation import MAX_ACKS
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.bell import Bell
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.outcomes import RELEASED_AT_SHUTDOWN

logger = guarded(__name__)

EXIT_CLEAN = 0
EXIT_CONFIGURATION = 2
EXIT_RELEASED = 10
EXIT_ABANDONED = 11
EXIT_MEMORY = 12
EXIT_LOOP_DEAD = 13
RELEASE_WINDOW_MS = 5_000
STORE_GRACE_S = 0.5
KILLED_S = 0.5


@frozen
class ExitStatus:
    """How a worker ended.

    Attributes:
        code: 0 drained; 10 jobs were handed back; 11 handlers still run, and the
            process must end with `os._exit`; 12 the memory limit was reached; 13 a
            service loop could not be revived.
        released: jobs handed back unfinished.
        abandoned: handler threads that did not return.
    """

    code: int
    released: int
    abandoned: int


def exit_status(
    *, released: int, abandoned: int, loop_died: bool, memory_full: bool = False
) -> ExitStatus:
    """The status with the highest code that applies."""
    code = EXIT_CLEAN
    if released:
        code = EXIT_RELEASED
    if abandoned:
        code = EXIT_ABANDONED
    if memory_full:
        code = EXIT_MEMORY
    if loop_died:
        code = EXIT_LOOP_DEAD
    return ExitStatus(code, released, abandoned)


class Signals:
    """Counts signals while installed, and restores the previous handlers afterwards.

    SIGTERM and SIGINT stop the worker, the second of them without waiting for handlers;
    the third ends the process at once. SIGHUP stops it too, but a terminal that closes
    sends several, which count as one; a process that was started to outlive its
    terminal ignores it, and goes on doing so. SIGUSR1 toggles whether work is taken,
    SIGUSR2 writes all stacks to standard error. A process that a handler forks is no
    worker: it has the previous handlers, so that it can be ended.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._previous: dict[int, Any] = {}
        self.stops = 0
        self.toggles = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            logger.info("not on the main thread: signal handlers are not installed")
            return self
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._stop)
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
            self._previous[hangup] = signal.signal(hangup, self._hang_up)
        if hasattr(signal, "SIGUSR1"):
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._toggle)
        if hasattr(faulthandler, "register") and sys.__stderr__ is not None:
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
        _installed.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._previous and hasattr(faulthandler, "register"):
            faulthandler.unregister(signal.SIGUSR2)
        for signum, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    # Handlers: counting and one reentrant put, nothing else. They can interrupt the
    # main thread while it holds any lock.

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.stops += 1
        if self.stops >= 3:
            os._exit(128 + signum)
        self._bell.ring()

    def _hang_up(self, signum: int, frame: FrameType | None) -> None:
        if self.stops == 0:
            self._stop(signum, frame)

    def _toggle(self, signum: int, frame: FrameType | None) -> None:
        self.toggles += 1
        self._bell.ring()


_installed: WeakSet[Signals] = WeakSet()


def _restore_in_child() -> None:
    for signals in list(_installed):
        signals._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)


class Drain:
    """Lets running handlers finish, for a bounded time, and hands the rest back.

    Args:
        hurried: whether the wait for handlers is to be skipped.
        bounded: whether the wait has an end; it begins when this becomes true.
        released: called with each attempt and ack that the store took back.
        lost: called with each attempt that it did not.
    """

    def __init__(
        self,
        store: Store,
        inflight: InFlight,
        acks: AckBox,
        bell: Bell,
        *,
        now_s: Callable[[], float],
        hurried: Callable[[], bool],
        bounded: Callable[[], bool] = lambda: True,
        released: Callable[[LiveAttempt, Ack], None] | None = None,
        lost: Callable[[LiveAttempt], None] | None = None,
    ) -> None:
        self._bounded = bounded
        self._released = released
        self._lost = lost
        self._store = store
        self._inflight = inflight
        self._acks = acks
        self._bell = bell
        self._now_s = now_s
        self._hurried = hurried

    def run(self, *, timeout_ms: int, grace_ms: int) -> tuple[int, list[LiveAttempt]]:
        """Drain; the heartbeat has to go on meanwhile.

        Returns:
            How many jobs were released here, and the attempts whose handlers have not
            returned.
        """
        self._inflight.draining = True
        self._wait(float("inf"), hurried=self._bounded)
        self._wait(self._now_s() + timeout_ms / 1000, hurried=self._hurried)
        for attempt in self._inflight.attempts():
            if not attempt.returned:
                attempt.cancel(CancelReason.SHUTDOWN)
        self._wait(self._now_s() + grace_ms / 1000)
        self._kill()
        window_s = min(timeout_ms, RELEASE_WINDOW_MS) / 1000
        until_s = self._now_s() + window_s
        released = self._release(window_s)
        # What handlers did finish may still be on its way to the store.
        self._wait(
            until_s, over=lambda attempt: attempt.concluded or not attempt.settled
        )
        self._acks.give_up()
        left = [a for a in self._inflight.attempts() if not a.returned]
        for attempt in left:
            logger.warning(
                "job %s (queue %s): its handler did not return",
                attempt.lease.job_id,
                attempt.claim.envelope.queue,
            )
        return released, left

    def _wait(
        self,
        until_s: float,
        *,
        over: Callable[[LiveAttempt], bool] = lambda attempt: False,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until every attempt has left the table, or is `over`."""
        while not hurried() and not all(map(over, self._inflight.attempts())):
            left_s = until_s - self._now_s()
            if left_s <= 0:
                return
            self._bell.wait(left_s)

    def _kill(self) -> None:
        """End the processes of attempts, before others run those jobs again."""
        for attempt in self._inflight.attempts():
            if (kill := attempt.kill) is not None:
                kill()
        self._wait(self._now_s() + KILLED_S, over=lambda attempt: not attempt.kill)

    def _release(self, window_s: float) -> int:
        """Hand back what still runs; returns how many the store took."""
        running = [
            attempt
            for attempt in self._inflight.attempts()
            if attempt.renewing
            and attempt.finished is None
            # Its row is locked by its own commit, which would hold up all the others.
            and not attempt.completing
            and self._inflight.settle(attempt)
        ]
        released: list[tuple[LiveAttempt, Ack | None]] = []
        if running:
            given_up = threading.Event()
            self._within_or_hurried(
                window_s + STORE_GRACE_S,
                "release",
                lambda: released.extend(
                    release(self._store, running, window_s, given_up=given_up)
                ),
            )
            given_up.set()
        taken = dict(released)
        for attempt in running:
            ack = taken.get(attempt)
            if ack is not None and self._released is not None:
                self._released(attempt, ack)
            elif ack is None and self._lost is not None:
                self._lost(attempt)
        self._inflight.conclude(running)
        return sum(ack is not None for ack in taken.values())

    def _within_or_hurried(
        self, seconds: float, name: str, work: Callable[[], object]
    ) -> None:
        """`within`, which a signal that comes meanwhile cuts short, too."""
        was_hurried, done = self._hurried(), threading.Event()

        def do() -> None:
            try:
                work()
            finally:
                done.set()
                self._bell.ring()

        until_s = time.monotonic() + seconds
        thread = threading.Thread(target=do, name=f"headgate-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.error("%s is left out: %s", name, error)
            return
        while not done.is_set() and (was_hurried or not self._hurried()):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            self._bell.wait(left_s)
        if not done.is_set():
            logger.warning("%s is not over and is left behind", name)


def release(
    store: Store,
    attempts: Sequence[LiveAttempt],
    window_s: float,
    *,
    given_up: threading.Event | None = None,
) -> list[tuple[LiveAttempt, Ack | None]]:
    """Hand jobs back because the worker ends; no attempt and no crash is counted.

    Args:
        window_s: how long an outage of the store is waited out.
        given_up: ends the waiting when it is set.

    Returns:
        Each attempt with the ack that the store took, or None where it did not.
    """
    acks = [
        Ack(
            lease=attempt.lease,
            outcome=Outcome.RATE_LIMITED,
            error=RELEASED_AT_SHUTDOWN,
            actual_weight=attempt.actual_weight,
        )
        for attempt in attempts
    ]
    over = given_up or threading.Event()
    retrying = Retrying(
        retry=retry_if_exception(may_pass),
        wait=wait_exponential(multiplier=0.1, max=2),
        stop=stop_any(stop_after_delay(window_s), stop_when_event_set(over)),
        sleep=sleep_using_event(over),
        reraise=True,
    )
    taken: list[Ack | None] = []
    for start in range(0, len(acks), MAX_ACKS):
        part = acks[start : start + MAX_ACKS]
        try:
            answers = retrying(store.ack_batch, part)
        except StoreError as error:
            logger.error(
                "%d running jobs could not be handed back; their leases run out",
                len(part),
                exc_info=error,
            )
            taken += [None] * len(part)
        else:
            taken += [
                ack if answer is None else None
                for ack, answer in zip(part, answers, strict=True)
            ]
    return list(zip(attempts, taken, strict=True))


def within(seconds: float, name: str, work: Callable[[], object]) -> bool:
    """Do something that a database which hangs cannot hold up for longer than this.

    It goes on, on a daemon thread, when the time is over.

    Returns:
        Whether it is done.
    """
    thread = threading.Thread(target=work, name=f"headgate-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        logger.error("%s is left out: %s", name, error)
        return False
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("%s took over %.1f s and is left behind", name, seconds)
        return False
    return True
