"""The limits of a MemStore."""

from __future__ import annotations

from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import State
from headgate_sync.memory.admission import Gate
from headgate_sync.memory.state import Rows
from headgate_sync.policies import (
    MAX_WAITING,
    BudgetState,
    RateClassState,
    check_partition_quantum,
    check_pause,
)
from headgate_sync.policy import (
    Ceiling,
    RateClassConfig,
    check_policy_name,
)
from headgate_sync.validation import check_type


class MemPolicies:
    """`Policies` over the gate."""

    def __init__(self, rows: Rows, gate: Gate) -> None:
        self._rows = rows
        self._gate = gate

    def rate_classes(self) -> list[RateClassState]:
        """All rate classes, by name."""
        with self._rows.lock:
            now_ms = self._rows.clock.now_ms()
            return [
                RateClassState(
                    name=name,
                    paused=row.paused,
                    paused_until_ms=row.paused_until_ms,
                    pause_reason=row.pause_reason,
                    jobs_waiting=min(self._waiting(name), MAX_WAITING),
                    budgets=tuple(
                        BudgetState(
                            slot=slot,
                            limit=budget.limit,
                            window_ms=budget.window_ms,
                            burst=budget.burst,
                            tokens_available=budget.at(now_ms).tokens,
                        )
                        for slot, budget in enumerate(row.budgets)
                    ),
                )
                for name, row in sorted(self._gate.classes.items())
            ]

    def upsert_rate_class(self, config: RateClassConfig) -> None:
        """Create or change a rate class."""
        check_type("config", config, RateClassConfig)
        with self._rows.lock:
            self._gate.upsert_rate_class(
                config.name,
                config.budgets,
                paused=config.paused,
                replace_all=config.further is not None,
            )

    def delete_rate_class(self, name: str) -> int | None:
        """Remove a rate class; returns the waiting jobs that name it."""
        check_policy_name("name", name)
        with self._rows.lock:
            if not self._gate.delete_rate_class(name):
                return None
            return min(self._waiting(name), MAX_WAITING)

    def pause_rate_class(self, name: str, delay_ms: int, reason: str = "") -> None:
        """Let nothing of a class pass for a time."""
        check_pause(name, delay_ms, reason)
        with self._rows.lock:
            self._gate.pause(name, delay_ms, reason)

    def resume_rate_class(self, name: str) -> bool:
        """End such a pause."""
        check_policy_name("name", name)
        with self._rows.lock:
            return self._gate.resume_rate_class(name)

    def concurrency_limits(self) -> list[Ceiling]:
        """All ceilings, by name."""
        with self._rows.lock:
            return [ceiling for _, ceiling in sorted(self._gate.ceilings.items())]

    def upsert_concurrency_limit(self, config: Ceiling) -> None:
        """Create or change a ceiling."""
        check_type("config", config, Ceiling)
        with self._rows.lock:
            if not self._gate.upsert_ceiling(config):
                raise InvalidRequest(
                    f"limit {config.name} counts something else; delete it first"
                )

    def delete_concurrency_limit(self, name: str) -> bool:
        """Remove a ceiling."""
        check_policy_name("name", name)
        with self._rows.lock:
            return self._gate.delete_ceiling(name)

    def set_partition_quantum(
        self, queue: str, partition_key: str, quantum: int | None
    ) -> None:
        """Give a partition a share of its own."""
        check_partition_quantum(queue, partition_key, quantum)
        with self._rows.lock:
            self._gate.set_partition_quantum(queue, partition_key, quantum)

    def _waiting(self, name: str) -> int:
        return sum(
            job.rate_class == name and job.state is State.AVAILABLE
            for job in self._rows.jobs.values()
        )
