"""How plain values become the bytes of a payload, and back.

A plain value is what JSON can say: None, bool, int, finite float, str, and lists and
dicts of them with str keys. Typed values become plain ones before they reach a codec.
"""

from __future__ import annotations

import json
import math
from itertools import repeat
from typing import Any, NoReturn, Protocol

from headgate_sync.errors import InvalidRequest, MalformedPayload

MAX_NESTING = 100
"""How deep lists and dicts may stand in each other. Python's own limit depends on who
reads: what a script could write, a handler below a deeper stack could not read."""


class Codec(Protocol):
    """Turns plain values into bytes and back.

    Equal values must give equal bytes: the bytes are the job's fingerprint.
    """

    def encode(self, value: Any) -> bytes:
        """Write a plain value.

        Raises:
            InvalidRequest: the codec cannot write it.
        """
        ...

    def decode(self, data: bytes) -> Any:
        """Read what `encode` wrote.

        Raises:
            MalformedPayload: the bytes are none of this codec.
        """
        ...


def check_codec(name: str, codec: object) -> None:
    """Check that something can stand for a codec.

    Raises:
        InvalidRequest: it lacks one of the two methods.
    """
    for method in ("encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise InvalidRequest(
                f"{name}: {type(codec).__name__} has no method {method}"
            )


def plain_fault(value: object, room: int = MAX_NESTING) -> str | None:
    """Say what keeps a value from being plain; None when nothing does.

    Tuples and keys of other types are refused: JSON would silently turn them into lists
    and texts.

    Args:
        room: how many levels of lists and dicts there may be.
    """
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a lone surrogate in a text"
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value!r}, which JSON cannot say"
    if not isinstance(value, list | dict):
        return type(value).__name__
    if room < 1:
        return f"lists and dicts nested more than {MAX_NESTING} deep"
    if isinstance(value, list):
        faults = map(plain_fault, value, repeat(room - 1))
        return next((fault for fault in faults if fault is not None), None)
    for key, item in value.items():
        if not isinstance(key, str):
            return f"a dict key of type {type(key).__name__}"
        fault = plain_fault(key) or plain_fault(item, room - 1)
        if fault is not None:
            return fault
    return None


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise MalformedPayload("a number beyond the range of float")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedPayload(f"{name} is not JSON")


# Made once: `json.loads` with options would make one for every payload.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


class JsonCodec:
    """JSON in UTF-8 with sorted keys and no blanks: one byte form for equal values."""

    def encode(self, value: Any) -> bytes:
        """Write a plain value; see `Codec`."""
        try:
            fault = plain_fault(value)
            if fault is not None:
                raise InvalidRequest(f"expected a plain JSON value, got {fault}")
            text = json.dumps(
                value,
                ensure_ascii=False,
                allow_nan=False,
                sort_keys=True,
                separators=(",", ":"),
            )
        except ValueError as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"not writable as JSON: {error}") from error
        return text.encode()

    def decode(self, data: bytes) -> Any:
        """Read one JSON text; see `Codec`."""
        try:
            value = _DECODER.decode(data.decode())
            # Only an escape can smuggle a lone surrogate through UTF-8.
            fault = plain_fault(value) if b"\\u" in data else None
        except RecursionError:
            raise MalformedPayload("nested too deeply") from None
        except ValueError as error:
            raise MalformedPayload(f"no JSON in UTF-8: {_where(error)}") from error
        if fault is not None:
            raise MalformedPayload(f"no JSON in UTF-8: {fault}")
        return value


def _where(error: ValueError) -> str:
    """The fault and its position, without a piece of the payload."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"{error.reason} at byte {error.start}"
    return type(error).__name__


JSON = JsonCodec()
