"""`Policies`, the port for the limits that admission reads, and its values."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from headgate_sync.envelope import check_identifier, check_int, check_text
from headgate_sync.lease import MAX_QUANTUM
from headgate_sync.policy import (
    MAX_PAUSE_MS,
    Ceiling,
    RateClassConfig,
    check_policy_name,
)

MAX_WAITING = 1_000


@frozen(kw_only=True)
class BudgetState:
    """A budget of a rate class, refilled up to the instant of reading.

    Attributes:
        tokens_available: whole tokens; negative after work cost more than estimated.
    """

    slot: int
    limit: int
    window_ms: int
    burst: int
    tokens_available: int


@frozen(kw_only=True)
class RateClassState:
    """A rate class as it is.

    Attributes:
        paused: nothing passes until somebody lifts it.
        paused_until_ms: nothing passes before this instant; None without such a pause.
        pause_reason: what was told with it.
        jobs_waiting: available jobs of the class, counted up to 1,000.
        budgets: by slot; without any the class limits nothing.
    """

    name: str
    paused: bool
    paused_until_ms: int | None
    pause_reason: str
    jobs_waiting: int = 0
    budgets: tuple[BudgetState, ...] = ()

    @property
    def tokens_available(self) -> int | None:
        """Whole tokens of the first budget; None without budgets."""
        return self.budgets[0].tokens_available if self.budgets else None


def check_pause(name: str, delay_ms: int, reason: str) -> None:
    """Check the arguments of `pause_rate_class`.

    Raises:
        InvalidRequest: no class, a delay that is not within 1 to 86,400,000, or a
            reason of more than 255 bytes.
    """
    check_policy_name("name", name)
    check_int("delay_ms", delay_ms, 1, MAX_PAUSE_MS)
    check_identifier("reason", check_text("reason", reason))


def check_partition_quantum(
    queue: str, partition_key: str, quantum: int | None
) -> None:
    """Check the arguments of `set_partition_quantum`.

    Raises:
        InvalidRequest: no queue, a key that no job can have, or a quantum that is not
            within 1 to 1,000,000.
    """
    check_policy_name("queue", queue)
    check_identifier("partition_key", check_text("partition_key", partition_key))
    if quantum is not None:
        check_int("quantum", quantum, 1, MAX_QUANTUM)


class Policies(Protocol):
    """Limits that every admission obeys from its next call on, on every worker."""

    def rate_classes(self) -> list[RateClassState]:
        """All rate classes, by name."""
        ...

    def upsert_rate_class(self, config: RateClassConfig) -> None:
        """Create or change a rate class.

        A new budget starts full. A changed one keeps its tokens, cut to the new burst.
        Pausing takes the tokens; after it the budgets refill from nothing.
        """
        ...

    def delete_rate_class(self, name: str) -> int | None:
        """Remove a rate class: jobs that name it become unlimited.

        Returns:
            Waiting jobs that name it, counted up to 1,000; None without such a class.
        """
        ...

    def pause_rate_class(self, name: str, delay_ms: int, reason: str = "") -> None:
        """Let nothing of a class pass for 1 to 86,400,000 ms.

        Running jobs go on and tokens refill. A longer pause that is on already is kept.
        A class that was never configured can be paused too.
        """
        ...

    def resume_rate_class(self, name: str) -> bool:
        """End such a pause; false for an unknown class."""
        ...

    def concurrency_limits(self) -> list[Ceiling]:
        """All ceilings, by name."""
        ...

    def upsert_concurrency_limit(self, config: Ceiling) -> None:
        """Create or change a ceiling. Lowering it cancels nothing.

        Raises:
            InvalidRequest: the ceiling of this name counts something else. Delete it
                first: one that moved would lift a limit unseen.
        """
        ...

    def delete_concurrency_limit(self, name: str) -> bool:
        """Remove a ceiling; false when there is none of this name."""
        ...

    def set_partition_quantum(
        self, queue: str, partition_key: str, quantum: int | None
    ) -> None:
        """Give a partition a share of its own, 1 or more; None takes it away."""
        ...
