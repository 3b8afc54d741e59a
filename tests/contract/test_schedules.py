"""Schedules as rows: kept, found when due, moved once, and what became of ticks."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from headgate_sync.envelope import MAX_PAYLOAD_BYTES
from headgate_sync.errors import InvalidRequest, NotFound, SpecError
from headgate_sync.lifecycle import Outcome
from headgate_sync.schedule import (
    FiredTick,
    FireResult,
    FireStatus,
    OnMissed,
    Schedule,
    ScheduleEvent,
    TickOutcome,
)
from headgate_sync.schedules import FiresTicks
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    claim_one,
    counts,
    crash_until_quarantined,
    job,
    run_one,
    steer,
)

ANCHOR_MS = START_MS + 5_000
ENQUEUED = (TickOutcome.ENQUEUED, "accepted")


def schedule(id: str = "s", **fields: Any) -> Schedule:
    values = {
        "kind": "tk:msg",
        "payload": b"ok",
        "queue": "q",
        "spec": "@every:1000",
        "next_run_ms": ANCHOR_MS,
        **fields,
    }
    return Schedule(id=id, **values)


def known(store: Any, id: str = "s") -> Schedule:
    found = steer(store).get_schedule(id)
    assert found is not None
    return found


def fire(store: Any, one: Schedule, *ticks: int, to_ms: int | None = None, **more: Any):
    inspect = steer(store)
    assert isinstance(inspect, FiresTicks)
    return inspect.fire_ticks(
        one.id,
        one.next_run_ms,
        ticks[-1] + 1_000 if to_ms is None else to_ms,
        [one.job(tick) for tick in ticks],
        **more,
    )


def events(store: Any, id: str = "s") -> list[tuple[Any, ...]]:
    """What happened, oldest first."""
    found = steer(store).list_schedule_events(id, limit=100)
    return [(e.tick_ms, e.job_id, str(e.outcome), e.reason) for e in reversed(found)]


# Values


FULL = {
    "kind": "k",
    "payload": b"\0\xff",
    "schema_version": 3,
    "queue": "reports",
    "partition_key": "p'; --",
    "rate_class": "r",
    "weight": 7,
    "priority": -4,
    "max_attempts": 1,
    "timeout_ms": 9,
    "retention_ms": 8,
    "headers": {"a": "é%"},
    "tags": ("y", "x"),
    "sticky_worker": "w",
    "spec": "CRON_TZ=Europe/Berlin 0 9 * * mon",
    "on_missed": "backfill",
    "backfill_limit": 12,
    "paused": True,
}


def test_a_schedule_comes_back_as_it_was_sent(store):
    sent = schedule("all:_.-Z9", **FULL)
    assert steer(store).upsert_schedule(sent) == sent
    assert known(store, sent.id) == sent
    assert sent.spec == "CRON_TZ=Europe/Berlin 0 9 * * MON"
    assert sent.tags == ("x", "y")


def test_defaults_are_those_of_a_job(store):
    one = steer(store).upsert_schedule(
        Schedule(id="s", kind="k", spec="@daily", next_run_ms=5)
    )
    assert (one.queue, one.max_attempts, one.weight, one.schema_version) == (
        "default", 25, 1, 1,
    )  # fmt: skip
    assert (one.on_missed, one.backfill_limit, one.paused) == (OnMissed.SKIP, 0, False)
    assert (one.payload, one.priority, one.retention_ms) == (b"", 0, 0)
    assert one.last_enqueued_ms is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""), ("id", "x" * 129), ("id", "a b"), ("id", "a\0"), ("id", "é"),
        ("id", "a/b"), ("id", 5), ("kind", ""), ("kind", "a b"),
        ("payload", "text"), ("payload", bytes(MAX_PAYLOAD_BYTES + 1)),
        ("queue", "x" * 256), ("queue", "\0"), ("rate_class", "\ud800"),
        ("partition_key", 5), ("priority", 2**31), ("max_attempts", 0),
        ("weight", 0), ("schema_version", 0), ("max_attempts", True),
        ("retention_ms", -1), ("timeout_ms", -1), ("backfill_limit", -1),
        ("backfill_limit", 1_001), ("on_missed", "never"), ("next_run_ms", 0),
        ("next_run_ms", 2**63), ("tags", "text"), ("tags", ("é",)),
        ("headers", {"a": "\0"}), ("sticky_worker", "é"), ("paused", 1),
    ],
)  # fmt: skip
def test_a_value_that_breaks_a_rule_does_not_exist(field, value):
    with pytest.raises(InvalidRequest):
        schedule(**{field: value})


@pytest.mark.parametrize("spec", ["", "nonsense", "CRON_TZ=Mars/Phobos 0 9 * * *"])
def test_a_bad_spec_cannot_even_be_made(spec):
    with pytest.raises(SpecError):
        schedule(spec=spec)


# Rows


def test_the_same_spec_keeps_the_next_tick(store):
    steer(store).upsert_schedule(schedule())
    changed = steer(store).upsert_schedule(schedule(next_run_ms=8_888, priority=3))
    assert (changed.next_run_ms, changed.priority) == (ANCHOR_MS, 3)
    assert known(store) == changed


@pytest.mark.parametrize(
    "spec", ["@every:2000", "0 9 * * *", "CRON_TZ=Europe/Berlin 0 9 * * *"]
)
def test_another_spec_takes_the_new_anchor(store, spec):
    steer(store).upsert_schedule(schedule())
    assert steer(store).upsert_schedule(
        schedule(spec=spec, next_run_ms=8_888)
    ).next_run_ms == 8_888  # fmt: skip


def test_only_another_zone_is_another_spec(store):
    steer(store).upsert_schedule(schedule(spec="CRON_TZ=Europe/Berlin 0 9 * * *"))
    moved = schedule(spec="CRON_TZ=Europe/London 0 9 * * *", next_run_ms=8_888)
    assert steer(store).upsert_schedule(moved).next_run_ms == 8_888


def test_a_nickname_and_its_fields_are_one_spec(store):
    steer(store).upsert_schedule(schedule(spec="@daily"))
    again = schedule(spec="0 0 * * *", next_run_ms=8_888)
    assert steer(store).upsert_schedule(again).next_run_ms == ANCHOR_MS


def test_an_equal_schedule_is_not_written_again(backend, store):
    steer(store).upsert_schedule(schedule(**FULL))
    again = schedule(**FULL | {"paused": None, "next_run_ms": 8_888})
    unchanged_by(backend, lambda: steer(store).upsert_schedule(again))


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_is_kept_unless_told_otherwise(store, paused):
    inspect = steer(store)
    inspect.upsert_schedule(schedule())
    assert known(store).paused is False
    inspect.set_schedule_paused("s", True)
    assert inspect.upsert_schedule(schedule(priority=1)).paused is True
    assert inspect.upsert_schedule(schedule(paused=paused)).paused is paused


def test_an_upsert_keeps_what_only_firing_may_change(store, clock):
    steer(store).upsert_schedule(schedule())
    clock.freeze_at(ANCHOR_MS + 3)
    steer(store).advance_schedule("s", ANCHOR_MS, ANCHOR_MS + 1_000)
    again = steer(store).upsert_schedule(schedule(priority=1, last_enqueued_ms=7))
    assert again.last_enqueued_ms == ANCHOR_MS + 3
    assert again.next_run_ms == ANCHOR_MS + 1_000


def test_verbs_on_a_missing_schedule_say_so(backend, store):
    inspect = steer(store)
    for call in (
        lambda: inspect.delete_schedule("none"),
        lambda: inspect.set_schedule_paused("none", True),
    ):
        error = unchanged_by(backend, call)
        assert isinstance(error, NotFound)
        assert str(error) == "schedule none does not exist"
    assert inspect.get_schedule("none") is None
    assert inspect.advance_schedule("none", 1, 2) is False


@pytest.mark.parametrize("id", ["", "a'b", "a\\", "a;b", "a%b", "a\0", "é", "x" * 129])
def test_a_bad_id_is_refused_by_every_call(backend, store, id):
    inspect = steer(store)
    for call in (
        lambda: inspect.get_schedule(id),
        lambda: inspect.delete_schedule(id),
        lambda: inspect.set_schedule_paused(id, True),
        lambda: inspect.advance_schedule(id, 1, 2),
        lambda: inspect.list_schedules(cursor=id),
        lambda: inspect.list_schedule_events(id),
    ):
        assert isinstance(unchanged_by(backend, call), InvalidRequest)


def test_schedules_are_listed_by_id_in_pages(store):
    for id in ("b", "B", "a", "c", "_"):
        steer(store).upsert_schedule(schedule(id))
    listed = [one.id for one in steer(store).list_schedules()]
    assert listed == ["B", "_", "a", "b", "c"]
    assert [one.id for one in steer(store).list_schedules(2, "_")] == ["a", "b"]
    for limit in (0, 10_001):
        with pytest.raises(InvalidRequest, match="limit"):
            steer(store).list_schedules(limit)


def test_a_list_without_payloads_has_everything_else(store):
    whole = schedule(payload=b"secret", headers={"k": "secret"}, tags=("t",))
    steer(store).upsert_schedule(whole)
    [found] = steer(store).list_schedules()
    assert (found.payload, found.headers) == (b"secret", {"k": "secret"})
    [seen] = steer(store).list_schedules(include_payload=False)
    assert seen == found.with_state(payload=b"", headers={})
    with pytest.raises(InvalidRequest, match="include_payload"):
        steer(store).list_schedules(include_payload=1)


# Due


def test_nothing_due_still_tells_the_store_time(store):
    assert steer(store).due_schedules(10) == ([], START_MS)
    steer(store).upsert_schedule(schedule())
    assert steer(store).due_schedules(10) == ([], START_MS)


def test_due_schedules_come_in_order_and_page_behind_the_last(store, clock):
    inspect = steer(store)
    for id, at_ms in (("c", 2), ("b", 1), ("a", 2), ("late", 9_999_999)):
        inspect.upsert_schedule(schedule(id, next_run_ms=at_ms))
    inspect.upsert_schedule(schedule("paused", next_run_ms=1, paused=True))
    due, now_ms = inspect.due_schedules(10)
    assert [one.id for one in due] == ["b", "a", "c"]
    assert now_ms == START_MS
    assert [one.id for one in inspect.due_schedules(1, (1, "b"))[0]] == ["a"]
    assert inspect.due_schedules(5, (2, "c"))[0] == []


def test_a_schedule_is_due_at_its_instant_and_not_before(store, clock):
    steer(store).upsert_schedule(schedule())
    clock.freeze_at(ANCHOR_MS - 1)
    assert steer(store).due_schedules(10)[0] == []
    assert store.duty_tick("w", ["scheduler"], 1_000) == {"scheduler": False}
    clock.advance_ms(1)
    assert [one.id for one in steer(store).due_schedules(10)[0]] == ["s"]
    assert store.duty_tick("w", ["scheduler"], 1_000) == {"scheduler": True}
    steer(store).set_schedule_paused("s", True)
    assert store.duty_tick("w", ["scheduler"], 1_000) == {"scheduler": False}


def test_a_schedule_moves_once_from_where_it_was_read(backend, store):
    steer(store).upsert_schedule(schedule())
    assert steer(store).advance_schedule("s", ANCHOR_MS, ANCHOR_MS + 9) is True
    assert known(store).next_run_ms == ANCHOR_MS + 9
    assert known(store).last_enqueued_ms == START_MS
    before = backend.image()
    assert steer(store).advance_schedule("s", ANCHOR_MS, ANCHOR_MS + 99) is False
    assert backend.image() == before


# Firing


def test_firing_enqueues_records_and_advances(store, clock):
    one = steer(store).upsert_schedule(schedule(**FULL | {"paused": False}))
    clock.freeze_at(ANCHOR_MS + 7)
    result = fire(store, one, ANCHOR_MS)
    id = f"sched-s-{ANCHOR_MS}"
    assert result == FireResult(
        FireStatus.FIRED, (FiredTick(ANCHOR_MS, id, *ENQUEUED),)
    )
    found = job(store, id)
    for name in (
        "kind", "payload", "schema_version", "queue", "partition_key", "rate_class",
        "weight", "priority", "max_attempts", "timeout_ms", "retention_ms", "headers",
        "tags", "sticky_worker",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(one, name), name
    assert (found.state, found.scheduled_at_ms) == ("available", ANCHOR_MS + 7)
    assert found.fingerprint
    origin = found.periodic_origin
    assert origin is not None
    assert (origin.schedule_id, origin.tick_ms) == ("s", ANCHOR_MS)
    assert events(store) == [(ANCHOR_MS, id, "enqueued", "accepted")]
    moved = known(store)
    assert moved.next_run_ms == ANCHOR_MS + 1_000
    assert moved.last_enqueued_ms == ANCHOR_MS + 7


def test_other_jobs_have_no_origin(store):
    run_one(store, "a")
    assert job(store, "a").periodic_origin is None


@pytest.mark.parametrize("how", ["moved", "paused", "deleted"])
def test_a_schedule_that_is_not_where_it_was_read_is_lost(backend, store, how):
    inspect = steer(store)
    one = inspect.upsert_schedule(schedule())
    if how == "moved":
        inspect.advance_schedule("s", ANCHOR_MS, ANCHOR_MS + 1)
    elif how == "paused":
        inspect.set_schedule_paused("s", True)
    else:
        inspect.delete_schedule("s")
    before = backend.image()
    assert fire(store, one, ANCHOR_MS) == FireResult(FireStatus.LOST)
    assert backend.image() == before


def test_a_tick_that_ran_and_left_no_row_does_not_run_again(store):
    one = steer(store).upsert_schedule(schedule(retention_ms=0))
    fire(store, one, ANCHOR_MS)
    store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
    assert fire(store, one, ANCHOR_MS) == FireResult(FireStatus.LOST)
    assert counts(store) == {}


def test_several_ticks_become_a_job_each(store):
    one = steer(store).upsert_schedule(schedule())
    instants = [ANCHOR_MS, ANCHOR_MS + 1_000, ANCHOR_MS + 2_000]
    assert fire(store, one, *instants).status is FireStatus.FIRED
    assert [event[0] for event in events(store)] == instants
    assert known(store).next_run_ms == ANCHOR_MS + 3_000
    assert counts(store) == {"available": 3}


def test_a_full_queue_stops_at_its_tick_and_keeps_the_earlier_ones(store):
    steer(store).set_enqueue_limit("q", 1)
    one = steer(store).upsert_schedule(schedule())
    instants = [ANCHOR_MS, ANCHOR_MS + 1_000, ANCHOR_MS + 2_000]
    result = fire(store, one, *instants)
    assert result.status is FireStatus.STOPPED
    assert [(t.outcome.value, t.reason) for t in result.ticks] == [
        ("enqueued", "accepted"), ("failed", "backpressure"),
    ]  # fmt: skip
    assert known(store).next_run_ms == ANCHOR_MS + 1_000
    assert [event[2] for event in events(store)] == ["enqueued", "failed"]
    steer(store).set_enqueue_limit("q", None)
    assert fire(store, known(store), *instants[1:]).status is FireStatus.FIRED
    assert [event[1] for event in events(store)] == [
        f"sched-s-{ANCHOR_MS + n}" for n in (0, 1_000, 1_000, 2_000)
    ]


def test_a_first_tick_that_fails_moves_nothing(store):
    steer(store).set_enqueue_limit("q", 0)
    one = steer(store).upsert_schedule(schedule())
    assert fire(store, one, ANCHOR_MS).status is FireStatus.STOPPED
    assert known(store) == one
    assert events(store) == [
        (ANCHOR_MS, f"sched-s-{ANCHOR_MS}", "failed", "backpressure")
    ]


def test_a_failure_that_was_told_is_not_recorded_again(backend, store):
    steer(store).set_enqueue_limit("q", 0)
    one = steer(store).upsert_schedule(schedule())
    told = {(ANCHOR_MS, "backpressure")}
    before = backend.image()
    assert fire(store, one, ANCHOR_MS, told=told).status is FireStatus.STOPPED
    assert backend.image() == before


def test_a_held_key_counts_as_done_and_names_its_holder(store):
    one = steer(store).upsert_schedule(schedule())
    store.enqueue([evolve(one.job(ANCHOR_MS), id="other")])
    assert fire(store, one, ANCHOR_MS).status is FireStatus.FIRED
    assert events(store) == [(ANCHOR_MS, "other", "deduplicated", "unique_key")]
    assert known(store).next_run_ms == ANCHOR_MS + 1_000


def test_a_taken_id_counts_as_done(store):
    one = steer(store).upsert_schedule(schedule())
    id = f"sched-s-{ANCHOR_MS}"
    store.enqueue([evolve(one.job(ANCHOR_MS), fingerprint="x", unique_key=None)])
    assert fire(store, one, ANCHOR_MS).status is FireStatus.FIRED
    assert events(store) == [(ANCHOR_MS, id, "deduplicated", "id_conflict")]


def test_an_equal_job_is_a_replay(store):
    one = steer(store).upsert_schedule(schedule())
    store.enqueue([one.job(ANCHOR_MS)])
    fire(store, one, ANCHOR_MS)
    assert [event[2] for event in events(store)] == ["enqueued"]
    assert counts(store) == {"available": 1}


def test_a_quarantined_payload_is_skipped_and_the_schedule_goes_on(store, clock):
    one = steer(store).upsert_schedule(schedule())
    claim = run_one(store, "bad", fingerprint=one.job(1).fingerprint)
    crash_until_quarantined(store, clock, claim)
    assert fire(store, one, ANCHOR_MS, ANCHOR_MS + 1_000).status is FireStatus.FIRED
    assert [event[2:] for event in events(store)] == [("skipped", "quarantined")] * 2
    assert known(store).next_run_ms == ANCHOR_MS + 2_000


def test_bad_arguments_fire_nothing(backend, store):
    one = steer(store).upsert_schedule(schedule())
    other = schedule("other")
    inspect: Any = steer(store)
    for to_ms, ticks in (
        (9_999_999, []),
        (ANCHOR_MS, [one.job(ANCHOR_MS)]),
        (9_999_999, [other.job(ANCHOR_MS)]),
        (9_999_999, [one.job(ANCHOR_MS + 1), one.job(ANCHOR_MS)]),
        (9_999_999, [one.job(ANCHOR_MS), one.job(ANCHOR_MS)]),
        (9_999_999, [one.job(n) for n in range(1, 1_002)]),
    ):
        call = lambda to_ms=to_ms, ticks=ticks: inspect.fire_ticks(  # noqa: E731
            "s", ANCHOR_MS, to_ms, ticks
        )
        assert isinstance(unchanged_by(backend, call), InvalidRequest)


# The audit trail


def event(tick_ms: int = 5, id: str = "s", **fields: Any) -> ScheduleEvent:
    values = {"job_id": "", "outcome": "failed", "reason": "why", **fields}
    return ScheduleEvent(schedule_id=id, tick_ms=tick_ms, **values)


def test_the_newest_hundred_events_are_kept_and_read_newest_first(store, clock):
    for tick_ms in range(1, 151):
        clock.advance_ms(1)
        steer(store).record_schedule_event(event(tick_ms))
    steer(store).record_schedule_event(event(7, id="t"))
    found = steer(store).list_schedule_events("s", limit=100)
    assert [e.tick_ms for e in found] == list(range(150, 50, -1))
    assert [e.recorded_at_ms for e in found] == [START_MS + e.tick_ms for e in found]
    ids = [e.event_id for e in found]
    assert ids == sorted(set(ids), reverse=True)
    assert len(steer(store).list_schedule_events("s")) == 30
    page = steer(store).list_schedule_events("s", ids[-2], 100)
    assert [e.event_id for e in page] == [ids[-1]]


@pytest.mark.parametrize("limit", [0, 101, -1, True])
def test_a_page_of_events_has_its_bounds(store, limit):
    with pytest.raises(InvalidRequest, match="limit"):
        steer(store).list_schedule_events("s", limit=limit)


def test_events_outlive_their_schedule(store):
    one = steer(store).upsert_schedule(schedule())
    fire(store, one, ANCHOR_MS)
    steer(store).delete_schedule("s")
    steer(store).record_schedule_event(event(9))
    assert [e[0] for e in events(store)] == [ANCHOR_MS, 9]


@pytest.mark.parametrize(
    "fields",
    [{"reason": "x" * 65}, {"reason": "é" * 33}, {"job_id": "\0"}, {"reason": "\0"}],
)
def test_a_reason_is_a_short_word(fields):
    with pytest.raises(InvalidRequest):
        event(**fields)
