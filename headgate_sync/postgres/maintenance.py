"""Upkeep of what the database keeps beside the job rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from headgate_sync.envelope import MAX_RELATIVE_MS, check_int
from headgate_sync.errors import InvalidRequest, StoreError
from headgate_sync.policy import LOCK_WAIT_MS, MANY_CLASSES
from headgate_sync.postgres.database import Database, Session, translate
from headgate_sync.store import (
    ArchivePolicy,
    CrowdedPartition,
    IndexHealth,
    Vacuumed,
)
from headgate_sync.validation import check_archive_month, check_limit, check_name

COUNTER_RETENTION_MS = 31 * 86_400_000
# By partition they only tell what is noisy now, and there may be many.
PARTITION_RETENTION_MS = 7_200_000
# Keys made per user would pile up; one that comes back later starts as a new one.
IDLE_RETENTION_MS = 86_400_000
SLEEPER_RETENTION_MS = 600_000
LANES_LOOKED_AT = 100_000
# Longer than a sweep takes; readers of a month that is pruned wait behind it as long.
ARCHIVE_LOCK_WAIT_MS = 1_000

# The secondary indexes of jobs and lanes, which grow with what was there at the worst.
INDEXES = (
    "headgate_job_class",
    "headgate_job_due",
    "headgate_job_ended",
    "headgate_job_fingerprint",
    "headgate_job_hold",
    "headgate_job_listing",
    "headgate_job_oldest",
    "headgate_job_ready",
    "headgate_job_retention",
    "headgate_job_running",
    "headgate_job_tag_lookup",
    "headgate_job_unique",
    "headgate_lane_group_closed",
    "headgate_lane_group_open",
    "headgate_lane_pick",
)


class PgMaintenance:
    """`Maintenance`; every call is bounded and safe on every node."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def gate_fold(self, limit: int) -> int:
        """Fold up to `limit` appended rows per queue, of the gate and of the tallies.

        Whoever admits folds the gate's rows of its own queues; this is for queues that
        are paused, or that nobody asks for, and looks behind the bound from which
        admissions read.
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

    def crowded_partitions(self, limit: int) -> list[CrowdedPartition]:
        """Partitions of many rate classes, the most crowded first."""
        check_limit(limit)
        rows = self._db.look(
            "crowded_partitions",
            most=MANY_CLASSES,
            max_rows=limit,
            max_lanes=LANES_LOOKED_AT,
        )
        return [
            CrowdedPartition(queue=queue, partition_key=key, classes=classes)
            for queue, key, classes in rows
        ]

    def index_health(self) -> list[IndexHealth]:
        """The indexes of jobs and lanes, by name."""
        rows = self._db.look(
            "index_health", schema_name=self._db.schema, names=list(INDEXES)
        )
        return [
            IndexHealth(
                name=name,
                bytes=size,
                scans=scans,
                live_tuples=live,
                dead_tuples=dead,
            )
            for name, size, scans, live, dead in rows
        ]

    def reindex_concurrently(self, name: str) -> None:
        """Rebuild one of these indexes while everything goes on."""
        if name not in INDEXES:
            raise InvalidRequest(f"index `{name}` is not one of {', '.join(INDEXES)}")
        with self._db.checkout() as session:
            self._command(session, "REINDEX INDEX CONCURRENTLY {}.{}", name)

    def vacuum(self) -> list[Vacuumed]:
        """Vacuum and analyse our tables one after another."""
        done: list[Vacuumed] = []
        tables = self._db.look("table_names", schema_name=self._db.schema)
        for (table,) in tables:
            told: list[str] = []
            with self._db.checkout() as session:
                try:
                    with _notices(session, told):
                        self._command(
                            session, "VACUUM (ANALYZE, SKIP_LOCKED) {}.{}", table
                        )
                except StoreError as error:
                    told.append(str(error))
            done.append(Vacuumed(table=table, ok=not told, error="; ".join(told)))
        return done

    def prune_effects(self, older_than_ms: int, limit: int) -> int:
        """Forget keys of effects whose job is gone, the oldest first."""
        check_int("older_than_ms", older_than_ms, 1, MAX_RELATIVE_MS)
        check_limit(limit)
        [(forgotten,)] = self._db.rows(
            "prune_effects", older_than_ms=older_than_ms, max_keys=limit
        )
        return int(forgotten)

    def set_archive_policy(self, queue: str, retention_ms: int) -> None:
        """Keep a copy of each job of a queue that is deleted because of its age."""
        check_name("queue", queue)
        check_int("retention_ms", retention_ms, 1, MAX_RELATIVE_MS)
        self._set_archive_policy(queue, retention_ms)

    def clear_archive_policy(self, queue: str) -> None:
        """Keep no further copies of a queue's jobs."""
        check_name("queue", queue)
        self._set_archive_policy(queue, None)

    def _set_archive_policy(self, queue: str, retention_ms: int | None) -> None:
        self._db.rows(
            "set_archive_policy",
            queue=queue,
            retention_ms=retention_ms,
            lock_wait_ms=ARCHIVE_LOCK_WAIT_MS,
        )

    def archive_policies(self) -> list[ArchivePolicy]:
        """The queues whose jobs are archived, by name."""
        return [
            ArchivePolicy(queue=queue, retention_ms=retention_ms)
            for queue, retention_ms in self._db.look("archive_policies")
        ]

    def prune_archive_month(self, month: str) -> int:
        """Empty a month of the archive that is over."""
        check_archive_month(month)
        [(pruned, not_before_ms)] = self._db.rows(
            "prune_archive_month", month=month, lock_wait_ms=ARCHIVE_LOCK_WAIT_MS
        )
        if pruned is None:
            raise InvalidRequest(
                f"month {month}: archive partition is open or still contains retained "
                f"rows; nothing can go before {not_before_ms}"
            )
        return int(pruned)

    def _command(self, session: Session, text: str, name: str) -> None:
        """Run a command that takes no arguments, outside any transaction."""
        command = sql.SQL(text).format(
            sql.Identifier(self._db.schema), sql.Identifier(name)
        )
        try:
            session.connection.execute(command, prepare=False)
        except psycopg.Error as error:
            raise translate(error) from error


@contextmanager
def _notices(session: Session, told: list[str]) -> Iterator[None]:
    """Collect what the server says beside its answers; a skipped table is a notice."""

    def tell(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            told.append(notice.message_primary or "")

    session.connection.add_notice_handler(tell)
    try:
        yield
    finally:
        session.connection.remove_notice_handler(tell)
