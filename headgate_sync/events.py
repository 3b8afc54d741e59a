"""What happens to jobs in this process, for the program around the worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from types import TracebackType
from typing import Self

from attrs import field, frozen

from headgate_sync.envelope import MAX_INT32, Envelope, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import State

DEFAULT_CAPACITY = 64


class EventKind(StrEnum):
    """What an attempt meant for its job."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@frozen(kw_only=True)
class JobEvent:
    """The store has taken the outcome of an attempt.

    Attributes:
        kind: `completed`, `failed` (to be retried, archived or undecodable) or
            `cancelled` (revoked by its handler).
        attempt: failures before this attempt.
        state: where the job is now; `deleted` where its retention is 0.
        error: the text of its history; None for a success.
        at_ms: store time.
    """

    kind: EventKind
    job_id: str
    job_kind: str
    queue: str
    attempt: int
    state: State
    error: str | None
    at_ms: int


class DeathReason(StrEnum):
    """Why a job was archived."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    SKIPPED = "skipped"
    DEADLINE_EXCEEDED = "deadline_exceeded"


@frozen(kw_only=True)
class JobDeath:
    """A job was archived by the outcome of an attempt.

    Attributes:
        envelope: as it was claimed.
        error: the text of its history.
    """

    envelope: Envelope
    reason: DeathReason
    error: str | None
    state: State = State.ARCHIVED


@frozen(kw_only=True)
class StuckHandler:
    """A handler goes on although it was told to stop.

    Attributes:
        envelope: as it was claimed.
        reason: "timeout" or "cancellation".
        threshold_ms: how long it was waited for.
        stack: where its thread is, as text.
    """

    envelope: Envelope
    reason: str
    threshold_ms: int
    stack: str


Listener = Callable[[JobEvent], None]
DeathHandler = Callable[[JobDeath], object]
StuckCallback = Callable[[StuckHandler], object]


def _kinds(kinds: Iterable[str] | None) -> frozenset[str] | None:
    if isinstance(kinds, str | bytes):
        raise InvalidRequest("kinds must be a collection, got one text")
    return None if kinds is None else frozenset(kinds)


@frozen(eq=False)
class _Wish:
    """What a subscriber wants to hear of; None is everything."""

    kinds: frozenset[str] | None = field(converter=_kinds)
    job_kinds: frozenset[str] | None = field(converter=_kinds)

    def __attrs_post_init__(self) -> None:
        unknown = (self.kinds or frozenset()) - set(EventKind)
        if unknown:
            raise InvalidRequest(
                f"kinds names {', '.join(sorted(map(str, unknown)))}, "
                f"allowed are {', '.join(EventKind)}"
            )

    def fits(self, event: JobEvent) -> bool:
        return (self.kinds is None or event.kind in self.kinds) and (
            self.job_kinds is None or event.job_kind in self.job_kinds
        )


class Subscription:
    """Events on their way to one subscriber; iterating waits for the next.

    What does not fit is dropped for this subscriber alone. Closing it, from any thread,
    ends the loop over it after what is there.

    Attributes:
        dropped: events that did not fit.
    """

    def __init__(self, bus: EventBus, capacity: int, wish: _Wish) -> None:
        self._bus = bus
        self._capacity = capacity
        self._wish = wish
        self._events: deque[JobEvent] = deque()
        self._changed = threading.Condition()  # guards every field here
        self._closed = False
        self.dropped = 0

    def get(self, timeout: float | None = None) -> JobEvent | None:
        """The next event, oldest first.

        Args:
            timeout: seconds to wait; None waits until there is one or it is closed.

        Returns:
            None at the time-out, and once it is closed and read to its end.
        """
        until_s = None
        if timeout is not None:
            until_s = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            while not self._events and not self._closed:
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Take no more events; a second call does nothing."""
        self._bus._leave(self)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[JobEvent]:
        while (event := self.get()) is not None:
            yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, event: JobEvent) -> None:
        if not self._wish.fits(event):
            return
        with self._changed:
            if self._closed:
                return
            if len(self._events) >= self._capacity:
                self.dropped += 1
                return
            self._events.append(event)
            self._changed.notify()


class EventBus:
    """Hands events to the subscribers of this process; nothing is kept or replayed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the changes of the next fields
        self._subscribers: tuple[Subscription, ...] = ()
        self._listeners: tuple[Listener, ...] = ()  # as well

    @property
    def has_subscribers(self) -> bool:
        """Whether anybody listens; without, no event need be made."""
        return bool(self._subscribers or self._listeners)

    def attach(self, listener: Listener) -> None:
        """Call a function with every event, on the thread that publishes it.

        It must be quick, wait for nothing and raise nothing; for anything else there is
        `subscribe`.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def detach(self, listener: Listener) -> None:
        """Undo one `attach`."""
        with self._lock:
            place = self._listeners.index(listener)
            self._listeners = (
                *self._listeners[:place],
                *self._listeners[place + 1 :],
            )

    def subscribe(
        self,
        capacity: int = DEFAULT_CAPACITY,
        *,
        kinds: Iterable[EventKind | str] | None = None,
        job_kinds: Iterable[str] | None = None,
    ) -> Subscription:
        """Listen from now on.

        Args:
            capacity: events that are kept for the subscriber until it reads them; 1 or
                more.
            kinds: of the events; None is all.
            job_kinds: kinds of jobs; None is all.

        Raises:
            InvalidRequest: the capacity is out of range, or a kind of event unknown.
        """
        check_int("capacity", capacity, 1, MAX_INT32)
        subscription = Subscription(self, capacity, _Wish(kinds, job_kinds))
        with self._lock:
            self._subscribers = (*self._subscribers, subscription)
        return subscription

    def publish(self, event: JobEvent) -> None:
        """Hand an event to everybody who wants it; never waits for a subscriber."""
        for subscriber in self._subscribers:
            subscriber._put(event)
        for listener in self._listeners:
            listener(event)

    def _leave(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscribers = tuple(
                other for other in self._subscribers if other is not subscription
            )
