"""JSON as the payload's bytes: one form for equal values, nothing lossy."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.codec import JSON, MAX_NESTING, plain_fault
from headgate_sync.errors import InvalidRequest, MalformedPayload

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=15,
)


def test_keys_are_sorted_and_nothing_is_padded():
    assert (
        JSON.encode({"b": [1, 2.5, None], "a": "ü"})
        == '{"a":"ü","b":[1,2.5,null]}'.encode()
    )


@given(PLAIN)
def test_plain_values_survive(value):
    assert JSON.decode(JSON.encode(value)) == value


@given(st.dictionaries(TEXT, PLAIN))
def test_equal_dicts_have_equal_bytes_in_any_order(value):
    turned = dict(reversed(list(value.items())))
    assert JSON.encode(turned) == JSON.encode(value)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), "nan"),
        ([float("-inf")], "-inf"),
        ({1: "x"}, "a dict key of type int"),
        ({"a": {None: 1}}, "a dict key of type NoneType"),
        ((1, 2), "tuple"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        ("\ud800", "a lone surrogate"),
        (os.fsdecode(b"\xff"), "a lone surrogate"),
        ({"\udfff": 1}, "a lone surrogate"),
        (object(), "object"),
    ],
)
def test_what_json_would_bend_or_refuse_is_refused(value, fault):
    with pytest.raises(
        InvalidRequest, match=f"expected a plain JSON value, got {fault}"
    ):
        JSON.encode(value)
    assert plain_fault(value) is not None


def nested(depth):
    value: object = 1
    for level in range(depth):
        value = {"in": value} if level % 2 else [value]
    return value


def test_what_can_be_written_can_be_read_below_any_stack():
    """Python refuses by what is left of the stack of whoever asks."""
    deepest = nested(MAX_NESTING)
    assert JSON.decode(JSON.encode(deepest)) == deepest
    with pytest.raises(InvalidRequest, match="nested more than 100 deep"):
        JSON.encode(nested(MAX_NESTING + 1))


def test_depth_without_end_is_refused_and_not_a_crash():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match="nested more than 100 deep"):
        JSON.encode(endless)
    with pytest.raises(MalformedPayload, match="nested too deeply"):
        JSON.decode(b"[" * 100_000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b"\xff",
        b'"\\ud800"',
        b'{"\\udfff":1}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"{} x",
    ],
)
def test_bytes_that_are_no_json_in_utf8_are_malformed(data):
    with pytest.raises(MalformedPayload):
        JSON.decode(data)


def test_no_piece_of_the_payload_stands_in_the_error():
    with pytest.raises(MalformedPayload) as caught:
        JSON.decode(b'{"password":"hunter2"')
    assert "hunter2" not in str(caught.value)


def test_numbers_of_any_length_are_refused_or_exact():
    assert JSON.decode(JSON.encode(10**4000)) == 10**4000
    with pytest.raises(InvalidRequest, match="not writable as JSON"):
        JSON.encode(10**5000)
