"""Schedules in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from types import MappingProxyType

from attrs import evolve

from headgate_sync.envelope import MAX_INT64, Envelope, check_int
from headgate_sync.errors import NotFound, StoreError
from headgate_sync.memory.intake import Intake
from headgate_sync.memory.state import Rows
from headgate_sync.schedule import (
    MAX_SCHEDULE_EVENTS,
    FiredTick,
    FireResult,
    FireStatus,
    Schedule,
    ScheduleEvent,
    check_fire,
    check_schedule_id,
    fired,
)
from headgate_sync.schedules import (
    DEFAULT_SCHEDULE_EVENTS,
    MAX_SCHEDULES,
    check_after,
    check_move,
)
from headgate_sync.validation import check_type, validate_enqueue


class MemSchedules:
    """`ScheduleRecords` and `FiresTicks` over the rows."""

    _rows: Rows

    def upsert_schedule(self, schedule: Schedule) -> Schedule:
        """Create or replace a schedule."""
        check_type("schedule", schedule, Schedule)
        schedules = self._rows.schedules
        with self._rows.lock:
            known = schedules.get(schedule.id)
            if known is None:
                made = schedule.with_state(
                    last_enqueued_ms=None, paused=schedule.paused is True
                )
            else:
                same = known.spec == schedule.spec
                made = schedule.with_state(
                    next_run_ms=known.next_run_ms if same else schedule.next_run_ms,
                    last_enqueued_ms=known.last_enqueued_ms,
                    paused=known.paused if schedule.paused is None else schedule.paused,
                )
            schedules[schedule.id] = made
            return made

    def get_schedule(self, schedule_id: str) -> Schedule | None:
        """One schedule, or None."""
        check_schedule_id(schedule_id)
        with self._rows.lock:
            return self._rows.schedules.get(schedule_id)

    def list_schedules(
        self,
        limit: int = MAX_SCHEDULES,
        cursor: str | None = None,
        *,
        include_payload: bool = True,
    ) -> list[Schedule]:
        """Schedules by id."""
        check_int("limit", limit, 1, MAX_SCHEDULES)
        check_type("include_payload", include_payload, bool)
        if cursor is not None:
            check_schedule_id(cursor)
        with self._rows.lock:
            found = sorted(self._rows.schedules.items())
        later = (row for name, row in found if cursor is None or name > cursor)
        page = list(islice(later, limit))
        if include_payload:
            return page
        return [
            row.with_state(payload=b"", headers=MappingProxyType({})) for row in page
        ]

    def set_schedule_paused(self, schedule_id: str, paused: bool) -> None:
        """Let a schedule fire or not."""
        check_type("paused", paused, bool)
        with self._rows.lock:
            self._change(self._known(schedule_id), paused=paused)

    def delete_schedule(self, schedule_id: str) -> None:
        """Remove a schedule; its events stay."""
        with self._rows.lock:
            del self._rows.schedules[self._known(schedule_id).id]

    def due_schedules(
        self, limit: int, after: tuple[int, str] | None = None
    ) -> tuple[list[Schedule], int]:
        """Schedules whose tick has come, and store time."""
        check_int("limit", limit, 1, MAX_SCHEDULES)
        check_after(after)
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            due = [
                row
                for row in self._rows.schedules.values()
                if not row.paused and row.next_run_ms <= now_ms
            ]
        due.sort(key=_order)
        later = (row for row in due if after is None or _order(row) > after)
        return list(islice(later, limit)), now_ms

    def advance_schedule(self, schedule_id: str, from_ms: int, to_ms: int) -> bool:
        """Move the next tick, if it is still `from_ms`."""
        check_move(schedule_id, from_ms, to_ms)
        with self._rows.lock:
            row = self._rows.schedules.get(schedule_id)
            if row is None or row.next_run_ms != from_ms:
                return False
            self._advance(row, to_ms)
            return True

    def record_schedule_event(self, event: ScheduleEvent) -> None:
        """Append to the audit trail."""
        check_type("event", event, ScheduleEvent)
        with self._rows.lock:
            self._record(event)

    def list_schedule_events(
        self,
        schedule_id: str,
        before_event_id: int | None = None,
        limit: int = DEFAULT_SCHEDULE_EVENTS,
    ) -> list[ScheduleEvent]:
        """Events of a schedule, newest first."""
        check_schedule_id(schedule_id)
        check_int("limit", limit, 1, MAX_SCHEDULE_EVENTS)
        if before_event_id is not None:
            check_int("before_event_id", before_event_id, 0, MAX_INT64)
        with self._rows.lock:
            newest = reversed(self._rows.schedule_events.get(schedule_id, []))
            older = (
                event
                for event in newest
                if before_event_id is None or event.event_id < before_event_id
            )
            return list(islice(older, limit))

    def fire_ticks(
        self,
        schedule_id: str,
        from_ms: int,
        to_ms: int,
        ticks: Sequence[Envelope],
        *,
        told: Collection[tuple[int, str]] = (),
    ) -> FireResult:
        """Enqueue the jobs of ticks, record them and advance, all or nothing."""
        check_fire(schedule_id, from_ms, to_ms, ticks)
        intake, done, status = Intake(self._rows), list[FiredTick](), FireStatus.FIRED
        with self._rows.lock:
            row = self._rows.schedules.get(schedule_id)
            if row is None or row.paused or row.next_run_ms != from_ms:
                return FireResult(FireStatus.LOST)
            for tick in ticks:
                refusal: StoreError | None = None
                try:
                    validate_enqueue([tick])
                    intake.enqueue([tick])
                except StoreError as error:
                    refusal = error
                outcome = fired(tick, refusal)
                done.append(outcome)
                if outcome.is_done or (outcome.tick_ms, outcome.reason) not in told:
                    self._record(outcome.event(schedule_id))
                if not outcome.is_done:
                    status, to_ms = FireStatus.STOPPED, outcome.tick_ms
                    break
            if status is FireStatus.FIRED or len(done) > 1:
                self._advance(row, to_ms)
        return FireResult(status, tuple(done))

    def _known(self, schedule_id: str) -> Schedule:
        row = self._rows.schedules.get(check_schedule_id(schedule_id))
        if row is None:
            raise NotFound.schedule(schedule_id)
        return row

    def _change(self, row: Schedule, **changes: object) -> None:
        self._rows.schedules[row.id] = row.with_state(**changes)

    def _advance(self, row: Schedule, to_ms: int) -> None:
        now_ms = self._rows.clock.now_ms()
        self._change(row, next_run_ms=to_ms, last_enqueued_ms=now_ms)

    def _record(self, event: ScheduleEvent) -> None:
        rows = self._rows
        kept = rows.schedule_events.setdefault(event.schedule_id, [])
        rows.newest_event_id += 1
        kept.append(
            evolve(
                event,
                event_id=rows.newest_event_id,
                recorded_at_ms=rows.clock.now_ms(),
            )
        )
        del kept[:-MAX_SCHEDULE_EVENTS]


def _order(row: Schedule) -> tuple[int, str]:
    return row.next_run_ms, row.id
