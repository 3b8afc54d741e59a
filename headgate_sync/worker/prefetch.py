"""Claims that a worker holds before it has a thread for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from headgate_sync.attempt import LiveAttempt

AHEAD_S = 0.1
PATIENCE_S = 1.0


class WaitingRoom:
    """Knows how many handler threads are busy, and which claims wait for one.

    Without `prefetch` a claim waits for moments at most: its slot was freed by a thread
    that is about to be done.

    How much may be taken ahead follows the pace of the threads: no more than they
    began within the last tenth of a second or so, which is then about what a claim
    waits. When handlers take seconds, nothing is taken ahead any more; what was by then
    is handed back after a second.

    Args:
        threads: how many handlers run at once.
        prefetch: the most claims that may wait.
    """

    def __init__(
        self, threads: int, prefetch: int, *, now_s: Callable[[], float]
    ) -> None:
        self.threads = threads
        self._prefetch = prefetch
        self._now_s = now_s
        self._lock = threading.Lock()  # guards the next three fields
        self._waiting: deque[LiveAttempt] = deque()
        self._busy = 0
        self._begun = 0  # claims that got a thread, ever
        self._mark = (now_s(), 0)  # instant, and claims begun until then
        self._pace = 0.0  # claims begun per second before the mark

    def invite(self, slots: int) -> int:
        """How many claims to ask for; for the admission's thread alone.

        Args:
            slots: that are free, those of the waiting room included.
        """
        allowed = self._allowed()
        if len(self._waiting) > allowed // 2:
            # A few large questions cost less than many small ones. Whoever has no
            # answer asks again when the next ack departs, and one will: claims wait
            # only while every thread is busy.
            return 0
        return slots - (self._prefetch - allowed)

    def _allowed(self) -> int:
        if not self._prefetch:
            return 0
        now_s, begun = self._now_s(), self._begun
        marked_s, before = self._mark
        if now_s - marked_s >= AHEAD_S / 2:
            self._pace = (begun - before) / (now_s - marked_s)
            self._mark = (now_s, begun)
        return min(self._prefetch, int(self._pace * AHEAD_S))

    def enter(self, claims: Sequence[LiveAttempt]) -> Sequence[LiveAttempt]:
        """Let fresh claims in; returns those that have a thread at once."""
        with self._lock:
            served = max(0, self.threads - self._busy)
            for attempt in claims[served:]:
                attempt.wait()
                self._waiting.append(attempt)
            begin = claims[:served]
            self._busy += len(begin)
            self._begun += len(begin)
        return begin

    def occupy(self) -> None:
        """Something that is no fresh claim keeps a thread busy until it leaves."""
        with self._lock:
            self._busy += 1

    def leave(self) -> LiveAttempt | None:
        """A thread is done; returns the claim that has it next, if one waits."""
        with self._lock:
            if not self._waiting or self._busy > self.threads:
                self._busy -= 1
                return None
            attempt = self._waiting.popleft()
            self._begun += 1
        attempt.begin()
        return attempt

    def overdue(self) -> tuple[list[LiveAttempt], float]:
        """Send away what has waited for too long, or was cancelled meanwhile.

        Returns:
            Those, and the local instant at which the next one is overdue.
        """
        until_s = self._now_s() - PATIENCE_S
        with self._lock:
            over = [
                attempt
                for attempt in self._waiting
                if attempt.returned_s <= until_s or attempt.token.stopped
            ]
            if over:
                gone = set(over)
                self._waiting = deque(a for a in self._waiting if a not in gone)
            return over, self._next_s()

    def _next_s(self) -> float:
        return (
            self._waiting[0].returned_s + PATIENCE_S if self._waiting else float("inf")
        )

    def due_s(self) -> float:
        """The local instant at which the first of those that wait is overdue."""
        with self._lock:
            return self._next_s()

    def clear(self) -> list[LiveAttempt]:
        """Send everything away that waits."""
        with self._lock:
            gone, self._waiting = list(self._waiting), deque()
        return gone
