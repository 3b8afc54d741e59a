"""Job ids: ULIDs that sort by time and never repeat within a process or its forks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80
_RANDOM_MAX = (1 << _RANDOM_BITS) - 1


def encode_ulid(at_ms: int, random_part: int) -> str:
    """Write 48 bits of milliseconds and 80 random bits as 26 base-32 characters.

    Source: the ULID specification; Crockford's alphabet, most significant digit first,
    so that text order is time order.
    """
    number = (at_ms << _RANDOM_BITS) | random_part
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


_generators: weakref.WeakSet[UlidGenerator] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for generator in list(_generators):
        generator._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class UlidGenerator:
    """Makes strictly increasing ULIDs; safe for threads and across `fork`.

    Within one millisecond, or when the clock steps back, the previous value plus 1 is
    used. A forked child starts afresh: with the inherited state two children would mint
    equal ids, and one job would pass for a replay of the other.

    Args:
        clock_ms: the producer's clock; nothing in a store depends on it.
        random_bytes: source of randomness, called with a length in bytes.
    """

    def __init__(
        self,
        *,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._clock_ms = clock_ms
        self._random_bytes = random_bytes
        self._reset()
        _generators.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # guards the two fields below
        self._at_ms = -1
        self._random = 0

    def __call__(self) -> str:
        """Return the next id."""
        with self._lock:
            now_ms = self._clock_ms()
            if now_ms > self._at_ms:
                self._at_ms = now_ms
                self._random = int.from_bytes(self._random_bytes(_RANDOM_BITS // 8))
            elif self._random < _RANDOM_MAX:
                self._random += 1
            else:
                self._at_ms += 1
                self._random = 0
            return encode_ulid(self._at_ms, self._random)
