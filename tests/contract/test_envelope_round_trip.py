"""What a producer hands in is what a claim hands out; what is malformed stays out."""

from __future__ import annotations

import pytest
from attrs import evolve

from headgate_sync.envelope import (
    MAX_HEADERS,
    MAX_INT32,
    MAX_INT64,
    MAX_PAYLOAD_BYTES,
    MAX_RELATIVE_MS,
    Envelope,
    field_names,
)
from headgate_sync.errors import IdConflict, InvalidRequest
from headgate_sync.lifecycle import State
from headgate_sync.loggers import visible
from headgate_sync.validation import MAX_BATCH_JOBS
from tests.builders import (
    START_MS,
    admit,
    bring_to,
    claim_one,
    counts,
    enqueue,
    envelope,
    envelopes,
    job,
    state_of,
    steer,
)

GOOD_KINDS = [
    "w", "k", "_", "0", "email:welcome", "notify:welcome", "a-b", "a.b", "a/b", "a+b",
    "a<b>", "a[b]", "Job_1", "x" * 128,
]  # fmt: skip
BAD_KINDS = [
    "", "x" * 129, "-lead", ".lead", ":lead", "+lead", "[lead", "a b", " a", "a\t",
    "a\n", "a!", "a#b", "a,b", "a(b)", "a*", "résumé:parse", "a·b", "a%b", 'a"b',
]  # fmt: skip
REQUEST_ONLY = {
    "unique_window_ms": 0,
    "unique_replace": 0,
    "unique_debounce_ms": 0,
    "unique_exclude_kind": False,
    "delay_ms": 0,
    "deadline_in_ms": 0,
    "pending": False,
}


def test_every_wellformed_kind_is_stored(store):
    enqueue_kinds = [envelope(f"k{n}", kind=kind) for n, kind in enumerate(GOOD_KINDS)]
    store.enqueue(enqueue_kinds)
    assert [job(store, f"k{n}").kind for n in range(len(GOOD_KINDS))] == GOOD_KINDS


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_a_malformed_kind_is_refused_by_name(store, kind):
    with pytest.raises(InvalidRequest) as caught:
        store.enqueue([envelope("a", kind=kind)])
    assert f"`{visible(kind)}`" in caught.value.message
    assert "1-128" in caught.value.message
    assert counts(store) == {}


def test_a_claim_carries_every_stored_field(store):
    sent = Envelope(
        id="a/ü",
        kind="mail:send",
        schema_version=7,
        payload=bytes(range(256)),
        queue="q",
        partition_key="tenant/ß",
        weight=3,
        fingerprint="f" * 255,
        priority=-(2**31),
        max_attempts=4,
        scheduled_at_ms=12,
        timeout_ms=MAX_INT64,
        deadline_ms=MAX_INT64,
        retention_ms=MAX_RELATIVE_MS,
        unique_key=b"\x00key\xff",
        unique_states=-5,
        unique_exclude_kind=True,
        periodic_schedule_id="nightly",
        periodic_tick_ms=60_000,
        headers={"b": "1", "a": 'quote " backslash \\ \u2028 😀', "": ""},
        tags=("urgent", "billing"),
        sticky_worker="w",
    )
    store.enqueue([sent])
    assert claim_one(store).envelope == evolve(sent, unique_exclude_kind=False)


@pytest.mark.parametrize(
    ("fields", "stored_key"),
    [
        ({"unique_key": b"k", "unique_replace": 4}, b"k"),
        ({"unique_key": b"k", "unique_debounce_ms": 1}, b"k"),
        ({"unique_key": b"k", "unique_window_ms": 60_000}, None),
        ({"unique_key": b"k", "unique_exclude_kind": True}, b"k"),
        ({"delay_ms": 1, "deadline_in_ms": 9}, None),
        ({"pending": True}, None),
    ],
)
def test_request_only_fields_come_back_as_their_defaults(
    store, clock, fields, stored_key
):
    store.enqueue([envelope("a", **fields)])
    clock.advance_ms(1)
    store.promote_due(10)
    if fields.get("pending"):
        steer(store).promote_job("a")
    found = claim_one(store).envelope
    assert {name: getattr(found, name) for name in REQUEST_ONLY} == REQUEST_ONLY
    assert found.unique_key == stored_key


def test_counters_that_a_producer_supplies_are_ignored(store):
    store.enqueue([envelope("a", attempt=9, crash_attempt=2)])
    claim = claim_one(store)
    assert (claim.envelope.attempt, claim.envelope.crash_attempt) == (0, 0)
    assert claim.fence == 1


def test_a_batch_in_which_an_id_stands_twice_is_refused(store):
    with pytest.raises(IdConflict, match=r"^id conflict: job a exists"):
        store.enqueue([envelope("b"), envelope("a"), envelope("a")])
    assert counts(store) == {}


def test_an_empty_id_is_refused(store):
    with pytest.raises(InvalidRequest, match="id must not be empty"):
        store.enqueue([envelope("")])
    assert counts(store) == {}


def test_a_sticky_worker_is_at_most_255_ascii_bytes(store):
    store.enqueue([envelope("a", sticky_worker="w" * 255)])
    for bad in ("w" * 256, "é"):
        with pytest.raises(InvalidRequest, match="sticky_worker"):
            store.enqueue([envelope("b", sticky_worker=bad)])
    assert counts(store) == {"available": 1}


@pytest.mark.parametrize(
    "field",
    [
        "unique_window_ms",
        "timeout_ms",
        "deadline_ms",
        "retention_ms",
        "scheduled_at_ms",
    ],
)
def test_a_negative_duration_is_refused_by_name(store, field):
    with pytest.raises(InvalidRequest, match=field):
        store.enqueue([envelope("a", unique_key=b"k", **{field: -1})])
    assert counts(store) == {}


def test_limits_of_size_are_inclusive(store):
    store.enqueue([envelope("big", payload=b"x" * MAX_PAYLOAD_BYTES)])
    store.enqueue(envelopes(*(f"n{n}" for n in range(MAX_BATCH_JOBS))))
    assert counts(store) == {"available": MAX_BATCH_JOBS + 1}
    with pytest.raises(InvalidRequest, match=str(MAX_PAYLOAD_BYTES)):
        store.enqueue([envelope("too-big", payload=b"x" * (MAX_PAYLOAD_BYTES + 1))])
    with pytest.raises(InvalidRequest, match=str(MAX_BATCH_JOBS)):
        store.enqueue(envelopes(*(f"m{n}" for n in range(MAX_BATCH_JOBS + 1))))
    assert counts(store) == {"available": MAX_BATCH_JOBS + 1}


def test_a_batch_above_16_mib_is_refused(store):
    with pytest.raises(InvalidRequest, match="16777216"):
        store.enqueue(
            envelopes(*(f"n{n}" for n in range(17)), payload=b"x" * MAX_PAYLOAD_BYTES)
        )
    assert counts(store) == {}


def test_an_empty_batch_changes_nothing(backend, store):
    before = backend.image()
    store.enqueue([])
    assert backend.image() == before


@pytest.mark.parametrize(
    "fields",
    [
        {"unique_replace": 4},
        {"unique_key": b"", "unique_replace": 4},
        {"unique_key": b"k", "unique_replace": 15 + 256},
        {"unique_debounce_ms": 500},
        {"unique_key": b"k", "unique_debounce_ms": 500, "unique_window_ms": 60_000},
        {"tags": tuple(f"t{n}" for n in range(33))},
        {"tags": ("t" * 65,)},
        {"tags": ("é",)},
        {"tags": ("",)},
        {"tags": ("a", "a")},
        {"pending": True, "scheduled_at_ms": 5},
        {"pending": True, "delay_ms": 5},
        {"delay_ms": 5, "scheduled_at_ms": 5},
        {"delay_ms": 5, "unique_key": b"k", "unique_debounce_ms": 5},
        {"deadline_in_ms": 5, "deadline_ms": 5},
        {"periodic_schedule_id": "s"},
        {"periodic_tick_ms": 5},
        {"periodic_schedule_id": "s", "periodic_tick_ms": -1},
        {"id": "nul\0"},
        {"headers": {"h": "nul\0"}},
        {"headers": {"nul\0": "h"}},
        {"queue": "lone\ud800"},
        {"partition_key": "lone\udfff"},
        {"headers": {str(n): "" for n in range(MAX_HEADERS + 1)}},
        {"headers": {"h": "x" * 65_536}},
        {"queue": "ü" * 128},
        {"unique_key": b"k" * 1025},
        {"retention_ms": MAX_RELATIVE_MS + 1},
        {"weight": -1},
        {"weight": MAX_INT32 + 1},
        {"priority": MAX_INT32 + 1},
        {"priority": True},
        {"max_attempts": -1},
        {"scheduled_at_ms": MAX_INT64 + 1},
        {"payload": "text"},
    ],
    ids=str,
)
def test_a_malformed_job_is_refused_before_it_reaches_the_store(store, fields):
    with pytest.raises(InvalidRequest):
        store.enqueue([envelope(**{"id": "a", **fields})])
    assert counts(store) == {}


def test_a_replacing_job_must_be_alone_in_its_batch(store):
    replacing = envelope("b", unique_key=b"k", unique_replace=4)
    with pytest.raises(InvalidRequest, match="exactly one job"):
        store.enqueue([envelope("a"), replacing])
    assert counts(store) == {}


def test_a_periodic_origin_is_read_back(store):
    store.enqueue([envelope("a", periodic_schedule_id="s", periodic_tick_ms=5)])
    found = job(store, "a")
    assert (found.periodic_schedule_id, found.periodic_tick_ms) == ("s", 5)


def test_weight_zero_reads_as_one(store):
    store.enqueue([envelope(f"w{weight}", weight=weight) for weight in (0, 1, 7)])
    assert [job(store, f"w{weight}").weight for weight in (0, 1, 7)] == [1, 1, 7]


def test_zero_values_are_filled_with_the_defaults(store):
    store.enqueue([Envelope(id="a", kind="k")])
    found = job(store, "a")
    assert found.queue == "default"
    assert found.max_attempts == 25
    assert found.schema_version == 1
    assert found.scheduled_at_ms == START_MS
    assert found.enqueued_at_ms == START_MS


def test_relative_times_count_from_store_time(store):
    store.enqueue([envelope("a", delay_ms=500, deadline_in_ms=900)])
    found = job(store, "a")
    assert found.state == State.SCHEDULED
    assert found.scheduled_at_ms == START_MS + 500
    assert found.deadline_ms == START_MS + 900


@pytest.mark.parametrize(
    ("at_ms", "state"),
    [
        (START_MS - 1, State.AVAILABLE),
        (START_MS, State.AVAILABLE),
        (START_MS + 1, State.SCHEDULED),
        (MAX_INT64, State.SCHEDULED),
    ],
)
def test_a_job_is_scheduled_only_while_its_instant_lies_ahead(store, at_ms, state):
    store.enqueue([envelope("a", scheduled_at_ms=at_ms)])
    assert state_of(store, "a") is state
    assert job(store, "a").scheduled_at_ms == at_ms


def test_tags_are_kept_sorted(store):
    store.enqueue([envelope("a", tags=("urgent", "billing", "Blue", "blue"))])
    assert job(store, "a").tags == ("Blue", "billing", "blue", "urgent")


def test_headers_are_opaque(store):
    headers = {"b": "1x", "a": "00-bad", "traceparent": "garbage", "Traceparent": ""}
    store.enqueue([envelope("a", headers=headers)])
    assert dict(claim_one(store).envelope.headers) == headers


def test_hostile_text_is_data(store):
    hostile = "'; DROP TABLE x; -- %s %(a)s {schema} $1 \\ \" \u202e 😀 \x01\x1f\x7f"
    sent = envelope(
        hostile,
        queue=hostile,
        partition_key=hostile,
        fingerprint=hostile,
        headers={hostile: hostile},
        unique_key=hostile.encode(),
    )
    store.enqueue([sent])
    claim = claim_one(store, queues=(hostile,))
    assert claim.envelope == evolve(sent, scheduled_at_ms=1)
    assert job(store, hostile).id == hostile


def test_a_stored_job_equals_the_sent_one_after_every_kind_of_return(store, clock):
    sent = envelope("a", priority=5, partition_key="p", tags=("t",), unique_key=b"k")
    bring_to(store, clock, "a", State.RETRYABLE, **{
        name: getattr(sent, name)
        for name in ("priority", "partition_key", "tags", "unique_key")
    })  # fmt: skip
    clock.advance_ms(60_000)
    store.promote_due(10)
    found = claim_one(store).envelope
    changed = {"attempt": 1, "scheduled_at_ms": found.scheduled_at_ms}
    assert found == evolve(sent, **changed)


def test_text_orders_by_code_point(store):
    ids = ["a", "Z", "ä", "b", "_", "10", "9", "é", "\U0001f600", "\uffee"]
    for id in ids:
        store.enqueue([envelope(id, partition_key=id, scheduled_at_ms=START_MS)])
    steered = steer(store)
    assert steered.distinct_kinds(100) == ["tk:msg"]
    claimed = [claim.envelope.id for claim in admit(store, capacity=10).claims]
    assert claimed == ids, "equal instants are served in order of insertion"


def test_field_names_of_a_claim_are_those_of_the_envelope(store):
    enqueue(store, "a")
    found = claim_one(store).envelope
    assert all(hasattr(found, name) for name in field_names())


def test_a_job_with_nothing_but_defaults_keeps_them(store, clock):
    """The fewest arguments mean what the constructor says."""
    sent = Envelope(id="a", kind="k")
    store.enqueue([sent])
    (claim,) = admit(store, queues=("default",)).claims
    assert claim.envelope == evolve(sent, scheduled_at_ms=START_MS)
