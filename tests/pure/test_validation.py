"""Rules of a batch and limits of calls."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import Envelope
from headgate_sync.errors import IdConflict, InvalidRequest
from headgate_sync.validation import (
    check_count,
    check_duty,
    check_limit,
    check_name,
    validate_enqueue,
)

MIB = 2**20


def job(id: str, **fields) -> Envelope:
    """A small valid job."""
    return Envelope(**{"id": id, "kind": "k", **fields})


def refusal(call, *arguments) -> str:
    """The text with which a check refuses."""
    with pytest.raises(InvalidRequest) as raised:
        call(*arguments)
    return raised.value.message


def test_an_empty_batch_breaks_no_rule():
    validate_enqueue([])


def test_a_batch_holds_at_most_1000_jobs():
    validate_enqueue([job(str(n)) for n in range(1000)])
    text = refusal(validate_enqueue, [job(str(n)) for n in range(1001)])
    assert text == "batch has 1001 jobs, the limit is 1000"


def test_a_batch_holds_at_most_16_mib_of_all_its_bytes():
    jobs = [job(f"{n:02}", queue="q", payload=bytes(MIB - 4)) for n in range(16)]
    validate_enqueue(jobs)
    heavier = [*jobs[:15], job("15", queue="q", payload=bytes(MIB - 4), tags=["t"])]
    assert refusal(validate_enqueue, heavier) == "batch has more than 16777216 bytes"


def test_an_id_stands_once_in_a_batch():
    with pytest.raises(IdConflict) as raised:
        validate_enqueue([job("a"), job("b"), job("b"), job("a")])
    assert raised.value.job_id == "b"


def test_a_batch_holds_nothing_but_envelopes():
    assert (
        refusal(validate_enqueue, [{"id": "a"}]) == "batch must hold Envelope, got dict"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"unique_replace": 4, "unique_key": b"k"},
        {"unique_debounce_ms": 4, "unique_key": b"k"},
    ],
    ids=["replace", "debounce"],
)
def test_a_replacing_job_is_alone_in_its_batch(fields):
    validate_enqueue([job("a", **fields)])
    for batch in ([job("a", **fields), job("b")], [job("b"), job("a", **fields)]):
        assert refusal(validate_enqueue, batch) == (
            "unique_replace and unique_debounce_ms need a batch of exactly one job"
        )


def test_a_repeated_id_is_named_before_a_crowded_replacement():
    with pytest.raises(IdConflict):
        validate_enqueue([job("a"), job("a", unique_replace=4, unique_key=b"k")])


@pytest.mark.parametrize("limit", [1, 1000, 1_000_000])
def test_a_sweep_has_a_limit(limit):
    check_limit(limit)


@pytest.mark.parametrize("limit", [0, -1, 1_000_001])
def test_a_limit_has_bounds(limit):
    assert refusal(check_limit, limit) == f"limit is {limit}, allowed is 1 to 1000000"


def test_a_limit_is_a_number():
    assert refusal(check_limit, True) == "limit must be int, got bool"
    assert refusal(check_limit, None) == "limit must be int, got NoneType"


def test_a_call_brings_a_bounded_number_of_values():
    check_count("acks", 1000, 1000)
    assert refusal(check_count, "acks", 1001, 1000) == (
        "acks has 1001 entries, the limit is 1000"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "queue must not be empty"),
        ("é" * 128, "queue has 256 bytes, the limit is 255"),
        ("\0", "queue must not contain NUL (U+0000)"),
        ("\ud800", "queue must not contain a lone surrogate"),
        (1, "queue must be str, got int"),
    ],
)
def test_a_name_is_some_text(name, text):
    assert refusal(check_name, "queue", name) == text
    check_name("queue", "é" * 127)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", "h", 1), "name must not be empty"),
        (("n", "", 1), "holder must not be empty"),
        (("n", "h", 0), "lease_ms is 0, allowed is 1 to 86400000"),
        (("n", "h", 86_400_001), "lease_ms is 86400001, allowed is 1 to 86400000"),
    ],
)
def test_a_duty_has_a_name_a_holder_and_an_end(arguments, text):
    assert refusal(check_duty, *arguments) == text
    check_duty("n", "h", 86_400_000)
