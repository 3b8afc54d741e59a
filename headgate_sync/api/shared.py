"""Answers that equal requests of one moment share, so that many may look at once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

from headgate_sync.api.answers import Answer
from headgate_sync.api.forks import afresh_in_child

MAX_KEYS = 128
# How often the same has to be asked within the time before anything is shared: whoever
# looks alone, such as a script that checks what it did, always sees the present.
CROWD = 5
# The first of several equal requests is bounded by the time of its statements.
WAIT_S = 30.0


class _Flight:
    """One reading of the store, and who waits for it."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.done = threading.Event()
        self.answer: Answer | None = None


class _Asked:
    """What is known of one key: when it was asked last, and the newest reading."""

    def __init__(self) -> None:
        self.at_s: deque[float] = deque(maxlen=CROWD)
        self.flight: _Flight | None = None


class SharedAnswers:
    """Keeps answers for a moment while a crowd asks for them.

    Args:
        keep_ms: how long after its reading was begun an answer is given again; within
            the same time a crowd has to have come.
        now_s: a clock that never steps back.
    """

    def __init__(
        self, keep_ms: int, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_ms / 1000
        self._now_s = now_s
        self.start_afresh()
        afresh_in_child(self)

    def start_afresh(self) -> None:
        """Forget what a parent process was at."""
        self._lock = threading.Lock()  # guards what was asked
        self._asked: OrderedDict[Hashable, _Asked] = OrderedDict()

    def holds(self, key: Hashable) -> bool:
        """Whether a request for this would get the answer of another one."""
        with self._lock:
            asked = self._asked.get(key)
            return asked is not None and self._current(asked) is not None

    def get(
        self, key: Hashable, make: Callable[[], Answer], *, anew: bool = False
    ) -> Answer:
        """The answer of a moment ago, if a crowd asks for it, or a new one.

        Only a success is kept; whoever waits for an answer gets also a failure.

        Args:
            key: of the request; equal ones must deserve equal answers.
            make: reads the store; must not raise.
            anew: read it now, whatever was read before.
        """
        with self._lock:
            now_s = self._now_s()
            asked = self._asked.setdefault(key, _Asked())
            self._asked.move_to_end(key)
            if len(self._asked) > MAX_KEYS:
                self._asked.popitem(last=False)
            joined = None if anew else self._current(asked)
            asked.at_s.append(now_s)
            if joined is None:
                flight = asked.flight = _Flight(now_s + self._keep_s)
        if joined is not None:
            joined.done.wait(WAIT_S)
            return make() if joined.answer is None else joined.answer
        try:
            answer = flight.answer = make()
            if answer.status >= 400:
                flight.until_s = self._now_s()
            return answer
        finally:
            flight.done.set()

    def forget(self) -> None:
        """Something was changed: whoever asks from now on has to see it."""
        with self._lock:
            for asked in self._asked.values():
                asked.flight = None

    def _current(self, asked: _Asked) -> _Flight | None:
        flight, now_s = asked.flight, self._now_s()
        crowded = len(asked.at_s) == CROWD and now_s - asked.at_s[0] <= self._keep_s
        if flight is None or not crowded:
            return None
        if flight.done.is_set() and flight.until_s <= now_s:
            return None
        return flight
