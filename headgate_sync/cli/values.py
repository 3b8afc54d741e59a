"""Types of options: durations, instants and payloads as they are typed."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from headgate_sync.durations import duration_ms, instant_ms
from headgate_sync.envelope import MAX_INT64
from headgate_sync.errors import InvalidRequest
from headgate_sync.loggers import visible
from headgate_sync.policy import BudgetConfig

_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class DurationType(click.ParamType):  # type: ignore[type-arg]
    """`500ms`, `30s`, `1h30m`, `7d`, as milliseconds."""

    name = "duration"

    def __init__(self, minimum_ms: int = 1) -> None:
        self._minimum_ms = minimum_ms

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read what was typed; a default is milliseconds already."""
        if isinstance(value, int):
            return value
        try:
            return duration_ms("it", value, minimum_ms=self._minimum_ms)
        except InvalidRequest as error:
            self.fail(error.message, param, ctx)


class InstantType(click.ParamType):  # type: ignore[type-arg]
    """Milliseconds since 1970, or RFC 3339 such as `2030-01-31T08:00:00Z`."""

    name = "instant"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read what was typed."""
        text = str(value)
        if _NUMBER.fullmatch(text):
            if int(text) <= MAX_INT64:
                return int(text)
            self.fail(f"{text} is too large", param, ctx)
        try:
            return instant_ms("it", datetime.fromisoformat(text))
        except ValueError as error:  # InvalidRequest is one
            told = getattr(error, "message", None)
            self.fail(
                told or f"{text!r} is neither milliseconds nor RFC 3339", param, ctx
            )


def typed_bytes(name: str, text: str) -> bytes:
    """The bytes of an argument as they were typed, also where they are no UTF-8.

    Raises:
        InvalidRequest: a lone surrogate that stands for no byte.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} must not contain a lone surrogate") from None


class PayloadType(click.ParamType):  # type: ignore[type-arg]
    """Bytes: `@file`, `@-` for the standard input, or the text itself."""

    name = "payload"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> bytes:
        """Read what was typed."""
        if isinstance(value, bytes):
            return value
        if not value.startswith("@"):
            return typed_bytes("payload", value)
        if value == "@-":
            return sys.stdin.buffer.read()
        try:
            return Path(value[1:]).read_bytes()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self.fail(f"{visible(value[1:])} cannot be read: {why}", param, ctx)


BUDGET_FORM = "the form is LIMIT/WINDOW[/BURST], such as 1000/1h or 1000/1h/50"


def _whole(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{name} is {text!r}, expected a whole number")
    return int(text)


class BudgetType(click.ParamType):  # type: ignore[type-arg]
    """A further budget of a rate class: `LIMIT/WINDOW` or `LIMIT/WINDOW/BURST`."""

    name = "budget"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        """Read what was typed; the burst is the limit, and 1 at least."""
        if isinstance(value, dict):
            return value
        parts = str(value).split("/")
        try:
            if len(parts) not in (2, 3):
                raise InvalidRequest(f"{value!r} has {len(parts)} of 2 or 3 parts")
            limit = _whole("LIMIT", parts[0])
            window_ms = duration_ms("WINDOW", parts[1])
            burst = _whole("BURST", parts[2]) if len(parts) == 3 else max(limit, 1)
            BudgetConfig(limit, window_ms, burst)
        except InvalidRequest as error:
            self.fail(f"{error.message}; {BUDGET_FORM}", param, ctx)
        return {"limit": limit, "window_ms": window_ms, "burst": burst}


DURATION = DurationType()
INSTANT = InstantType()
PAYLOAD = PayloadType()
BUDGET = BudgetType()
