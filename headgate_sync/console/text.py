"""How figures, instants and foreign texts are written on a page."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

NOTHING = "–"
LAST_INSTANT_MS = 253_402_300_799_999  # the end of the year 9999
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))
_LONG = 100  # so many days are told without their hours
_WINDOWS = {1_000: "second", 60_000: "minute", 3_600_000: "hour", 86_400_000: "day"}
# Marks that turn or hide the text around them. What joins letters and emoji stays.
_HIDDEN = frozenset("\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067"
                    "\u2068\u2069\u061c\ufeff\u2028\u2029")  # fmt: skip


def duration(ms: float | None) -> str:
    """A stretch of time in its two largest units."""
    if ms is None:
        return NOTHING
    if ms < 0:
        return f"-{duration(-ms)}"
    if ms < 1_000:
        return f"{round(ms)} ms"
    if ms < 10_000:
        return f"{ms / 1000:.1f} s".replace(".0 s", " s")
    place = next(n for n, (_, size) in enumerate(_UNITS) if ms >= size)
    unit, size = _UNITS[place]
    first, rest = divmod(int(ms), size)
    if first < _LONG and place + 1 < len(_UNITS):
        smaller, size = _UNITS[place + 1]
        if second := rest // size:
            return f"{first:,} {unit} {second} {smaller}"
    return f"{first:,} {unit}"


def per(ms: int) -> str:
    """A window, as the end of "so many per"."""
    return _WINDOWS.get(ms) or duration(ms)


def relative(at_ms: int | None, now_ms: int) -> str:
    """An instant as seen from now."""
    if at_ms is None:
        return NOTHING
    if abs(at_ms - now_ms) < 1_000:
        return "now"
    if at_ms > now_ms:
        return f"in {duration(at_ms - now_ms)}"
    return f"{duration(now_ms - at_ms)} ago"


def instant(at_ms: int | None) -> str:
    """An instant of store time, in UTC."""
    if at_ms is None:
        return NOTHING
    if not 0 <= at_ms <= LAST_INSTANT_MS:
        return f"{at_ms} ms"
    moment = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{at_ms % 1000:03d}Z"


def number(value: float | None, approximate: bool = False) -> str:
    """A count, with a sign when it is a lower bound."""
    if value is None:
        return NOTHING
    return f"≥ {value:,}" if approximate else f"{value:,}"


def counted(value: int, word: str, several: str = "") -> str:
    """So many of something, in the singular for one.

    Args:
        value: how many.
        word: for one of them.
        several: for another number, where an s at the end is not enough.
    """
    return f"{number(value)} {word if value == 1 else several or word + 's'}"


def rate(per_second: float) -> str:
    """Jobs in time, in the unit that needs the fewest zeros."""
    if per_second == 0:
        return "0/s"
    if per_second >= 100:
        return f"{per_second:,.0f}/s"
    if per_second >= 1:
        return f"{per_second:.1f}/s"
    if per_second * 60 >= 1:
        return f"{per_second * 60:.0f}/min"
    return "< 1/min"


def size(count: int | None) -> str:
    """Bytes, in the unit that fits."""
    if count is None:
        return NOTHING
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            break
    return f"{amount:.1f} {unit}"


def percent(share: float) -> str:
    """A share of one."""
    return f"{share * 100:.0f} %"


def visible(text: object) -> str:
    """A foreign text whose control characters can be seen and do nothing."""
    return "".join(map(_visible, str(text)))


def _visible(letter: str) -> str:
    code = ord(letter)
    if letter in "\n\t":
        return letter
    if letter in _HIDDEN or unicodedata.category(letter) in ("Cc", "Cs"):
        return f"⟨U+{code:04X}⟩"
    return letter
