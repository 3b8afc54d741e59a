"""`CircuitBreaker`: stops asking a store that does not answer, and probes it later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from weakref import WeakSet

from attrs import frozen

from headgate_sync.durations import duration_ms
from headgate_sync.envelope import MAX_INT32, check_int
from headgate_sync.errors import (
    CircuitRejected,
    InvalidRequest,
    StoreConflict,
    StoreError,
    StoreUnavailable,
)

DEFAULT_FAILURE_THRESHOLD = 5
DEFAULT_RECOVERY_TIMEOUT = timedelta(seconds=60)
DEFAULT_HALF_OPEN_CALLS = 3


class CircuitState(StrEnum):
    """Whether calls are let through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@frozen(kw_only=True)
class CircuitSnapshot:
    """A breaker at one moment.

    Attributes:
        consecutive_failures: since the last answer, while closed.
        half_open_successes, half_open_in_flight: of the probes, while half open.
        retry_after_ms: until probes are let through, while open.
    """

    state: CircuitState
    consecutive_failures: int = 0
    half_open_successes: int = 0
    half_open_in_flight: int = 0
    retry_after_ms: int = 0


class CircuitBreaker:
    """Counts outages in a row, for any number of clients of one process.

    Only `StoreUnavailable` is an outage; every other answer of a store, a refusal or a
    collision included, proves that it is there. What is raised before the store was
    asked (`InvalidRequest`, errors of other origin) says nothing either way.

    Args:
        failure_threshold: outages in a row that open the circuit.
        recovery_timeout: how long it stays open before probes are let through.
        half_open_max_calls: probes that must succeed to close it.
        clock: seconds of a clock that never steps back.

    Raises:
        InvalidRequest: a number below 1, or a time below 1 ms.
    """

    def __init__(
        self,
        *,
        failure_threshold: int = DEFAULT_FAILURE_THRESHOLD,
        recovery_timeout: timedelta | str = DEFAULT_RECOVERY_TIMEOUT,
        half_open_max_calls: int = DEFAULT_HALF_OPEN_CALLS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = check_int(
            "failure_threshold", failure_threshold, 1, MAX_INT32
        )
        self._recovery_ms = duration_ms("recovery_timeout", recovery_timeout)
        self._probes = check_int(
            "half_open_max_calls", half_open_max_calls, 1, MAX_INT32
        )
        self._clock = clock
        self._start_afresh()
        _breakers.add(self)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()  # guards every field below
        self._generation = 0
        self._enter(CircuitState.CLOSED)

    def _enter(self, state: CircuitState) -> None:
        self._state = state
        # Permits given before a change of state must not speak about the new one.
        self._generation += 1
        self._failures = self._successes = self._in_flight = 0
        self._open_until_ms = 0

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Let one store call through; what the block raises is the verdict.

        Raises:
            CircuitRejected: the circuit is open, or enough probes are under way.
        """
        generation = self._take()
        try:
            yield
        except StoreUnavailable as error:
            self._give_back(generation, answered=isinstance(error, StoreConflict))
            raise
        except InvalidRequest:
            self._give_back(generation, answered=None)
            raise
        except StoreError:
            self._give_back(generation, answered=True)
            raise
        except BaseException:
            self._give_back(generation, answered=None)
            raise
        self._give_back(generation, answered=True)

    def snapshot(self) -> CircuitSnapshot:
        """How it stands now."""
        with self._lock:
            now_ms = self._advance()
            return CircuitSnapshot(
                state=self._state,
                consecutive_failures=self._failures,
                half_open_successes=self._successes,
                half_open_in_flight=self._in_flight,
                retry_after_ms=max(self._open_until_ms - now_ms, 0),
            )

    def _advance(self) -> int:
        """Let time pass; the lock is held."""
        now_ms = round(self._clock() * 1000)
        if self._state is CircuitState.OPEN and now_ms >= self._open_until_ms:
            self._enter(CircuitState.HALF_OPEN)
        return now_ms

    def _take(self) -> int:
        with self._lock:
            now_ms = self._advance()
            if self._state is CircuitState.OPEN:
                raise CircuitRejected("open", self._open_until_ms - now_ms)
            if self._state is CircuitState.HALF_OPEN:
                if self._successes + self._in_flight >= self._probes:
                    raise CircuitRejected("half_open", 0)
                self._in_flight += 1
            return self._generation

    def _give_back(self, generation: int, *, answered: bool | None) -> None:
        with self._lock:
            if generation != self._generation:
                return
            half_open = self._state is CircuitState.HALF_OPEN
            if half_open:
                self._in_flight -= 1
            if answered is None:
                return
            if not answered:
                self._failures += 1
                if half_open or self._failures >= self._threshold:
                    self._enter(CircuitState.OPEN)
                    self._open_until_ms = (
                        round(self._clock() * 1000) + self._recovery_ms
                    )
            elif not half_open:
                self._failures = 0
            else:
                self._successes += 1
                if self._successes >= self._probes:
                    self._enter(CircuitState.CLOSED)


_breakers: WeakSet[CircuitBreaker] = WeakSet()


def _start_afresh_in_child() -> None:
    # Another thread of the parent may have held the lock, and its probes are not here.
    for breaker in list(_breakers):
        breaker._start_afresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_in_child)
