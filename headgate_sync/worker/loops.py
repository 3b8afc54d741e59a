"""Service threads that never die silently."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from attrs import frozen

from headgate_sync.errors import StoreClosed, StoreUnavailable
from headgate_sync.loggers import guarded

logger = guarded(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
FAILURES_UNTIL_DEAD = 20
REPEAT_LOG_S = 60.0


@frozen(kw_only=True)
class LoopHealth:
    """How one loop of the worker is doing.

    Attributes:
        alive: neither ended nor given up.
        rounds: good rounds so far.
        failures: failed rounds so far; outages of the store are none.
        consecutive_failures: failed rounds since the last good one.
        last_error: type and text of the newest failure.
    """

    alive: bool
    rounds: int
    failures: int
    consecutive_failures: int
    last_error: str | None


class LoopGuard:
    """Judges the rounds of one loop: how long to pause, and when to give up.

    Used by one thread; `health` may be read by any.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self._rounds = 0
        self._failures = 0
        self._consecutive = 0
        self._outages = 0
        self._last_error: str | None = None
        self._logged_s = float("-inf")
        self._unlogged = 0

    def good(self) -> None:
        """A round went well."""
        self._rounds += 1
        self._consecutive = self._outages = 0

    def failed(self, error: BaseException, now_s: float) -> float:
        """A round failed.

        Returns:
            Seconds to pause. After 20 failures in a row, or when the program itself
            has closed the store, the loop is `dead`.
        """
        closed = isinstance(error, StoreClosed)
        if isinstance(error, StoreUnavailable) and not closed:
            # The database is away: the worker waits for it, however long it takes.
            self._outages += 1
            logger.warning("%s: %s", self.name, error)
            return self._pause(self._outages)
        self._failures += 1
        self._consecutive += 1
        self._last_error = f"{type(error).__name__}: {error}"
        if now_s - self._logged_s >= REPEAT_LOG_S:
            logger.error(
                "%s failed (%d times since the last report)",
                self.name,
                self._unlogged + 1,
                exc_info=error,
            )
            self._logged_s, self._unlogged = now_s, 0
        else:
            self._unlogged += 1
        self.dead = closed or self._consecutive >= FAILURES_UNTIL_DEAD
        return self._pause(self._consecutive)

    def noted(self, error: BaseException) -> None:
        """Something of the user's failed within a round that goes on all the same."""
        self._failures += 1
        self._last_error = f"{type(error).__name__}: {error}"

    def _pause(self, count: int) -> float:
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(count - 1, 10))

    def health(self, *, running: bool) -> LoopHealth:
        """The figures now; `running` says whether the thread is there."""
        return LoopHealth(
            alive=running and not self.dead,
            rounds=self._rounds,
            failures=self._failures,
            consecutive_failures=self._consecutive,
            last_error=self._last_error,
        )


class ServiceLoop:
    """A daemon thread that calls a step whenever it is due.

    The wait is until an absolute instant, so that being woken early never postpones
    what is due.

    Args:
        name: of the thread, behind "headgate-".
        step: one round; returns the local instant of the next one in seconds.
        died: called once when the loop is given up.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float],
        *,
        died: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.guard = LoopGuard(name)
        self._step = step
        self._died = died
        self._now_s = now_s
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._started = False
        self._thread = threading.Thread(
            target=self._run, name=f"headgate-{name}", daemon=True
        )

    def start(self) -> None:
        """Start the thread; the first step is due at once."""
        self._thread.start()
        self._started = True

    def nudge(self) -> None:
        """Make the next step due now. Not for signal handlers."""
        self._wake.set()

    def stop(self) -> None:
        """End after the present step."""
        self._stopped.set()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False when it is still running."""
        if self._started:
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """The thread was started and is gone, although nobody stopped it."""
        gone = self._started and not self._thread.is_alive()
        # Looked at last: a thread that obeyed was stopped before it was gone.
        return gone and not self._stopped.is_set()

    def health(self) -> LoopHealth:
        """How the loop is doing."""
        return self.guard.health(running=self._thread.is_alive())

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                due_s = self._step()
            except BaseException as error:  # the top of a thread: nothing above sees it
                pause_s = self.guard.failed(error, self._now_s())
                if self.guard.dead:
                    self._died(self.name)
                    return
                self._stopped.wait(pause_s)
                continue
            self.guard.good()
            self._wake.wait(max(0.0, min(due_s - self._now_s(), threading.TIMEOUT_MAX)))
            # Cleared before the step, so that a nudge during the step ends the next
            # wait.
            self._wake.clear()
