"""Follows the jobs of a batch to their ends, a bounded number of reads at a time."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from attrs import frozen

from headgate_sync.client.waiting import Pace, is_over
from headgate_sync.errors import StoreClosed, StoreUnavailable
from headgate_sync.events import EventBus, JobEvent
from headgate_sync.inspection import MAX_JOBS, Inspect, JobSummary
from headgate_sync.lifecycle import State

ROUND_JOBS = 5_000
BUSY_INTERVAL_S = 0.2
IDLE_INTERVAL_S = 2.0
# Jobs that end within this time of each other are read together.
TOLD_INTERVAL_S = 0.02
# No wait is longer, so that no clock of the platform overflows.
LONGEST_WAIT_S = 3600.0

_SUCCEEDED = (State.COMPLETED, State.DELETED)


@frozen
class Ended:
    """A job of the batch that is over."""

    index: int
    state: State
    error: str | None

    @property
    def succeeded(self) -> bool:
        return self.state in _SUCCEEDED


class Following:
    """What was sent and how it ended.

    Whoever waits does the reading: one thread at a time makes a round, the others wait
    for what it finds. Half of a round goes to the jobs that were sent first, which are
    likely to end first; the other half goes round all of them, so that blocked ones in
    front hide nobody.

    Jobs of which the bus of this process tells that they ended are read at once, in
    rounds of their own beside the others.

    Args:
        inspect: reads jobs.
        pace: the time.
        patience_ms: how long reads may fail before an outage is raised.
        bus: tells about workers of this process.
    """

    def __init__(
        self,
        inspect: Inspect,
        *,
        pace: Pace,
        patience_ms: int,
        bus: EventBus | None = None,
    ) -> None:
        self._inspect = inspect
        self._bus = bus
        self.pace = pace
        self._patience_s = patience_ms / 1000
        self.changed = threading.Condition()  # guards every field below
        self.sent = 0
        self.own = 0  # unfinished jobs of this batch itself, without joined ones
        self.by_state: Counter[State] = Counter()
        self.failed: dict[int, Ended] = {}
        self.ids: dict[int, str] = {}  # by index, where it is not that of the batch
        self.joined: set[int] = set()  # indexes that follow the job of somebody else
        self.first_s: float | None = None
        self.last_s = 0.0
        self._ends = bytearray()  # by index: whether the job is over
        self._ended: deque[Ended] = deque()  # not yielded yet
        self._indexes: dict[str, tuple[int, ...]] = {}  # by id, of unfinished jobs
        self._turns: deque[str] = deque()  # the same ids and some that are over
        self._fruitless = 0  # jobs looked at since one was over
        self._looking = False
        self._look_due_s = 0.0
        self._told: set[str] = set()  # unfinished jobs that the bus says are over
        self._told_due_s = 0.0
        self._interval_s = BUSY_INTERVAL_S
        self._fault_s: float | None = None  # since when reads fail

    def follow(
        self, index: int, job_id: str, *, other: bool = False, joined: bool = False
    ) -> None:
        """Take a stored job over. Only then may it be read: absent means deleted.

        Args:
            index: place in the batch.
            job_id: of the row.
            other: the id is not the one that the batch gave.
            joined: the row is somebody else's.
        """
        with self.changed:
            if self.first_s is None:
                self.first_s = self.last_s = self.pace.now_s()
            self.sent += 1
            if other:
                self.ids[index] = job_id
            if joined:
                self.joined.add(index)
            else:
                self.own += 1
            if job_id in self._indexes:
                self._indexes[job_id] += (index,)
            else:
                self._indexes[job_id] = (index,)
                self._turns.append(job_id)
            self.changed.notify_all()

    @property
    def done(self) -> int:
        """How many are over."""
        return self.by_state.total()

    @property
    def outstanding(self) -> int:
        """How many are not."""
        return self.sent - self.done

    def is_over(self, index: int) -> bool:
        """Whether this job is over."""
        return index < len(self._ends) and bool(self._ends[index])

    def some_id(self) -> str:
        """The id of a job that is not over; "" without one."""
        with self.changed:
            return next(iter(self._indexes), "")

    def own_ids(self) -> list[str]:
        """Ids of unfinished jobs of this batch itself."""
        with self.changed:
            return [
                job_id
                for job_id, indexes in self._indexes.items()
                if any(index not in self.joined for index in indexes)
            ]

    def next_ended(self) -> Ended | None:
        """One that was not given out yet."""
        with self.changed:
            return self._ended.popleft() if self._ended else None

    @property
    def untaken(self) -> int:
        """How many `next_ended` has in store."""
        return len(self._ended)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of ends, until the end of the block; any number of threads may."""
        if self._bus is None:
            yield
            return
        self._bus.attach(self._hear)
        try:
            yield
        finally:
            self._bus.detach(self._hear)

    def _hear(self, event: JobEvent) -> None:
        with self.changed:
            if event.job_id in self._indexes:
                self._told.add(event.job_id)
                self.changed.notify_all()

    def look_soon(self) -> None:
        """Let the next turn read."""
        with self.changed:
            self._look_due_s = 0.0
            self._interval_s = BUSY_INTERVAL_S

    def turn(self, until_s: float, stale: Callable[[], bool]) -> None:
        """Make a round, or wait until there may be news.

        Args:
            until_s: when to come back at the latest.
            stale: asked under the lock; True when what the caller waits for may have
                happened already.

        Raises:
            StoreUnavailable: reads have failed for longer than the patience.
        """
        with self.changed:
            if stale():
                return
            now_s = self.pace.now_s()
            due_s = until_s
            if not self._looking and self._indexes:
                due_s = min(self._look_due_s, until_s)
                if self._told:
                    due_s = min(due_s, self._told_due_s)
            if due_s > now_s:
                self.pace.wait(self.changed, min(due_s - now_s, LONGEST_WAIT_S))
                return
            if self._looking or not self._indexes:
                return
            self._looking = True
            only_told = bool(self._told) and now_s < self._look_due_s
            ids = self._next_round(only_told)
        found: dict[str, JobSummary] | None = None
        try:
            found = self._read(ids)
        finally:
            with self.changed:
                self._looking = False
                self._settle(ids, found, only_told)
                self.changed.notify_all()

    def _next_round(self, only_told: bool) -> list[str]:
        """The jobs to look at; the lock is held."""
        chosen = dict.fromkeys(islice(self._told, ROUND_JOBS))
        self._told.difference_update(chosen)
        if only_told:
            return list(chosen)
        room = ROUND_JOBS - len(chosen)
        chosen |= dict.fromkeys(islice(self._indexes, room // 2))
        for _ in range(len(self._turns)):
            if len(chosen) == ROUND_JOBS:
                break
            job_id = self._turns.popleft()
            if job_id in self._indexes:
                chosen[job_id] = None
                self._turns.append(job_id)
        return list(chosen)

    def _read(self, ids: Sequence[str]) -> dict[str, JobSummary] | None:
        """The jobs that exist; None in an outage that may pass."""
        found: dict[str, JobSummary] = {}
        left: Iterable[str] = iter(ids)
        try:
            while page := list(islice(left, MAX_JOBS)):
                found.update((job.id, job) for job in self._inspect.get_jobs(page))
        except StoreClosed:
            raise
        except StoreUnavailable:
            now_s = self.pace.now_s()
            if self._fault_s is None:
                self._fault_s = now_s
            if now_s - self._fault_s >= self._patience_s:
                self._fault_s = None
                raise
            return None
        self._fault_s = None
        return found

    def _settle(
        self, ids: list[str], found: dict[str, JobSummary] | None, only_told: bool
    ) -> None:
        now_s = self.pace.now_s()
        ended = 0
        for job_id in ids:
            job = None if found is None else found.get(job_id)
            if found is not None and is_over(job):
                ended += self._end(job_id, job)
        self._told_due_s = now_s + TOLD_INTERVAL_S
        if only_told:
            self.last_s = now_s if ended else self.last_s
            return
        self._fruitless += len(ids)
        if ended:
            self.last_s = now_s
            self._fruitless = 0
            self._interval_s = BUSY_INTERVAL_S
        elif self._fruitless >= len(self._indexes):
            self._interval_s = min(self._interval_s * 2, IDLE_INTERVAL_S)
        self._look_due_s = now_s + self._interval_s
        if len(self._turns) > 2 * len(self._indexes):
            # Mostly ids of jobs that are over; now and then, so that it costs nothing.
            self._turns = deque(i for i in self._turns if i in self._indexes)

    def _end(self, job_id: str, job: JobSummary | None) -> int:
        state = State.DELETED if job is None else State(job.state)
        error = None
        if state not in _SUCCEEDED and job is not None and job.errors:
            error = job.errors[-1].error
        indexes = self._indexes.pop(job_id)
        self._told.discard(job_id)
        for index in indexes:
            ended = Ended(index, state, error)
            if index >= len(self._ends):
                self._ends.extend(bytes(index + 1 - len(self._ends)))
            self._ends[index] = 1
            self.by_state[state] += 1
            if index not in self.joined:
                self.own -= 1
            if not ended.succeeded:
                self.failed[index] = ended
            self._ended.append(ended)
        return len(indexes)
