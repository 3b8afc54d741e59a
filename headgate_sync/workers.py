"""`Workers`, the port for seeing worker processes and steering them, and its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from attrs import field, frozen

from headgate_sync.envelope import (
    MAX_INT32,
    MAX_INT64,
    check_identifier,
    check_int,
    check_text,
)
from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import MAX_LEASE_MS, MAX_REQUEST_QUEUES
from headgate_sync.policy import LATE_BEATS
from headgate_sync.validation import check_count, check_name

COMMANDS = ("quiet", "resume", "restart", "terminate", "resign")
STATUSES = ("running", "quiet", "restarting", "terminating")
MAX_WORKERS = 10_000
MAX_NAMED_QUEUES = 10_000
LIVE_MS = 900_000
LATE_MS = 60_000
FORGOTTEN_MS = 7 * 86_400_000
MAX_FORGOTTEN = 1_000
DEFAULT_BEAT_MS = 10_000


def _names(queues: Iterable[str]) -> tuple[str, ...]:
    if isinstance(queues, str | bytes):
        raise InvalidRequest("queues must be a sequence of str, got one text")
    return tuple(queues)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def is_late(heartbeat_at_ms: int, beat_ms: int, now_ms: int) -> bool:
    """Whether a worker has been silent for three beats and for a minute."""
    return now_ms - heartbeat_at_ms > max(LATE_BEATS * beat_ms, LATE_MS)


def check_command(command: str | None) -> None:
    """Check what a worker is asked to do; None asks for nothing.

    Raises:
        InvalidRequest: the text names the words that are allowed.
    """
    if command is not None and command not in COMMANDS:
        raise InvalidRequest(
            f"command is {command!r}, allowed are {', '.join(COMMANDS)} or None"
        )


@frozen(kw_only=True)
class WorkerMeta:
    """What a worker tells about itself with each beat; levels, never differences.

    Attributes:
        worker_id: identity; a second live process of this name is a mistake in the
            configuration, and the two overwrite each other here.
        host, pid, started_at_ms: the process; the instant is that of its own clock.
        queues: where it takes jobs from.
        concurrency: handlers at the same time.
        inflight: slots taken.
        polls, empty_polls: its last admits, at most 128, and how many brought nothing.
        status: "running", "quiet", "restarting" or "terminating".
        duties_active: it takes part in the fleet's upkeep.
        beat_ms: how often it means to beat.
        applied: the command that it has carried out since its last beat. The store
            clears it if it still stands; a newer one stays.
    """

    worker_id: str
    host: str
    pid: int
    queues: tuple[str, ...] = field(converter=_names)
    concurrency: int
    started_at_ms: int
    inflight: int = 0
    polls: int = 0
    empty_polls: int = 0
    status: str = "running"
    duties_active: bool = True
    beat_ms: int = DEFAULT_BEAT_MS
    applied: str | None = None

    def __attrs_post_init__(self) -> None:
        check_name("worker_id", self.worker_id)
        check_identifier("host", check_text("host", self.host))
        check_count("queues", len(self.queues), MAX_REQUEST_QUEUES)
        for queue in self.queues:
            check_name("queue", queue)
        for name in ("pid", "concurrency", "inflight", "polls"):
            check_int(name, getattr(self, name), 0, MAX_INT32)
        check_int("empty_polls", self.empty_polls, 0, self.polls)
        check_int("started_at_ms", self.started_at_ms, 0, MAX_INT64)
        check_int("beat_ms", self.beat_ms, 1, MAX_LEASE_MS)
        if self.status not in STATUSES:
            raise InvalidRequest(
                f"status is {self.status!r}, allowed are {', '.join(STATUSES)}"
            )
        check_command(self.applied)


@frozen(kw_only=True)
class WorkerState:
    """A worker as the store knows it; the fields are those of `WorkerMeta`.

    Attributes:
        heartbeat_at_ms: store time of its last beat.
        pending_command: what an operator asked for and the worker has not applied.
    """

    worker_id: str
    host: str
    pid: int
    queues: tuple[str, ...]
    concurrency: int
    started_at_ms: int
    heartbeat_at_ms: int
    inflight: int
    polls: int
    empty_polls: int
    status: str
    duties_active: bool
    beat_ms: int
    pending_command: str | None

    @property
    def utilization(self) -> float:
        """Share of its handlers that are busy; 0 without any."""
        return _ratio(self.inflight, self.concurrency)

    @property
    def empty_poll_ratio(self) -> float:
        """Share of its last admits that brought nothing; 0 without any."""
        return _ratio(self.empty_polls, self.polls)

    def is_live(self, now_ms: int) -> bool:
        """It has beaten within the last 15 minutes."""
        return now_ms - self.heartbeat_at_ms < LIVE_MS

    def is_late(self, now_ms: int) -> bool:
        """Live, and yet silent for three beats and for a minute: probably dead."""
        late = is_late(self.heartbeat_at_ms, self.beat_ms, now_ms)
        return self.is_live(now_ms) and late


@frozen(kw_only=True)
class QueueCover:
    """Who serves a queue.

    Attributes:
        live_workers: with 0 nobody does: its jobs wait for ever.
        late_workers: of these, those that are probably dead.
    """

    queue: str
    live_workers: int
    late_workers: int


@frozen(kw_only=True)
class ClusterView:
    """The fleet at one instant; sums are over the live workers.

    Attributes:
        now_ms: store time of the reading.
        live, late, stale, total: numbers of workers; the late are live too, stale are
            those that were silent for 15 minutes, and total is live and stale.
        queues: by name, every queue that has settings, jobs or a worker.
    """

    now_ms: int
    live: int
    late: int
    stale: int
    capacity_total: int
    inflight_total: int
    polls_total: int
    empty_polls_total: int
    queues: tuple[QueueCover, ...]

    @property
    def total(self) -> int:
        """All workers that the store remembers."""
        return self.live + self.stale

    @property
    def utilization(self) -> float:
        """Busy share of all handlers: a ratio of sums, no mean of ratios."""
        return _ratio(self.inflight_total, self.capacity_total)

    @property
    def empty_poll_ratio(self) -> float:
        """Share of all recent admits that brought nothing."""
        return _ratio(self.empty_polls_total, self.polls_total)


def cluster_of(
    workers: Sequence[WorkerState], queues: Iterable[str], now_ms: int
) -> ClusterView:
    """Sum the fleet up.

    Args:
        workers: all that are remembered.
        queues: names of all queues that are known without them.
        now_ms: store time.
    """
    live = [worker for worker in workers if worker.is_live(now_ms)]
    late = [worker for worker in live if worker.is_late(now_ms)]
    names = {*queues, *(queue for worker in workers for queue in worker.queues)}
    served, served_late = _served(live), _served(late)
    return ClusterView(
        now_ms=now_ms,
        live=len(live),
        late=len(late),
        stale=len(workers) - len(live),
        capacity_total=sum(worker.concurrency for worker in live),
        inflight_total=sum(worker.inflight for worker in live),
        polls_total=sum(worker.polls for worker in live),
        empty_polls_total=sum(worker.empty_polls for worker in live),
        queues=tuple(
            QueueCover(
                queue=name,
                live_workers=served[name],
                late_workers=served_late[name],
            )
            for name in sorted(names)
        ),
    )


def _served(workers: Sequence[WorkerState]) -> Counter[str]:
    """How many of the workers serve each queue."""
    return Counter(queue for worker in workers for queue in set(worker.queues))


class Workers(Protocol):
    """Seeing worker processes and telling them what to do."""

    def heartbeat_worker(self, meta: WorkerMeta) -> str | None:
        """Note that a worker lives, and how it is doing.

        A process that is new under its name does not inherit what its predecessor was
        asked for. The first beat of a new name also forgets, a thousand at a time,
        workers that were silent for a week.

        Returns:
            The command that waits for the worker, or None.
        """
        ...

    def forget_worker(self, worker_id: str, started_at_ms: int) -> None:
        """Take a worker that ends out of the list; not its successor of that name."""
        ...

    def signal_worker(self, worker_id: str, command: str | None) -> None:
        """Ask a worker to do something; it hears of it with its next beat.

        A level and no queue: a later command replaces an earlier one that was not
        applied, and None takes it back.

        Args:
            worker_id: of a worker that has beaten.
            command: "quiet", "resume", "restart", "terminate", "resign" or None.

        Raises:
            InvalidRequest: another word.
            NotFound: no such worker.
        """
        ...

    def list_workers(self, stale_after_ms: int = LIVE_MS) -> list[WorkerState]:
        """Workers that have beaten within the time, by id; at most 10,000."""
        ...

    def get_worker(self, worker_id: str) -> WorkerState | None:
        """One worker, however long it has been silent; None when it is not known."""
        ...

    def cluster(self) -> ClusterView:
        """The fleet as a whole, and which queue is served by how many workers."""
        ...
