"""The states of a job and the one table of every edge between them.

A state says who may act on the job next. *Waiting* states (`pending`, `scheduled`,
`available`, `retryable`) belong to the store: time, an operator or the gate moves them.
`running` belongs to the holder of the lease. *Terminal* states belong to nobody.
`DELETED` is no stored state: an edge to it removes the row.

Invariants that every statement keeps:

* running <=> lease id, lease expiry, claimant and claim instant are all set;
* terminal <=> `finalized_at_ms` is set;
* `fence` counts entries into `running`: plus 1 on `ADMITTED`, never otherwise;
* `attempt` counts failures that a handler returned: plus 1 on `RETRY`, never otherwise;
* `crash_attempt` counts lost leases: plus 1 on `LEASE_LOST`, never otherwise;
* leaving `running` frees one slot of (queue, partition, rate class);
* leaving `available` clears the gate's hold mark.

MemStore walks the table. PgStore renders the target of an event into its statements
from the same rows, and the test schema rejects every update that no row allows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from attrs import field, frozen
from attrs.validators import in_

from headgate_sync.errors import InvalidRequest


class State(StrEnum):
    """Where a job stands; the values are the stored strings."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    RETRYABLE = "retryable"
    COMPLETED = "completed"
    ARCHIVED = "archived"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    UNDECODABLE = "undecodable"
    DELETED = "deleted"


WAITING = frozenset({State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE})
UNFINISHED = WAITING | {State.RUNNING}
EVICTABLE = frozenset(
    {State.COMPLETED, State.ARCHIVED, State.CANCELLED, State.UNDECODABLE}
)
TERMINAL = EVICTABLE | {State.QUARANTINED}
STORED = UNFINISHED | TERMINAL


class Outcome(StrEnum):
    """How an attempt ended, as told to `Store.ack`."""

    SUCCESS = "success"
    RETRY = "retry"
    SKIP = "skip"
    REVOKE = "revoke"
    SNOOZE = "snooze"
    LEASE_LOST = "lease_lost"
    UNDECODABLE = "undecodable"
    RATE_LIMITED = "rate_limited"

    @property
    def event(self) -> Event:
        """The event of the table that an ack with this outcome takes."""
        return Event(self.value)


ACKABLE = frozenset(Outcome) - {Outcome.LEASE_LOST}


class Event(StrEnum):
    """What can happen to a job."""

    ADMITTED = "admitted"
    SUCCESS = "success"
    RETRY = "retry"
    SKIP = "skip"
    REVOKE = "revoke"
    SNOOZE = "snooze"
    UNDECODABLE = "undecodable"
    RATE_LIMITED = "rate_limited"
    LEASE_LOST = "lease_lost"
    CHECKPOINT_STALE = "checkpoint_stale"
    SCHEDULE_DUE = "schedule_due"
    BACKOFF_DUE = "backoff_due"
    RETENTION_LAPSED = "retention_lapsed"
    QUARANTINE_SWEEP = "quarantine_sweep"
    SATURATION_DISCARD = "saturation_discard"
    SATURATION_CANCEL = "saturation_cancel"
    DISPLACED = "displaced"
    DEBOUNCED = "debounced"
    OPERATOR_PROMOTE = "operator_promote"
    OPERATOR_RETRY = "operator_retry"
    OPERATOR_RELEASE = "operator_release"
    OPERATOR_CANCEL = "operator_cancel"
    OPERATOR_DELETE = "operator_delete"
    OPERATOR_RESCHEDULE = "operator_reschedule"
    SCHEDULE_PENDING = "schedule_pending"
    EDIT_PAYLOAD = "edit_payload"


class GuardedFields(Protocol):
    """What a guard may read; a job row and the store's options have these names."""

    @property
    def attempt(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def crash_attempt(self) -> int: ...
    @property
    def crash_limit(self) -> int: ...
    @property
    def retention_ms(self) -> int: ...


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
}


@frozen
class Guard:
    """`left + plus op right`, true of a job in Python and of its row in SQL."""

    left: str
    op: str = field(validator=in_(_COMPARE))
    right: str | int
    plus: int = 0

    def holds(self, job: GuardedFields) -> bool:
        """Evaluate the guard on a job."""
        right = self.right if isinstance(self.right, int) else getattr(job, self.right)
        return _COMPARE[self.op](getattr(job, self.left) + self.plus, right)

    def sql(self) -> str:
        """Render the guard; its names must be columns in scope."""
        left = f"{self.left} + {self.plus}" if self.plus else self.left
        return f"{left} {self.op} {self.right}"


MAY_RETRY = Guard("attempt", "<", "max_attempts", plus=1)
MAY_CRASH_AGAIN = Guard("crash_attempt", "<", "crash_limit", plus=1)
KEEPS_RECORD = Guard("retention_ms", ">", 0)


@frozen
class Transition:
    """One edge: `source` meets `event` and becomes `target`, where the guard holds."""

    source: State
    event: Event
    target: State
    when: Guard | None = None


def _each(
    sources: tuple[State, ...],
    event: Event,
    target: State | None = None,
    when: Guard | None = None,
) -> tuple[Transition, ...]:
    """One row per source; without a target each source keeps its state."""
    return tuple(Transition(s, event, target or s, when) for s in sources)


# Rows with one source and event are tried in order; the last of them has no guard,
# except where the event simply does not happen to a job that fails the guard
# (retention).
TRANSITIONS: tuple[Transition, ...] = (
    Transition(State.PENDING, Event.OPERATOR_PROMOTE, State.AVAILABLE),
    Transition(State.SCHEDULED, Event.SCHEDULE_DUE, State.AVAILABLE),
    Transition(State.AVAILABLE, Event.ADMITTED, State.RUNNING),
    Transition(State.RUNNING, Event.SUCCESS, State.COMPLETED, KEEPS_RECORD),
    Transition(State.RUNNING, Event.SUCCESS, State.DELETED),
    Transition(State.RUNNING, Event.RETRY, State.RETRYABLE, MAY_RETRY),
    Transition(State.RUNNING, Event.RETRY, State.ARCHIVED),
    Transition(State.RUNNING, Event.SKIP, State.ARCHIVED),
    Transition(State.RUNNING, Event.REVOKE, State.DELETED),
    Transition(State.RUNNING, Event.SNOOZE, State.SCHEDULED),
    Transition(State.RUNNING, Event.UNDECODABLE, State.UNDECODABLE),
    Transition(State.RUNNING, Event.RATE_LIMITED, State.AVAILABLE),
    Transition(State.RUNNING, Event.LEASE_LOST, State.RETRYABLE, MAY_CRASH_AGAIN),
    Transition(State.RUNNING, Event.LEASE_LOST, State.QUARANTINED),
    Transition(State.RETRYABLE, Event.BACKOFF_DUE, State.AVAILABLE),
    Transition(State.RUNNING, Event.CHECKPOINT_STALE, State.UNDECODABLE),
    Transition(State.ARCHIVED, Event.OPERATOR_RETRY, State.AVAILABLE),
    Transition(State.CANCELLED, Event.OPERATOR_RETRY, State.AVAILABLE),
    Transition(State.UNDECODABLE, Event.OPERATOR_RETRY, State.AVAILABLE),
    Transition(State.QUARANTINED, Event.OPERATOR_RELEASE, State.AVAILABLE),
    *_each(
        (
            State.PENDING,
            State.SCHEDULED,
            State.AVAILABLE,
            State.RUNNING,
            State.RETRYABLE,
        ),
        Event.OPERATOR_CANCEL,
        State.CANCELLED,
    ),
    *_each(
        (State.COMPLETED, State.ARCHIVED, State.CANCELLED, State.UNDECODABLE),
        Event.RETENTION_LAPSED,
        State.DELETED,
        KEEPS_RECORD,
    ),
    *_each(
        (State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE),
        Event.QUARANTINE_SWEEP,
        State.QUARANTINED,
    ),
    Transition(State.AVAILABLE, Event.SATURATION_DISCARD, State.ARCHIVED),
    Transition(State.AVAILABLE, Event.SATURATION_CANCEL, State.CANCELLED),
    Transition(State.RUNNING, Event.DISPLACED, State.CANCELLED),
    *_each(
        (State.SCHEDULED, State.AVAILABLE, State.RETRYABLE),
        Event.DEBOUNCED,
        State.SCHEDULED,
    ),
    *_each(
        tuple(s for s in State if s in STORED and s is not State.RUNNING),
        Event.OPERATOR_DELETE,
        State.DELETED,
    ),
    Transition(State.PENDING, Event.SCHEDULE_PENDING, State.SCHEDULED),
    *_each((State.SCHEDULED, State.RETRYABLE), Event.OPERATOR_RESCHEDULE),
    *_each(
        tuple(s for s in State if s in STORED and s is not State.RUNNING),
        Event.EDIT_PAYLOAD,
    ),
)


_SAID = {
    (Event.OPERATOR_DELETE, State.RUNNING): (
        "cannot delete a running job; cancel it first"
    ),
    (Event.EDIT_PAYLOAD, State.RUNNING): "cannot edit a running job's payload",
    (Event.OPERATOR_RETRY, State.QUARANTINED): (
        "cannot retry a quarantined job; release its fingerprint"
    ),
}


def refused(event: Event, source: State) -> InvalidRequest:
    """The error for an event that the table does not know in this state."""
    if (event, source) in _SAID:
        return InvalidRequest(_SAID[event, source])
    return InvalidRequest(
        f"{event.value} is not defined from {source.value}, "
        f"only from {', '.join(sources_of(event))}"
    )


def _by_edge() -> dict[tuple[State, Event], tuple[Transition, ...]]:
    found: dict[tuple[State, Event], tuple[Transition, ...]] = {}
    for row in TRANSITIONS:
        found[row.source, row.event] = (*found.get((row.source, row.event), ()), row)
    return found


_BY_EDGE = _by_edge()


def _rows(source: State, event: Event) -> tuple[Transition, ...]:
    rows = _BY_EDGE.get((source, event))
    if rows is None:
        raise refused(event, source)
    return rows


def find_transition(source: State, event: Event, job: GuardedFields) -> Transition:
    """The row of the table that this event takes on this job.

    Raises:
        InvalidRequest: no row allows the event in this state; the text names both.
    """
    for row in _rows(source, event):
        if row.when is None or row.when.holds(job):
            return row
    raise refused(event, source)


def next_state(source: State, event: Event, job: GuardedFields) -> State:
    """Where the event leads; `State.DELETED` means that the row goes.

    Raises:
        InvalidRequest: no row allows the event in this state.
    """
    return find_transition(source, event, job).target


def sources_of(event: Event) -> tuple[State, ...]:
    """The states in which the event can happen, in the order of the table."""
    return tuple(dict.fromkeys(t.source for t in TRANSITIONS if t.event is event))


def target_sql(event: Event, source: State = State.RUNNING) -> str:
    """Render the target of an event as an SQL expression over the job's columns.

    The columns that the guards name must be in scope without a qualifier; a limit that
    is an option of the store (`crash_limit`) has to be there as a column of that name.
    """
    rows = _rows(source, event)
    text = f"'{rows[-1].target.value}'"
    for row in reversed(rows[:-1]):
        assert row.when is not None, (
            "only the last row of a source and event is unguarded"
        )
        text = f"CASE WHEN {row.when.sql()} THEN '{row.target.value}' ELSE {text} END"
    return text


def states_sql(states: frozenset[State] | tuple[State, ...]) -> str:
    """Render states as the inside of an SQL `IN (...)`, in declaration order."""
    return ", ".join(f"'{state.value}'" for state in State if state in states)
