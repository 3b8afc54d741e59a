"""Upkeep of what the database keeps beside the job rows."""

from __future__ import annotations

from headgate_sync.policy import LOCK_WAIT_MS
from headgate_sync.postgres.database import Database
from headgate_sync.validation import check_limit

COUNTER_RETENTION_MS = 31 * 86_400_000
# By partition they only tell what is noisy now, and there may be many.
PARTITION_RETENTION_MS = 7_200_000
# Keys made per user would pile up; one that comes back later starts as a new one.
IDLE_RETENTION_MS = 86_400_000
SLEEPER_RETENTION_MS = 600_000


class PgMaintenance:
    """`Maintenance`; every call is bounded and safe on every node."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def gate_fold(self, limit: int) -> int:
        """Fold up to `limit` appended rows per queue, of the gate and of the tallies.

        Whoever admits folds the gate's rows of its own queues; this is for queues that
        are paused, or that nobody asks for.
        """
        check_limit(limit)
        folded, queue = 0, ""
        while queue is not None:
            [(queue, taken)] = self._db.rows("gate_fold", after=queue, max_rows=limit)
            folded += taken
        [(tallies,)] = self._db.rows(
            "tally_fold",
            max_rows=limit,
            keep_ms=COUNTER_RETENTION_MS,
            keep_partitions_ms=PARTITION_RETENTION_MS,
        )
        return int(folded) + int(tallies)

    def gate_reconcile(self, limit: int) -> int:
        """Recompute the counters of up to `limit` partitions.

        Sleepers of long ago are forgotten with it.
        """
        check_limit(limit)
        self._db.rows("sleeper_sweep", max_age_ms=SLEEPER_RETENTION_MS)
        [(corrections,)] = self._db.rows(
            "gate_reconcile",
            max_partitions=limit,
            idle_ms=IDLE_RETENTION_MS,
            lock_wait_ms=LOCK_WAIT_MS,
        )
        return int(corrections)
