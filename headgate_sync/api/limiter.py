"""How many requests a sender may send: one token bucket for each, in this process."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from headgate_sync.api.config import RateLimit

# Whoever invents names cannot make the table grow; the least recent is forgotten.
MAX_SENDERS = 10_000
_UNIT = 1_000_000_000  # of a token, so that each elapsed nanosecond counts


class Limiter:
    """Token buckets by sender.

    Args:
        limit: of each sender.
        now_ns: a clock that never steps back.
    """

    def __init__(
        self, limit: RateLimit, *, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._limit = limit
        self._now_ns = now_ns
        self._lock = threading.Lock()  # guards the buckets
        # Sender -> units left and when that was.
        self._buckets: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def take(self, sender: str) -> int:
        """Take a token.

        Returns:
            0, or in how many milliseconds there will be one.
        """
        rate, cap = self._limit.per_second, self._limit.burst * _UNIT
        with self._lock:
            now_ns = self._now_ns()
            units, at_ns = self._buckets.pop(sender, (cap, now_ns))
            units = min(cap, units + (now_ns - at_ns) * rate)
            lacking = _UNIT - units
            if lacking <= 0:
                units -= _UNIT
            self._buckets[sender] = (units, now_ns)
            if len(self._buckets) > MAX_SENDERS:
                self._buckets.popitem(last=False)
        return 0 if lacking <= 0 else -(-lacking // (rate * 1_000_000))
