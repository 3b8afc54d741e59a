"""Operations over many jobs: what is asked for, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256
from urllib.parse import quote

from attrs import field, frozen

from headgate_sync.envelope import MAX_INT64, check_identifier, check_int, check_text
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import STORED, Event, State, sources_of
from headgate_sync.search import stored_text
from headgate_sync.validation import check_name

MAX_OPERATION_BATCH = 10_000
OPERATIONS_PER_RUN = 5
_MAX_QUOTED = 200
QUEUE_NOT_EMPTY = "queue is not empty; retry with force=true"


class BulkAction(StrEnum):
    """What an operation does to each job; the values are the stored strings."""

    RETRY = "retry"
    CANCEL = "cancel"
    DELETE = "delete"

    @property
    def event(self) -> Event:
        """The edge of the table of transitions that each job takes."""
        return _EVENTS[self]


class OperationState(StrEnum):
    """How far an operation has come; the values are the stored strings."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


_EVENTS: Mapping[BulkAction, Event] = {
    BulkAction.RETRY: Event.OPERATOR_RETRY,
    BulkAction.CANCEL: Event.OPERATOR_CANCEL,
    BulkAction.DELETE: Event.OPERATOR_DELETE,
}


@frozen(kw_only=True)
class BulkRequest:
    """One verb for many jobs. What is given must all hold; something must be given.

    Attributes:
        id: names the operation, chosen by the caller.
        action: "retry", "cancel" or "delete".
        state: one of the ten stored states; it must be one that the action starts from.
        older_than_ms: only jobs enqueued at least so long ago, 0 or more.
        dry_run: only estimate how many jobs it would be.
    """

    id: str
    action: str = field(converter=stored_text)
    queue: str | None = None
    state: str | None = field(default=None, converter=stored_text)
    kind: str | None = None
    partition_key: str | None = None
    older_than_ms: int | None = None
    dry_run: bool = False

    def __attrs_post_init__(self) -> None:
        check_name("id", self.id)
        if self.action not in set(BulkAction):
            allowed = ", ".join(BulkAction)
            raise InvalidRequest(f"action `{self.action}` is not one of {allowed}")
        for name in ("queue", "state", "kind", "partition_key"):
            value = getattr(self, name)
            if value is not None:
                check_identifier(name, check_text(name, value))
        if self.older_than_ms is not None:
            check_int("older_than_ms", self.older_than_ms, 0, MAX_INT64)
        if type(self.dry_run) is not bool:
            raise InvalidRequest("dry_run must be bool")
        if self.state is not None and self.state not in STORED:
            known = ", ".join(sorted(STORED))
            raise InvalidRequest(f"state `{self.state}` is not one of {known}")
        if (
            self.queue is self.state is self.kind is self.partition_key is None
            and self.older_than_ms is None
        ):
            raise InvalidRequest("empty selector is rejected")

        if not self.states():
            event = BulkAction(self.action).event
            raise InvalidRequest(
                f"{self.action} is not defined from {self.state}, "
                f"only from {', '.join(sources_of(event))}"
            )

    def states(self) -> tuple[State, ...]:
        """The states whose jobs the operation touches, in the order of the table."""
        sources = sources_of(BulkAction(self.action).event)
        return tuple(s for s in sources if self.state in (None, s.value))


@frozen(kw_only=True)
class OperationStatus:
    """How far an operation has come.

    Attributes:
        status: "pending", "running", "completed" or "failed".
        affected: jobs changed so far.
        total_estimated: jobs that matched at the start, counted up to 50,000; 0 also
            where counting took too long.
        error: why it failed; "" otherwise.
    """

    id: str
    status: str
    affected: int
    total_estimated: int
    dry_run: bool
    error: str = ""


def check_batch(batch: int) -> None:
    """Check how many jobs of an operation one step may touch.

    Raises:
        InvalidRequest: not within 1 to 10,000.
    """
    check_int("batch", batch, 1, MAX_OPERATION_BATCH)


def queue_deletion_id(queue: str, now_ms: int) -> str:
    """The id of the operation that empties a queue; no two queues share one."""
    name = quote(queue, safe="")
    if len(name) > _MAX_QUOTED:
        name = sha256(queue.encode()).hexdigest()
    return f"qdel-{now_ms}-{name}"
