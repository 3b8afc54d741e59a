"""Values in words, as a terminal is sent them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

from headgate_sync.loggers import visible

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))
NOTHING = "-"
# Last words of the names of instants; all others that end in `_ms` are durations.
_INSTANTS = ("at", "until", "tick", "run", "enqueued", "deadline", "seen")
_NONE_IS_ZERO = ("timeout_ms", "deadline_ms", "retention_ms")


def instant(at_ms: int | None) -> str:
    """An instant in UTC; the bare number where no calendar reaches it."""
    if at_ms is None:
        return NOTHING
    try:
        moment = _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return str(at_ms)
    digits = "milliseconds" if at_ms % 1000 else "seconds"
    return moment.replace(tzinfo=None).isoformat(timespec=digits) + "Z"


def span(ms: int | None) -> str:
    """A duration by its two largest units, such as `2h5m`."""
    if ms is None:
        return NOTHING
    if 0 <= ms < 1_000:
        return f"{ms}ms"
    for place, (unit, unit_ms) in enumerate(_UNITS):
        if ms >= unit_ms:
            whole, rest_ms = divmod(ms, unit_ms)
            next_unit, next_ms = (*_UNITS, ("ms", 1))[place + 1]
            small = rest_ms // next_ms if unit != "s" else 0
            return f"{whole}{unit}" + (f"{small}{next_unit}" if small else "")
    return f"{ms}ms"


def drain(ms: int | None) -> str:
    """The time to drain of a queue, which has none while it does not shrink."""
    return "∞" if ms is None else span(ms)


def cell(value: object) -> str:
    """A value of a table."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(each) for each in value) or NOTHING
    if isinstance(value, dict):
        pairs = sorted(value.items())
        return ", ".join(f"{visible(key)}={named(key, each)}" for key, each in pairs)
    return visible(str(value))


def named(name: str, value: object) -> str:
    """A value of a table as its name says: an instant, a duration, or as it is.

    Where none is 0 in the store, as for a deadline or a timeout, there is nothing.
    """
    if type(value) is not int or not name.endswith("_ms"):
        return cell(value)
    if value == 0 and name in _NONE_IS_ZERO:
        return NOTHING
    words = name.split("_")
    return instant(value) if words[-2] in _INSTANTS else span(value)


def readable(encoded: str) -> tuple[str, str]:
    """Bytes in base64 as text where they are UTF-8, and the name of what came out."""
    try:
        return base64.b64decode(encoded).decode(), "utf-8"
    except UnicodeDecodeError:
        return encoded, "base64"
