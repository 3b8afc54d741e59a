"""Envelopes: kinds, identities, keys, defaults and every rule with its message."""

from __future__ import annotations

import hashlib
from types import MappingProxyType

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.envelope import (
    UNIQUE_REPLACE_ALL,
    Envelope,
    check_kind,
    check_payload,
    effective_unique_key,
    field_names,
    fingerprint,
    headers_json,
    lane_key,
    unique_key_of,
)
from headgate_sync.errors import InvalidRequest
from headgate_sync.loggers import visible

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
THOUSAND_YEARS_MS = 31_536_000_000_000


def build(**fields) -> Envelope:
    """A small valid job, changed in some fields."""
    return Envelope(**{"id": "a", "kind": "k", **fields})


def refusal(**fields) -> str:
    """The text with which the constructor refuses."""
    with pytest.raises(InvalidRequest) as raised:
        build(**fields)
    return raised.value.message


# Kind


GOOD_KINDS = (
    *(
        "w",
        "k",
        "_",
        "0",
        "email:welcome",
        "notify:welcome",
        "a-b",
        "a.b",
        "a/b",
        "a+b",
    ),
    *("a<b>", "a[b]", "Job_1", "x" * 128),
)
BAD_KINDS = (
    *("", "x" * 129, "-lead", ".lead", ":lead", "+lead", "[lead", "a b", " a", "a\t"),
    *("a\n", "a\0", "a!", "a#b", "a,b", "a(b)", "a*", "résumé:parse", "a·b", "a%b"),
    *('a"b', "/lead", "<lead", "a\\b", "a{b}", "a٣", "é", "a\ud800"),
)


@pytest.mark.parametrize("kind", GOOD_KINDS)
def test_a_wellformed_kind_is_taken(kind):
    assert build(kind=kind).kind == kind
    check_kind(kind)


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_a_malformed_kind_is_refused(kind):
    with pytest.raises(InvalidRequest):
        build(kind=kind)
    with pytest.raises(InvalidRequest) as raised:
        check_kind(kind)
    assert raised.value.message == (
        f"invalid kind `{visible(kind)}`: 1-128 characters, first [A-Za-z0-9_], "
        "rest [A-Za-z0-9_] or one of -[]<>/.:+"
    )


@given(st.characters())
def test_a_kind_is_ascii_whatever_else_unicode_calls_a_letter(character):
    kind = "a" + character
    allowed = character.isascii() and (character.isalnum() or character in "_-[]<>/.:+")
    if allowed:
        check_kind(kind)
    else:
        with pytest.raises(InvalidRequest):
            check_kind(kind)


# Identities


@pytest.mark.parametrize(
    ("kind", "payload", "digest"),
    [
        ("email:welcome", b"", "bed0eecb39af02d79d5cdc8026a9b817"),
        ("", b"", "af5570f5a1810b7af78caf4bc70a660f"),
        ("a", b"bc", "47ea6f805c5b663e33012cd34184e139"),
        ("ab", b"c", "60014a36d7b05b0730e42a8b96faa1ff"),
        ("charge", b"\x00\x01\x02", "295e280cea51e7f3978bc3195d8fd4ae"),
        ("résumé:parse", b"{}", "a9b8c5d03aa1a0710129091fa3dc0a1d"),
        ("w", b"", "03e251678cf08a21b344e60d64d0e229"),
        ("tk:msg", b"ok", "7767f1be487a6de827d96da7a067114b"),
        ("tk:msg", b"old", "0aedf07fd3589ca57081b25f713321ba"),
    ],
)
def test_the_fingerprint_of_kind_and_payload_is_fixed(kind, payload, digest):
    assert fingerprint(kind, payload) == digest


@given(st.text(), st.binary(), st.text(), st.binary())
def test_two_pairs_of_kind_and_payload_never_run_together(kind, payload, other, data):
    same = (kind, payload) == (other, data)
    assert (fingerprint(kind, payload) == fingerprint(other, data)) == same


@pytest.mark.parametrize(
    ("kind", "key", "exclude", "stored"),
    [
        ("tk:msg", b"event", False, "014b00000006746b3a6d73676576656e74"),
        ("tk:other", b"event", False, "014b00000008746b3a6f746865726576656e74"),
        ("tk:other", b"global-key", True, "0147676c6f62616c2d6b6579"),
        ("a", b"", False, "014b0000000161"),
        ("a", b"", True, "0147"),
    ],
)
def test_the_stored_form_of_a_unique_key_is_fixed(kind, key, exclude, stored):
    effective = bytes.fromhex(stored)
    assert effective_unique_key(kind, key, exclude_kind=exclude) == effective
    job = build(kind=kind, unique_key=key, unique_exclude_kind=exclude)
    assert job.effective_unique_key == effective
    assert unique_key_of(kind, effective) == (key, exclude)


def test_without_a_unique_key_there_is_no_stored_form():
    assert build().effective_unique_key is None
    assert unique_key_of("k", None) == (None, False)


def test_a_lane_is_named_by_its_four_fields_behind_their_lengths():
    lengths = [b"\x00\x00\x00\x01q", b"\x00\x00\x00\x02\xc3\xa9", b"\x00\x00\x00\x00"]
    digest = hashlib.sha256(b"".join(lengths) + b"\x00\x00\x00\x01w").digest()
    name = int.from_bytes(digest[:8], "big", signed=True)
    job = build(queue="q", partition_key="é", sticky_worker="w")
    assert job.lane_key == lane_key("q", "é", "", "w") == name


def test_lanes_whose_fields_are_cut_elsewhere_differ():
    names = {
        lane_key("a", "b", "", ""),
        lane_key("ab", "", "", ""),
        lane_key("", "ab", "", ""),
        lane_key("a", "", "b", ""),
        lane_key("a", "", "", "b"),
    }
    assert len(names) == 5


# Defaults and normal forms


def test_zero_values_read_as_defaults():
    for job in (build(), build(queue="", max_attempts=0, schema_version=0, weight=0)):
        assert job.queue == "default"
        assert (job.max_attempts, job.schema_version, job.weight) == (25, 1, 1)
        assert (job.scheduled_at_ms, job.timeout_ms, job.deadline_ms) == (0, 0, 0)
    assert build(max_attempts=1, weight=7, schema_version=2) == evolve(
        build(), max_attempts=1, weight=7, schema_version=2
    )


def test_tags_are_sorted_by_code_point():
    assert build(tags=["b", "a", "B", "~"]).tags == ("B", "a", "b", "~")
    assert build(tags=(tag for tag in ("b", "a"))) == build(tags=["a", "b"])


def test_headers_are_copied_and_kept_as_they_are():
    given_headers = {"b": "1", "a": "é", "Traceparent": "garbage"}
    job = build(headers=given_headers)
    given_headers["c"] = "later"
    assert job.headers == {"b": "1", "a": "é", "Traceparent": "garbage"}
    with pytest.raises(TypeError):
        job.headers["c"] = "x"


def test_headers_are_stored_with_sorted_keys_and_without_blanks():
    assert headers_json({}) == "{}"
    assert headers_json(build(headers={"b": "x y", "a": "é"}).headers) == (
        '{"a":"é","b":"x y"}'
    )


def test_a_value_of_the_wire_compares_by_its_fields():
    assert build(headers={"a": "1"}) == build(headers=MappingProxyType({"a": "1"}))
    assert build(priority=1) != build()


def test_the_size_of_a_job_counts_bytes_of_every_text_and_blob():
    job = build(
        id="é",  # 2
        kind="kind",  # 4
        payload=b"12345",
        queue="q",
        partition_key="pp",
        rate_class="rrr",
        fingerprint="f",
        unique_key=b"123",
        periodic_schedule_id="s",
        periodic_tick_ms=1,
        headers={"k": "é"},  # 3
        tags=("ab", "c"),  # 3
        sticky_worker="w",
    )
    assert job.size_bytes == 2 + 4 + 5 + 1 + 2 + 3 + 1 + 3 + 1 + 3 + 3 + 1


def test_a_stored_job_is_rebuilt_field_by_field():
    job = build(
        payload=b"\xff", unique_key=b"k", tags=("a", "b"), headers={"a": "1"}, attempt=3
    )
    values = [getattr(job, name) for name in field_names()]
    assert Envelope.from_stored(values) == job
    with pytest.raises(ValueError, match="shorter"):
        Envelope.from_stored(values[:-1])


# Rules

TEXTS = ("id", "queue", "partition_key", "rate_class", "fingerprint")
TEXTS_AND_WORKER = (*TEXTS, "sticky_worker")


@pytest.mark.parametrize("field", [*TEXTS_AND_WORKER, "kind", "periodic_schedule_id"])
def test_text_columns_take_only_what_they_can_hold(field):
    assert refusal(**{field: "a\0"}) == f"{field} must not contain NUL (U+0000)"
    assert refusal(**{field: "a\ud800"}) == f"{field} must not contain a lone surrogate"
    assert refusal(**{field: b"a"}) == f"{field} must be str, got bytes"
    assert refusal(**{field: None}) == f"{field} must be str, got NoneType"


@pytest.mark.parametrize("field", TEXTS)
def test_names_are_at_most_255_bytes(field):
    assert getattr(build(**{field: "é" * 127 + "x"}), field) == "é" * 127 + "x"
    assert refusal(**{field: "é" * 128}) == f"{field} has 256 bytes, the limit is 255"


def test_a_schedule_id_is_at_most_255_bytes():
    assert build(periodic_schedule_id="s" * 255, periodic_tick_ms=1)
    text = refusal(periodic_schedule_id="s" * 256, periodic_tick_ms=1)
    assert text == "periodic_schedule_id has 256 bytes, the limit is 255"


def test_an_id_is_not_empty():
    assert refusal(id="") == "id must not be empty"


def test_a_sticky_worker_is_ascii():
    assert build(sticky_worker="w" * 255)
    assert (
        refusal(sticky_worker="é") == "sticky_worker must be ASCII, at most 255 bytes"
    )
    assert refusal(sticky_worker="w" * 256) == (
        "sticky_worker has 256 bytes, the limit is 255"
    )


RANGES = {
    "schema_version": (0, MAX_INT32),
    "weight": (0, MAX_INT32),
    "priority": (-MAX_INT32 - 1, MAX_INT32),
    "attempt": (0, MAX_INT32),
    "crash_attempt": (0, MAX_INT32),
    "max_attempts": (0, MAX_INT32),
    "unique_states": (-MAX_INT32 - 1, MAX_INT32),
    "scheduled_at_ms": (0, MAX_INT64),
    "timeout_ms": (0, MAX_INT64),
    "deadline_ms": (0, MAX_INT64),
    "retention_ms": (0, THOUSAND_YEARS_MS),
    "unique_window_ms": (0, THOUSAND_YEARS_MS),
    "delay_ms": (0, THOUSAND_YEARS_MS),
    "deadline_in_ms": (0, THOUSAND_YEARS_MS),
}


@pytest.mark.parametrize("field", RANGES)
def test_numbers_have_a_range_and_a_type(field):
    low, high = RANGES[field]
    for value in (low, high):
        assert getattr(build(**{field: value}), field) in (value, 1, 25)
    for value in (low - 1, high + 1):
        assert (
            refusal(**{field: value})
            == f"{field} is {value}, allowed is {low} to {high}"
        )
    assert refusal(**{field: 2**80}).startswith(f"{field} is {2**80}, allowed is ")
    assert refusal(**{field: True}) == f"{field} must be int, got bool"
    assert refusal(**{field: 1.0}) == f"{field} must be int, got float"


@pytest.mark.parametrize("field", ["pending", "unique_exclude_kind"])
def test_switches_are_bool(field):
    assert refusal(**{field: 1}) == f"{field} must be bool"


def test_a_payload_is_bytes_of_at_most_1_mib():
    assert len(build(payload=b"x" * 1_048_576).payload) == 1_048_576
    assert refusal(payload=b"x" * 1_048_577) == (
        "payload has 1048577 bytes, the limit is 1048576"
    )
    assert refusal(payload="text") == "payload must be bytes, got str"
    assert refusal(payload=bytearray(b"x")) == "payload must be bytes, got bytearray"


def test_a_unique_key_is_bytes_of_at_most_1024():
    assert build(unique_key=b"x" * 1024)
    assert build(unique_key=b"").unique_key == b""
    assert refusal(unique_key=b"x" * 1025) == (
        "unique_key has 1025 bytes, the limit is 1024"
    )
    assert refusal(unique_key="k") == "unique_key must be bytes or None"


def test_headers_are_bounded_in_number_and_size():
    assert build(headers={str(n): "" for n in range(128)})
    assert refusal(headers={str(n): "" for n in range(129)}) == (
        "headers has 129 entries, the limit is 128"
    )
    assert build(headers={"k": "é" * 32_767 + "x"}).headers_bytes == 65_536
    assert refusal(headers={"k": "é" * 32_768}) == (
        "headers has 65537 bytes, the limit is 65536"
    )


def test_headers_are_a_mapping_of_text():
    assert refusal(headers=[("a", "b")]) == "headers must be a mapping, got list"
    assert refusal(headers={"a": 1}) == "headers must be str, got int"
    assert refusal(headers={1: "a"}) == "headers must be str, got int"
    assert refusal(headers={"a": "\0"}) == "headers must not contain NUL (U+0000)"
    assert (
        refusal(headers={"\ud800": ""}) == "headers must not contain a lone surrogate"
    )


def test_tags_are_few_short_ascii_and_distinct():
    assert len(build(tags=[f"t{n}" for n in range(32)]).tags) == 32
    assert refusal(tags=[f"t{n}" for n in range(33)]) == (
        "tags has 33 entries, the limit is 32"
    )
    assert build(tags=["x" * 64])
    assert refusal(tags=["x" * 65]) == f"tag {'x' * 65!r} must be 1 to 64 ASCII bytes"
    assert refusal(tags=[""]) == "tag '' must be 1 to 64 ASCII bytes"
    assert refusal(tags=["é"]) == "tag 'é' must be 1 to 64 ASCII bytes"
    assert refusal(tags=["a", "a"]) == "tags must not repeat"
    assert refusal(tags=["a\0"]) == "tags must not contain NUL (U+0000)"
    assert refusal(tags=[1]) == "tags must be str, got int"
    assert refusal(tags="abc") == "tags must be a sequence of str, got str"
    assert refusal(tags=5) == "tags must be a sequence of str, got int"


def test_debounce_needs_a_lifecycle_key():
    assert build(unique_debounce_ms=5, unique_key=b"k")
    text = (
        "unique_debounce_ms needs a non-empty lifecycle unique_key (unique_window_ms 0)"
    )
    assert refusal(unique_debounce_ms=5) == text
    assert refusal(unique_debounce_ms=5, unique_key=b"") == text
    assert (
        refusal(unique_debounce_ms=5, unique_key=b"k", unique_window_ms=60_000) == text
    )
    assert refusal(unique_debounce_ms=-1, unique_key=b"k") == (
        f"unique_debounce_ms is -1, allowed is 0 to {THOUSAND_YEARS_MS}"
    )


def test_replacement_has_known_bits_and_a_key():
    assert build(unique_replace=UNIQUE_REPLACE_ALL, unique_key=b"k")
    assert refusal(unique_replace=4) == "unique_replace needs a non-empty unique_key"
    assert refusal(unique_replace=4, unique_key=b"") == (
        "unique_replace needs a non-empty unique_key"
    )
    for bits in (16, 15 + 256, -1):
        assert refusal(unique_replace=bits, unique_key=b"k") == (
            f"unique_replace has unknown bits: {bits}, known are 15"
        )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"pending": True, "scheduled_at_ms": 5}, "pending excludes scheduled_at_ms"),
        ({"pending": True, "delay_ms": 5}, "pending excludes delay_ms"),
        ({"delay_ms": 5, "scheduled_at_ms": 5}, "delay_ms excludes scheduled_at_ms"),
        (
            {"delay_ms": 5, "unique_debounce_ms": 5, "unique_key": b"k"},
            "delay_ms excludes unique_debounce_ms",
        ),
        (
            {"deadline_in_ms": 5, "deadline_ms": 5},
            "deadline_in_ms excludes deadline_ms",
        ),
    ],
)
def test_contradicting_schedules_name_both_fields(fields, text):
    assert refusal(**fields) == text


@pytest.mark.parametrize(
    "origin", [("s", 0), ("", 5), ("s", -1), ("", -1)], ids=lambda origin: str(origin)
)
def test_a_periodic_origin_is_whole_or_absent(origin):
    text = refusal(periodic_schedule_id=origin[0], periodic_tick_ms=origin[1])
    assert text == (
        "periodic_schedule_id and periodic_tick_ms go together: "
        f"{origin[0]!r}, {origin[1]}"
    )
    assert build(periodic_schedule_id="s", periodic_tick_ms=5).periodic_tick_ms == 5


def test_types_and_text_are_judged_before_lengths():
    assert refusal(id="", queue="\0") == "queue must not contain NUL (U+0000)"
    assert refusal(id="x" * 256, payload=1) == "payload must be bytes, got int"
    assert refusal(id="", kind="!") == "id must not be empty"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("p", 1, "f"), "payload must be bytes, got str"),
        ((b"p", 0, "f"), f"schema_version is 0, allowed is 1 to {MAX_INT32}"),
        ((b"p", True, "f"), "schema_version must be int, got bool"),
        ((b"p", 1, "f" * 256), "fingerprint has 256 bytes, the limit is 255"),
        ((b"p", 1, "\0"), "fingerprint must not contain NUL (U+0000)"),
        (
            (b"x" * 1_048_577, 1, "f"),
            "payload has 1048577 bytes, the limit is 1048576",
        ),
    ],
)
def test_an_edit_obeys_the_rules_of_the_fields_it_replaces(arguments, text):
    with pytest.raises(InvalidRequest) as raised:
        check_payload(*arguments)
    assert raised.value.message == text
    check_payload(b"x" * 1_048_576, 1, "")


EDGES = ["", "a", "x" * 127, "x" * 128, "x" * 254, "x" * 255, "x" * 256]
anything = st.deferred(
    lambda: (
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-1, 300)
        | st.sampled_from([MAX_INT32, MAX_INT32 + 1, MAX_INT64, MAX_INT64 + 1, 2**200])
        | st.floats()
        | st.binary(max_size=8)
        | st.text(st.characters(exclude_categories=()), max_size=8)
        | st.sampled_from(["x" * 300, "é" * 200, "\0", "\ud800", "\udfff", "٣", "\n"])
        | st.lists(anything, max_size=2)
        | st.dictionaries(st.text(max_size=2) | st.integers(), anything, max_size=2)
    )
)


@given(st.dictionaries(st.sampled_from(field_names()), anything, max_size=4))
def test_hostile_values_are_taken_or_refused_and_nothing_else(fields):
    try:
        job = build(**fields)
    except InvalidRequest:
        return
    for name in (*TEXTS_AND_WORKER, "kind"):
        text = getattr(job, name)
        assert len(text.encode()) <= 255
        assert "\0" not in text
    assert job.queue
    assert min(job.weight, job.schema_version, job.max_attempts) >= 1
    assert list(job.tags) == sorted(set(job.tags))
    assert headers_json(job.headers).encode()
    assert job.size_bytes < 2**21
    assert evolve(job) == job


@given(
    st.dictionaries(
        st.sampled_from((*TEXTS_AND_WORKER, "kind")), st.sampled_from(EDGES), max_size=4
    ),
    st.dictionaries(
        st.sampled_from([*RANGES, "periodic_tick_ms"]),
        st.sampled_from([-1, 0, 1, MAX_INT32, MAX_INT32 + 1, THOUSAND_YEARS_MS]),
        max_size=3,
    ),
)
def test_small_jobs_are_judged_like_all_others(texts, numbers):
    """What a joint look lets through, a look at each field lets through too."""
    try:
        job = build(**texts, **numbers)
    except InvalidRequest:
        return
    apart = evolve(job, partition_key="é", priority=-1)
    assert evolve(
        apart, partition_key=job.partition_key, priority=job.priority
    ) == evolve(job)


@given(st.dictionaries(st.sampled_from(sorted(RANGES)), st.just(10**5000), min_size=1))
def test_a_number_too_long_to_print_is_refused_by_its_length(numbers):
    assert "is a number of 16610 bits, allowed is" in refusal(**numbers)
