"""What the gate of MemStore keeps about lanes, and what one call knows of them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heappush

from attrs import Factory, define

from headgate_sync.memory.state import Job, Lane, Partition, Queue
from headgate_sync.policy import Budget, Service

GroupKey = tuple[str, str]  # rate class, sticky worker


@define(eq=False)
class RateClass:
    """A rate class; without budgets it is a marker that limits nothing."""

    paused: bool = False
    paused_until_ms: int | None = None
    pause_reason: str = ""
    budgets: list[Budget] = Factory(list)

    def is_paused(self, now_ms: int) -> bool:
        """Whether nothing of the class may pass at this instant."""
        until_ms = self.paused_until_ms
        return self.paused or (until_ms is not None and until_ms > now_ms)


class Group:
    """Lanes of one queue, rate class and sticky worker, least recently served first.

    Lanes that ran empty and lanes whose partition was served elsewhere keep their old
    place until somebody passes by, which is before any lane behind them.
    """

    __slots__ = ("_entries", "_listed")

    def __init__(self) -> None:
        # One lane for each partition, so that the lane itself is never compared.
        self._entries: list[tuple[int, str, Lane]] = []
        self._listed: set[Lane] = set()

    def list(self, lane: Lane) -> None:
        """Add a lane that got work."""
        if lane not in self._listed:
            self._listed.add(lane)
            self._put(lane)

    def _put(self, lane: Lane) -> None:
        partition = lane.partition
        insort(self._entries, (partition.last_round, partition.key, lane))

    def __iter__(self) -> Iterator[Lane]:
        """The lanes with work, in order; also puts right what it passes."""
        entries, at = self._entries, 0
        while at < len(entries):
            last_round, _, lane = entries[at]
            if not len(lane.ready):
                del entries[at]
                self._listed.discard(lane)
            elif last_round != lane.partition.last_round:
                del entries[at]
                self._put(lane)
            else:
                yield lane
                at += 1


def place(lane: Lane) -> tuple[int, str, int, str, str]:
    """The order of lanes in a window: least recently served first.

    Partitions come first, then the lanes of each: where one has more lanes than fit,
    each gets its turn.
    """
    partition = lane.partition
    return (
        partition.last_round,
        partition.key,
        lane.served_round,
        lane.rate_class,
        lane.sticky_worker,
    )


@define(eq=False)
class Share:
    """What a call knows of a partition; round and credit are as at its start."""

    partition: Partition
    last_round: int
    quantum: int
    taken: int = 0
    noisy: bool = False
    closed: bool = False

    @property
    def is_used_up(self) -> bool:
        """Whether the partition had its share."""
        return self.taken >= self.partition.deficit + self.quantum


@define(eq=False)
class Runner:
    """A lane in the window of a call."""

    lane: Lane
    share: Share
    closed: bool = False
    full: bool = False
    served: bool = False


@define(eq=False)
class Desk:
    """A queue in a call: its window, and the first job of each lane in merge order."""

    queue: Queue
    decisions: int
    quantum: int
    served: int = 0
    runners: dict[Lane, Runner] = Factory(dict)
    heap: list[tuple[bool, int, int, int, int, Runner, Job]] = Factory(list)

    @property
    def service(self) -> Service:
        """What the ledger compares."""
        return Service(self.decisions, self.queue.weight)

    def offer(self, runner: Runner) -> None:
        """Put the first job of a lane, if it has one, among the candidates."""
        job = runner.lane.ready.first()
        if job is not None:
            share = runner.share
            heappush(
                self.heap,
                (
                    share.noisy,
                    share.last_round,
                    -job.priority,
                    job.scheduled_at_ms,
                    job.seq,
                    runner,
                    job,
                ),
            )
