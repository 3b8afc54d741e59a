"""Forms of scalars and fixed choices: how one value becomes a plain value, and back.

A `Form` is compiled once per annotation. `encode` takes what a producer has, `decode`
takes what a codec read. Neither converts anything on the quiet except int to float:
"42" is no int, True is no int, a tuple is no list.
"""

from __future__ import annotations

import base64
import binascii
import enum
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from attrs import define

from headgate_sync.codec import plain_fault

NULL, BOOL, INT, FLOAT, TEXT, LIST, OBJECT = range(7)
SHAPES = {
    type(None): NULL, bool: BOOL, int: INT, float: FLOAT,
    str: TEXT, list: LIST, dict: OBJECT,
}  # fmt: skip


class UnknownAnnotation(Exception):
    """No form exists for the annotation; the text says what is wrong with it."""


class Mismatch(Exception):
    """A value is none of its annotation.

    Attributes:
        problem: what was expected and what came, by type; the value itself stays out.
        only_type: the type alone was wrong, so another alternative may fit.
        path: where, from the outermost name inwards: ".name" or "[index]".
    """

    def __init__(self, problem: str, *, only_type: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.only_type = only_type
        self.path: list[str] = []

    def inside(self, step: str) -> Mismatch:
        """Note one more step of the path on the way out."""
        self.path.insert(0, step)
        return self

    def __str__(self) -> str:
        path = "".join(self.path).removeprefix(".")
        return f"{path}: {self.problem}" if path else self.problem


def expected_other(expected: str, value: object) -> Mismatch:
    """The mismatch of a value of another type."""
    got = "None" if value is None else type(value).__name__
    return Mismatch(f"expected {expected}, got {got}", only_type=True)


@define(kw_only=True)
class Form:
    """One annotation, compiled.

    Attributes:
        expected: how error texts call it.
        encode: value to plain value; raises `Mismatch`.
        decode: plain value to value; raises `Mismatch`.
        shapes: the kinds of JSON value that `encode` makes.
        choices: all encoded values, where they are few and fixed.
        parts: forms of named fields, for classes and typed dicts.
        required: the fields that are always there.
    """

    expected: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    shapes: frozenset[int]
    choices: tuple[object, ...] | None = None
    parts: Mapping[str, Form] | None = None
    required: frozenset[str] = frozenset()


def exactly(kind: type, *, but: type | None = None) -> Callable[[Any], Any]:
    """Accept instances, also of subclasses, as the kind itself."""
    expected = "None" if kind is type(None) else kind.__name__

    def check(value: Any) -> Any:
        if not isinstance(value, kind) or (but is not None and isinstance(value, but)):
            raise expected_other(expected, value)
        return value

    return check


def _encode_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise expected_other("str", value)
    fault = plain_fault(value)
    if fault is not None:
        raise Mismatch(f"expected str, got {fault}")
    return value


def _float(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise expected_other("float", value)
    try:
        number = float(value)
    except OverflowError:
        raise Mismatch("expected float, got an int beyond its range") from None
    if not math.isfinite(number):
        raise Mismatch(f"expected a finite float, got {number!r}")
    if number != value:
        raise Mismatch("expected float, got an int that float cannot hold exactly")
    return number


def _parsed(
    expected: str, pattern: str, parse: Callable[[str], Any]
) -> Callable[[Any], Any]:
    """Decode a text of exactly one grammar."""
    grammar = re.compile(pattern, re.ASCII)

    def decode(value: Any) -> Any:
        if type(value) is not str:
            raise expected_other(expected, value)
        if grammar.fullmatch(value):
            try:
                return parse(value)
            except (ValueError, ArithmeticError, OverflowError):
                pass  # well written, but no such day, hour or number
        raise Mismatch(f"expected {expected}, got another str")

    return decode


def _encode_datetime(value: Any) -> str:
    if not isinstance(value, datetime):
        raise expected_other("datetime", value)
    offset = value.utcoffset()
    if offset is None:
        raise Mismatch("expected a datetime with a time zone, got a naive one")
    if offset % timedelta(minutes=1):
        raise Mismatch("expected an offset of whole minutes, which RFC 3339 can write")
    return value.isoformat()


def _encode_date(value: Any) -> str:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise expected_other("date", value)
    return value.isoformat()


def _encode_time(value: Any) -> str:
    if not isinstance(value, time):
        raise expected_other("time", value)
    if value.tzinfo is not None:
        raise Mismatch("expected a time without a time zone")
    return value.isoformat()


def _encode_timedelta(value: Any) -> int:
    if not isinstance(value, timedelta):
        raise expected_other("timedelta", value)
    if value.microseconds % 1000:
        raise Mismatch("expected a timedelta of whole milliseconds")
    return value // timedelta(milliseconds=1)


def _decode_timedelta(value: Any) -> timedelta:
    if type(value) is not int:
        raise expected_other("timedelta in milliseconds", value)
    try:
        return timedelta(milliseconds=value)
    except OverflowError:
        raise Mismatch("expected timedelta, got a number beyond its range") from None


def _encode_decimal(value: Any) -> str:
    if not isinstance(value, Decimal):
        raise expected_other("Decimal", value)
    if not value.is_finite():
        raise Mismatch("expected a finite Decimal")
    return str(value)


def _encode_bytes(value: Any) -> str:
    if type(value) is not bytes:
        raise expected_other("bytes", value)
    return base64.b64encode(value).decode()


def _decode_bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise expected_other("bytes in base64", value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise Mismatch("expected bytes in base64, got another str") from None


def _encode_uuid(value: Any) -> str:
    if not isinstance(value, UUID):
        raise expected_other("UUID", value)
    return str(value)


def _encode_any(value: Any) -> Any:
    fault = plain_fault(value)
    if fault is not None:
        raise Mismatch(f"expected a plain JSON value, got {fault}")
    return value


def scalar(
    expected: str,
    shape: int,
    encode: Callable[[Any], Any],
    decode: Callable[[Any], Any],
) -> Form:
    return Form(
        expected=expected, encode=encode, decode=decode, shapes=frozenset({shape})
    )


_DAY = r"\d{4}-\d\d-\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(\.\d{1,6})?"
_NUMBER = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
_HEX = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

ANY = Form(
    expected="a JSON value",
    encode=_encode_any,
    decode=lambda value: value,
    shapes=frozenset(SHAPES.values()),
)
_NOTHING = exactly(type(None))
SIMPLE: dict[Any, Form] = {
    Any: ANY,
    object: ANY,
    inspect.Parameter.empty: ANY,
    type(None): scalar("None", NULL, _NOTHING, _NOTHING),
    bool: scalar("bool", BOOL, exactly(bool), exactly(bool)),
    int: scalar("int", INT, exactly(int, but=bool), exactly(int, but=bool)),
    float: scalar("float", FLOAT, _float, _float),
    str: scalar("str", TEXT, _encode_text, exactly(str)),
    bytes: scalar("bytes", TEXT, _encode_bytes, _decode_bytes),
    UUID: scalar("UUID", TEXT, _encode_uuid, _parsed("UUID", _HEX, UUID)),
    Decimal: scalar(
        "Decimal", TEXT, _encode_decimal, _parsed("Decimal", _NUMBER, Decimal)
    ),
    date: scalar("date", TEXT, _encode_date, _parsed("date", _DAY, date.fromisoformat)),
    time: scalar(
        "time", TEXT, _encode_time, _parsed("time", _CLOCK, time.fromisoformat)
    ),
    datetime: scalar(
        "datetime",
        TEXT,
        _encode_datetime,
        _parsed(
            "datetime in RFC 3339",
            rf"{_DAY}T{_CLOCK}(Z|[+-]\d\d:\d\d)",
            datetime.fromisoformat,
        ),
    ),
    timedelta: scalar("timedelta", INT, _encode_timedelta, _decode_timedelta),
}


# Fixed choices.


def _choice(expected: str, pairs: Iterable[tuple[object, object]]) -> Form:
    """A form of few values, given as (value, encoded); types must match, too."""
    encoded_by = {(type(value), value): encoded for value, encoded in pairs}
    value_by = {
        (type(encoded), encoded): value for (_, value), encoded in encoded_by.items()
    }
    if len(value_by) != len(encoded_by):
        raise UnknownAnnotation(f"{expected}: two values have one form")

    def lookup(table: Mapping[Any, Any], value: Any) -> Any:
        try:
            return table[type(value), value]
        except (KeyError, TypeError):  # TypeError: a list or dict, which has no hash
            if type(value) in {kind for kind, _ in table}:
                raise Mismatch(f"expected {expected}, got another value") from None
            raise expected_other(expected, value) from None

    return Form(
        expected=expected,
        encode=lambda value: lookup(encoded_by, value),
        decode=lambda value: lookup(value_by, value),
        shapes=frozenset(SHAPES[kind] for kind, _ in value_by),
        choices=tuple(value_by),
    )


def literal_form(values: tuple[Any, ...]) -> Form:
    expected = f"one of {', '.join(map(repr, values))}"
    pairs = []
    for value in values:
        encoded = value.value if isinstance(value, enum.Enum) else value
        if type(encoded) not in (type(None), bool, int, str):
            raise UnknownAnnotation(f"Literal of {type(encoded).__name__}")
        pairs.append((value, encoded))
    return _choice(expected, pairs)


def enum_form(kind: type[enum.Enum]) -> Form:
    if issubclass(kind, enum.Flag):

        def encode(value: Any) -> Any:
            if type(value) is not kind:
                raise expected_other(kind.__name__, value)
            return value.value

        def decode(value: Any) -> Any:
            try:
                return kind(exactly(int, but=bool)(value))
            except ValueError:
                raise Mismatch(f"expected {kind.__name__}, got another int") from None

        return scalar(kind.__name__, INT, encode, decode)
    for member in kind:
        if type(member.value) not in (type(None), bool, int, float, str):
            raise UnknownAnnotation(
                f"{kind.__name__}: the value of {member.name} is no plain scalar"
            )
    return _choice(kind.__name__, ((member, member.value) for member in kind))
