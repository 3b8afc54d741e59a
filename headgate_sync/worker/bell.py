"""What wakes the thread that runs a worker, in a form that signal handlers may use."""

from __future__ import annotations

from queue import Empty, SimpleQueue

LONGEST_S = 1.0


class Bell:
    """Rung by anybody, heard by one thread.

    A signal handler runs on that very thread and may find any lock already held by it;
    `SimpleQueue.put` is documented as reentrant.
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread, from any thread or signal handler."""
        self._rings.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring, at most so long and a second; earlier rings end it at once.

        Whoever waits looks again by itself: a signal that arrives between Python's last
        look for signals and the system call below does not end that call, and its
        handler, which would ring, runs only behind it.
        """
        try:
            if timeout_s > 0:
                self._rings.get(timeout=min(timeout_s, LONGEST_S))
            while True:
                self._rings.get_nowait()
        except Empty:
            pass
