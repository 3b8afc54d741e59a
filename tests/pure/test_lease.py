"""Values around a claim: requests, checkpoints, acks, results, what admit answers."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.envelope import Envelope
from headgate_sync.errors import InvalidRequest
from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import (
    Ack,
    AdmissionBatch,
    AdmissionUnit,
    AdmitRequest,
    Checkpoint,
    Claim,
    JobResult,
    LeaseRef,
    ProgressUpdate,
    Resumability,
    cut_text,
    group_admission_claims,
    step_set_hash,
    storable_text,
)
from headgate_sync.lifecycle import ACKABLE, Outcome

LEASE = LeaseRef("a", "l", 1)
MAX_INT32 = 2**31 - 1
THOUSAND_YEARS_MS = 31_536_000_000_000


def refusal(kind, **fields) -> str:
    """The text with which a constructor refuses."""
    with pytest.raises(InvalidRequest) as raised:
        kind(**fields)
    return raised.value.message


def claim(id: str, kind: str = "k", fence: int = 1) -> Claim:
    """A claim of one job."""
    return Claim(
        envelope=Envelope(id=id, kind=kind),
        lease_id="l",
        fence=fence,
        expires_at_ms=2,
        claimed_at_ms=1,
    )


# Requests


def request(**fields) -> AdmitRequest:
    """An ordinary request, changed in some fields."""
    usual = {"lease_id": "l", "queues": ("q",), "capacity": 1, "lease_ms": 1000}
    return AdmitRequest(**{**usual, **fields})


def test_queues_of_a_request_are_a_sorted_set():
    assert request(queues=["q", "é", "p", "q"]).queues == ("p", "q", "é")
    assert request(queues=[]).queues == ()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"worker": "é"}, "worker must be ASCII, at most 255 bytes"),
        ({"worker": "w" * 256}, "worker has 256 bytes, the limit is 255"),
        ({"worker": None}, "worker must be str, got NoneType"),
        ({"lease_id": ""}, "lease_id must not be empty"),
        ({"lease_id": "l" * 256}, "lease_id has 256 bytes, the limit is 255"),
        ({"lease_id": "\0"}, "lease_id must not contain NUL (U+0000)"),
        ({"queues": "q"}, "queues must be a sequence of str, got str"),
        ({"queues": None}, "queues must be a sequence of str, got NoneType"),
        ({"queues": [""]}, "queues must not hold an empty name"),
        ({"queues": ["q" * 256]}, "queues has 256 bytes, the limit is 255"),
        ({"queues": [1]}, "queues must be str, got int"),
        (
            {"queues": [str(n) for n in range(257)]},
            "queues has 257 names, the limit is 256",
        ),
        ({"capacity": -1}, "capacity is -1, allowed is 0 to 10000"),
        ({"capacity": 10_001}, "capacity is 10001, allowed is 0 to 10000"),
        ({"capacity": True}, "capacity must be int, got bool"),
        ({"lease_ms": 0}, "lease_ms is 0, allowed is 1 to 86400000"),
        ({"lease_ms": 86_400_001}, "lease_ms is 86400001, allowed is 1 to 86400000"),
        ({"quantum": -1}, "quantum is -1, allowed is 0 to 1000000"),
        ({"quantum": 1_000_001}, "quantum is 1000001, allowed is 0 to 1000000"),
    ],
)
def test_a_malformed_request_is_refused_by_name(fields, text):
    assert refusal(request, **fields) == text


def test_the_bounds_of_a_request_are_inclusive():
    largest = request(
        worker="w" * 255,
        lease_id="l" * 255,
        queues=["q" * 255, *(str(n) for n in range(255))],
        capacity=10_000,
        lease_ms=86_400_000,
        quantum=1_000_000,
    )
    assert len(largest.queues) == 256
    assert request(capacity=0, lease_ms=1, quantum=0).worker == ""


# Checkpoints

FULL = Checkpoint(
    completed_steps=("fetch", "transform"),
    in_progress_step="publish",
    cursor_step="transform",
    cursor=b"42",
    schema_version=2,
    step_set_hash="steps-v2",
    crashes_by_step={"publish": 1},
    remaining_weight=0,
)
FULL_JSON = (
    '{"completed":["fetch","transform"],"crashes":{"publish":1},"cursor_step":"transform",'
    '"hash":"steps-v2","in_progress":"publish","version":2}'
)


def test_the_stored_form_of_a_checkpoint_is_fixed():
    assert FULL.to_json() == FULL_JSON
    assert Checkpoint.from_json(FULL_JSON, cursor=b"42", remaining_weight=0) == FULL


def test_an_empty_checkpoint_stores_no_key():
    assert Checkpoint().to_json() == "{}"
    for text in (None, "", "{}"):
        assert Checkpoint.from_json(text) == Checkpoint()


def test_the_last_completed_step_is_the_newest():
    assert FULL.last_completed_step == "transform"
    assert Checkpoint().last_completed_step is None


steps = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20
)
checkpoints = st.builds(
    Checkpoint,
    completed_steps=st.lists(steps, max_size=5),
    in_progress_step=st.none() | steps,
    cursor_step=st.none() | steps,
    cursor=st.none() | st.binary(max_size=9),
    schema_version=st.integers(0, MAX_INT32),
    step_set_hash=st.text(
        st.characters(codec="utf-8", exclude_characters="\0"), max_size=9
    ),
    crashes_by_step=st.dictionaries(steps, st.integers(0, MAX_INT32), max_size=3),
    remaining_weight=st.none() | st.integers(0, MAX_INT32),
)


@given(checkpoints)
def test_every_checkpoint_is_read_back_as_it_was(checkpoint):
    text = checkpoint.to_json()
    read = Checkpoint.from_json(
        text, cursor=checkpoint.cursor, remaining_weight=checkpoint.remaining_weight
    )
    assert read == checkpoint
    assert list(json.loads(text)) == sorted(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        *("{", "nul", "null", "[]", "5", '"x"', '{"completed":5}', '{"completed":[5]}'),
        *('{"completed":"abc"}', '{"crashes":[1]}', '{"crashes":{"a":"b"}}'),
        *('{"version":-1}', '{"version":true}', '{"hash":5}', '{"in_progress":""}'),
        *('{"crashes":5}', '{"cursor_step":[]}', '{"version":1e999}', "\ud800"),
        *('{"completed":["a\\u0000"]}', "[" * 100_000),
    ],
)
def test_a_malformed_checkpoint_reads_as_an_empty_one_that_keeps_its_own_columns(text):
    kept = Checkpoint(cursor=b"42", remaining_weight=3)
    assert Checkpoint.from_json(text, cursor=b"42", remaining_weight=3) == kept


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"completed_steps": [str(n) for n in range(1001)]},
            "completed_steps has 1001 names, the limit is 1000",
        ),
        ({"completed_steps": [""]}, "completed_steps must not be empty"),
        ({"completed_steps": ["\0"]}, "completed_steps must not contain NUL (U+0000)"),
        ({"completed_steps": [1]}, "completed_steps must be str, got int"),
        (
            {"completed_steps": "fetch"},
            "completed_steps must be a sequence of str, got str",
        ),
        (
            {"in_progress_step": "s" * 256},
            "in_progress_step has 256 bytes, the limit is 255",
        ),
        ({"cursor_step": ""}, "cursor_step must not be empty"),
        (
            {"cursor": b"x" * 1_048_577},
            "cursor has 1048577 bytes, the limit is 1048576",
        ),
        ({"cursor": "42"}, "cursor must be bytes or None"),
        ({"schema_version": -1}, f"schema_version is -1, allowed is 0 to {MAX_INT32}"),
        ({"step_set_hash": 1}, "step_set_hash must be str, got int"),
        ({"crashes_by_step": 5}, "crashes_by_step must be a mapping, got int"),
        (
            {"crashes_by_step": {"s": -1}},
            f"crashes_by_step is -1, allowed is 0 to {MAX_INT32}",
        ),
        (
            {"remaining_weight": MAX_INT32 + 1},
            f"remaining_weight is {MAX_INT32 + 1}, allowed is 0 to {MAX_INT32}",
        ),
    ],
)
def test_a_malformed_checkpoint_is_refused_by_name(fields, text):
    assert refusal(Checkpoint, **fields) == text


def test_a_checkpoint_does_not_follow_the_mapping_it_was_made_from():
    crashes = {"publish": 1}
    checkpoint = Checkpoint(crashes_by_step=crashes)
    crashes["publish"] = 2
    assert checkpoint.crashes_by_step == {"publish": 1}


def test_a_lost_lease_is_charged_to_the_step_in_progress():
    assert FULL.with_crash().crashes_by_step == {"publish": 2}
    first = evolve(FULL, in_progress_step="upload").with_crash()
    assert first.crashes_by_step == {"publish": 1, "upload": 1}
    assert evolve(first, crashes_by_step={"publish": 1}) == evolve(
        FULL, in_progress_step="upload"
    )


def test_a_lost_lease_between_steps_is_charged_to_none():
    between = evolve(FULL, in_progress_step=None)
    assert between.with_crash() == between


@pytest.mark.parametrize(
    ("version", "steps_hash", "answer"),
    [
        (1, "abc", Resumability.CONTINUE),
        (2, "abc", Resumability.CONTINUE),
        (2, "xyz", Resumability.REMAPPED),
        (0, "xyz", Resumability.REMAPPED),
        (1, "xyz", Resumability.UNDECODABLE),
        (1, "", Resumability.UNDECODABLE),
    ],
)
def test_recorded_steps_are_continued_mapped_or_given_up(version, steps_hash, answer):
    recorded = Checkpoint(schema_version=1, step_set_hash="abc")
    assert recorded.resumability(version, steps_hash) is answer


@given(st.integers(0, MAX_INT32), st.text())
def test_a_job_without_steps_continues_under_any_code(version, steps_hash):
    unused = Checkpoint(schema_version=1)
    assert unused.resumability(version, steps_hash) is Resumability.CONTINUE


@pytest.mark.parametrize(
    ("names", "digest"),
    [
        ((), "3feed2ddf6389f29286cbdceef4201e1"),
        (("download",), "08a9a0840440cb1d30e615460f265f71"),
        (("download", "transcode"), "76310bf7ec4d65f02fbf4376a352b293"),
    ],
)
def test_the_identity_of_a_step_set_is_fixed(names, digest):
    assert step_set_hash(names) == digest


# Claims and their batches


def test_a_claim_proves_itself_by_job_lease_and_fence():
    assert claim("a", fence=7).lease_ref == LeaseRef("a", "l", 7)
    assert claim("a").checkpoint == Checkpoint()


def grouped(claims: list[Claim], size: int) -> list[list[str]]:
    """Ids of the units."""
    units = group_admission_claims(claims, size)
    return [[member.envelope.id for member in unit.claims] for unit in units]


MIXED = [
    claim("a1", "mail"),
    claim("b1", "index"),
    claim("a2", "mail"),
    claim("a3", "mail"),
]


@pytest.mark.parametrize(
    ("size", "ids"),
    [
        (2, [["a1", "a2"], ["b1"], ["a3"]]),
        (9, [["a1", "a2", "a3"], ["b1"]]),
        (1, [["a1"], ["b1"], ["a2"], ["a3"]]),
        (0, [["a1"], ["b1"], ["a2"], ["a3"]]),
        (-5, [["a1"], ["b1"], ["a2"], ["a3"]]),
    ],
)
def test_claims_of_one_kind_are_grouped_in_order(size, ids):
    assert grouped(MIXED, size) == ids


@given(st.lists(st.sampled_from("xyz"), max_size=30), st.integers(1, 5))
def test_grouping_keeps_every_claim_once_and_the_order_within_a_kind(kinds, size):
    claims = [claim(str(n), kind) for n, kind in enumerate(kinds)]
    units = group_admission_claims(claims, size)
    for kind in "xyz":
        members = [c for unit in units for c in unit.claims if c.envelope.kind == kind]
        assert members == [c for c in claims if c.envelope.kind == kind]
    assert all(1 <= unit.size <= size for unit in units)
    assert all(len({c.envelope.kind for c in unit.claims}) == 1 for unit in units)


def test_an_admission_is_a_sequence_of_its_units():
    units = (AdmissionUnit((claim("a"),)), AdmissionUnit((claim("b"), claim("c"))))
    batch = AdmissionBatch(units, retry_after_ms=5, refused={"rate_class": 2})
    assert list(batch) == list(units)
    assert (len(batch), batch[1], batch[-1]) == (2, units[1], units[1])
    assert [found.envelope.id for found in batch.claims] == ["a", "b", "c"]
    assert (units[1] in batch, batch.index(units[1])) == (True, 1)


def test_an_empty_admission_is_false_and_names_no_reason():
    batch = AdmissionBatch()
    assert not batch
    assert (batch.claims, batch.retry_after_ms, dict(batch.refused)) == ([], None, {})
    assert batch.sent_away == ()


# Acks


def ack(**fields) -> Ack:
    """A success, changed in some fields."""
    return Ack(**{"lease": LEASE, "outcome": Outcome.SUCCESS, **fields})


@pytest.mark.parametrize("outcome", sorted(ACKABLE - {Outcome.SNOOZE}))
def test_an_outcome_needs_nothing_else(outcome):
    found = ack(outcome=outcome)
    assert (found.error, found.delay_ms, found.logs, found.result) == (
        None,
        None,
        (),
        None,
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"outcome": Outcome.LEASE_LOST},
            "outcome lease_lost belongs to the reclaimer",
        ),
        ({"outcome": "success"}, "outcome must be an Outcome, got 'success'"),
        ({"lease": "a"}, "lease must be a LeaseRef"),
        ({"outcome": Outcome.SNOOZE}, "outcome snooze needs delay_ms above 0"),
        (
            {"outcome": Outcome.SNOOZE, "delay_ms": 0},
            "outcome snooze needs delay_ms above 0",
        ),
        ({"delay_ms": -1}, f"delay_ms is -1, allowed is 0 to {THOUSAND_YEARS_MS}"),
        (
            {"delay_ms": THOUSAND_YEARS_MS + 1},
            f"delay_ms is {THOUSAND_YEARS_MS + 1}, allowed is 0 to {THOUSAND_YEARS_MS}",
        ),
        ({"delay_ms": 1.5}, "delay_ms must be int, got float"),
        ({"actual_weight": -1}, f"actual_weight is -1, allowed is 0 to {MAX_INT32}"),
        (
            {"actual_weight": MAX_INT32 + 1},
            f"actual_weight is {MAX_INT32 + 1}, allowed is 0 to {MAX_INT32}",
        ),
        ({"latency_ms": -1}, f"latency_ms is -1, allowed is 0 to {MAX_INT32}"),
        (
            {"error_code": "http"},
            "error_code is 'http', allowed are up to 64 of [A-Z0-9_]",
        ),
        (
            {"error_code": "X" * 65},
            f"error_code is {'X' * 65!r}, allowed are up to 64 of [A-Z0-9_]",
        ),
        (
            {"error_code": "٣"},
            "error_code is '٣', allowed are up to 64 of [A-Z0-9_]",
        ),
        (
            {"error_code": "X\n"},
            "error_code is 'X\\n', allowed are up to 64 of [A-Z0-9_]",
        ),
        ({"reason_code": "é" * 33}, "reason_code has 66 bytes, the limit is 64"),
        ({"reason_code": "\0"}, "reason_code must not contain NUL (U+0000)"),
        ({"error": 5}, "error must be str or None, got int"),
        ({"logs": "one line"}, "logs must be a sequence of str, got str"),
        ({"logs": 5}, "logs must be a sequence of str, got int"),
        ({"logs": [b"x"]}, "logs must hold str, got bytes"),
        ({"result": b"x"}, "result must be a JobResult or None"),
        (
            {"outcome": Outcome.RETRY, "result": JobResult(1, b"")},
            "result needs outcome success",
        ),
    ],
)
def test_a_malformed_ack_is_refused_by_name(fields, text):
    assert refusal(ack, **fields) == text


def test_the_bounds_of_an_ack_are_inclusive():
    largest = ack(
        outcome=Outcome.SNOOZE,
        delay_ms=THOUSAND_YEARS_MS,
        actual_weight=MAX_INT32,
        latency_ms=MAX_INT32,
        error_code="A9_" * 21,
        reason_code="r" * 64,
    )
    assert largest.delay_ms == THOUSAND_YEARS_MS
    assert ack(delay_ms=0, actual_weight=0, latency_ms=0).actual_weight == 0
    assert ack(result=JobResult(1, b"")).result == JobResult(1, b"")


def test_error_text_is_made_storable_and_cut_without_splitting_a_character():
    assert ack(error="a\0b\ud800c").error == "a\ufffdb\ufffdc"
    assert ack(error="é" * 5000).error == "é" * 4096
    assert ack(error="x" + "é" * 5000).error == "x" + "é" * 4095
    assert ack(error="\0" * 9000).error == "\ufffd" * 2730
    assert ack(logs=["a\0", "\udfff"]).logs == ("a\ufffd", "\ufffd")


@given(st.text(st.characters(exclude_categories=())))
def test_storable_text_is_storable_and_keeps_what_was_storable(text):
    stored = storable_text(text)
    assert "\0" not in stored
    assert stored.encode().decode() == stored
    assert len(stored) == len(text)
    kept = [(a, b) for a, b in zip(text, stored, strict=True) if b != "\ufffd"]
    assert all(a == b for a, b in kept)


@given(st.text(), st.integers(0, 40))
def test_cut_text_is_the_longest_beginning_that_fits(text, limit):
    short = cut_text(text, limit)
    assert text.startswith(short)
    assert len(short.encode()) <= limit or short == text
    if short != text:
        assert len(text[: len(short) + 1].encode()) > limit


# Results and progress


@pytest.mark.parametrize("version", [0, -1, MAX_INT32 + 1])
def test_a_result_has_a_version(version):
    assert refusal(JobResult, schema_version=version, data=b"") == (
        f"result schema_version is {version}, allowed is 1 to {MAX_INT32}"
    )


def test_a_result_is_at_most_32_mib_of_bytes():
    assert len(JobResult(1, bytes(33_554_432)).data) == 33_554_432
    assert refusal(JobResult, schema_version=1, data=bytes(33_554_433)) == (
        "result has 33554433 bytes, the limit is 33554432"
    )
    assert (
        refusal(JobResult, schema_version=1, data="x")
        == "result must be bytes, got str"
    )
    assert JobResult(MAX_INT32, b"\xff").data == b"\xff"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0), "progress total is 0, it must be above 0"),
        ((11, 10), "progress current is 11, allowed is 0 to total 10"),
        ((-1, 10), "progress current is -1, allowed is 0 to total 10"),
        ((1, 2**53), f"progress total is {2**53}, the limit is {2**53 - 1}"),
        (
            (2**53 + 1, 2**53),
            f"progress current is {2**53 + 1}, allowed is 0 to total {2**53}",
        ),
        ((1, 2, "é" * 257), "progress message has 514 bytes, the limit is 512"),
        ((1, 2, "a\0"), "progress message must not contain NUL (U+0000)"),
        ((1, 2, "\ud800"), "progress message must not contain a lone surrogate"),
        ((1, 2, 5), "progress message must be str or None"),
        ((True, 2), "progress current must be int, got bool"),
    ],
)
def test_a_malformed_progress_is_refused_by_name(arguments, text):
    with pytest.raises(InvalidRequest) as raised:
        ProgressUpdate(*arguments)
    assert raised.value.message == text


def test_the_bounds_of_progress_are_inclusive():
    assert ProgressUpdate(0, 1).message is None
    assert ProgressUpdate(2**53 - 1, 2**53 - 1, "é" * 256).total == 2**53 - 1


# History


@pytest.mark.parametrize(
    ("entry", "stored"),
    [
        (
            AttemptEntry(
                at_ms=1, outcome="retry", attempt=2, error="e", logs=["l"], fence=3
            ),
            {
                "at_ms": 1,
                "outcome": "retry",
                "error": "e",
                "attempt": 2,
                "logs": ["l"],
                "worker": "",
                "fence": 3,
            },
        ),
        (
            AttemptEntry(at_ms=1, outcome="archived", error_code="E", latency_ms=0),
            {
                "at_ms": 1,
                "outcome": "archived",
                "error": None,
                "latency_ms": 0,
                "error_code": "E",
                "worker": "",
                "fence": 0,
            },
        ),
        (
            AttemptEntry(at_ms=1, outcome="success", attempt=0, logs=["l"], worker="w"),
            {
                "at_ms": 1,
                "outcome": "success",
                "attempt": 0,
                "logs": ["l"],
                "worker": "w",
                "fence": 0,
            },
        ),
        (
            AttemptEntry(at_ms=1, outcome="lease_lost", crash_attempt=1, error="lost"),
            {
                "at_ms": 1,
                "outcome": "lease_lost",
                "error": "lost",
                "crash_attempt": 1,
                "worker": "",
                "fence": 0,
            },
        ),
    ],
    ids=lambda value: value.outcome if isinstance(value, AttemptEntry) else "",
)
def test_an_entry_of_the_history_is_stored_and_read_back(entry, stored):
    assert entry.to_dict() == stored
    assert AttemptEntry.from_dict(json.loads(json.dumps(stored))) == entry
