"""The limits in the database."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from headgate_sync.errors import InvalidRequest
from headgate_sync.policies import (
    MAX_WAITING,
    BudgetState,
    RateClassState,
    check_partition_quantum,
    check_pause,
)
from headgate_sync.policy import (
    NEVER_MS,
    Ceiling,
    RateClassConfig,
    check_policy_name,
)
from headgate_sync.postgres.database import Database
from headgate_sync.validation import check_type


class PgPolicies:
    """`Policies` on the tables of the gate."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def rate_classes(self) -> list[RateClassState]:
        """All rate classes, by name."""
        rows = self._db.look("rate_classes", max_waiting=MAX_WAITING)
        return [
            RateClassState(
                name=name,
                paused=paused,
                paused_until_ms=paused_until_ms,
                pause_reason=reason,
                jobs_waiting=waiting,
                budgets=tuple(
                    BudgetState(
                        slot=slot,
                        limit=limit,
                        window_ms=window_ms,
                        burst=burst,
                        tokens_available=units // window_ms,
                    )
                    for slot, limit, window_ms, burst, units in (
                        row[5:] for row in group
                    )
                    if slot is not None
                ),
            )
            for (name, paused, paused_until_ms, reason, waiting), group in groupby(
                rows, key=itemgetter(0, 1, 2, 3, 4)
            )
        ]

    def upsert_rate_class(self, config: RateClassConfig) -> None:
        """Create or change a rate class."""
        check_type("config", config, RateClassConfig)
        self._db.rows(
            "upsert_rate_class",
            name=config.name,
            limits=[budget.limit for budget in config.budgets],
            windows_ms=[budget.window_ms for budget in config.budgets],
            bursts=[budget.burst for budget in config.budgets],
            paused=config.paused,
            replace_all=config.further is not None,
            never_ms=NEVER_MS,
        )

    def delete_rate_class(self, name: str) -> int | None:
        """Remove a rate class; returns the waiting jobs that name it."""
        check_policy_name("name", name)
        [(waiting,)] = self._db.rows(
            "delete_rate_class", name=name, max_waiting=MAX_WAITING
        )
        return None if waiting is None else int(waiting)

    def pause_rate_class(self, name: str, delay_ms: int, reason: str = "") -> None:
        """Let nothing of a class pass for a time."""
        check_pause(name, delay_ms, reason)
        self._db.rows("pause_rate_class", name=name, delay_ms=delay_ms, reason=reason)

    def resume_rate_class(self, name: str) -> bool:
        """End such a pause."""
        check_policy_name("name", name)
        return bool(self._db.rows("resume_rate_class", name=name)[0][0])

    def concurrency_limits(self) -> list[Ceiling]:
        """All ceilings, by name."""
        return [
            Ceiling(
                name=name,
                scope=scope,
                queue=queue,
                rate_class=rate_class,
                max_concurrent=max_concurrent,
                on_saturated=on_saturated,
            )
            for name, scope, queue, rate_class, max_concurrent, on_saturated in (
                self._db.look("concurrency_limits")
            )
        ]

    def upsert_concurrency_limit(self, config: Ceiling) -> None:
        """Create or change a ceiling."""
        check_type("config", config, Ceiling)
        [(same,)] = self._db.rows(
            "upsert_concurrency_limit",
            name=config.name,
            scope=config.scope.value,
            queue=config.queue,
            rate_class=config.rate_class,
            max_concurrent=config.max_concurrent,
            on_saturated=config.on_saturated.value,
        )
        if not same:
            raise InvalidRequest(
                f"limit {config.name} counts something else; delete it first"
            )

    def delete_concurrency_limit(self, name: str) -> bool:
        """Remove a ceiling."""
        check_policy_name("name", name)
        return bool(self._db.rows("delete_concurrency_limit", name=name)[0][0])

    def set_partition_quantum(
        self, queue: str, partition_key: str, quantum: int | None
    ) -> None:
        """Give a partition a share of its own."""
        check_partition_quantum(queue, partition_key, quantum)
        self._db.rows(
            "set_partition_quantum",
            queue=queue,
            partition_key=partition_key,
            quantum=quantum,
        )
