"""What a worker holds before it has a thread for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from headgate_sync.attempt import LiveAttempt
from headgate_sync.worker.batching import Chunk

AHEAD_S = 0.1
PATIENCE_S = 1.0


class WaitingRoom:
    """Knows how many handler threads are busy, and which claims wait for one.

    Without `prefetch` a claim waits for moments, as its slot was freed by a thread that
    is about to be done; or for a callback of the user's that came in between.

    How much may be taken ahead follows the pace of the threads: no more than they
    began within the last tenth of a second or so, which is then about what a claim
    waits. When handlers take seconds, nothing is taken ahead any more; what was by then
    is handed back after a second.

    Args:
        threads: how many handlers run at once.
        prefetch: the most claims that may wait.
        half_empty: called, outside of the lock, when more may be asked for than the
            last `invite` said.
    """

    def __init__(
        self,
        threads: int,
        prefetch: int,
        *,
        now_s: Callable[[], float],
        half_empty: Callable[[], None] = lambda: None,
    ) -> None:
        self.threads = threads
        self._prefetch = prefetch
        self._now_s = now_s
        self._half_empty = half_empty
        self._lock = threading.Lock()  # guards the fields below
        self._waiting: deque[LiveAttempt] = deque()
        self._chunks: deque[tuple[float, Chunk]] = deque()  # with when they came
        self._busy = 0
        self._begun = 0  # claims that got a thread, ever
        self._few: int | None = None  # when so many wait, `half_empty` is called
        self._mark = (now_s(), 0)  # instant, and claims begun until then
        self._pace = 0.0  # claims begun per second before the mark

    def invite(self, slots: int) -> int:
        """How many claims to ask for; for the admission's thread alone.

        Args:
            slots: that are free, those of the waiting room included.
        """
        with self._lock:
            allowed = self._allowed()
            few = allowed // 2
            # A few large questions cost less than many small ones.
            full = len(self._waiting) > few
            self._few = few if full else None
        return 0 if full else slots - (self._prefetch - allowed)

    def _allowed(self) -> int:
        if not self._prefetch:
            return 0
        now_s = self._now_s()
        marked_s, before = self._mark
        if now_s - marked_s >= AHEAD_S / 2:
            self._pace = (self._begun - before) / (now_s - marked_s)
            self._mark = (now_s, self._begun)
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

    def enter_chunk(self, chunk: Chunk) -> bool:
        """Let jobs in that waited for each other; true when they have a thread."""
        with self._lock:
            if self._busy >= self.threads:
                self._chunks.append((self._now_s(), chunk))
                return False
            self._busy += 1
            return True

    def occupy(self) -> None:
        """A callback keeps a thread busy until it leaves, whether one is free or not.

        It runs beside handlers that may take hours, and waits for none of them.
        """
        with self._lock:
            self._busy += 1

    @property
    def crowded(self) -> bool:
        """Not even the thread that there is besides those of handlers may be free."""
        return self._busy > self.threads

    def leave(self) -> LiveAttempt | Chunk | None:
        """A thread is done; returns what has it next, if something waits."""
        following: LiveAttempt | Chunk | None = None
        with self._lock:
            if self._busy > self.threads or not (self._chunks or self._waiting):
                self._busy -= 1
            elif self._chunks:
                _, following = self._chunks.popleft()
            else:
                following = self._waiting.popleft()
                self._begun += 1
            asks = self._few is not None and len(self._waiting) <= self._few
            if asks:
                self._few = None
        if isinstance(following, LiveAttempt):
            following.begin()
        if asks:
            self._half_empty()
        return following

    def overdue(self) -> tuple[list[LiveAttempt], list[Chunk], float]:
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
            chunks: list[Chunk] = []
            while self._chunks and self._chunks[0][0] <= until_s:
                chunks.append(self._chunks.popleft()[1])
            if over or chunks:
                # The pace of before was no prophet: without this they came back.
                self._pace, self._mark = 0.0, (self._now_s(), self._begun)
            return over, chunks, self._next_s()

    def _next_s(self) -> float:
        first_s = float("inf")
        if self._waiting:
            first_s = self._waiting[0].returned_s
        if self._chunks:
            first_s = min(first_s, self._chunks[0][0])
        return first_s + PATIENCE_S

    def due_s(self) -> float:
        """The local instant at which the first of those that wait is overdue."""
        with self._lock:
            return self._next_s()

    def clear(self) -> tuple[list[LiveAttempt], list[Chunk]]:
        """Send everything away that waits."""
        with self._lock:
            claims, self._waiting = list(self._waiting), deque()
            chunks, self._chunks = [chunk for _, chunk in self._chunks], deque()
        return claims, chunks
