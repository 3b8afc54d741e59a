"""Values for generated tests, built through the constructors that callers use.

Two families: hostile text and numbers over the whole allowed range, and small worlds in
which ids, keys and queues meet often.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from headgate_sync.envelope import (
    MAX_INT32,
    MAX_INT64,
    MAX_RELATIVE_MS,
    UNIQUE_REPLACE_ALL,
    Envelope,
)
from headgate_sync.lease import (
    MAX_PROGRESS_MESSAGE_BYTES,
    MAX_PROGRESS_TOTAL,
    Ack,
    Checkpoint,
    JobResult,
    LeaseRef,
    ProgressUpdate,
)
from headgate_sync.lifecycle import ACKABLE, Outcome
from tests.builders import START_MS

# The whole range

HOSTILE_PIECES = (
    "'", '"', "\\", ";", "--", "%s", "%(a)s", "{schema}", "$1", "\n", "\t", "\x01",
    "\x7f", "\u202e", "\u2028", "\ufeff", "\ufffd", "\uffff", "é", "ß", "😀", "İ",
    "ﬀ", " ", "NULL", "../", "\x1b[0m", "{}", "[]", "\r\n",
)  # fmt: skip


def _within(limit_bytes: int) -> Any:
    return lambda text: len(text.encode()) <= limit_bytes


def texts(max_bytes: int = 255, *, min_size: int = 0) -> st.SearchStrategy[str]:
    """Text that a column can hold, hostile pieces among it."""
    characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    plain = st.text(characters, min_size=min_size, max_size=12)
    pieces = st.lists(
        st.sampled_from(HOSTILE_PIECES), min_size=max(1, min_size), max_size=4
    )
    return (plain | pieces.map("".join)).filter(_within(max_bytes))


def unstorable_texts() -> st.SearchStrategy[str]:
    """Text that no column can hold."""
    bad = st.sampled_from(["\0", "\ud800", "\udfff"])
    return st.tuples(texts(20), bad, texts(20)).map("".join)


def kinds() -> st.SearchStrategy[str]:
    """Kinds that obey the rule."""
    return st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_\-\[\]<>/.:+]{0,20}\Z")


def ascii_texts(max_size: int = 64, *, min_size: int = 0) -> st.SearchStrategy[str]:
    """ASCII without NUL."""
    return st.text(
        st.characters(min_codepoint=1, max_codepoint=127),
        min_size=min_size,
        max_size=max_size,
    )


def int32s(low: int = 0) -> st.SearchStrategy[int]:
    """A 32-bit column, its ends often."""
    return st.sampled_from([low, 1, MAX_INT32]) | st.integers(low, MAX_INT32)


def instants() -> st.SearchStrategy[int]:
    """A 64-bit instant or duration, its ends often."""
    return st.sampled_from([0, 1, MAX_INT64]) | st.integers(0, MAX_INT64)


@st.composite
def any_envelopes(draw: st.DrawFn, *, id: str | None = None) -> Envelope:
    """A job with every field somewhere in its range."""
    periodic = draw(st.booleans())
    key = draw(st.none() | st.binary(max_size=20))
    timing = draw(st.sampled_from(["scheduled", "delay", "pending"]))
    return Envelope(
        id=id if id is not None else draw(texts(min_size=1)),
        kind=draw(kinds()),
        schema_version=draw(int32s()),
        payload=draw(st.binary(max_size=64)),
        queue=draw(texts()),
        partition_key=draw(texts()),
        rate_class=draw(texts()),
        weight=draw(int32s()),
        fingerprint=draw(texts()),
        priority=draw(int32s(-MAX_INT32 - 1)),
        max_attempts=draw(int32s()),
        scheduled_at_ms=draw(instants()) if timing == "scheduled" else 0,
        timeout_ms=draw(instants()),
        deadline_ms=draw(instants()),
        retention_ms=draw(st.sampled_from([0, 1, MAX_RELATIVE_MS])),
        unique_key=key,
        unique_states=draw(int32s(-MAX_INT32 - 1)),
        unique_window_ms=draw(st.sampled_from([0, 0, 1, MAX_RELATIVE_MS])),
        unique_exclude_kind=draw(st.booleans()),
        periodic_schedule_id=draw(texts(min_size=1)) if periodic else "",
        periodic_tick_ms=draw(st.integers(1, MAX_INT64)) if periodic else 0,
        headers=draw(st.dictionaries(texts(40), texts(40), max_size=4)),
        tags=tuple(draw(st.sets(ascii_texts(64, min_size=1), max_size=4))),
        pending=timing == "pending",
        sticky_worker=draw(ascii_texts(40)),
        delay_ms=draw(st.integers(0, MAX_RELATIVE_MS)) if timing == "delay" else 0,
    )


@st.composite
def any_acks(draw: st.DrawFn, lease: LeaseRef) -> Ack:
    """How an attempt may end, with every text and number in its range."""
    outcome = draw(st.sampled_from(sorted(ACKABLE)))
    needs_delay = outcome is Outcome.SNOOZE
    delays_ms = st.sampled_from([1, MAX_RELATIVE_MS]) | st.integers(1, MAX_RELATIVE_MS)
    anything = st.text(max_size=20) | unstorable_texts() | texts(10_000)
    return Ack(
        lease=lease,
        outcome=outcome,
        error=draw(st.none() | anything),
        delay_ms=draw(
            delays_ms if needs_delay else st.sampled_from([None, 0]) | delays_ms
        ),
        logs=draw(st.lists(anything, max_size=3)),
        actual_weight=draw(st.none() | int32s()),
        latency_ms=draw(st.none() | int32s()),
        error_code=draw(st.from_regex(r"\A[A-Z0-9_]{0,64}\Z")),
        reason_code=draw(texts(64)),
        result=(
            JobResult(draw(int32s(1)), draw(st.binary(max_size=64)))
            if outcome is Outcome.SUCCESS
            else None
        ),
    )


@st.composite
def any_checkpoints(draw: st.DrawFn) -> Checkpoint:
    """Steps with every text and number in its range."""
    steps = texts(min_size=1)
    return Checkpoint(
        completed_steps=draw(st.lists(steps, max_size=4)),
        in_progress_step=draw(st.none() | steps),
        cursor_step=draw(st.none() | steps),
        cursor=draw(st.none() | st.binary(max_size=64)),
        schema_version=draw(int32s()),
        step_set_hash=draw(texts()),
        crashes_by_step=draw(st.dictionaries(steps, int32s(), max_size=3)),
        remaining_weight=draw(st.none() | int32s()),
    )


@st.composite
def any_progress(draw: st.DrawFn) -> ProgressUpdate:
    """Progress with every text and number in its range."""
    total = draw(st.sampled_from([1, MAX_PROGRESS_TOTAL]) | st.integers(1, 10**9))
    message = draw(st.none() | texts(MAX_PROGRESS_MESSAGE_BYTES))
    return ProgressUpdate(draw(st.integers(0, total)), total, message)


# Small worlds

QUEUES = ("q", "r")
WORKERS = ("", "w1", "w2")
FINGERPRINTS = ("", "f1", "f2", "f3")
KEYS = (b"", b"k1", b"k2")
IDS = tuple("abcdefghijkl")
DELAYS_MS = (1, 500, 1_000, 30_000)
LEASES_MS = (1, 1_000, 30_000)


@st.composite
def small_envelopes(draw: st.DrawFn) -> Envelope:
    """A job that is likely to meet others: few ids, keys, queues and instants."""
    timing = draw(
        st.sampled_from(["now", "now", "now", "past", "future", "delay", "pending"])
    )
    key = draw(st.none() | st.sampled_from(KEYS))
    return Envelope(
        id=draw(st.sampled_from(IDS)),
        kind=draw(st.sampled_from(["k", "l"])),
        payload=draw(st.sampled_from([b"", b"\x00p"])),
        queue=draw(st.sampled_from(QUEUES)),
        partition_key=draw(st.sampled_from(["", "p", "é"])),
        rate_class=draw(st.sampled_from(["", "", "c"])),
        weight=draw(st.sampled_from([0, 1, 3])),
        fingerprint=draw(st.sampled_from(FINGERPRINTS)),
        priority=draw(st.sampled_from([0, 0, -1, 5])),
        max_attempts=draw(st.sampled_from([0, 1, 2])),
        scheduled_at_ms={"past": 1, "future": START_MS + 40_000}.get(timing, 0),
        retention_ms=draw(st.sampled_from([0, 1_000, 60_000])),
        unique_key=key,
        unique_window_ms=draw(st.sampled_from([0, 0, 1_000])) if key is not None else 0,
        unique_exclude_kind=draw(st.booleans()) if key is not None else False,
        tags=draw(st.sampled_from([(), ("t",), ("z", "a")])),
        pending=timing == "pending",
        delay_ms=draw(st.sampled_from(DELAYS_MS)) if timing == "delay" else 0,
        deadline_in_ms=draw(st.sampled_from([0, 0, 700])),
        sticky_worker=draw(st.sampled_from(["", "", "w1"])),
        headers=draw(st.sampled_from([{}, {"h": "é"}])),
    )


@st.composite
def replacing_envelopes(draw: st.DrawFn) -> Envelope:
    """A job that asks to change or postpone the holder of its key."""
    key = draw(st.sampled_from([b"k1", b"k1", b"k2"]))
    debounce_ms = draw(st.sampled_from([0, 0, 500, 30_000]))
    window_ms = 0 if debounce_ms else draw(st.sampled_from([0, 0, 1_000]))
    timing = draw(st.sampled_from(["now", "past", "future"]))
    return Envelope(
        id=draw(st.sampled_from(IDS)),
        kind=draw(st.sampled_from(["k", "k", "l"])),
        payload=b"replaced",
        schema_version=draw(st.sampled_from([1, 2])),
        queue=draw(st.sampled_from(QUEUES)),
        fingerprint=draw(st.sampled_from(FINGERPRINTS)),
        priority=draw(st.sampled_from([0, 9])),
        max_attempts=draw(st.sampled_from([0, 1, 3])),
        scheduled_at_ms={"past": 1, "future": START_MS + 50_000}.get(timing, 0),
        unique_key=key,
        unique_window_ms=window_ms,
        unique_replace=draw(st.integers(0, UNIQUE_REPLACE_ALL)),
        unique_debounce_ms=debounce_ms,
        unique_exclude_kind=draw(st.sampled_from([False, False, True])),
        tags=draw(st.sampled_from([(), ("new",)])),
    )


def batches() -> st.SearchStrategy[list[Envelope]]:
    """Batches of up to six jobs; an id or a key may stand twice."""
    return st.lists(small_envelopes(), min_size=2, max_size=6)


@st.composite
def acks(draw: st.DrawFn, lease: LeaseRef, *, results: bool = True) -> Ack:
    """How an attempt may end."""
    outcome = draw(st.sampled_from(sorted(ACKABLE)))
    delays_ms: st.SearchStrategy[int | None] = st.sampled_from(DELAYS_MS)
    if outcome is not Outcome.SNOOZE:
        delays_ms = delays_ms | st.sampled_from([None, 0])
    result = None
    if results and outcome is Outcome.SUCCESS:
        result = draw(st.none() | st.just(JobResult(2, b"\x00r")))
    return Ack(
        lease=lease,
        outcome=outcome,
        error=draw(st.sampled_from([None, "boom \0 \ud800"])),
        delay_ms=draw(delays_ms),
        logs=draw(st.sampled_from([(), ("one", "two\0")])),
        actual_weight=draw(st.sampled_from([None, None, 0, 2])),
        latency_ms=draw(st.sampled_from([None, 0, 12])),
        error_code=draw(st.sampled_from(["", "E_1"])),
        reason_code=draw(st.sampled_from(["", "", "mine é"])),
        result=result,
    )


def checkpoints() -> st.SearchStrategy[Checkpoint]:
    """Checkpoints with and without steps, cursor and remaining weight."""
    steps = st.sampled_from([None, "one", "two"])
    return st.builds(
        Checkpoint,
        completed_steps=st.sampled_from([(), ("one",), ("one", "é")]),
        in_progress_step=steps,
        cursor_step=steps,
        cursor=st.sampled_from([None, b"", b"\x00c"]),
        schema_version=st.sampled_from([0, 2]),
        step_set_hash=st.sampled_from(["", "h"]),
        crashes_by_step=st.sampled_from([{}, {"one": 3}]),
        remaining_weight=st.sampled_from([None, 0, 2]),
    )


def progress_updates() -> st.SearchStrategy[ProgressUpdate]:
    """Progress with and without a message."""
    return st.builds(
        ProgressUpdate,
        st.integers(0, 3),
        st.integers(3, 5),
        st.sampled_from([None, "é"]),
    )
