"""Delays before the next attempt, in milliseconds."""

from __future__ import annotations

DEFAULT_RETRY_BASE_MS = 1_000
DEFAULT_RETRY_CAP_MS = 3_600_000
DEFAULT_CRASH_LIMIT = 3
MAX_DOUBLINGS = 20


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
