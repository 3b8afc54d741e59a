"""The backlog of a MemStore's queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from attrs import fields

from headgate_sync.backlog import (
    MAX_HISTORY_BUCKETS,
    MAX_PARTITIONS,
    MAX_QUEUES,
    MAX_SAMPLE,
    MAX_WAITING_SAMPLE,
    MINUTE_MS,
    HistoryBucket,
    PartitionState,
    QueueStats,
    QuietGroups,
    StateCounts,
    noisy_partitions,
    rate,
    sample_of_page,
    sampled,
    time_to_drain_ms,
    window_start_ms,
)
from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.lifecycle import UNFINISHED, State
from headgate_sync.memory.policies import MemPolicies
from headgate_sync.memory.state import Job, Minute, Partition, Queue
from headgate_sync.validation import check_count, check_name, check_texts

_TRAFFIC = [attribute.name for attribute in fields(Minute)]


class MemBacklog(MemPolicies):
    """Queues, their history and their partitions."""

    def counts(self, queue: str | None = None) -> StateCounts:
        """Jobs by state, from a sample of at most 50,000 rows."""
        if queue is not None:
            check_name("queue", queue)
        with self._rows.lock:
            return sampled(self._by_state(queue), MAX_SAMPLE)

    def queue_stats(
        self,
        limit: int = MAX_QUEUES,
        cursor: str | None = None,
        *,
        queues: Sequence[str] | None = None,
    ) -> list[QueueStats]:
        """Queues by name, with their backlog."""
        check_int("limit", limit, 1, MAX_QUEUES)
        with self._rows.lock:
            if queues is None:
                if cursor is not None:
                    check_name("cursor", cursor)
                known = (q.name for q in self._rows.queues.values() if is_known(q))
                names = sorted((n for n in known if n > (cursor or "")), key=str.encode)
                names = names[:limit]
            else:
                check_texts("queues", queues)
                check_count("queues", len(queues), MAX_QUEUES)
                names = list(queues)
                for name in names:
                    check_name("queue", name)
            most = sample_of_page(len(names))
            return [self._stats(name, most) for name in names]

    def history(
        self, queue: str, since_ms: int, bucket_ms: int = MINUTE_MS
    ) -> list[HistoryBucket]:
        """What happened to a queue since an instant."""
        check_name("queue", queue)
        check_int("since_ms", since_ms, 0, MAX_INT64)
        check_int("bucket_ms", bucket_ms, MINUTE_MS, MAX_INT64)
        sums: dict[int, Counter[str]] = {}
        with self._rows.lock:
            for group in self._partitions(queue):
                for at_ms, minute in group.minutes.items():
                    if at_ms >= since_ms:
                        bucket = sums.setdefault(at_ms - at_ms % bucket_ms, Counter())
                        bucket.update({n: getattr(minute, n) for n in _TRAFFIC})
        return [
            _bucket(at_ms, sums[at_ms]) for at_ms in sorted(sums)[:MAX_HISTORY_BUCKETS]
        ]

    def partitions(self, queue: str) -> list[PartitionState]:
        """Up to 1,000 partitions of a queue, the most waiting jobs first."""
        check_name("queue", queue)
        with self._rows.lock:
            since_ms = window_start_ms(self._rows.clock.now_ms())
            groups = self._partitions(queue)
            noisy = noisy_partitions(_arrived(groups, since_ms))
            jobs = (j for j in self._jobs_of(queue) if j.state is State.AVAILABLE)
            waiting = Counter(
                job.partition_key for job in islice(jobs, MAX_WAITING_SAMPLE)
            )
            found = [
                PartitionState(
                    partition_key=group.key,
                    deficit=group.deficit,
                    waiting=waiting[group.key],
                    inflight=group.inflight,
                    noisy=group.key in noisy,
                    quantum_override=group.quantum_override,
                )
                for group in groups
                if waiting[group.key]
                or group.deficit
                or group.inflight
                or group.quantum_override is not None
            ]
        found.sort(key=lambda group: (-group.waiting, group.partition_key.encode()))
        return found[:MAX_PARTITIONS]

    def _jobs_of(self, queue: str | None) -> Iterable[Job]:
        jobs = self._rows.jobs.values()
        return (job for job in jobs if queue is None or job.queue == queue)

    def _by_state(self, queue: str | None) -> Counter[str]:
        return Counter(job.state.value for job in self._jobs_of(queue))

    def _partitions(self, queue: str) -> list[Partition]:
        found = self._rows.queues.get(queue)
        return [] if found is None else list(found.partitions.values())

    def _stats(self, name: str, most: int) -> QueueStats:
        queue = self._rows.queues.get(name) or Queue(name)
        now_ms = self._rows.clock.now_ms()
        groups = list(queue.partitions.values())
        arrived, completed = _traffic(groups, window_start_ms(now_ms))
        return QueueStats(
            queue=name,
            weight=queue.weight,
            paused=queue.paused,
            unfinished_jobs=queue.unfinished,
            max_unfinished_jobs=queue.max_unfinished_jobs,
            by_state=sampled(self._by_state(name), most),
            arrival_rate=rate(arrived, now_ms),
            drain_rate=rate(completed, now_ms),
            time_to_drain_ms=time_to_drain_ms(
                queue.unfinished, arrived, completed, now_ms
            ),
            oldest_available_ms=_age(self._jobs_of(name), now_ms),
            quiet_groups=self._quiet(name, groups, most),
            memory_bytes=queue.memory_bytes,
        )

    def _quiet(self, name: str, groups: list[Partition], most: int) -> QuietGroups:
        now_ms = self._rows.clock.now_ms()
        since_ms = window_start_ms(now_ms)
        by_key = _arrived(groups, since_ms)
        noisy = noisy_partitions(by_key)
        quiet = [group for group in groups if group.key not in noisy]
        arrived, completed = _traffic(quiet, since_ms)
        jobs = [job for job in self._jobs_of(name) if job.state in UNFINISHED]
        calm = [job for job in jobs if job.partition_key not in noisy]
        return QuietGroups(
            arrival_rate=rate(arrived, now_ms),
            drain_rate=rate(completed, now_ms),
            time_to_drain_ms=time_to_drain_ms(len(calm), arrived, completed, now_ms),
            oldest_available_ms=_age(calm, now_ms),
            noisy_partitions=len(noisy),
            approximate=len(by_key) > MAX_PARTITIONS
            or (bool(noisy) and len(jobs) >= most),
        )


def is_known(queue: Queue) -> bool:
    """Whether somebody set the queue up, or a job was ever enqueued to it."""
    return (
        queue.is_configured
        or queue.max_unfinished_jobs is not None
        or any(group.minutes for group in queue.partitions.values())
    )


def _recent(group: Partition, since_ms: int) -> list[Minute]:
    return [minute for at_ms, minute in group.minutes.items() if at_ms >= since_ms]


def _traffic(groups: Iterable[Partition], since_ms: int) -> tuple[int, int]:
    minutes = [minute for group in groups for minute in _recent(group, since_ms)]
    return sum(m.arrived for m in minutes), sum(m.completed for m in minutes)


def _arrived(groups: Iterable[Partition], since_ms: int) -> dict[str, int]:
    """Arrivals by partition, of those that had any traffic."""
    traffic = {group.key: _traffic([group], since_ms) for group in groups}
    return {key: moved[0] for key, moved in traffic.items() if any(moved)}


def _age(jobs: Iterable[Job], now_ms: int) -> int | None:
    since = [job.scheduled_at_ms for job in jobs if job.state is State.AVAILABLE]
    return max(0, now_ms - min(since)) if since else None


def _bucket(at_ms: int, sums: Counter[str]) -> HistoryBucket:
    return HistoryBucket(
        at_ms=at_ms,
        admission_rejections=sums["rejected"],
        **{name: sums[name] for name in _TRAFFIC if name != "rejected"},
    )
