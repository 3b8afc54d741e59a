"""Waits for the store's wake-ups on behalf of the admission loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate_sync.store import Notifying

WAIT_MS = 500


class Listening:
    """One wait after the other; each is short, so that a stop is seen soon."""

    def __init__(
        self,
        notifying: Notifying,
        queues: Sequence[str],
        *,
        notice: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._notifying = notifying
        self._queues = queues
        self._notice = notice
        self._now_s = now_s

    def step(self) -> float:
        """Wait once; returns the local instant of the next wait."""
        until_s = self._now_s() + WAIT_MS / 1000
        if self._notifying.wait_wakeup(self._queues, WAIT_MS) is None:
            # Also when the wait ends early, because the store was closed: no spinning.
            return until_s
        self._notice()
        return self._now_s()
