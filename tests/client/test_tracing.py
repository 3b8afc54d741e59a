"""Trace headers: parsed exactly, inherited by children, never a reason to fail."""

from __future__ import annotations

import pytest

from headgate_sync.tracing import inherited, parse_traceparent, trace_of

T = "4bf92f3577b34da6a3ce929d0e0e4736"
S = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("flags", "sampled"), [("01", True), ("00", False), ("03", True)]
)
def test_a_valid_header_is_parsed_and_rendered_again(flags, sampled):
    header = f"00-{T}-{S}-{flags}"
    context = parse_traceparent(header)
    assert context is not None
    assert (context.trace_id, context.span_id) == (T, S)
    assert context.sampled is sampled
    assert context.to_traceparent() == header


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{T}-{S}",
        f"00-{T}-{S}-01-extra",
        f"01-{T}-{S}-01",
        f"00-{T.upper()}-{S}-01",
        f"00-{T[:-1]}-{S}-01",
        f"00-{T}-{S[:-1]}-01",
        f"00-{T}-{S}-1",
        f"00-{T}-{S}-zz",
        f"00-{'0' * 32}-{S}-01",
        f"00-{T}-{'0' * 16}-01",
        f" 00-{T}-{S}-01",
        f"00-{T}-{S}-01\n",
    ],
)
def test_anything_else_is_no_context(header):
    assert parse_traceparent(header) is None


def test_the_state_is_taken_only_beside_a_valid_parent():
    valid = {"traceparent": f"00-{T}-{S}-01", "tracestate": "vendor=x"}
    context = trace_of(valid)
    assert context is not None
    assert context.trace_state == "vendor=x"
    assert trace_of({"traceparent": "no", "tracestate": "vendor=x"}) is None
    assert trace_of({"Traceparent": f"00-{T}-{S}-01"}) is None


def test_a_child_without_a_trace_gets_the_parents():
    parent = {"traceparent": f"00-{T}-{S}-01", "tracestate": "vendor=x", "other": "y"}
    assert inherited({"own": "z"}, parent) == {
        "own": "z",
        "traceparent": parent["traceparent"],
        "tracestate": "vendor=x",
    }


def test_a_child_keeps_a_trace_of_its_own():
    own = {"traceparent": f"00-{T}-{S}-00"}
    assert inherited(own, {"traceparent": f"00-{T}-{S}-01"}) == own


def test_an_invalid_trace_is_not_inherited():
    assert inherited({}, {"traceparent": "garbage", "tracestate": "x"}) == {}
