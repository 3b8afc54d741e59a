"""The sweep that turns due ticks of schedules into jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from attrs import define, evolve, frozen

from headgate_sync.cron import due_ticks, is_tick, next_after
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    InvalidRequest,
    SpecError,
    StoreError,
    StoreUnavailable,
)
from headgate_sync.inspection import Inspect
from headgate_sync.loggers import guarded
from headgate_sync.schedule import (
    FiredTick,
    FireResult,
    FireStatus,
    Schedule,
    TickOutcome,
    fired,
)
from headgate_sync.schedules import FiresTicks
from headgate_sync.store import Store

logger = guarded(__name__)

DUE_PAGE = 50
SWEEP_BUDGET_S = 1.0
PARK_MS = 3_600_000
# A transaction keeps the limit of its queue locked, and every producer of it waiting.
TICKS_AT_ONCE = 100
# Where enqueue and advance are two calls, a job gone in between would run again.
TICK_RETENTION_MS = 600_000
REPEAT_FAILURE_S = 60.0
LONGEST_BACKOFF_S = 60.0


@frozen(kw_only=True)
class PeriodicAttempt:
    """A tick that is about to be enqueued; copies, so that nothing can be changed.

    Attributes:
        envelope: the job.
    """

    schedule: Schedule
    tick_ms: int
    envelope: Envelope

    @property
    def schedule_id(self) -> str:
        """The schedule's id."""
        return self.schedule.id


class PeriodicHook(Protocol):
    """Watches every enqueue of a tick; must be quick."""

    def begin(self, attempt: PeriodicAttempt) -> None:
        """Before the store is called; an exception keeps the tick due."""
        ...

    def end(self, attempt: PeriodicAttempt, outcome: FiredTick) -> None:
        """After the store's answer, or the news that another node was faster."""
        ...


@define
class SweepReport:
    """What one sweep did.

    Attributes:
        enqueued, deduplicated, skipped, failed: ticks by outcome.
        lost: schedules that another node fired, or that changed meanwhile.
        parked: schedules whose spec cannot be read.
        resting: schedules left out, because they failed a moment ago.
        unfinished: the time was up before the last page.
    """

    enqueued: int = 0
    deduplicated: int = 0
    skipped: int = 0
    failed: int = 0
    lost: int = 0
    parked: int = 0
    resting: int = 0
    unfinished: bool = False

    def add(self, ticks: Collection[FiredTick]) -> None:
        """Count ticks by their outcome."""
        for tick in ticks:
            setattr(self, tick.outcome, getattr(self, tick.outcome) + 1)


@define
class _Trouble:
    """A schedule that failed: where it stood, how often, and until when it rests."""

    anchor: tuple[int, str]
    failures: int
    until_s: float


class Scheduler:
    """Fires due ticks; any number of nodes may do so at once.

    Which node wins a tick is decided by the store, and what is due by the store's
    clock. Only the rest after a failure is known here alone.

    Args:
        store: without inspection there is nothing to do.
        hooks: called around every enqueue, in this order.
        budget_s: after which a sweep ends; the next one goes on behind it.
    """

    def __init__(
        self,
        store: Store,
        hooks: Sequence[PeriodicHook] = (),
        *,
        now_s: Callable[[], float] = time.monotonic,
        budget_s: float = SWEEP_BUDGET_S,
    ) -> None:
        self._store = store
        self._hooks = tuple(hooks)
        self._now_s = now_s
        self._budget_s = budget_s
        self._after: tuple[int, str] | None = None  # where the time was up
        self._troubles: dict[str, _Trouble] = {}  # by schedule id
        self._told: dict[tuple[str, int, str], float] = {}  # when it was recorded

    def sweep(self) -> SweepReport:
        """Fire what is due, page by page, until the time is up.

        Raises:
            StoreUnavailable: the store did not answer; the next sweep goes on.
        """
        report, inspect = SweepReport(), self._store.inspect
        if inspect is None:
            return report
        self._forget()
        began_s, after = self._now_s(), self._after
        self._after = None
        while True:
            page, now_ms = inspect.due_schedules(DUE_PAGE, after)
            for schedule in page:
                # Behind the last one seen: schedules that keep failing stay in front.
                after = (schedule.next_run_ms, schedule.id)
                self._judge(inspect, schedule, now_ms, report)
                if self._now_s() - began_s >= self._budget_s:
                    self._after = after
                    report.unfinished = True
                    return report
            if len(page) < DUE_PAGE:
                return report

    def _judge(
        self, inspect: Inspect, schedule: Schedule, now_ms: int, report: SweepReport
    ) -> None:
        """Fire one schedule; whatever goes wrong with it, the next one follows."""
        anchor = (schedule.next_run_ms, schedule.spec)
        trouble = self._troubles.get(schedule.id)
        if trouble is not None and trouble.anchor == anchor:
            if self._now_s() < trouble.until_s:
                report.resting += 1
                return
        else:
            trouble = _Trouble(anchor, 0, 0.0)
        try:
            is_well = self._fire_due(inspect, schedule, now_ms, report)
        except StoreUnavailable:
            raise  # the others would only wait for the same store
        except Exception:
            logger.exception("schedule %s failed; it stays due", schedule.id)
            report.failed += 1
            is_well = False
        if is_well:
            self._troubles.pop(schedule.id, None)
            return
        pause_s = min(LONGEST_BACKOFF_S, 2.0 ** min(trouble.failures, 10))
        trouble.failures += 1
        trouble.until_s = self._now_s() + pause_s
        self._troubles[schedule.id] = trouble

    def _fire_due(
        self, inspect: Inspect, schedule: Schedule, now_ms: int, report: SweepReport
    ) -> bool:
        """Fire the due ticks of one schedule; False when one of them stays due."""
        first_ms, spec = schedule.next_run_ms, schedule.spec
        try:
            if schedule.last_enqueued_ms is not None and not is_tick(spec, first_ms):
                # Parking, or an older version of the zone's rules, left it off the
                # grid. One that never fired may have been put there on purpose.
                first_ms = next_after(spec, first_ms)
                if first_ms > now_ms:
                    inspect.advance_schedule(
                        schedule.id, schedule.next_run_ms, first_ms
                    )
                    return True
            due = due_ticks(spec, first_ms, now_ms, schedule.cap)
            to_ms = next_after(spec, max(now_ms, due[-1]))
        except SpecError as error:
            self._park(inspect, schedule, now_ms, error)
            report.parked += 1
            return True
        try:
            jobs = [schedule.job(tick_ms) for tick_ms in due]
        except InvalidRequest as error:
            logger.error("schedule %s: its row is unusable: %s", schedule.id, error)
            tick = FiredTick(first_ms, "", TickOutcome.FAILED, "invalid_request")
            self._record_failure(inspect, schedule, tick)
            report.add([tick])
            return False
        return self._fire(inspect, schedule, jobs, to_ms, report)

    def _park(
        self, inspect: Inspect, schedule: Schedule, now_ms: int, error: SpecError
    ) -> None:
        """Look at an unreadable spec again in an hour; the event comes first."""
        logger.error("schedule %s is parked for an hour: %s", schedule.id, error)
        tick = FiredTick(schedule.next_run_ms, "", TickOutcome.FAILED, "invalid_spec")
        inspect.record_schedule_event(tick.event(schedule.id))
        inspect.advance_schedule(schedule.id, schedule.next_run_ms, now_ms + PARK_MS)

    def _fire(
        self,
        inspect: Inspect,
        schedule: Schedule,
        jobs: Sequence[Envelope],
        to_ms: int,
        report: SweepReport,
    ) -> bool:
        if not isinstance(inspect, FiresTicks):
            ticks, advanced = self._fire_in_steps(inspect, schedule, jobs, to_ms)
            report.lost += not advanced and ticks[-1].is_done
        else:
            ticks, status = self._fire_at_once(inspect, inspect, schedule, jobs, to_ms)
            report.lost += status is FireStatus.LOST
        report.add(ticks)
        for tick in ticks:
            self._log(schedule, tick)
        return all(tick.is_done for tick in ticks)

    # One transaction.

    def _fire_at_once(
        self,
        inspect: Inspect,
        firing: FiresTicks,
        schedule: Schedule,
        jobs: Sequence[Envelope],
        to_ms: int,
    ) -> tuple[list[FiredTick], FireStatus]:
        """One transaction for up to 100 ticks; with hooks one for each."""
        from_ms, done = schedule.next_run_ms, list[FiredTick]()
        size = 1 if self._hooks else TICKS_AT_ONCE
        for start in range(0, len(jobs), size):
            batch, later = jobs[start : start + size], jobs[start + size :]
            until_ms = later[0].periodic_tick_ms if later else to_ms
            attempts = self._begin(schedule, batch) if self._hooks else []
            refusal: StoreError | None = None
            try:
                result = firing.fire_ticks(
                    schedule.id, from_ms, until_ms, batch, told=self._known(schedule)
                )
            except StoreError as error:
                refusal = error
                result = FireResult(FireStatus.STOPPED, (fired(batch[0], error),))
            for attempt in attempts:
                self._end_after_commit(attempt, result)
            if isinstance(refusal, StoreUnavailable):
                now = inspect.get_schedule(schedule.id)
                if now is None or now.next_run_ms != from_ms:
                    # Only the answer was lost, or another node was faster.
                    return done, FireStatus.LOST
            if refusal is not None:
                self._record_failure(inspect, schedule, result.ticks[0])
            self._remember(schedule, result.ticks)
            done += result.ticks
            if result.status is not FireStatus.FIRED:
                return done, result.status
            from_ms = until_ms
        return done, FireStatus.FIRED

    def _end_after_commit(self, attempt: PeriodicAttempt, result: FireResult) -> None:
        lost = FiredTick(attempt.tick_ms, "", TickOutcome.SKIPPED, "lost")
        try:
            self._end(attempt, result.ticks[0] if result.ticks else lost)
        except Exception:
            logger.exception("periodic hook of schedule %s failed", attempt.schedule_id)

    # Three calls, for stores without that transaction.

    def _fire_in_steps(
        self,
        inspect: Inspect,
        schedule: Schedule,
        jobs: Sequence[Envelope],
        to_ms: int,
    ) -> tuple[list[FiredTick], bool]:
        """Enqueue, record, then advance: what a crash repeats, the ids make harmless.

        Returns:
            The ticks up to the first that stays due, and whether the schedule moved.
        """
        done: list[FiredTick] = []
        for job in jobs:
            kept_ms = max(job.retention_ms, TICK_RETENTION_MS)
            job = evolve(job, retention_ms=kept_ms)
            attempts = self._begin(schedule, [job]) if self._hooks else []
            refusal: StoreError | None = None
            try:
                self._store.enqueue([job])
            except StoreError as error:
                refusal = error
            tick = fired(job, refusal)
            for attempt in attempts:
                self._end(attempt, tick)
            done.append(tick)
            if not tick.is_done:
                self._record_failure(inspect, schedule, tick)
                return done, False
            inspect.record_schedule_event(tick.event(schedule.id))
        return done, inspect.advance_schedule(schedule.id, schedule.next_run_ms, to_ms)

    # Hooks. Each gets copies of its own.

    def _begin(
        self, schedule: Schedule, jobs: Sequence[Envelope]
    ) -> list[PeriodicAttempt]:
        attempts = []
        for job in jobs:
            attempt = PeriodicAttempt(
                schedule=schedule, tick_ms=job.periodic_tick_ms, envelope=job
            )
            for hook in self._hooks:
                hook.begin(_copy(attempt))
            attempts.append(attempt)
        return attempts

    def _end(self, attempt: PeriodicAttempt, outcome: FiredTick) -> None:
        for hook in self._hooks:
            hook.end(_copy(attempt), evolve(outcome))

    # What is known about failures.

    def _record_failure(
        self, inspect: Inspect, schedule: Schedule, tick: FiredTick
    ) -> None:
        if (tick.tick_ms, tick.reason) not in self._known(schedule):
            inspect.record_schedule_event(tick.event(schedule.id))
            self._remember(schedule, [tick])

    def _known(self, schedule: Schedule) -> set[tuple[int, str]]:
        """Failures of a schedule that were recorded less than a minute ago."""
        return {
            (tick_ms, reason)
            for name, tick_ms, reason in self._told
            if name == schedule.id
        }

    def _remember(self, schedule: Schedule, ticks: Collection[FiredTick]) -> None:
        for tick in ticks:
            if not tick.is_done:
                key = (schedule.id, tick.tick_ms, tick.reason)
                self._told.setdefault(key, self._now_s())

    def _forget(self) -> None:
        now_s = self._now_s()
        self._told = {
            key: at_s
            for key, at_s in self._told.items()
            if now_s - at_s < REPEAT_FAILURE_S
        }
        self._troubles = {
            name: trouble
            for name, trouble in self._troubles.items()
            if now_s - trouble.until_s < 2 * LONGEST_BACKOFF_S
        }

    def _log(self, schedule: Schedule, tick: FiredTick) -> None:
        level = logging.DEBUG if tick.reason == "accepted" else logging.INFO
        if tick.outcome in (TickOutcome.FAILED, TickOutcome.SKIPPED):
            level = logging.WARNING
        logger.log(
            level,
            "schedule %s, tick %d, queue %s: job %s %s, %s",
            *(schedule.id, tick.tick_ms, schedule.queue, tick.job_id),
            *(tick.outcome, tick.reason),
        )


def _copy(attempt: PeriodicAttempt) -> PeriodicAttempt:
    return PeriodicAttempt(
        schedule=attempt.schedule.with_state(),
        tick_ms=attempt.tick_ms,
        envelope=evolve(attempt.envelope),
    )


def scheduler_sweep(store: Store, hooks: Sequence[PeriodicHook] = ()) -> SweepReport:
    """Fire all that is due, by hand.

    Raises:
        StoreUnavailable: the store did not answer; what is due stays due.
    """
    return Scheduler(store, hooks, budget_s=float("inf")).sweep()
