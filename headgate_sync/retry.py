"""Delays before the next attempt, in milliseconds, and the options of a store."""

from __future__ import annotations

from headgate_sync.envelope import MAX_INT32, MAX_RELATIVE_MS, check_int

DEFAULT_RETRY_BASE_MS = 1_000
DEFAULT_RETRY_CAP_MS = 3_600_000
DEFAULT_CRASH_LIMIT = 3
MAX_DOUBLINGS = 20
# Longer than the promoter takes to come round: two that are so far apart are not made
# available together, and jobs shorter than that do not run together.
APART_MS = 2_000

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


def has_one_chance(crashes: int, crash_limit: int = DEFAULT_CRASH_LIMIT) -> bool:
    """Whether the next lost lease quarantines a job that has lost so many."""
    return crashes == crash_limit - 1


def crash_backoff_ms(
    crashes: int,
    before: int,
    *,
    crash_limit: int = DEFAULT_CRASH_LIMIT,
    base_ms: int = DEFAULT_RETRY_BASE_MS,
    cap_ms: int = DEFAULT_RETRY_CAP_MS,
) -> int:
    """Delay before a job that lost its lease is tried again, at most the cap.

    Jobs that one worker loses together return together, and would so once more. Before
    its last chance each gets a moment of its own: the one that ends its worker must not
    take the others into quarantine.

    Args:
        crashes: leases lost so far, this one included; 1 or more.
        before: how many of those that are lost with it by the same worker, and have one
            chance left as well, come first.
        crash_limit: lost leases after which a job is quarantined.
        base_ms: delay after the first lost lease.
        cap_ms: upper bound.
    """
    delay_ms = backoff_ms(crashes, base_ms=base_ms, cap_ms=cap_ms)
    if has_one_chance(crashes, crash_limit):
        delay_ms += before * APART_MS
    return min(cap_ms, delay_ms)
