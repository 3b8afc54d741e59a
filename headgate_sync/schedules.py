"""`ScheduleRecords`, the port for schedules, and `FiresTicks`, its atomic step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from headgate_sync.envelope import MAX_INT64, Envelope, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.schedule import (
    FireResult,
    Schedule,
    ScheduleEvent,
    check_schedule_id,
)

MAX_SCHEDULES = 10_000
DEFAULT_SCHEDULE_EVENTS = 30


class ScheduleRecords(Protocol):
    """Schedules as rows. The store reads no spec: when a tick is due is told to it."""

    def upsert_schedule(self, schedule: Schedule) -> Schedule:
        """Create or replace a schedule.

        With the spec that is stored already, `next_run_ms` is kept; `paused` is kept
        with None. `last_enqueued_ms` of the argument is not taken. What is equal is not
        written.

        Returns:
            The schedule as it is stored now.
        """
        ...

    def get_schedule(self, schedule_id: str) -> Schedule | None:
        """One schedule, or None."""
        ...

    def list_schedules(
        self,
        limit: int = MAX_SCHEDULES,
        cursor: str | None = None,
        *,
        include_payload: bool = True,
    ) -> list[Schedule]:
        """Up to 10,000 schedules by id; `cursor` is the last id seen.

        Args:
            include_payload: without, payload and headers are empty whatever is stored,
                and a role that may not read them may make the call.
        """
        ...

    def set_schedule_paused(self, schedule_id: str, paused: bool) -> None:
        """Let a schedule fire or not; its next tick stays. `NotFound` without one."""
        ...

    def delete_schedule(self, schedule_id: str) -> None:
        """Remove a schedule; its events stay readable. `NotFound` without one."""
        ...

    def due_schedules(
        self, limit: int, after: tuple[int, str] | None = None
    ) -> tuple[list[Schedule], int]:
        """Schedules that are not paused and whose tick has come, and store time.

        Args:
            limit: most schedules, 1 to 10,000.
            after: `(next_run_ms, id)` of the last one seen; they come in this order.
        """
        ...

    def advance_schedule(self, schedule_id: str, from_ms: int, to_ms: int) -> bool:
        """Move the next tick, if it is still `from_ms`; False when it is not."""
        ...

    def record_schedule_event(self, event: ScheduleEvent) -> None:
        """Append to the audit trail, of which the newest 100 per schedule are kept."""
        ...

    def list_schedule_events(
        self,
        schedule_id: str,
        before_event_id: int | None = None,
        limit: int = DEFAULT_SCHEDULE_EVENTS,
    ) -> list[ScheduleEvent]:
        """Events of a schedule, newest first, 1 to 100 of them."""
        ...


@runtime_checkable
class FiresTicks(Protocol):
    """What the inspection of a store may have besides: ticks in one transaction."""

    def fire_ticks(
        self,
        schedule_id: str,
        from_ms: int,
        to_ms: int,
        ticks: Sequence[Envelope],
        *,
        told: Collection[tuple[int, str]] = (),
    ) -> FireResult:
        """Enqueue the jobs of ticks, record them and advance, all or nothing.

        At a tick that cannot be enqueued now the call stops: the earlier ones are done,
        this one stays due.

        Args:
            schedule_id: whose row is locked; one that is locked already is left alone.
            from_ms: where the schedule has to be.
            to_ms: where it is afterwards, later than every tick.
            ticks: the jobs, `Schedule.job`, in order; 1 to 1,000.
            told: `(tick_ms, reason)` of failures that are not recorded again.

        Raises:
            InvalidRequest: ticks of another schedule, or out of order.
        """
        ...


def check_after(after: object) -> None:
    """Check where a page of due schedules begins.

    Raises:
        InvalidRequest: neither None nor an instant with an id.
    """
    if after is None:
        return
    if not isinstance(after, tuple) or len(after) != 2:
        raise InvalidRequest("after must be a tuple of next_run_ms and id, or None")
    check_int("after", after[0], 1, MAX_INT64)
    check_schedule_id(after[1])


def check_move(schedule_id: str, from_ms: int, to_ms: int) -> None:
    """Check the arguments of `advance_schedule`.

    Raises:
        InvalidRequest: a bad id, or instants that are none.
    """
    check_schedule_id(schedule_id)
    check_int("from_ms", from_ms, 1, MAX_INT64)
    check_int("to_ms", to_ms, 1, MAX_INT64)
