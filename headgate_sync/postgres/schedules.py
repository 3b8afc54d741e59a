"""Schedules in the database."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headgate_sync.envelope import MAX_INT64, Envelope, check_int, headers_json
from headgate_sync.errors import (
    BackendError,
    Backpressure,
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    NotFound,
    StoreError,
)
from headgate_sync.postgres.database import Database, Session
from headgate_sync.postgres.enqueue import Intake
from headgate_sync.postgres.rows import schedule_of
from headgate_sync.schedule import (
    MAX_SCHEDULE_EVENTS,
    SCHEDULE_FIELDS,
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
from headgate_sync.validation import check_type

# Answers of the database function, after which the transaction is as good as before.
_ANSWERS = (
    Backpressure, DuplicateJob, FingerprintQuarantined, IdConflict, InvalidRequest,
)  # fmt: skip


class PgSchedules:
    """`ScheduleRecords` and `FiresTicks` on the tables."""

    _db: Database

    def upsert_schedule(self, schedule: Schedule) -> Schedule:
        """Create or replace a schedule."""
        check_type("schedule", schedule, Schedule)
        values = {name: getattr(schedule, name) for name in SCHEDULE_FIELDS}
        del values["last_enqueued_ms"]
        values["headers"] = headers_json(schedule.headers)
        values["tags"] = list(schedule.tags)
        values["on_missed"] = schedule.on_missed.value

        def write(session: Session) -> Schedule:
            session.rows("upsert_schedule", **values)
            # The upsert locked the row, also where it wrote nothing.
            [row] = session.rows("get_schedule", schedule_id=schedule.id)
            return schedule_of(row)

        return self._db.run(write)

    def get_schedule(self, schedule_id: str) -> Schedule | None:
        """One schedule, or None."""
        check_schedule_id(schedule_id)
        rows = self._db.look("get_schedule", schedule_id=schedule_id)
        return schedule_of(rows[0]) if rows else None

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
        name = "list_schedules_payload" if include_payload else "list_schedules"
        rows = self._db.look(name, cursor=cursor, max_schedules=limit)
        return [schedule_of(row) for row in rows]

    def set_schedule_paused(self, schedule_id: str, paused: bool) -> None:
        """Let a schedule fire or not."""
        check_type("paused", paused, bool)
        check_schedule_id(schedule_id)
        if not self._db.rows(
            "set_schedule_paused", schedule_id=schedule_id, paused=paused
        ):
            raise NotFound.schedule(schedule_id)

    def delete_schedule(self, schedule_id: str) -> None:
        """Remove a schedule; its events stay."""
        check_schedule_id(schedule_id)
        if not self._db.rows("delete_schedule", schedule_id=schedule_id):
            raise NotFound.schedule(schedule_id)

    def due_schedules(
        self, limit: int, after: tuple[int, str] | None = None
    ) -> tuple[list[Schedule], int]:
        """Schedules whose tick has come, and store time."""
        check_int("limit", limit, 1, MAX_SCHEDULES)
        check_after(after)
        after_ms, after_id = after or (None, None)
        rows = self._db.rows(
            "due_schedules", max_schedules=limit, after_ms=after_ms, after_id=after_id
        )
        due = [schedule_of(row[1:]) for row in rows if row[1] is not None]
        return due, int(rows[0][0])

    def advance_schedule(self, schedule_id: str, from_ms: int, to_ms: int) -> bool:
        """Move the next tick, if it is still `from_ms`."""
        check_move(schedule_id, from_ms, to_ms)
        return bool(
            self._db.rows(
                "advance_schedule",
                schedule_id=schedule_id,
                from_ms=from_ms,
                to_ms=to_ms,
            )
        )

    def record_schedule_event(self, event: ScheduleEvent) -> None:
        """Append to the audit trail."""
        check_type("event", event, ScheduleEvent)

        def write(session: Session) -> None:
            name = event.schedule_id
            # Two writers that did not wait for each other would keep one too many.
            if not session.rows("lock_schedule", schedule_id=name):
                session.rows(
                    "lock_schedule_name", schema_name=self._db.schema, schedule_id=name
                )
            _append(session, event)

        self._db.run(write)

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
        rows = self._db.look(
            "list_schedule_events",
            schedule_id=schedule_id,
            before_event_id=before_event_id,
            max_events=limit,
        )
        return [
            ScheduleEvent(
                schedule_id=schedule_id,
                event_id=event_id,
                tick_ms=tick_ms,
                job_id=job_id,
                outcome=outcome,
                reason=reason,
                recorded_at_ms=recorded_at_ms,
            )
            for event_id, tick_ms, job_id, outcome, reason, recorded_at_ms in rows
        ]

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

        def fire(session: Session) -> FireResult:
            if not session.rows(
                "lock_due_schedule", schedule_id=schedule_id, from_ms=from_ms
            ):
                return FireResult(FireStatus.LOST)
            done, status, anchor_ms = list[FiredTick](), FireStatus.FIRED, to_ms
            for tick in ticks:
                outcome = fired(tick, self._take_in(session, tick))
                done.append(outcome)
                if outcome.is_done or (outcome.tick_ms, outcome.reason) not in told:
                    _append(session, outcome.event(schedule_id))
                if not outcome.is_done:
                    status, anchor_ms = FireStatus.STOPPED, outcome.tick_ms
                    break
            if status is FireStatus.FIRED or len(done) > 1:
                session.rows(
                    "advance_schedule",
                    schedule_id=schedule_id,
                    from_ms=from_ms,
                    to_ms=anchor_ms,
                )
            return FireResult(status, tuple(done))

        return self._db.run(fire)

    def _take_in(self, session: Session, tick: Envelope) -> StoreError | None:
        """Enqueue one tick; what refuses it leaves nothing of it behind."""
        session.command(b"SAVEPOINT headgate_tick")
        refusal: StoreError | None = None
        try:
            Intake(self._db).enqueue_in(session, [tick])
        except _ANSWERS as error:
            refusal = error
        except BackendError as error:
            refusal = error
            session.command(b"ROLLBACK TO SAVEPOINT headgate_tick")
        session.command(b"RELEASE SAVEPOINT headgate_tick")
        return refusal


def _append(session: Session, event: ScheduleEvent) -> None:
    session.rows(
        "append_schedule_event",
        schedule_id=event.schedule_id,
        tick_ms=event.tick_ms,
        job_id=event.job_id,
        outcome=event.outcome.value,
        reason=event.reason,
        max_events=MAX_SCHEDULE_EVENTS,
    )
