"""The handler threads and the queue that feeds them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from queue import SimpleQueue
from typing import Final

from headgate_sync.attempt import LiveAttempt
from headgate_sync.loggers import guarded
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.batching import Chunk
from headgate_sync.worker.prefetch import WaitingRoom
from headgate_sync.worker.runner import Runner

logger = guarded(__name__)


class _Order:
    """What a handler thread gets besides claims."""


class _Call(_Order):
    """Something of the user's that belongs on such a thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work


_FLY: Final = _Order()
_END: Final = _Order()


class HandlerThreads:
    """As many threads as handlers may run, and one that sends acks.

    All share one queue, of what a thread is free for; claims beyond that stay in the
    waiting room. A thread that is done before the others wake up takes the next claim
    itself, which saves most of the switches between threads when jobs are short. Acks
    are therefore sent behind the claims that are already in the queue: they start
    within moments, whatever they are, and their acks may share the call. Only callbacks
    are put there although no thread may be free; behind them no ack is sent.

    Args:
        begun_late: called with each claim that had to wait for its thread.
    """

    def __init__(
        self,
        runner: Runner,
        acks: AckBox,
        room: WaitingRoom,
        *,
        begun_late: Callable[[LiveAttempt], None] = lambda attempt: None,
    ) -> None:
        self._runner = runner
        self._acks = acks
        self._room = room
        self._begun_late = begun_late
        self._queue: SimpleQueue[LiveAttempt | Chunk | _Order] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two fields below
        self._threads: list[threading.Thread] = []
        self._made = 0

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self._room.threads + 1):
            self._add_thread()

    def feed(self, attempts: Sequence[LiveAttempt]) -> float:
        """Hand claims over; each has a slot already, though not always a thread.

        Returns:
            The local instant of the next `look`.
        """
        for attempt in self._room.enter(attempts):
            self._queue.put(attempt)
        return self._room.due_s()

    def look(self) -> float:
        """Hand back what waits for too long; returns the instant of the next look."""
        claims, chunks, due_s = self._room.overdue()
        self._decline(claims, chunks)
        return due_s

    def close(self) -> None:
        """Hand everything back that waits for a thread."""
        self._decline(*self._room.clear())

    def _decline(self, claims: Iterable[LiveAttempt], chunks: Iterable[Chunk]) -> None:
        self._runner.decline(claims)
        for chunk in chunks:
            self._runner.batches.decline(chunk)

    def call(self, work: Callable[[], None]) -> None:
        """Run a function on the next thread that is free; the caller holds a slot."""
        self._room.occupy()
        self._queue.put(_Call(work))

    def feed_chunks(self, chunks: Iterable[Chunk]) -> None:
        """Hand over jobs that waited for each other; each has a slot already."""
        for chunk in chunks:
            if self._room.enter_chunk(chunk):
                self._queue.put(chunk)

    def end(self) -> None:
        """Let every thread end once nothing is left to do."""
        self._queue.put(_END)

    def join(
        self, timeout_s: float, *, but: Set[int | None] = frozenset()
    ) -> list[str]:
        """Wait for the ends.

        Args:
            timeout_s: for all together.
            but: identities of threads that are known not to come back.

        Returns:
            The names of the threads that are still running, those included.
        """
        until_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread.ident is not None and thread.ident not in but:
                thread.join(max(0.0, until_s - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _add_thread(self) -> None:
        with self._lock:
            self._made += 1
            thread = threading.Thread(
                target=self._loop, name=f"headgate-handler-{self._made}", daemon=True
            )
            self._threads = [
                t for t in self._threads if t.is_alive() or t.ident is None
            ]
            self._threads.append(thread)
        thread.start()

    def _loop(self) -> None:
        queue = self._queue
        while True:
            order = queue.get()
            if order is _END:
                over = queue.empty()
                queue.put(_END)  # for the others, or behind acks that wait
                if over:
                    return
                continue
            try:
                if order is not _FLY:
                    if not self._do(order):
                        continue
                    if not (queue.empty() or self._room.crowded):
                        queue.put(_FLY)
                        continue
                self._acks.fly()
            except Exception:
                logger.exception("headgate failed around a handler; the thread goes on")
                self._forget(order)
            except BaseException:
                # Asked for by catch_base_exceptions=False. The job is not acked: its
                # lease runs out and counts as a crash.
                logger.critical("a handler ended its thread", exc_info=True)
                self._forget(order)
                self._add_thread()
                return

    def _do(self, order: LiveAttempt | Chunk | _Order) -> bool:
        """Run it; returns whether this thread must let the ack box fly."""
        try:
            if isinstance(order, LiveAttempt):
                return self._runner.run(order)
            if isinstance(order, Chunk):
                return self._runner.batches.run(order)
            assert isinstance(order, _Call)
            order.work()
            return False
        finally:
            # Before this thread sends acks, which is none of the handlers' time.
            if (following := self._room.leave()) is not None:
                self._queue.put(following)
                if isinstance(following, LiveAttempt):
                    self._begun_late(following)

    def _forget(self, order: LiveAttempt | Chunk | _Order) -> None:
        if isinstance(order, LiveAttempt):
            self._runner.abandon(order)
        elif isinstance(order, Chunk):
            self._runner.batches.forget(order.members)
