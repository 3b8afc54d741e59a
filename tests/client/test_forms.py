"""Typed payload values: exact round trips, and refusal of everything that is bent."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import typing
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NewType, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import pytest
from hypothesis import given, settings

from headgate_sync.codec import JSON
from headgate_sync.forms import form_of
from headgate_sync.scalars import Mismatch, UnknownAnnotation
from tests.client.payloads import (
    TYPED_VALUES,
    Access,
    Address,
    Color,
    Level,
    Line,
    Mode,
    Shipping,
    Tree,
)


def travelled(form, value):
    """A value after the way through the bytes."""
    return form.decode(JSON.decode(JSON.encode(form.encode(value))))


def types_of(value: object) -> object:
    """The shape of a value by exact types, which == does not compare."""
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    if isinstance(value, dict):
        return dict, {key: types_of(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return type(value), {type(item) for item in value}
    return type(value)


def turned(value: object) -> object:
    """An equal value whose dicts and sets were filled in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    if isinstance(value, set | frozenset):
        return type(value)(reversed(list(value)))
    if isinstance(value, list | tuple):
        return type(value)(turned(item) for item in value)
    return value


@settings(max_examples=300)
@given(TYPED_VALUES)
def test_every_payload_type_survives_the_bytes_exactly(typed):
    annotation, value = typed
    form = form_of(annotation)
    data = JSON.encode(form.encode(value))
    back = form.decode(JSON.decode(data))
    assert back == value
    assert types_of(back) == types_of(value)
    assert JSON.encode(form.encode(turned(value))) == data


@pytest.mark.parametrize(
    ("annotation", "value", "data"),
    [
        (float, 3, b"3.0"),
        (bytes, b"\0\xff", b'"AP8="'),
        (timedelta, timedelta(seconds=1.5), b"1500"),
        (Decimal, Decimal("1.50"), b'"1.50"'),
        (
            datetime,
            datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            b'"2026-01-02T03:04:05+00:00"',
        ),
        (
            datetime,
            datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/Berlin")),
            b'"2026-07-01T00:00:00+02:00"',
        ),
        (date, date(2026, 1, 2), b'"2026-01-02"'),
        (time, time(1, 2), b'"01:02:00"'),
        (UUID, UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (Color, Color.RED, b'"red"'),
        (set[int], {3, 1, 2}, b"[1,2,3]"),
        (Address, Address("x"), b'{"number":1,"street":"x","tags":[]}'),
        (str, Mode.FAST, b'"fast"'),
    ],
)
def test_the_stored_form_is_fixed(annotation, value, data):
    assert JSON.encode(form_of(annotation).encode(value)) == data


def test_rfc_3339_with_a_z_is_read():
    read = form_of(datetime).decode("2026-01-02T03:04:05.5Z")
    assert read == datetime(2026, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC)


class Email(str):
    pass


ENCODE_REFUSALS = [
    (int, "42", "expected int, got str"),
    (int, True, "expected int, got bool"),
    (int, None, "expected int, got None"),
    (int, 4.0, "expected int, got float"),
    (bool, 1, "expected bool, got int"),
    (float, "1", "expected float, got str"),
    (float, True, "expected float, got bool"),
    (float, math.nan, "expected a finite float"),
    (float, 2**53 + 1, "float cannot hold exactly"),
    (float, 10**400, "beyond its range"),
    (str, 1, "expected str, got int"),
    (str, os.fsdecode(b"\xff"), "got a lone surrogate"),
    (bytes, "x", "expected bytes, got str"),
    (bytes, bytearray(b"x"), "expected bytes, got bytearray"),
    (datetime, datetime(2026, 1, 1), "with a time zone, got a naive one"),
    (datetime | None, datetime(2026, 1, 1), "with a time zone, got a naive one"),
    (datetime, date(2026, 1, 1), "expected datetime, got date"),
    (
        datetime,
        datetime(1800, 1, 1, tzinfo=timezone(timedelta(seconds=1))),
        "whole minutes",
    ),
    (date, datetime(2026, 1, 1, tzinfo=UTC), "expected date, got datetime"),
    (time, time(1, tzinfo=UTC), "without a time zone"),
    (timedelta, timedelta(microseconds=1), "whole milliseconds"),
    (UUID, "533e9183-0191-4214-91e4-f8336512de81", "expected UUID, got str"),
    (Decimal, Decimal("NaN"), "finite"),
    (Decimal, 1, "expected Decimal, got int"),
    (Color, "red", "expected Color, got str"),
    (Level, 1, "expected Level, got int"),
    (Access, 1, "expected Access, got int"),
    (Literal[1], True, "expected one of 1, got bool"),
    (Literal["a"], "b", "expected one of 'a', got another value"),
    (Literal["a"], [], "expected one of 'a', got list"),
    (int | None, "x", "expected int or None, got str"),
    (list[int], (1,), "expected list, got tuple"),
    (list[int], [1, "x"], r"\[1\]: expected int, got str"),
    (tuple[int, str], (1,), "expected tuple of 2, got 1"),
    (tuple[int, str], (1, 2), r"\[1\]: expected str, got int"),
    (set[int], frozenset({1}), "expected set, got frozenset"),
    (dict[str, int], {1: 2}, "expected dict keys of str, got int"),
    (dict[str, int], {"a": "b"}, r"\['a'\]: expected int, got str"),
    (dict[str, int], {"\udfff": 1}, "lone surrogate"),
    (Any, {1: 2}, "a dict key of type int"),
    (Any, (1,), "got tuple"),
    (Any, {"a": object()}, "got object"),
    (Address, {"street": "x"}, "expected Address, got dict"),
    (Address, Address(1), "street: expected str, got int"),
    (
        list[Line],
        [Line("a", Decimal(1), Line("b", 2))],
        r"\[0\].next.price: expected Decimal",
    ),
    (Shipping, {}, "carrier: missing"),
    (Shipping, {"carrier": "x", "wieght": 1.0}, "unknown key 'wieght'"),
]


@pytest.mark.parametrize(("annotation", "value", "problem"), ENCODE_REFUSALS)
def test_a_producer_cannot_send_what_it_does_not_declare(annotation, value, problem):
    with pytest.raises(Mismatch, match=problem):
        travelled(form_of(annotation), value)


DECODE_REFUSALS = [
    (int, True, "expected int, got bool"),
    (int, 1.0, "expected int, got float"),
    (bytes, "%%", "expected bytes in base64"),
    (bytes, 1, "expected bytes in base64, got int"),
    (datetime, "2026-01-02 03:04:05Z", "expected datetime in RFC 3339"),
    (datetime, "2026-01-02T03:04:05", "expected datetime in RFC 3339"),
    (datetime, "20260102T030405Z", "expected datetime in RFC 3339"),
    (date, "2026-02-30", "expected date, got another str"),
    (date, "2026-W01-1", "expected date, got another str"),
    (time, "25:00:00", "expected time, got another str"),
    (timedelta, 10**20, "beyond its range"),
    (timedelta, "1s", "expected timedelta in milliseconds, got str"),
    (UUID, "{00000000-0000-0000-0000-000000000001}", "expected UUID"),
    (Decimal, "1_000", "expected Decimal"),
    (Decimal, "NaN", "expected Decimal"),
    (Color, "green", "expected Color, got another value"),
    (Level, True, "expected Level, got bool"),
    (Access, "x", "expected int, got str"),
    (set[list[int]], [[1]], "hashable"),
    (tuple[int, ...], "ab", "expected tuple, got str"),
    (list[int], {"0": 1}, "expected list, got dict"),
    (Address, {"number": 1}, "street: missing"),
    (Address, {"street": "x", "nubmer": 1}, "unknown field 'nubmer'"),
    (Address, ["x"], "expected Address, got list"),
    (Address | Line | None, {"street": 1}, "expected Address or Line or None|street"),
]


@pytest.mark.parametrize(("annotation", "plain", "problem"), DECODE_REFUSALS)
def test_a_stored_value_of_another_form_is_refused(annotation, plain, problem):
    with pytest.raises(Mismatch, match=problem):
        form_of(annotation).decode(plain)


def test_an_enum_that_mixes_with_bool_is_matched_by_type():
    class Odd(enum.Enum):
        ONE = 1
        TEXT = "1"

    form = form_of(Odd)
    assert form.decode(1) is Odd.ONE
    assert form.decode("1") is Odd.TEXT
    with pytest.raises(Mismatch):
        form.decode(True)


T = typing.TypeVar("T")


class ManyValued(enum.Enum):
    PAIR = (1, 2)


@pytest.mark.parametrize(
    "annotation",
    [
        complex,
        Sequence[int],
        typing.Callable,
        T,
        dict[int, str],
        Literal[b"x"],
        ManyValued,
        Literal[Color.RED, "red"],
        str | UUID,
        date | datetime,
        list[int] | list[str],
        int | Level,
        dict[str, int] | Address,
        int | timedelta,
        float | timedelta,
        list[complex],
        "unresolved",
        3,
        [int],
    ],
)
def test_an_annotation_that_nothing_can_carry_is_unknown(annotation):
    with pytest.raises(UnknownAnnotation):
        form_of(annotation)


def test_an_unknown_annotation_stays_unknown_when_asked_again():
    class Holder:
        pass

    for _ in range(2):
        with pytest.raises(UnknownAnnotation, match="Holder"):
            form_of(list[Holder])


def test_names_that_say_nothing_about_the_form_are_looked_through():
    assert form_of(typing.Annotated[int, ["unhashable"]]) is form_of(int)
    assert form_of(NewType("OrderId", int)) is form_of(int)


def test_bare_containers_hold_plain_values():
    for annotation, value in ((list, [1, "x"]), (dict, {"a": [1]}), (tuple, (1, "x"))):
        form = form_of(annotation)
        assert form.decode(form.encode(value)) == value


def test_a_subclass_of_a_payload_class_is_not_cut_down_to_it():
    @attrs.frozen
    class Wider(Address):
        country: str = "de"

    with pytest.raises(Mismatch, match="expected Address, got Wider"):
        form_of(Address).encode(Wider("x"))


def test_a_text_subclass_is_sent_as_its_text():
    assert (
        form_of(str).decode(JSON.decode(JSON.encode(form_of(str).encode(Email("a@b")))))
        == "a@b"
    )


def test_private_and_derived_fields_follow_the_constructor():
    @attrs.frozen
    class Account:
        _token: str
        name: str = attrs.field(kw_only=True)
        shout: str = attrs.field(init=False)

        def __attrs_post_init__(self) -> None:
            object.__setattr__(self, "shout", self.name.upper())

    form = form_of(Account)
    value = Account("t", name="n")
    plain = form.encode(value)
    assert plain == {"_token": "t", "name": "n"}
    assert form.decode(plain) == value


def test_a_constructor_that_refuses_is_a_mismatch():
    @dataclasses.dataclass
    class Positive:
        value: int

        def __post_init__(self) -> None:
            if self.value < 0:
                raise ValueError("negative")

    with pytest.raises(Mismatch, match="ValueError in the constructor of Positive"):
        form_of(Positive).decode({"value": -1})


def test_fields_may_have_any_name():
    @attrs.frozen
    class Names:
        converter: int
        cl: int
        o: int
        self_: int
        _cattrs_detailed_validation: int = 5

    value = Names(1, 2, 3, 4)
    assert form_of(Names).decode(form_of(Names).encode(value)) == value


def test_fields_without_a_type_hold_plain_values():
    kind = attrs.make_class("Loose", ["value"])
    form = form_of(kind)
    assert form.decode(form.encode(kind([1]))) == kind([1])


def test_local_classes_find_their_names_in_the_scope():
    @attrs.frozen
    class Inner:
        value: int

    @dataclasses.dataclass
    class Outer:
        inner: Inner

    form = form_of(list[Outer], {"Inner": Inner})
    assert form.decode(form.encode([Outer(Inner(1))])) == [Outer(Inner(1))]


def test_typed_dict_inheritance_keeps_required_and_optional_keys():
    class Base(TypedDict):
        id: int

    class Extended(Base, total=False):
        note: str

    form = form_of(Extended)
    assert form.decode({"id": 1}) == {"id": 1}
    with pytest.raises(Mismatch, match="id: missing"):
        form.decode({"note": "x"})


def test_a_class_may_contain_itself():
    value = Tree(1, (Tree(2), Tree(3, (Tree(4),))))
    assert form_of(Tree).decode(form_of(Tree).encode(value)) == value
