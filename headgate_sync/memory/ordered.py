"""An order of jobs that any of them may leave at any time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ordered(Generic[T]):
    """Jobs by an ascending key, any of which may leave at any time.

    An entry is `(*key, seq, job)`. Leaving only forgets the entry; the heap drops it
    when it comes to the top, or all at once when forgotten entries outnumber the live.
    """

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[Any] = []
        self._live: dict[int, Any] = {}  # seq -> the entry that counts

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[T]:
        """The jobs in order; sorts, so it is for looking and not for deciding."""
        return (entry[-1] for entry in sorted(self._live.values()))

    def put(self, entry: tuple[Any, ...]) -> None:
        """Add a job, or move it to another key."""
        live, heap = self._live, self._heap
        live[entry[-2]] = entry
        if len(heap) > 2 * len(live) + 64:
            heap[:] = live.values()
            heapify(heap)
        else:
            heappush(heap, entry)

    def discard(self, seq: int) -> None:
        """Remove a job, if it is here."""
        self._live.pop(seq, None)

    def first(self, until: int | None = None) -> T | None:
        """The job with the smallest key; None when its key starts above `until`."""
        live, heap = self._live, self._heap
        while heap:
            entry = heap[0]
            forgotten = live.get(entry[-2]) is not entry
            if forgotten:
                heappop(heap)
            elif until is not None and entry[0] > until:
                return None
            else:
                found: T = entry[-1]
                return found
        return None

    def jobs(self) -> Iterator[T]:
        """The jobs in no particular order."""
        return (entry[-1] for entry in self._live.values())
