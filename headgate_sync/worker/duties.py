"""The fleet's upkeep: who does it is decided by leases, one per duty."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from attrs import evolve

from headgate_sync.errors import StoreError, StoreUnavailable
from headgate_sync.inspection import Inspect
from headgate_sync.loggers import guarded
from headgate_sync.policy import FOLD_MAX, MANY_CLASSES, UPKEEP_INTERVAL_MS
from headgate_sync.store import Maintenance, Store
from headgate_sync.telemetry import Evicted, GateCorrected, Quarantined
from headgate_sync.worker.loops import LoopGuard, LoopHealth
from headgate_sync.worker.reporting import Emitter
from headgate_sync.worker.scheduler import PeriodicHook, Scheduler

logger = guarded(__name__)

RECLAIM_LIMIT = 1_000
PROMOTE_LIMIT = 10_000
QUARANTINE_LIMIT = 1_000
EVICT_LIMIT = 1_000
OPERATION_BATCH = 500
RECONCILE_LIMIT = 100
CROWDED_LIMIT = 10
CROWDED_EVERY = 20  # times that the gate's counters are looked at
HUNG_S = 60.0
STAGGER_S = 0.05
RELEASE_S = 1.0


class Duty:
    """One duty: its work, and the thread that does it when it is due.

    Every duty has a thread of its own, so that a sweep that hangs stops only itself.

    Args:
        sweep: one bounded piece of work; True when it was a full batch, so that more is
            likely.
        every_s: how often it is due even when the store sees no row for it.
    """

    def __init__(
        self,
        name: str,
        sweep: Callable[[], bool],
        *,
        now_s: Callable[[], float],
        every_s: float = float("inf"),
    ) -> None:
        self.name = name
        self._sweep = sweep
        self._now_s = now_s
        self._every_s = every_s
        self._thread: threading.Thread | None = None
        self._began_s = float("-inf")
        self._stopping = False
        self._guard = LoopGuard(f"duty {name}")

    @property
    def hangs(self) -> bool:
        """A batch takes over a minute: the duty is left to others until it is back."""
        return self.runs and self._now_s() - self._began_s > HUNG_S

    @property
    def runs(self) -> bool:
        """A sweep is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, *, due: bool) -> None:
        """Start a sweep if one is due and none is under way."""
        if self.runs or not (due or self._now_s() - self._began_s >= self._every_s):
            return
        self._began_s = self._now_s()
        thread = threading.Thread(
            target=self._work, name=f"headgate-duty-{self.name}", daemon=True
        )
        thread.start()
        self._thread = thread  # one that could not be started cannot be joined

    def stop(self) -> None:
        """Start no further batch."""
        self._stopping = True

    def join(self, timeout_s: float) -> bool:
        """Wait for the sweep; False when it is still under way."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
        return not self.runs

    def health(self) -> LoopHealth:
        """How its sweeps went; it is never given up, the next tick starts another."""
        return evolve(self._guard.health(running=True), alive=True)

    def _work(self) -> None:
        try:
            while self._sweep() and not self._stopping:
                self._began_s = self._now_s()
        except BaseException as error:  # the top of a thread
            self._guard.failed(error, self._now_s())
        else:
            self._guard.good()


class Duties:
    """Asks once per interval which duties this worker holds, and does the due ones.

    Args:
        hooks: see `Scheduler`.
        at_start: done once, before the first tick; again at the next step as long as
            the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        *,
        interval_ms: int,
        now_s: Callable[[], float],
        hooks: Sequence[PeriodicHook] = (),
        at_start: Callable[[], object] | None = None,
        emit: Emitter | None = None,
    ) -> None:
        self._store = store
        self._holder = holder
        self._interval_ms = interval_ms
        self._now_s = now_s
        self._at_start = at_start
        duties = built_in_duties(store, now_s, hooks, emit)
        self._duties = {duty.name: duty for duty in duties}
        self._resigned = False
        self._next_s = now_s() + interval_ms / 1000
        self.held: frozenset[str] = frozenset()

    def step(self) -> float:
        """Tick if it is time; returns the local instant of the next tick."""
        if self._resigned:
            self.release(RELEASE_S)
            return float("inf")
        now_s = self._now_s()
        self._begin()
        if now_s < self._next_s:
            return self._next_s
        names = [duty.name for duty in self._duties.values() if not duty.hangs]
        held: dict[str, bool] = {}
        try:
            held = self._store.duty_tick(
                self._holder, names, lease_ms=2 * self._interval_ms
            )
        except StoreError as error:
            # Without an answer nothing is known to be held.
            logger.warning("duties: %s; tried again at the next tick", error)
        finally:
            self.held = frozenset(held)
        for name, due in held.items():
            self._duties[name].begin(due=due)
            # Most are over within milliseconds. One after the other they need one
            # connection, and leave the rest of the machine to the jobs.
            self._duties[name].join(STAGGER_S)
        # Only now: a tick that failed in another way stays due, and counts as failed
        # until one goes well.
        self._next_s = now_s + self._interval_ms / 1000
        return self._next_s

    def resign(self) -> None:
        """Take no part any more, from any thread: the next step releases everything."""
        self._resigned = True

    def health(self) -> dict[str, LoopHealth]:
        """How the sweeps went, as "duty-" and their name."""
        return {f"duty-{duty.name}": duty.health() for duty in self._duties.values()}

    def release(self, timeout_s: float) -> None:
        """Stop the sweeps and give every duty up, so that others need not wait."""
        for duty in self._duties.values():
            duty.stop()
        until_s = self._now_s() + timeout_s
        for duty in self._duties.values():
            if not duty.join(until_s - self._now_s()):
                logger.warning("duty %s is still under way at the end", duty.name)
            elif duty.name in self.held:
                self._release(duty.name)
        self.held = frozenset()

    def _begin(self) -> None:
        if self._at_start is None:
            return
        try:
            self._at_start()
        except StoreUnavailable as error:
            logger.warning("duties: %s; tried again at the next tick", error)
            return
        except StoreError as error:
            logger.error(
                "declared schedules are not applied: %s; an operator applies them "
                "with `headgate cron sync`",
                error,
            )
        self._at_start = None

    def _release(self, name: str) -> None:
        try:
            self._store.release_duty(name, self._holder)
        except StoreError as error:
            logger.warning("duty %s not released, its lease runs out: %s", name, error)


def built_in_duties(
    store: Store,
    now_s: Callable[[], float],
    hooks: Sequence[PeriodicHook] = (),
    emit: Emitter | None = None,
) -> list[Duty]:
    """The duties that this store can do."""
    crowds = Crowds()
    duties = [
        Duty("reclaimer", lambda: _reclaim(store, emit), now_s=now_s),
        Duty(
            "promoter",
            lambda: _promote(store, emit, crowds),
            now_s=now_s,
            every_s=UPKEEP_INTERVAL_MS / 1000,
        ),
        Duty("retention", lambda: _evict(store, emit), now_s=now_s),
    ]
    inspect = store.inspect
    if inspect is not None:
        duties.append(Duty("quarantine", lambda: _quarantine(inspect), now_s=now_s))
        duties.append(Duty("operations", lambda: _operate(inspect), now_s=now_s))
        scheduler = Scheduler(store, hooks, now_s=now_s)
        duties.append(
            Duty("scheduler", lambda: scheduler.sweep().unfinished, now_s=now_s)
        )
    return duties


def _evict(store: Store, emit: Emitter | None) -> bool:
    evicted = store.evict_retained(EVICT_LIMIT)
    if evicted:
        logger.info("duty retention: %d finished jobs deleted", evicted)
        if emit is not None:
            emit(Evicted(count=evicted))
    return evicted >= EVICT_LIMIT


def _quarantine(inspect: Inspect) -> bool:
    moved = inspect.quarantine_sweep(QUARANTINE_LIMIT)
    if moved:
        logger.warning(
            "duty quarantine: %d waiting jobs of bad content set aside", moved
        )
    return moved >= QUARANTINE_LIMIT


def _operate(inspect: Inspect) -> bool:
    touched = inspect.run_pending_operations(OPERATION_BATCH)
    if touched:
        logger.info("duty operations: %d jobs changed in bulk", touched)
    return touched > 0


def _reclaim(store: Store, emit: Emitter | None) -> bool:
    taken = store.reclaim_expired(RECLAIM_LIMIT)
    for job in taken:
        logger.warning(
            "job %s (queue %s, kind %s): worker %s lost its lease, crash %d%s",
            job.job_id,
            job.queue,
            job.kind,
            job.worker,
            job.crash_attempt,
            "; quarantined" if job.quarantined else "",
        )
        if job.quarantined and emit is not None:
            emit(Quarantined(fingerprint=job.fingerprint, crashes=job.crash_attempt))
    return len(taken) >= RECLAIM_LIMIT


def _promote(store: Store, emit: Emitter | None, crowds: Crowds) -> bool:
    """Promote due jobs, then keep the gate's books; a fault of one spares the other."""
    promoted = 0
    try:
        promoted = store.promote_due(PROMOTE_LIMIT)
    finally:
        folded = _fold(store, emit, crowds)
    return promoted >= PROMOTE_LIMIT or folded >= FOLD_MAX


def _fold(store: Store, emit: Emitter | None, crowds: Crowds) -> int:
    if store.maintenance is None:
        return 0
    try:
        folded = store.maintenance.gate_fold(FOLD_MAX)
        if folded < FOLD_MAX:
            _reconcile(store.maintenance, emit, crowds)
    except StoreError as error:
        logger.warning("gate upkeep: %s; tried again at the next tick", error)
        return 0
    return folded


def _reconcile(maintenance: Maintenance, emit: Emitter | None, crowds: Crowds) -> None:
    wrong = maintenance.gate_reconcile(RECONCILE_LIMIT)
    if wrong:
        logger.warning("the gate's counters were wrong for %d partitions", wrong)
        if emit is not None:
            emit(GateCorrected(count=wrong))
    crowds.look(maintenance)


class Crowds:
    """Warns of partitions with work of many rate classes, once while it stays so."""

    def __init__(self) -> None:
        self._looks = 0
        self._told: set[tuple[str, str]] = set()

    def look(self, maintenance: Maintenance) -> None:
        """Look at the first call, and at every twentieth after it."""
        self._looks += 1
        if self._looks % CROWDED_EVERY != 1:
            return
        found = {
            (each.queue, each.partition_key): each.classes
            for each in maintenance.crowded_partitions(CROWDED_LIMIT)
        }
        for (queue, partition), classes in found.items():
            if (queue, partition) not in self._told:
                logger.warning(
                    "queue %s: jobs of %d rate classes wait in partition %r, more than "
                    "%d: classes take turns there, and admissions slow down; give jobs "
                    "of the same customer or host a partition of their own",
                    *(queue, classes, partition, MANY_CLASSES),
                )
        self._told = set(found)
