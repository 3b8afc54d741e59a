"""Option texts with names in braces."""

from __future__ import annotations

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.templates import parse_template

PLAIN = {
    "tenant": "acme",
    "n": 42,
    "flag": True,
    "none": None,
    "ratio": 0.5,
    "items": [1],
    "order": {"id": 7, "buyer": {"name": "Ada"}},
    "für": "ü",
}


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("constant", "constant"),
        ("", ""),
        ("{tenant}", "acme"),
        ("{tenant}:{n}", "acme:42"),
        ("{flag}", "true"),
        ("{order.id}/{order.buyer.name}", "7/Ada"),
        ("{{{tenant}}}", "{acme}"),
        ("{{tenant}}", "{tenant}"),
        ("{für}", "ü"),
    ],
)
def test_names_are_filled_in(text, rendered):
    assert parse_template(text).render(PLAIN) == rendered


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{none}", r"\{none\} is None"),
        ("{ratio}", r"\{ratio\} is float"),
        ("{items}", r"\{items\} is list"),
        ("{order}", r"\{order\} is dict"),
        ("{nope}", r"\{nope\} is not in the payload"),
        ("{order.nope}", r"\{order.nope\} is not in the payload"),
        ("{tenant.x}", r"\{tenant.x\} is not in the payload"),
    ],
)
def test_a_value_that_names_nothing_is_refused(text, fault):
    with pytest.raises(InvalidRequest, match=fault):
        parse_template(text).render(PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "}",
        "{}",
        "{tenant",
        "tenant}",
        "{tenant!r}",
        "{n:04}",
        "{items[0]}",
        "{f()}",
        "{1}",
        "{a..b}",
        "{ a }",
        "{{}",
    ],
)
def test_anything_but_names_is_refused(text):
    with pytest.raises(InvalidRequest):
        parse_template(text)
