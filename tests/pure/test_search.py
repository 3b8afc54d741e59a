"""The text that stands for a filter."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.errors import InvalidRequest
from headgate_sync.search import MAX_QUERY_BYTES, JobFilter, parse_query, read_cursor


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("   ", {}),
        ("queue:mail state:archived", {"queue": "mail", "state": "archived"}),
        ("  queue:mail   kind:x ", {"queue": "mail", "kind": "x"}),
        ("kind:email:welcome", {"kind": "email:welcome"}),
        ("email", {"kind_prefix": "email"}),
        ("partition:", {"partition_key": ""}),
        ("tag:b tag:a tag:a", {"tags_all": ("a", "b")}),
        ("tag_any:a tag_any:b", {"tags_any": ("a", "b")}),
        ("priority:-7", {"priority": -7}),
        ("queue:a queue:b", {"queue": "b"}),
        ("id:1 rate_class:c fingerprint:f", {"id": "1", "rate_class": "c",
                                             "fingerprint": "f"}),
        ("one\ttwo", {"kind_prefix": "one\ttwo"}),
    ],
)  # fmt: skip
def test_a_search_is_a_filter(text, wanted):
    assert parse_query(text) == JobFilter(**wanted)


def test_what_the_text_names_replaces_what_was_given():
    given = JobFilter(queue="a", state="archived", tags_all=("x",))
    assert parse_query("queue:b tag:y", given) == JobFilter(
        queue="b", state="archived", tags_all=("y",)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bogus:x", "unknown search field `bogus`, did you mean kind:bogus:x?"),
        ("queu:x", "unknown search field `queu`, did you mean queue:x?"),
        ("tags:a:b", "unknown search field `tags`, did you mean tag:a:b?"),
        ("email:x", "unknown search field `email`, did you mean kind:email:x?"),
        ("queue=a", "`queue=a` is no beginning of a kind, did you mean queue:a?"),
        (":x", "unknown search field ``, did you mean kind::x?"),
        ("priority:x", "priority `x` is not a number"),
        ("priority:", "priority `` is not a number"),
        ("priority:١", "priority `١` is not a number"),
        ("priority:1_0", "priority `1_0` is not a number"),
        ("priority:" + "9" * 5000, None),
        ("priority:2147483648", None),
        ("state:finished", None),
        ("queue:nul\0", "q must not contain NUL (U+0000)"),
        ("x" * (MAX_QUERY_BYTES + 1), None),
        (7, "q must be str, got int"),
    ],
)
def test_a_search_that_means_nothing_is_refused(text, message):
    with pytest.raises(InvalidRequest) as raised:
        parse_query(text)
    assert message is None or raised.value.message == message


@given(st.text(max_size=200))
def test_any_text_is_a_filter_or_a_typed_refusal(text):
    with suppress(InvalidRequest):
        assert isinstance(parse_query(text), JobFilter)


@given(st.text(max_size=25))
def test_any_cursor_is_a_place_or_a_typed_refusal(text):
    with suppress(InvalidRequest):
        assert 0 < read_cursor(text, 10) <= 10
