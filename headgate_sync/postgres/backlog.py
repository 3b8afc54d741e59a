"""The backlog of the queues in the database."""

from __future__ import annotations

from collections.abc import Sequence

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
    count_arguments,
    rate,
    sample_of_page,
    state_counts,
    time_to_drain_ms,
)
from headgate_sync.envelope import MAX_INT64, check_int
from headgate_sync.postgres.database import Row, Session
from headgate_sync.postgres.policies import PgPolicies
from headgate_sync.validation import check_count, check_name, check_texts


class PgBacklog(PgPolicies):
    """Queues, their history and their partitions."""

    def counts(self, queue: str | None = None) -> StateCounts:
        """Jobs by state, from a sample of at most 50,000 rows."""
        if queue is not None:
            check_name("queue", queue)
        rows = self._db.look("counts", queues=[queue], **count_arguments(MAX_SAMPLE))
        return state_counts(row[1:] for row in rows)

    def queue_stats(
        self,
        limit: int = MAX_QUEUES,
        cursor: str | None = None,
        *,
        queues: Sequence[str] | None = None,
    ) -> list[QueueStats]:
        """Queues by name, with their backlog."""
        check_int("limit", limit, 1, MAX_QUEUES)
        if queues is not None:
            check_texts("queues", queues)
            check_count("queues", len(queues), MAX_QUEUES)
            for name in queues:
                check_name("queue", name)
        elif cursor is not None:
            check_name("cursor", cursor)

        def read(session: Session) -> list[QueueStats]:
            names = list(queues or ())
            if queues is None:
                found = session.rows(
                    "queue_names", after=cursor or "", max_queues=limit
                )
                names = [name for (name,) in found]
            if not names:
                return []
            most = sample_of_page(len(names))
            stats = session.rows(
                "queue_stats",
                queues=names,
                max_partitions=MAX_PARTITIONS,
                max_sample=most,
            )
            counts: list[list[tuple[str, int, bool]]] = [[] for _ in names]
            arguments = count_arguments(most, len(names))
            for place, *counted in session.rows("counts", queues=names, **arguments):
                counts[place - 1].append(tuple(counted))
            return [
                _stats(row, state_counts(rows))
                for row, rows in zip(stats, counts, strict=True)
            ]

        return self._db.looking(read)

    def history(
        self, queue: str, since_ms: int, bucket_ms: int = MINUTE_MS
    ) -> list[HistoryBucket]:
        """What happened to a queue since an instant."""
        check_name("queue", queue)
        check_int("since_ms", since_ms, 0, MAX_INT64)
        check_int("bucket_ms", bucket_ms, MINUTE_MS, MAX_INT64)
        rows = self._db.look(
            "history",
            queue=queue,
            since_ms=since_ms,
            bucket_ms=bucket_ms,
            max_buckets=MAX_HISTORY_BUCKETS,
        )
        return [
            HistoryBucket(
                at_ms=at_ms,
                arrived=arrived,
                completed=completed,
                failed=failed,
                retried=retried,
                admission_rejections=rejected,
                latency_ms_sum=latency_ms_sum,
                latency_count=latency_count,
            )
            for (
                at_ms,
                arrived,
                completed,
                failed,
                retried,
                rejected,
                latency_ms_sum,
                latency_count,
            ) in rows
        ]

    def partitions(self, queue: str) -> list[PartitionState]:
        """Up to 1,000 partitions of a queue, the most waiting jobs first."""
        check_name("queue", queue)
        rows = self._db.look(
            "partitions",
            queue=queue,
            max_sample=MAX_WAITING_SAMPLE,
            max_traffic=MAX_PARTITIONS,
            max_partitions=MAX_PARTITIONS,
        )
        return [
            PartitionState(
                partition_key=key,
                deficit=deficit,
                waiting=waiting,
                inflight=inflight,
                noisy=noisy,
                quantum_override=quantum,
            )
            for key, deficit, waiting, inflight, noisy, quantum in rows
        ]


def _stats(row: Row, by_state: StateCounts) -> QueueStats:
    (
        queue, weight, paused, unfinished, limit, arrived, completed, oldest_at_ms,
        noisy, noisy_arrived, noisy_completed, has_more, quiet_backlog,
        quiet_oldest_at_ms, is_cut, memory_bytes, now_ms,
    ) = row  # fmt: skip
    oldest_ms = _age(oldest_at_ms, now_ms)
    quiet_arrived, quiet_completed = (
        arrived - noisy_arrived,
        completed - noisy_completed,
    )
    return QueueStats(
        queue=queue,
        weight=weight,
        paused=paused,
        unfinished_jobs=unfinished,
        max_unfinished_jobs=limit,
        by_state=by_state,
        arrival_rate=rate(arrived, now_ms),
        drain_rate=rate(completed, now_ms),
        time_to_drain_ms=time_to_drain_ms(unfinished, arrived, completed, now_ms),
        oldest_available_ms=oldest_ms,
        quiet_groups=QuietGroups(
            arrival_rate=rate(quiet_arrived, now_ms),
            drain_rate=rate(quiet_completed, now_ms),
            time_to_drain_ms=time_to_drain_ms(
                quiet_backlog if noisy else unfinished,
                quiet_arrived,
                quiet_completed,
                now_ms,
            ),
            oldest_available_ms=(
                _age(quiet_oldest_at_ms, now_ms) if noisy else oldest_ms
            ),
            noisy_partitions=noisy,
            approximate=has_more or bool(is_cut),
        ),
        memory_bytes=memory_bytes,
    )


def _age(since_ms: int | None, now_ms: int) -> int | None:
    return None if since_ms is None else max(0, now_ms - since_ms)
