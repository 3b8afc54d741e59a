"""Admission policy: every constant of the gate, and its arithmetic as pure functions.

MemStore decides with these functions. PgStore decides in the database with the same
rules, and is passed `GATE_CONSTANTS`, so that no number of policy stands in its SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from attrs import evolve, field, frozen

from headgate_sync.envelope import (
    MAX_INT32,
    check_identifier,
    check_int,
    check_text,
)
from headgate_sync.errors import InvalidRequest

WINDOW_MAX = 256
WINDOW_SPARE = 16
WINDOW_DRAWS = 32
DEFICIT_CAP = 4
LEDGER_LAG = 64
FOLD_MAX = 256
# The gate's upkeep has no due row to look for, so it is looked at this often.
UPKEEP_INTERVAL_MS = 30_000
HOLD_MAX = 256
MANY_CLASSES = 64
"""Rate classes with waiting jobs in one partition beyond which upkeep warns."""
# A worker that is silent for more of its own beats than this may be gone.
LATE_BEATS = 3
LOCK_WAIT_MS = 250
BUSY_RETRY_MS = 20

GATE_CONSTANTS: Mapping[str, int] = {
    "window_max": WINDOW_MAX,
    "window_spare": WINDOW_SPARE,
    "window_draws": WINDOW_DRAWS,
    "deficit_cap": DEFICIT_CAP,
    "ledger_lag": LEDGER_LAG,
    "fold_max": FOLD_MAX,
    "hold_max": HOLD_MAX,
    "lock_wait_ms": LOCK_WAIT_MS,
    "busy_ms": BUSY_RETRY_MS,
}
"""What `headgate_admit` takes beside the request, by the names of its parameters."""

MAX_UNITS = 2**62
MIN_UNITS = -(2**62)
MAX_BUDGETS = 4
MAX_PAUSE_MS = 86_400_000
NEVER_MS = 2**62
"""Where the budgets of a paused class stand, so that time gains them nothing."""


# The window and the shares


def window_size(capacity: int, quantum: int) -> int:
    """How many lanes of a queue one call looks at.

    Twice the lanes that fill the capacity when each gives its quantum, and some to
    spare for those that turn out to be blocked.
    """
    share = min(max(quantum, 1), capacity)
    return min(WINDOW_MAX, 2 * -(-capacity // share) + WINDOW_SPARE)


def automatic_quantum(capacity: int, partitions: int) -> int:
    """The share of one partition when the request names none."""
    return max(1, -(-capacity // max(1, partitions)))


def is_noisy(inflight: int, others: int, partitions: int) -> bool:
    """Whether a partition runs more than twice the mean of its peers.

    Args:
        inflight: running jobs of the partition.
        others: running jobs of all its peers.
        partitions: the partition and its peers; alone nobody is noisy.
    """
    return inflight >= 2 and inflight * (partitions - 1) > 2 * others


def settled_deficit(deficit: int, quantum: int, taken: int, *, emptied: bool) -> int:
    """The credit that a partition carries into the next call.

    What was not used of the share is kept, up to a few quanta; a partition without work
    keeps nothing, so that nobody can save up for a burst.
    """
    if emptied:
        return 0
    return max(0, min(deficit + quantum - taken, DEFICIT_CAP * quantum))


# The service ledger of the queues


@frozen
class Service:
    """How much service a queue has had: decisions, and its weight."""

    decisions: int
    weight: int

    def is_behind(self, other: Service) -> bool:
        """Whether this queue had less service for its weight; exact, no division."""
        return self.decisions * other.weight < other.decisions * self.weight


def with_lag(services: Sequence[Service]) -> list[int]:
    """The decisions that count in a call, in the order given.

    A queue that was idle reads as at most `LEDGER_LAG` decisions behind the one that
    was served most, so that it cannot claim the time it slept through.
    """
    most = Service(0, 1)
    for service in services:
        if most.is_behind(service):
            most = service
    return [
        max(
            service.decisions,
            most.decisions * service.weight // most.weight - LEDGER_LAG,
        )
        for service in services
    ]


def reweighted(decisions: int, old_weight: int, new_weight: int) -> int:
    """The decisions that leave a queue where it was in the order, at its new weight."""
    return decisions * new_weight // old_weight


# Rate classes


@frozen
class BudgetConfig:
    """A limit of a rate class: `limit` tokens per `window_ms`, `burst` at most.

    Raises:
        InvalidRequest: out of range; the text names field and limit.
    """

    limit: int
    window_ms: int
    burst: int

    def __attrs_post_init__(self) -> None:
        check_int("limit", self.limit, 0, MAX_INT32)
        check_int("window_ms", self.window_ms, 1, MAX_UNITS)
        check_int("burst", self.burst, 1, MAX_INT32)
        if self.burst * self.window_ms > MAX_UNITS:
            raise InvalidRequest(
                f"burst * window_ms is {self.burst * self.window_ms}, "
                f"the limit is {MAX_UNITS}"
            )

    def full(self, now_ms: int) -> Budget:
        """A new bucket, which starts full."""
        return Budget(
            limit=self.limit,
            window_ms=self.window_ms,
            burst=self.burst,
            units=self.burst * self.window_ms,
            refilled_at_ms=now_ms,
        )


def check_policy_name(subject: str, name: str) -> None:
    """Check the name of a policy or of what it applies to; it must not be empty.

    Raises:
        InvalidRequest: the text names subject and limit.
    """
    check_identifier(subject, check_text(subject, name))
    if not name:
        raise InvalidRequest(f"{subject} must not be empty")


@frozen(kw_only=True)
class RateClassConfig:
    """A rate class as it shall be.

    Attributes:
        name: what jobs name as their `rate_class`.
        limit, window_ms, burst: the first budget.
        paused: nothing passes and nothing refills while it is set.
        further: up to three more budgets, all of which must have room too; None keeps
            what is stored, () removes them.

    Raises:
        InvalidRequest: out of range; the text names field and limit.
    """

    name: str
    limit: int
    window_ms: int
    burst: int
    paused: bool = False
    further: tuple[BudgetConfig, ...] | None = None

    def __attrs_post_init__(self) -> None:
        check_policy_name("name", self.name)
        if type(self.paused) is not bool:
            raise InvalidRequest("paused must be a bool")
        if len(self.budgets) > MAX_BUDGETS:
            raise InvalidRequest(
                f"a rate class has {len(self.budgets)} budgets, "
                f"the limit is {MAX_BUDGETS}"
            )

    @property
    def budgets(self) -> tuple[BudgetConfig, ...]:
        """The budgets that are given, from the first on."""
        return (
            BudgetConfig(self.limit, self.window_ms, self.burst),
            *(self.further or ()),
        )


@frozen(kw_only=True)
class Budget:
    """A token bucket of a rate class, kept in units: one token is `window_ms` units.

    Each elapsed millisecond gains `limit` units, so that nothing is ever rounded away.

    Attributes:
        limit: tokens per window; 0 never refills.
        window_ms: at least 1.
        burst: tokens at most, at least 1.
        units: the balance; negative while work that cost more than estimated is owed.
        refilled_at_ms: the instant of the balance.
    """

    limit: int
    window_ms: int
    burst: int
    units: int
    refilled_at_ms: int

    @property
    def cap_units(self) -> int:
        """The balance of a full bucket."""
        return self.burst * self.window_ms

    @property
    def tokens(self) -> int:
        """Whole tokens, rounded down; negative in debt."""
        return self.units // self.window_ms

    def at(self, now_ms: int) -> Budget:
        """The bucket at an instant; a clock that stepped back changes nothing."""
        elapsed_ms = now_ms - self.refilled_at_ms
        if elapsed_ms <= 0:
            return self
        units = self.units
        if self.limit:
            units = min(self.cap_units, units + elapsed_ms * self.limit)
        return evolve(self, units=units, refilled_at_ms=now_ms)

    def fits(self, weight: int) -> bool:
        """Whether a job of this weight may pass now; weight 0 always may."""
        return weight == 0 or self.units >= weight * self.window_ms

    def wait_ms(self, weight: int) -> int | None:
        """Milliseconds until it fits; None when it never will by time alone."""
        missing = weight * self.window_ms - self.units
        if weight == 0 or missing <= 0:
            return 0
        return -(-missing // self.limit) if self.limit else None

    def charged(self, weight: int) -> Budget:
        """The bucket after a job of this weight was admitted."""
        return evolve(self, units=self.units - weight * self.window_ms)

    def settled(self, charge: int, actual: int) -> Budget:
        """The bucket after work charged with `charge` turned out to cost `actual`."""
        units = self.units + (charge - actual) * self.window_ms
        return evolve(self, units=max(MIN_UNITS, min(self.cap_units, units)))

    def resized(self, budget: BudgetConfig) -> Budget:
        """The bucket under a new limit: the same tokens, never more than before."""
        units = self.units * budget.window_ms // self.window_ms
        return Budget(
            limit=budget.limit,
            window_ms=budget.window_ms,
            burst=budget.burst,
            units=max(MIN_UNITS, min(units, budget.burst * budget.window_ms)),
            refilled_at_ms=self.refilled_at_ms,
        )

    def steered(self, now_ms: int, *, paused: bool) -> Budget:
        """The bucket from now on: paused without credit, or refilling."""
        current = self.at(now_ms)
        if paused:
            return evolve(current, units=min(current.units, 0), refilled_at_ms=NEVER_MS)
        if current.refilled_at_ms == NEVER_MS:
            return evolve(current, refilled_at_ms=now_ms)
        return current


# Ceilings


class Scope(StrEnum):
    """What a ceiling counts: each partition by itself, a queue, or a rate class."""

    PARTITION = "partition"
    QUEUE = "queue"
    CLASS = "class"


_BREADTH = {Scope.PARTITION: 1, Scope.QUEUE: 2, Scope.CLASS: 3}


class OnSaturated(StrEnum):
    """What happens to a job that meets a full ceiling."""

    QUEUE = "queue"
    DISCARD = "discard"
    CANCEL_INCOMING = "cancel_incoming"
    CANCEL_RUNNING = "cancel_running"

    @property
    def strength(self) -> int:
        """Of several full ceilings the one with the highest strength decides."""
        return _STRENGTH[self]


_STRENGTH = {
    OnSaturated.CANCEL_RUNNING: 1,
    OnSaturated.CANCEL_INCOMING: 2,
    OnSaturated.DISCARD: 3,
    OnSaturated.QUEUE: 4,
}


def _scope(value: str) -> Scope:
    try:
        return Scope(value)
    except ValueError:
        raise InvalidRequest(
            f"scope is {value!r}, allowed are {', '.join(Scope)}"
        ) from None


def _on_saturated(value: str) -> OnSaturated:
    try:
        return OnSaturated(value)
    except ValueError:
        raise InvalidRequest(
            f"on_saturated is {value!r}, allowed are {', '.join(OnSaturated)}"
        ) from None


@frozen(kw_only=True)
class Ceiling:
    """A ceiling: at most `max_concurrent` running jobs of what it counts.

    Attributes:
        name: its own.
        queue: what the scopes partition and queue count; "" for class.
        rate_class: what the scope class counts, in whatever queue; else "".
        scope: each partition of the queue by itself, the queue, or the class.
        max_concurrent: at least 1.
        on_saturated: what happens to a job that finds no room.

    Raises:
        InvalidRequest: out of range, or scope and names do not fit; the text says how.
    """

    name: str
    queue: str = ""
    max_concurrent: int
    on_saturated: OnSaturated = field(
        default=OnSaturated.QUEUE, converter=_on_saturated
    )
    scope: Scope = field(default=Scope.PARTITION, converter=_scope)
    rate_class: str = ""

    def __attrs_post_init__(self) -> None:
        check_policy_name("name", self.name)
        wanted, refused = "queue", "rate_class"
        if self.scope is Scope.CLASS:
            wanted, refused = refused, wanted
        if getattr(self, wanted) == "":
            raise InvalidRequest(
                f"{wanted} must not be empty: a limit of scope {self.scope} needs it"
            )
        check_policy_name(wanted, getattr(self, wanted))
        if getattr(self, refused):
            raise InvalidRequest(
                f"a limit of scope {self.scope} names a {wanted} and no {refused}"
            )
        check_int("max_concurrent", self.max_concurrent, 1, MAX_INT32)

    @property
    def key(self) -> tuple[Scope, str, str]:
        """What it counts; this never changes under one name."""
        return self.scope, self.queue, self.rate_class

    @property
    def breadth(self) -> tuple[int, int]:
        """The order in which several full ones seek whom to displace, narrowest first.

        Whoever leaves a partition makes room in its queue and class as well.
        """
        return _BREADTH[self.scope], self.max_concurrent


# Polling


@frozen(kw_only=True)
class Poll:
    """How long an idle worker waits between two admissions.

    Attributes:
        floor_ms: the wait after work; the first empty answer multiplies it.
        ceiling_ms: the longest wait before jitter.
        multiplier: growth per empty answer, above 1.
        jitter: up to this part of the wait is taken off at random, 0 to 1.
    """

    floor_ms: int = 50
    ceiling_ms: int = 2_000
    multiplier: float = 2.0
    jitter: float = 0.2

    def __attrs_post_init__(self) -> None:
        check_int("floor_ms", self.floor_ms, 1, MAX_PAUSE_MS)
        check_int("ceiling_ms", self.ceiling_ms, self.floor_ms, MAX_PAUSE_MS)
        if not 1 < self.multiplier <= 1_000:
            raise InvalidRequest(
                f"multiplier is {self.multiplier}, allowed is above 1 to 1000"
            )
        if not 0 <= self.jitter <= 1:
            raise InvalidRequest(f"jitter is {self.jitter}, allowed is 0 to 1")


@frozen
class Delay:
    """A wait between two admissions.

    Attributes:
        base_ms: without jitter; the next wait grows from it.
        wait_ms: how long to wait now.
    """

    base_ms: int
    wait_ms: int


def next_delay(
    admitted: int,
    woken: bool,
    current_ms: int,
    poll: Poll,
    *,
    draw: float,
    retry_after_ms: int | None = None,
) -> Delay:
    """How long to wait after an admission.

    Args:
        admitted: jobs it returned.
        woken: a signal asked for it.
        current_ms: `base_ms` of the wait before it; the floor at the start.
        draw: random, 0 to 1, 1 excluded. Jitter shortens, so that workers that all wait
            the longest time still spread.
        retry_after_ms: when a rate class reopens, as the admission said.
    """
    if admitted > 0 or woken:
        return Delay(poll.floor_ms, poll.floor_ms)
    base_ms = int(min(current_ms * poll.multiplier, poll.ceiling_ms))
    wait_ms = max(1, int(base_ms * (1 - poll.jitter * draw)))
    if retry_after_ms is not None:
        wait_ms = min(wait_ms, max(retry_after_ms, 1))
    return Delay(base_ms, wait_ms)
