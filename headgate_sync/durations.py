"""The one grammar of durations and instants, for code and for command lines."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from headgate_sync.envelope import MAX_RELATIVE_MS
from headgate_sync.errors import InvalidRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_TEXT = re.compile(
    r"(?:([0-9]{1,15})d)?(?:([0-9]{1,15})h)?(?:([0-9]{1,15})m)?"
    r"(?:([0-9]{1,15})s)?(?:([0-9]{1,15})ms)?"
)
_UNITS_MS = (86_400_000, 3_600_000, 60_000, 1_000, 1)


@lru_cache(maxsize=1024)
def _parse(text: str) -> int | None:
    match = _TEXT.fullmatch(text) if text else None
    if match is None:
        return None
    parts = zip(match.groups(), _UNITS_MS, strict=True)
    return sum(int(count) * unit_ms for count, unit_ms in parts if count)


def duration_ms(name: str, value: object, *, minimum_ms: int = 1) -> int:
    """Read a duration: a `timedelta`, or text such as `500ms`, `30s`, `1h30m`, `7d`.

    Parts of a text stand from the largest unit to the smallest, each at most once. What
    lies below a millisecond is dropped, but nothing is raised to the minimum.

    Args:
        name: how error texts call the value.
        value: what the caller gave.
        minimum_ms: 1, or 0 where "no time at all" has a meaning.

    Raises:
        InvalidRequest: a bare number (the unit is missing), another type or grammar, a
            negative or too small value, or one above a thousand years.
    """
    if isinstance(value, timedelta):
        total_ms = value // _MILLISECOND
    elif isinstance(value, str):
        parsed = _parse(value)
        if parsed is None:
            raise InvalidRequest(
                f"{name} is {value!r}, expected a duration: 500ms, 30s, 1h30m, 7d"
            )
        total_ms = parsed
    elif isinstance(value, int | float) and not isinstance(value, bool):
        raise InvalidRequest(
            f"{name} is {value!r}: say the unit, as in '30s' or timedelta(seconds=30)"
        )
    else:
        raise InvalidRequest(
            f"{name} must be a timedelta or text, got {type(value).__name__}"
        )
    if total_ms < 0:
        raise InvalidRequest(f"{name} is {value!r}, a duration cannot be negative")
    vanished = total_ms == 0 and isinstance(value, timedelta) and bool(value)
    if total_ms < minimum_ms or vanished:
        raise InvalidRequest(f"{name} is {value!r}, the minimum is 1 ms")
    if total_ms > MAX_RELATIVE_MS:
        raise InvalidRequest(
            f"{name} is {value!r}, the limit is {MAX_RELATIVE_MS} ms (a thousand years)"
        )
    return total_ms


def instant_ms(name: str, value: object) -> int:
    """Read an instant: a timezone-aware `datetime`, as milliseconds since the epoch.

    Raises:
        InvalidRequest: another type, no time zone, or not after the epoch.
    """
    if not isinstance(value, datetime):
        raise InvalidRequest(
            f"{name} must be a datetime with a time zone, got {type(value).__name__}"
        )
    if value.utcoffset() is None:
        raise InvalidRequest(
            f"{name} has no time zone: use an aware datetime, as datetime.now(UTC)"
        )
    total_ms = (value - _EPOCH) // _MILLISECOND
    if total_ms < 1:
        raise InvalidRequest(f"{name} is {value.isoformat()}, it must be after 1970")
    return total_ms
