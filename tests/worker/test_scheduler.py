"""The sweep: due ticks become jobs, once, whatever goes wrong beside them."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from attrs import evolve

from headgate_sync.context import JobContext
from headgate_sync.cron import next_after
from headgate_sync.errors import BackendError, StoreUnavailable
from headgate_sync.lifecycle import Outcome
from headgate_sync.registry import Registry
from headgate_sync.schedule import FiredTick, PeriodicOrigin, Schedule, TickOutcome
from headgate_sync.worker.scheduler import (
    PARK_MS,
    TICK_RETENTION_MS,
    PeriodicAttempt,
    Scheduler,
    scheduler_sweep,
)
from tests.builders import (
    DAY_MS,
    claim_one,
    counts,
    crash_until_quarantined,
    job,
    run_one,
    steer,
)
from tests.contract.test_schedules import events, known, schedule
from tests.worker.rig import Bench, Steps, wait_for, working

HOUR_MS = 3_600_000


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


class InSteps:
    """A store whose inspection cannot fire ticks in one transaction.

    Attributes:
        fail: errors by name of the call, raised once each.
        calls: what was called.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.fail: dict[str, list[Exception]] = {}
        self.calls: list[str] = []
        self.inspect = Calls(self, store.inspect)

    def __getattr__(self, name: str) -> Any:
        return tapped(self, name, getattr(self._store, name))


class Calls:
    """The inspection of such a store."""

    def __init__(self, owner: InSteps, inspect: Any) -> None:
        self._owner = owner
        self._inspect = inspect

    def __getattr__(self, name: str) -> Any:
        if name == "fire_ticks":
            raise AttributeError(name)
        return tapped(self._owner, name, getattr(self._inspect, name))


def tapped(owner: InSteps, name: str, found: Any) -> Any:
    if not callable(found):
        return found

    def call(*args: Any, **keywords: Any) -> Any:
        owner.calls.append(name)
        if owner.fail.get(name):
            raise owner.fail[name].pop(0)
        return found(*args, **keywords)

    return call


@pytest.fixture(params=["at once", "in steps"])
def swept(request: Any, store: Any) -> Any:
    """The store as a sweep sees it: with the one transaction, and without."""
    return store if request.param == "at once" else InSteps(store)


def put(store: Any, clock: Any, id: str = "s", **fields: Any) -> Schedule:
    fields.setdefault("next_run_ms", clock.now_ms())
    return steer(store).upsert_schedule(schedule(id, **fields))


def tick_ids(store: Any, id: str = "s") -> list[str]:
    return [event[1] for event in events(store, id)]


# Missed ticks


@pytest.mark.parametrize("on_missed", ["skip", "run_once"])
def test_of_several_due_ticks_the_newest_fires(swept, store, clock, on_missed):
    put(store, clock, next_run_ms=1_000, on_missed=on_missed)
    clock.freeze_at(10_000)
    assert scheduler_sweep(swept).enqueued == 1
    assert tick_ids(store) == ["sched-s-10000"]
    assert known(store).next_run_ms == 11_000


def test_backfill_fires_the_newest_ones_oldest_first(swept, store, clock):
    put(store, clock, next_run_ms=1_000, on_missed="backfill", backfill_limit=3)
    clock.freeze_at(10_000)
    assert scheduler_sweep(swept).enqueued == 3
    assert tick_ids(store) == [f"sched-s-{n}000" for n in (8, 9, 10)]
    assert known(store).next_run_ms == 11_000
    assert counts(store) == {"available": 3}


def test_a_long_backfill_is_fired_in_portions(store, clock):
    put(store, clock, next_run_ms=1_000, on_missed="backfill", backfill_limit=250)
    sizes: list[int] = []

    class Counting(Calls):
        def fire_ticks(self, *args: Any, **keywords: Any) -> Any:
            sizes.append(len(args[3]))
            return steer(store).fire_ticks(*args, **keywords)  # type: ignore[attr-defined]

    node = InSteps(store)
    node.inspect = Counting(node, steer(store))
    assert scheduler_sweep(node).enqueued == 250
    assert sizes == [100, 100, 50]
    assert counts(store) == {"available": 250}
    assert known(store).next_run_ms == clock.now_ms() + 1_000


def test_backfill_without_a_limit_fires_one(swept, store, clock):
    put(store, clock, next_run_ms=1_000, on_missed="backfill")
    clock.freeze_at(10_000)
    assert scheduler_sweep(swept).enqueued == 1


def test_a_zoned_schedule_catches_up_on_its_own_clock(swept, store, clock):
    first = ms("2024-01-01T14:00")
    put(
        store, clock, spec="CRON_TZ=America/New_York 0 9 * * *", next_run_ms=first,
        on_missed="backfill", backfill_limit=5,
    )  # fmt: skip
    clock.freeze_at(first + 200_000_000)
    scheduler_sweep(swept)
    assert [event[0] for event in events(store)] == [
        first + n * DAY_MS for n in (0, 1, 2)
    ]


@pytest.mark.parametrize(("on_missed", "jobs"), [("skip", 1), ("backfill", 3)])
def test_a_resumed_schedule_catches_up_as_it_says(swept, store, clock, on_missed, jobs):
    start = ms("2024-01-01T00:30")
    clock.freeze_at(start)
    put(
        store, clock, spec="0 * * * *", next_run_ms=start + HOUR_MS // 2,
        on_missed=on_missed, backfill_limit=5, paused=True,
    )  # fmt: skip
    clock.advance_ms(3 * HOUR_MS)
    assert scheduler_sweep(swept).enqueued == 0
    steer(store).set_schedule_paused("s", False)
    assert scheduler_sweep(swept).enqueued == jobs


def test_the_hour_that_a_day_lacks_is_not_missed(swept, store, clock):
    spec = "CRON_TZ=Europe/Berlin 30 2 * * *"
    clock.freeze_at(ms("2026-03-28T00:00"))
    anchor = next_after(spec, clock.now_ms())
    put(store, clock, spec=spec, next_run_ms=anchor)
    fired = []
    for _ in range(4 * 24):
        clock.advance_ms(HOUR_MS)
        fired.append(scheduler_sweep(swept).enqueued)
    assert sum(fired) == 3  # on 28, 30 and 31 March
    assert all(n <= 1 for n in fired)


def test_a_daily_job_after_four_days_of_downtime_comes_once(swept, store, clock):
    clock.freeze_at(ms("2026-01-01T00:00"))
    put(store, clock, spec="@daily", next_run_ms=clock.now_ms() + DAY_MS)
    clock.advance_ms(4 * DAY_MS + HOUR_MS)
    assert scheduler_sweep(swept).enqueued == 1
    assert scheduler_sweep(swept).enqueued == 0


def test_a_restart_does_not_lose_the_place(swept, store, clock):
    clock.freeze_at(DAY_MS)
    put(store, clock, spec="@every 60m", next_run_ms=DAY_MS + HOUR_MS)
    for _ in range(18):
        clock.advance_ms(600_000)
        Scheduler(swept).sweep()  # a fresh one each time
    assert [event[0] for event in events(store)] == [
        DAY_MS + n * HOUR_MS for n in (1, 2, 3)
    ]


def test_no_minute_of_a_day_is_lost_or_doubled(swept, store, clock):
    luck = random.Random(7)
    clock.freeze_at(DAY_MS)
    put(
        store, clock, spec="* * * * *", next_run_ms=DAY_MS + 60_000,
        on_missed="backfill", backfill_limit=9,
    )  # fmt: skip
    seen: list[int] = []
    while clock.now_ms() < DAY_MS + 4 * HOUR_MS:
        clock.advance_ms(luck.choice([1_000, 30_000, 61_000, 240_000]))
        scheduler_sweep(swept)
        newest = steer(store).list_schedule_events("s", limit=9)
        seen += [e.tick_ms for e in reversed(newest) if e.tick_ms not in seen]
    expected = range(DAY_MS + 60_000, clock.now_ms() + 1, 60_000)
    assert seen == list(expected)
    assert sum(counts(store).values()) == len(expected)


# One sweep


def test_a_tick_on_the_wall_clock_of_new_york(swept, store, clock):
    spec, first = "CRON_TZ=America/New_York 0 9 * * *", 1_704_117_600_000
    put(store, clock, spec=spec, next_run_ms=first)
    clock.freeze_at(first + 5_000)
    scheduler_sweep(swept)
    (found,) = steer(store).get_jobs([f"sched-s-{first}"])
    assert found.periodic_origin == PeriodicOrigin("s", first)
    assert known(store).next_run_ms == first + DAY_MS


def test_a_full_queue_keeps_its_tick_due_under_the_same_id(swept, store, clock):
    steer(store).set_enqueue_limit("q", 0)
    before = put(store, clock)
    report = scheduler_sweep(swept)
    assert (report.failed, report.enqueued) == (1, 0)
    assert known(store) == before
    steer(store).set_enqueue_limit("q", None)
    assert scheduler_sweep(swept).enqueued == 1
    id = f"sched-s-{clock.now_ms()}"
    assert [e[1:] for e in events(store)] == [
        (id, "failed", "backpressure"),
        (id, "enqueued", "accepted"),
    ]


def test_a_quarantined_payload_is_skipped_with_a_warning(swept, store, clock, caplog):
    claim = run_one(store, "bad", fingerprint=schedule().job(1).fingerprint)
    crash_until_quarantined(store, clock, claim)
    put(store, clock, spec="@every:1")
    assert scheduler_sweep(swept).skipped == 1
    assert events(store)[0][2:] == ("skipped", "quarantined")
    assert known(store).next_run_ms == clock.now_ms() + 1
    assert "quarantined" in caplog.text


def broken(store: Any, id: str, **fields: Any) -> None:
    """A row as somebody left it who changed it by hand."""
    row = schedule(id, next_run_ms=1).with_state(paused=False, **fields)
    steer(store).upsert_schedule(row)


@pytest.mark.parametrize("spec", ["garbage", "CRON_TZ=Mars/Phobos 0 9 * * *", ""])
def test_a_spec_that_cannot_be_read_is_parked_for_an_hour(
    swept, store, clock, caplog, spec
):
    broken(store, "a", spec=spec)
    put(store, clock, "b", spec="@every:1")
    report = scheduler_sweep(swept)
    assert (report.parked, report.enqueued) == (1, 1)
    assert events(store, "a") == [(1, "", "failed", "invalid_spec")]
    assert known(store, "a").next_run_ms == clock.now_ms() + PARK_MS
    assert [r.levelname for r in caplog.records if "parked" in r.message] == ["ERROR"]
    good = steer(store).upsert_schedule(
        schedule("a", next_run_ms=next_after("@every:1000", clock.now_ms()))
    )
    assert good.next_run_ms % 1_000 == 0


def test_an_anchor_that_parking_left_off_the_grid_does_not_fire(swept, store, clock):
    broken(store, "a", spec="garbage")
    clock.advance_ms(17)
    scheduler_sweep(swept)
    parked = known(store, "a")
    steer(store).delete_schedule("a")
    # Mended by hand, without an upsert that would start afresh.
    steer(store).upsert_schedule(parked.with_state(spec="0 * * * *"))
    steer(store).advance_schedule("a", parked.next_run_ms, parked.next_run_ms)
    clock.freeze_at(parked.next_run_ms)
    report = scheduler_sweep(swept)
    assert (report.enqueued, report.parked) == (0, 0)
    assert known(store, "a").next_run_ms % HOUR_MS == 0
    assert known(store, "a").next_run_ms > clock.now_ms()


def test_a_first_tick_off_the_grid_was_meant(swept, store, clock):
    put(store, clock, spec="0 * * * *", next_run_ms=clock.now_ms() - 7)
    assert scheduler_sweep(swept).enqueued == 1
    assert events(store)[0][0] == clock.now_ms() - 7


def test_a_start_off_the_grid_of_one_that_fired_gives_way_to_the_next_tick(
    swept, store, clock
):
    put(store, clock)
    scheduler_sweep(swept)
    begin_ms = clock.now_ms() + 7
    steer(store).upsert_schedule(schedule(spec="0 * * * *", next_run_ms=begin_ms))
    clock.freeze_at(begin_ms)
    assert scheduler_sweep(swept).enqueued == 0
    assert known(store).next_run_ms == next_after("0 * * * *", begin_ms)


def test_a_row_that_is_no_job_fails_alone(swept, store, clock, caplog):
    broken(store, "a", spec="@every:1", max_attempts=5, weight=-1)
    put(store, clock, "b")
    report = scheduler_sweep(swept)
    assert (report.failed, report.enqueued) == (1, 1)
    assert events(store, "a")[0][2:] == ("failed", "invalid_request")
    assert known(store, "a").next_run_ms == 1
    assert "unusable" in caplog.text


def test_a_schedule_far_ahead_does_not_disturb(swept, store, clock):
    put(store, clock, "far", spec="0 0 1 1 *", next_run_ms=253_370_764_800_000)
    put(store, clock, "near")
    assert scheduler_sweep(swept).enqueued == 1


def test_schedules_that_fail_do_not_starve_the_one_behind_them(swept, store, clock):
    steer(store).set_enqueue_limit("full", 0)
    for n in range(60):
        put(store, clock, f"blocked-{n:02}", queue="full")
    put(store, clock, "z-healthy")
    report = scheduler_sweep(swept)
    assert (report.failed, report.enqueued) == (60, 1)


def test_a_sweep_that_ran_out_of_time_goes_on_where_it_was(swept, store, clock):
    for n in range(120):
        put(store, clock, f"s-{n:03}")
    steps = Steps()

    def now_s() -> float:
        steps.advance(0.02)
        return steps()

    scheduler = Scheduler(swept, now_s=now_s)
    reports = [scheduler.sweep() for _ in range(20)]
    done = [r.enqueued for r in reports if r.enqueued]
    assert sum(done) == 120
    assert max(done) < 60
    assert [r.unfinished for r in reports if r.enqueued] == [
        *[True] * (len(done) - 1), False,
    ]  # fmt: skip


def test_a_sweep_out_of_time_starts_behind_those_that_keep_failing(swept, store, clock):
    """They stay in front: from the first one on it would never come to the last."""
    steer(store).set_enqueue_limit("full", 0)
    for n in range(60):
        put(store, clock, f"blocked-{n:02}", queue="full")
    put(store, clock, "healthy")
    steps = Steps()

    def now_s() -> float:
        steps.advance(0.02)
        return steps()

    scheduler = Scheduler(swept, now_s=now_s)
    reports = [scheduler.sweep() for _ in range(10)]
    assert reports[0].unfinished
    assert sum(report.enqueued for report in reports) == 1


def test_a_store_without_inspection_has_no_schedules():
    class Bare:
        inspect = None

    assert scheduler_sweep(Bare()).enqueued == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS, 10 * 365 * DAY_MS])
def test_the_clock_of_the_node_plays_no_part(swept, store, clock, monkeypatch, off_ms):
    clock.freeze_at(999_999)
    put(store, clock, next_run_ms=1_000_000)
    off_s = time.time() + off_ms / 1_000
    monkeypatch.setattr(time, "time", lambda: off_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(off_s * 1e9))
    assert scheduler_sweep(swept).enqueued == 0
    clock.advance_ms(1)
    assert scheduler_sweep(swept).enqueued == 1
    assert tick_ids(store) == ["sched-s-1000000"]
    assert known(store).next_run_ms == 1_001_000


@pytest.mark.parametrize("step_ms", [-HOUR_MS, HOUR_MS, 10 * 365 * DAY_MS])
def test_a_step_of_the_store_clock_doubles_nothing(swept, store, clock, step_ms):
    clock.freeze_at(DAY_MS)
    put(store, clock, spec="@every:60000", next_run_ms=DAY_MS)
    for _ in range(5):
        scheduler_sweep(swept)
        clock.advance_ms(60_000)
    clock.advance_ms(step_ms)
    scheduler_sweep(swept)
    clock.advance_ms(-step_ms)
    for _ in range(200):
        scheduler_sweep(swept)
        clock.advance_ms(60_000)
    fired = [e[0] for e in events(store)]
    assert fired == sorted(set(fired))


def test_through_both_changes_of_a_year_the_sweeps_stay_few_and_the_ticks_true(
    store, clock
):
    spec = "CRON_TZ=Europe/Berlin */30 * * * *"
    for day in ("2026-03-28T22:00", "2026-10-24T22:00"):
        clock.freeze_at(ms(day))
        put(store, clock, day[5:7], spec=spec, next_run_ms=next_after(spec, ms(day)))
        tap = InSteps(store)
        for _ in range(8 * 60):
            clock.advance_ms(60_000)
            scheduler_sweep(tap)
        expected, at = [], ms(day)
        while (at := next_after(spec, at)) <= clock.now_ms():
            expected.append(at)
        assert [e[0] for e in events(store, day[5:7])] == expected
        assert tap.calls.count("due_schedules") == 8 * 60


# Failures


ANSWERS = [
    (StoreUnavailable("away"), "store_unavailable"),
    (BackendError("broken"), "store_error"),
]


@pytest.mark.parametrize(("error", "reason"), ANSWERS)
def test_a_tick_that_the_store_refused_stays_due(store, clock, error, reason):
    swept = InSteps(store)
    swept.fail["enqueue"] = [error]
    before = put(store, clock)
    assert scheduler_sweep(swept).failed == 1
    assert known(store) == before
    assert events(store)[0][2:] == ("failed", reason)
    assert scheduler_sweep(swept).enqueued == 1


def test_an_event_that_cannot_be_written_keeps_the_tick_due(store, clock):
    swept = InSteps(store)
    swept.fail["record_schedule_event"] = [BackendError("full disk")]
    before = put(store, clock)
    scheduler_sweep(swept)
    assert known(store) == before
    scheduler_sweep(swept)
    assert counts(store) == {"available": 1}
    assert events(store)[0][2:] == ("enqueued", "accepted")


def test_a_crash_between_enqueue_and_advance_is_harmless(store, clock):
    swept = InSteps(store)
    put(store, clock)
    swept.fail["advance_schedule"] = [KeyboardInterrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        scheduler_sweep(swept)
    scheduler_sweep(swept)
    assert counts(store) == {"available": 1}
    assert [e[2] for e in events(store)] == ["enqueued", "enqueued"]
    assert known(store).next_run_ms == clock.now_ms() + 1_000
    assert scheduler_sweep(swept).enqueued == 0


def test_in_steps_a_finished_tick_leaves_a_row_for_the_slower_node(store, clock):
    put(store, clock, retention_ms=0)
    slow = InSteps(store)
    page = steer(store).due_schedules(10)
    scheduler_sweep(InSteps(store))
    store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
    slow.inspect.due_schedules = lambda *args: page if args[1] is None else ([], 0)
    assert scheduler_sweep(slow).lost == 1
    assert counts(store) == {"completed": 1}
    id = f"sched-s-{clock.now_ms()}"
    assert job(store, id).retention_ms == TICK_RETENTION_MS


def test_at_once_the_slower_node_with_an_old_list_runs_nothing(store, clock):
    put(store, clock, retention_ms=0)
    page = steer(store).due_schedules(10)
    scheduler_sweep(store)
    store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)

    class Slow:
        def __init__(self) -> None:
            self.inspect = type(steer(store)).__new__(type(steer(store)))
            self.inspect.__dict__.update(steer(store).__dict__)
            self.inspect.due_schedules = lambda *args: page

    assert scheduler_sweep(Slow()).lost == 1  # type: ignore[arg-type]
    assert counts(store) == {}


def test_a_schedule_that_is_deleted_meanwhile_is_no_error(swept, store, clock, caplog):
    put(store, clock)
    due = steer(store).due_schedules(10)
    steer(store).delete_schedule("s")
    if isinstance(swept, InSteps):
        swept.inspect.due_schedules = lambda *args: due
        assert scheduler_sweep(swept).lost == 1
    else:
        assert scheduler_sweep(swept).enqueued == 0
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_failing_tick_is_tried_ever_more_seldom_and_told_once_a_minute(
    swept, store, clock
):
    steer(store).set_enqueue_limit("q", 0)
    put(store, clock)
    steps = Steps()
    scheduler = Scheduler(swept, now_s=steps)
    tries = []
    for second in range(130):
        report = scheduler.sweep()
        if report.failed:
            tries.append(second)
        else:
            assert report.resting == 1
        steps.advance(1)
    assert tries == [0, 1, 3, 7, 15, 31, 63, 123]
    assert len(events(store)) == 3  # at 0, at 63 and at 123
    steer(store).set_enqueue_limit("q", None)
    steps.advance(60)
    assert scheduler.sweep().enqueued == 1


def test_a_schedule_that_was_changed_is_tried_at_once(swept, store, clock):
    steer(store).set_enqueue_limit("q", 0)
    put(store, clock)
    scheduler = Scheduler(swept, now_s=Steps())
    assert scheduler.sweep().failed == 1
    assert scheduler.sweep().resting == 1
    put(store, clock, queue="other", spec="@every:500")
    assert scheduler.sweep().enqueued == 1


def test_without_a_store_the_sweep_ends_and_nothing_is_lost(store, clock):
    swept = InSteps(store)
    put(store, clock, "a")
    put(store, clock, "b")
    away = StoreUnavailable("away")
    swept.fail |= {"enqueue": [away], "record_schedule_event": [away]}
    with pytest.raises(StoreUnavailable):
        scheduler_sweep(swept)
    assert swept.calls.count("enqueue") == 1
    assert scheduler_sweep(swept).enqueued == 2


# Hooks


class Hook:
    """Notes what it saw; may spoil its copies, or raise."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.log = log
        self.spoils = False
        self.raises = ""

    def begin(self, attempt: PeriodicAttempt) -> None:
        self.note("begin", attempt)
        if self.spoils:
            object.__setattr__(attempt.envelope, "payload", b"spoilt")
            object.__setattr__(attempt.envelope, "unique_key", b"spoilt")
            object.__setattr__(attempt.schedule, "payload", b"spoilt")

    def end(self, attempt: PeriodicAttempt, outcome: FiredTick) -> None:
        self.note("end", attempt)
        self.outcome = outcome

    def note(self, phase: str, attempt: PeriodicAttempt) -> None:
        self.log.append(f"{self.name}.{phase}")
        self.seen = attempt
        if self.raises == phase:
            raise RuntimeError(f"{phase} of {self.name}")


@pytest.fixture
def hooks() -> Iterator[tuple[Hook, Hook]]:
    log: list[Any] = []
    return Hook("A", log), Hook("B", log)


def test_hooks_stand_around_each_enqueue_in_order(swept, store, clock, hooks):
    put(store, clock, on_missed="backfill", backfill_limit=2, next_run_ms=998_000)
    scheduler_sweep(swept, hooks)
    assert hooks[0].log == ["A.begin", "B.begin", "A.end", "B.end"] * 2
    assert hooks[1].seen.schedule_id == "s"
    assert hooks[1].seen.tick_ms == hooks[1].outcome.tick_ms == clock.now_ms()
    assert hooks[1].outcome.outcome is TickOutcome.ENQUEUED
    assert counts(store) == {"available": 2}


def test_a_hook_can_spoil_only_its_own_copies(swept, store, clock, hooks):
    put(store, clock)
    hooks[0].spoils = True
    scheduler_sweep(swept, hooks)
    assert hooks[1].seen.envelope.payload == hooks[1].seen.schedule.payload == b"ok"
    assert job(store, f"sched-s-{clock.now_ms()}").payload == b"ok"
    assert known(store).payload == b"ok"


def test_an_anchor_set_back_by_hand_is_a_second_lifecycle_and_one_row(
    swept, store, clock, hooks
):
    one = put(store, clock)
    scheduler_sweep(swept, hooks)
    steer(store).advance_schedule("s", known(store).next_run_ms, one.next_run_ms)
    scheduler_sweep(swept, hooks)
    assert len(hooks[0].log) == 8
    assert counts(store) == {"available": 1}
    assert len(set(tick_ids(store))) == 1


def test_an_exception_in_begin_keeps_the_tick_due(swept, store, clock, hooks, caplog):
    before = put(store, clock)
    hooks[1].raises = "begin"
    assert scheduler_sweep(swept, hooks).failed == 1
    assert known(store) == before
    assert counts(store) == {}
    assert "begin of B" in caplog.text


def test_an_exception_in_end_never_loses_the_job(swept, store, clock, hooks, caplog):
    put(store, clock)
    hooks[0].raises = "end"
    scheduler_sweep(swept, hooks)
    assert counts(store) == {"available": 1}
    assert "end of A" in caplog.text
    hooks[0].raises = ""
    scheduler_sweep(swept, hooks)
    assert counts(store) == {"available": 1}
    assert known(store).next_run_ms == clock.now_ms() + 1_000


def test_a_refusal_reaches_the_end_of_the_hooks(swept, store, clock, hooks):
    steer(store).set_enqueue_limit("q", 0)
    put(store, clock)
    scheduler_sweep(swept, hooks)
    assert hooks[0].outcome.reason == "backpressure"


def test_a_hook_that_fails_for_one_schedule_lets_the_others_fire(swept, store, clock):
    class Picky(Hook):
        def begin(self, attempt: PeriodicAttempt) -> None:
            if attempt.schedule_id == "a":
                raise RuntimeError("not this one")

    for id in ("a", "b", "c"):
        put(store, clock, id)
    report = scheduler_sweep(swept, [Picky("P", [])])
    assert (report.failed, report.enqueued) == (1, 2)


# In a worker


def test_a_handler_reads_its_tick(store, clock):
    registry, got = Registry(), []

    @registry.task("tk:msg")
    def handler(ctx: JobContext) -> None:
        got.append(ctx.periodic)

    put(store, clock, payload=b"{}")
    scheduler_sweep(store)
    Bench(store, registry).run_next()
    assert got == [PeriodicOrigin("s", clock.now_ms())]


def test_a_worker_fires_and_runs_ticks_by_itself(backend, store):
    if backend.name == "memory":
        store.unfreeze_clock()
    else:
        backend.connection.execute(
            "UPDATE headgate.headgate_test_clock SET frozen_at_ms = NULL"
        )
    registry, done = Registry(), []

    for kind in ("often", "seconds"):

        @registry.task(kind)
        def handler(ctx: JobContext) -> None:
            done.append(ctx.periodic)

    for id, spec in (("often", "@every:300"), ("seconds", "*/1 * * * * *")):
        now_ms = steer(store).store_now_ms()
        one = schedule(id, kind=id, payload=b"{}", spec=spec, next_run_ms=now_ms)
        steer(store).upsert_schedule(evolve(one, next_run_ms=next_after(spec, now_ms)))

    def enough() -> bool:
        ids = [origin.schedule_id for origin in list(done)]
        return ids.count("often") >= 2 and ids.count("seconds") >= 2

    with working(store, registry, duty_interval="50ms"):
        wait_for(enough, "each ran twice")
    assert all(o.tick_ms % 1_000 == 0 for o in done if o.schedule_id == "seconds")
    assert len(set(done)) == len(done)
