"""`FakeClock`: time for stores and for running attempts, in the hands of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.testing.target import store_of

DEFAULT_START_MS = 1_000_000


class FakeClock:
    """Time that moves only when a test says so.

    The stores that it drives show its time, and so do the attempts of `drain`,
    `perform_job` and `run_handler` that are given it. A handler that advances it sees
    what a worker would do meanwhile: its lease is renewed, and its timeout strikes.

    Args:
        start_ms: store time at the beginning, in milliseconds since the epoch.
    """

    def __init__(self, start_ms: int = DEFAULT_START_MS) -> None:
        self._now_ms = check_int("start_ms", start_ms, 0, MAX_INT64)
        self._driven: WeakSet[Any] = WeakSet()
        self._watching: list[Callable[[], object]] = []

    @property
    def now_ms(self) -> int:
        """The present instant, in milliseconds since the epoch."""
        return self._now_ms

    def now_s(self) -> float:
        """The present instant in seconds, in the place of `time.monotonic`."""
        return self._now_ms / 1000

    def drive(self, store_or_hg: Any) -> None:
        """Let a store show this time from now on; twice is fine.

        Raises:
            InvalidRequest: the clock of such a store cannot be set: it is no `MemStore`
                and was not made by `PostgresTestDatabase`.
        """
        store: Any = store_of(store_or_hg)
        if not hasattr(store, "freeze_clock_at"):
            raise InvalidRequest(
                f"the clock of a {type(store).__name__} cannot be set; that of a "
                "MemStore or of a store of PostgresTestDatabase can"
            )
        store.freeze_clock_at(self._now_ms)
        self._driven.add(store)

    def advance(self, by_ms: int) -> None:
        """Step the time of everything that it drives.

        Raises:
            InvalidRequest: backwards, or no int.
        """
        check_int("by_ms", by_ms, 0, MAX_INT64 - self._now_ms)
        self._now_ms += by_ms
        for store in list(self._driven):
            store.freeze_clock_at(self._now_ms)
        for look in list(self._watching):
            look()

    @contextmanager
    def watched(self, look: Callable[[], object]) -> Iterator[None]:
        """A block in which something is called after every step."""
        self._watching.append(look)
        try:
            yield
        finally:
            self._watching.remove(look)
