"""Lines of an attempt's log: their stored form, and the buffer that collects them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from headgate_sync.lease import cut_text, storable_text

PREFIX = "\x1eheadgate-log-v1:"
LEVELS = ("debug", "info", "warn", "error")
MAX_LOG_LINES = 100
MAX_LOG_LINE_BYTES = 2048
MAX_LOG_FIELDS = 32
MAX_LOG_KEY_BYTES = 128
MAX_LOG_VALUE_BYTES = 1024
LOG_CAP_REACHED = f"... log cap reached ({MAX_LOG_LINES} lines/attempt)"
UNSUPPORTED_VALUE = "[unsupported log value]"
_LONGEST_INT_BITS = 2048

Scalar = str | int | float | bool | None


@frozen(kw_only=True)
class LogLine:
    """One line.

    Attributes:
        level: "debug", "info", "warn" or "error".
        at_ms: store time; 0 for a line that is plain text.
        truncated: something was cut or left out.
    """

    level: str
    message: str
    at_ms: int = 0
    fields: Mapping[str, Scalar] = field(factory=dict)
    truncated: bool = False

    def encode(self) -> str:
        """The stored form, at most 2,048 bytes.

        Fields are given up first, the last by name before the others; then the message
        is halved.
        """
        line = self._fitting_fields()
        text = line._text()
        while len(text.encode()) > MAX_LOG_LINE_BYTES:
            if line.fields:
                kept = dict(list(line.fields.items())[:-1])
                line = evolve(line, fields=kept, truncated=True)
            else:
                half = line.message[: len(line.message) // 2]
                line = evolve(line, message=half, truncated=True)
            text = line._text()
        return text

    def _fitting_fields(self) -> LogLine:
        truncated = self.truncated or len(self.fields) > MAX_LOG_FIELDS
        kept: dict[str, Scalar] = {}
        for name in sorted(self.fields)[:MAX_LOG_FIELDS]:
            key = cut_text(storable_text(name), MAX_LOG_KEY_BYTES)
            value = _scalar(self.fields[name])
            if isinstance(value, str):
                whole = value
                value = cut_text(whole, MAX_LOG_VALUE_BYTES)
                truncated |= value != whole
            truncated |= key != storable_text(name)
            kept[key] = value
        # What is longer than a line in characters is so in bytes.
        message = storable_text(self.message[: MAX_LOG_LINE_BYTES + 1])
        truncated |= len(message) < len(self.message)
        ordered = dict(sorted(kept.items()))
        return evolve(self, fields=ordered, message=message, truncated=truncated)

    def _text(self) -> str:
        stored = {
            "at_ms": self.at_ms,
            "fields": dict(self.fields),
            "level": self.level,
            "message": self.message,
            "truncated": self.truncated,
        }
        return PREFIX + json.dumps(stored, ensure_ascii=False, separators=(",", ":"))


def read_line(text: str) -> LogLine:
    """Read a stored line; what `encode` did not write is a plain line of level info."""
    plain = LogLine(level="info", message=text)
    if not text.startswith(PREFIX):
        return plain
    try:
        stored = json.loads(text.removeprefix(PREFIX))
        line = LogLine(**stored)
        exact = line._text() == text
    except (ValueError, TypeError, RecursionError):
        return plain
    known = line.level in LEVELS and isinstance(line.message, str)
    shaped = type(line.at_ms) is int and type(line.truncated) is bool
    return line if exact and known and shaped else plain


def _scalar(value: Any) -> Scalar:
    if isinstance(value, str):
        return storable_text(str.__str__(value))
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int) and value.bit_length() <= _LONGEST_INT_BITS:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return UNSUPPORTED_VALUE


class LogBuffer:
    """The lines of one attempt, up to a cap; any thread may add.

    Attributes:
        dropped: lines beyond the cap.
    """

    __slots__ = ("_closed", "_lines", "_lock", "dropped")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._lines: list[str] = []
        self._closed = False
        self.dropped = 0

    @property
    def takes(self) -> bool:
        """Whether a further line would be kept."""
        return not self._closed and len(self._lines) <= MAX_LOG_LINES

    def add(self, line: str) -> None:
        """Keep a line; the first one beyond the cap is replaced by a note of that."""
        with self._lock:
            if self._closed:
                return
            if len(self._lines) < MAX_LOG_LINES:
                self._lines.append(line)
                return
            if len(self._lines) == MAX_LOG_LINES:
                self._lines.append(LOG_CAP_REACHED)
            self.dropped += 1

    def drop(self) -> None:
        """Count a line that need not be made because it would not be kept."""
        with self._lock:
            self.dropped += not self._closed

    def lines(self) -> tuple[str, ...]:
        """What was kept so far."""
        with self._lock:
            return tuple(self._lines)

    def close(self) -> None:
        """Take nothing more."""
        with self._lock:
            self._closed = True
