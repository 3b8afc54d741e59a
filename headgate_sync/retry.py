"""Delays before the next attempt, in milliseconds, and the options of a store."""

from __future__ import annotations

from headgate_sync.envelope import MAX_INT32, MAX_RELATIVE_MS, check_int

DEFAULT_RETRY_BASE_MS = 1_000
DEFAULT_RETRY_CAP_MS = 3_600_000
DEFAULT_CRASH_LIMIT = 3
MAX_DOUBLINGS = 20

# No delay that follows from them, doubled as often as it may be, leaves 64 bits.
_OPTIONS = {
    "retry_base_ms": (1, MAX_RELATIVE_MS >> MAX_DOUBLINGS),
    "retry_cap_ms": (1, MAX_RELATIVE_MS),
    "crash_limit": (1, MAX_INT32),
}


def check_option(name: str, value: int) -> None:
    """Check an option of a store: `retry_base_ms`, `retry_cap_ms` or `crash_limit`.

    Raises:
        InvalidRequest: the text names the option and its range.
    """
    low, high = _OPTIONS[name]
    check_int(name, value, low, high)


def backoff_ms(
    count: int,
    *,
    base_ms: int = DEFAULT_RETRY_BASE_MS,
    cap_ms: int = DEFAULT_RETRY_CAP_MS,
) -> int:
    """Exponential backoff: base, doubled per earlier failure, at most the cap.

    Args:
        count: failures so far, this one included; 1 or more.
        base_ms: delay after the first failure.
        cap_ms: upper bound; doubling stops after 20 in any case.
    """
    return min(cap_ms, base_ms << min(count - 1, MAX_DOUBLINGS))
