"""Values around a claim: requests, leases, checkpoints, acks, what readers return."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from attrs import evolve, field, frozen

from headgate_sync.envelope import (
    MAX_INT32,
    MAX_INT64,
    MAX_PAYLOAD_BYTES,
    MAX_RELATIVE_MS,
    Envelope,
    check_identifier,
    check_int,
    check_text,
    fingerprint,
)
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import Outcome

MAX_REQUEST_QUEUES = 256
MAX_CAPACITY = 10_000
MAX_QUANTUM = 1_000_000
MAX_LEASE_MS = 86_400_000
MAX_CURSOR_BYTES = MAX_PAYLOAD_BYTES
MAX_STEPS = 1000
MAX_RESULT_BYTES = 33_554_432
MAX_PROGRESS_TOTAL = 9_007_199_254_740_991  # 2**53 - 1: exact in JSON readers
MAX_PROGRESS_MESSAGE_BYTES = 512
MAX_ERROR_BYTES = 8192
MAX_CODE_BYTES = 64
MAX_HISTORY = 50

_CODE = re.compile(r"[A-Z0-9_]{0,64}", re.ASCII)


@frozen
class LeaseRef:
    """Proof of a claim: all three values are needed for every write on the job.

    `lease_id` is shared by all claims of one admit and `fence` counts per job, so
    neither names a job without `job_id`.
    """

    job_id: str
    lease_id: str
    fence: int

    def __attrs_post_init__(self) -> None:
        check_text("job_id", self.job_id)
        check_text("lease_id", self.lease_id)
        check_int("fence", self.fence, 0, MAX_INT64)


def check_lease_ms(lease_ms: int) -> None:
    """Check the length of a lease.

    Raises:
        InvalidRequest: not within 1 to 86,400,000.
    """
    check_int("lease_ms", lease_ms, 1, MAX_LEASE_MS)


def _check_sequence(name: str, value: object) -> None:
    """Refuse one text where several are meant, and what holds nothing."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        kind = type(value).__name__
        raise InvalidRequest(f"{name} must be a sequence of str, got {kind}")


def _normal_queues(queues: Iterable[str]) -> tuple[str, ...]:
    _check_sequence("queues", queues)
    return tuple(sorted({check_text("queues", queue) for queue in queues}))


@frozen(kw_only=True)
class AdmitRequest:
    """What a worker asks for: identity, queues and free capacity; never policy.

    Attributes:
        worker: stable identity, matched against `Envelope.sticky_worker` byte for byte.
        lease_id: chosen by the caller, fresh for each call.
        queues: any order; kept sorted and without repeats. Empty asks for nothing.
        capacity: upper bound of decisions, 0 to 10,000; never a target.
        lease_ms: 1 to 86,400,000.
        quantum: fair share per partition and call; 0 is automatic.
    """

    worker: str = ""
    lease_id: str
    queues: tuple[str, ...] = field(converter=_normal_queues)
    capacity: int
    lease_ms: int
    quantum: int = 0

    def __attrs_post_init__(self) -> None:
        check_identifier("worker", check_text("worker", self.worker), ascii_only=True)
        check_identifier("lease_id", check_text("lease_id", self.lease_id))
        if not self.lease_id:
            raise InvalidRequest("lease_id must not be empty")
        if len(self.queues) > MAX_REQUEST_QUEUES:
            raise InvalidRequest(
                f"queues has {len(self.queues)} names, "
                f"the limit is {MAX_REQUEST_QUEUES}"
            )
        for queue in self.queues:
            check_identifier("queues", queue)
            if not queue:
                raise InvalidRequest("queues must not hold an empty name")
        check_int("capacity", self.capacity, 0, MAX_CAPACITY)
        check_lease_ms(self.lease_ms)
        check_int("quantum", self.quantum, 0, MAX_QUANTUM)


class Resumability(StrEnum):
    """Whether recorded steps can be continued by the present code."""

    CONTINUE = "continue"
    REMAPPED = "remapped"
    UNDECODABLE = "undecodable"


_NO_CRASHES: Mapping[str, int] = MappingProxyType({})


def _freeze_crashes(value: Mapping[str, int]) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise InvalidRequest(f"crashes_by_step must be a mapping, got {kind}")
    return MappingProxyType(dict(value)) if value else _NO_CRASHES


def _step_names(value: Iterable[str]) -> tuple[str, ...]:
    _check_sequence("completed_steps", value)
    return tuple(value)


def _check_step(name: str, step: str) -> None:
    check_identifier(name, check_text(name, step))
    if not step:
        raise InvalidRequest(f"{name} must not be empty")


@frozen(kw_only=True)
class Checkpoint:
    """How far a handler with steps has come.

    Attributes:
        completed_steps: in the order of completion, at most 1,000.
        in_progress_step: entered and not completed; a lost lease is charged to it.
        cursor_step, cursor: position inside one step, at most 1 MiB.
        schema_version: version of the step set, 0 without steps.
        step_set_hash: identity of the step set, "" without steps.
        crashes_by_step: leases lost in each step.
        remaining_weight: what the next admission charges instead of the job's weight.
    """

    completed_steps: tuple[str, ...] = field(default=(), converter=_step_names)
    in_progress_step: str | None = None
    cursor_step: str | None = None
    cursor: bytes | None = None
    schema_version: int = 0
    step_set_hash: str = ""
    crashes_by_step: Mapping[str, int] = field(
        default=_NO_CRASHES, converter=_freeze_crashes
    )
    remaining_weight: int | None = None

    def __attrs_post_init__(self) -> None:
        if len(self.completed_steps) > MAX_STEPS:
            raise InvalidRequest(
                f"completed_steps has {len(self.completed_steps)} names, "
                f"the limit is {MAX_STEPS}"
            )
        for step in self.completed_steps:
            _check_step("completed_steps", step)
        for name in ("in_progress_step", "cursor_step"):
            if getattr(self, name) is not None:
                _check_step(name, getattr(self, name))
        if self.cursor is not None:
            if type(self.cursor) is not bytes:
                raise InvalidRequest("cursor must be bytes or None")
            if len(self.cursor) > MAX_CURSOR_BYTES:
                raise InvalidRequest(
                    f"cursor has {len(self.cursor)} bytes, "
                    f"the limit is {MAX_CURSOR_BYTES}"
                )
        check_int("schema_version", self.schema_version, 0, MAX_INT32)
        check_identifier(
            "step_set_hash", check_text("step_set_hash", self.step_set_hash)
        )
        for step, count in self.crashes_by_step.items():
            _check_step("crashes_by_step", step)
            check_int("crashes_by_step", count, 0, MAX_INT32)
        if self.remaining_weight is not None:
            check_int("remaining_weight", self.remaining_weight, 0, MAX_INT32)

    @property
    def last_completed_step(self) -> str | None:
        """The newest completed step."""
        return self.completed_steps[-1] if self.completed_steps else None

    def resumability(self, current_version: int, current_hash: str) -> Resumability:
        """Say whether code with this version and step set may go on from here."""
        if not self.step_set_hash or self.step_set_hash == current_hash:
            return Resumability.CONTINUE
        if self.schema_version == current_version:
            return Resumability.UNDECODABLE
        return Resumability.REMAPPED

    def to_json(self) -> str:
        """The stored form; cursor and remaining weight have columns of their own."""
        stored: dict[str, object] = {
            "completed": list(self.completed_steps),
            "crashes": dict(self.crashes_by_step),
            "cursor_step": self.cursor_step,
            "hash": self.step_set_hash,
            "in_progress": self.in_progress_step,
            "version": self.schema_version,
        }
        kept = {key: value for key, value in stored.items() if value}
        return json.dumps(
            kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )

    @classmethod
    def from_json(
        cls,
        text: str | None,
        *,
        cursor: bytes | None = None,
        remaining_weight: int | None = None,
    ) -> Checkpoint:
        """Read the stored form; from malformed JSON only the cursor is kept."""
        kept = cls(cursor=cursor, remaining_weight=remaining_weight)
        if not text:
            return kept
        try:
            stored = json.loads(text)
            return evolve(
                kept,
                completed_steps=stored.get("completed", ()),
                in_progress_step=stored.get("in_progress"),
                cursor_step=stored.get("cursor_step"),
                schema_version=stored.get("version", 0),
                step_set_hash=stored.get("hash", ""),
                crashes_by_step=stored.get("crashes", {}),
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            return kept

    def with_crash(self) -> Checkpoint:
        """The checkpoint after a lease was lost: the step in progress is charged."""
        if self.in_progress_step is None:
            return self
        counts = dict(self.crashes_by_step)
        crashes = counts.get(self.in_progress_step, 0) + 1
        # A handler may have written any count; it must not stop the reclaimer.
        counts[self.in_progress_step] = min(crashes, MAX_INT32)
        return evolve(self, crashes_by_step=counts)


def step_set_hash(steps: Sequence[str]) -> str:
    """Identity of a list of step names."""
    return fingerprint("steps", "\0".join(steps).encode())


@frozen(kw_only=True)
class Claim:
    """One admitted job with its lease; instants are store time."""

    envelope: Envelope
    lease_id: str
    fence: int
    expires_at_ms: int
    claimed_at_ms: int
    checkpoint: Checkpoint = Checkpoint()

    @property
    def lease_ref(self) -> LeaseRef:
        """The proof to show with every write."""
        return LeaseRef(self.envelope.id, self.lease_id, self.fence)


@frozen
class AdmissionUnit:
    """Claims that run as one call; a store returns one claim per unit."""

    claims: tuple[Claim, ...]

    @property
    def size(self) -> int:
        """Number of claims."""
        return len(self.claims)


_NOTHING_REFUSED: Mapping[str, int] = MappingProxyType({})


@frozen
class SentAway:
    """Jobs that an admission ended, since a full ceiling does not let them wait.

    Attributes:
        policy: "discard" for jobs archived, "cancel_incoming" for jobs cancelled.
    """

    queue: str
    policy: str
    count: int


@frozen
class AdmissionBatch(Sequence[AdmissionUnit]):
    """The answer of an admit, in the order of the decisions.

    Attributes:
        retry_after_ms: when the earliest blocked rate class reopens; None without one.
        refused: candidates refused in this call, by name of the policy.
        sent_away: what full ceilings ended in this call, by queue and policy.
    """

    units: tuple[AdmissionUnit, ...] = ()
    retry_after_ms: int | None = None
    refused: Mapping[str, int] = _NOTHING_REFUSED
    sent_away: tuple[SentAway, ...] = ()

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: Any) -> Any:
        return self.units[index]

    def __iter__(self) -> Iterator[AdmissionUnit]:
        return iter(self.units)

    @property
    def claims(self) -> list[Claim]:
        """All claims, in order."""
        return [claim for unit in self.units for claim in unit.claims]


def group_admission_claims(
    claims: Sequence[Claim], max_unit_size: int
) -> list[AdmissionUnit]:
    """Group claims of one kind for batch handlers, in order.

    Each claim joins the newest unit of its kind that has room, else it opens one.

    Args:
        claims: in decision order.
        max_unit_size: below 1 reads as 1.
    """
    units: list[list[Claim]] = []
    for claim in claims:
        for unit in reversed(units):
            if unit[0].envelope.kind == claim.envelope.kind:
                break
        else:
            unit = []
        if not unit or len(unit) >= max(1, max_unit_size):
            unit = []
            units.append(unit)
        unit.append(claim)
    return [AdmissionUnit(tuple(unit)) for unit in units]


@frozen(kw_only=True)
class Reclaimed:
    """A job taken back from a lease that ran out.

    Attributes:
        crash_attempt: leases that the job has lost so far.
        kind: for a log line, as `queue` and `worker`, which play no part in equality.
        worker: who had the lease.
    """

    job_id: str
    fingerprint: str
    crash_attempt: int
    quarantined: bool
    kind: str = field(default="", eq=False)
    queue: str = field(default="", eq=False)
    worker: str = field(default="", eq=False)


def check_blob(subject: str, schema_version: object, data: object) -> None:
    """Check version and size of a result or an output.

    Raises:
        InvalidRequest: the text names subject and limit.
    """
    check_int(f"{subject} schema_version", schema_version, 1, MAX_INT32)
    if type(data) is not bytes:
        raise InvalidRequest(f"{subject} must be bytes, got {type(data).__name__}")
    if len(data) > MAX_RESULT_BYTES:
        raise InvalidRequest(
            f"{subject} has {len(data)} bytes, the limit is {MAX_RESULT_BYTES}"
        )


@frozen
class JobResult:
    """Versioned bytes: the result of a job, or its output while it runs."""

    schema_version: int
    data: bytes

    def __attrs_post_init__(self) -> None:
        check_blob("result", self.schema_version, self.data)


@frozen
class JobOutput:
    """The newest output of a job; `fence` names the claim that wrote it."""

    schema_version: int
    data: bytes
    fence: int
    updated_at_ms: int


@frozen
class ProgressUpdate:
    """How far the work has come: `current` of `total`, with a short text."""

    current: int
    total: int
    message: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("current", "total"):
            check_int(f"progress {name}", getattr(self, name), -MAX_INT64, MAX_INT64)
        if self.total <= 0:
            raise InvalidRequest(f"progress total is {self.total}, it must be above 0")
        if not 0 <= self.current <= self.total:
            raise InvalidRequest(
                f"progress current is {self.current}, "
                f"allowed is 0 to total {self.total}"
            )
        if self.total > MAX_PROGRESS_TOTAL:
            raise InvalidRequest(
                f"progress total is {self.total}, the limit is {MAX_PROGRESS_TOTAL}"
            )
        if self.message is None:
            return
        if type(self.message) is not str:
            raise InvalidRequest("progress message must be str or None")
        size = len(self.message.encode("utf-8", "surrogatepass"))
        if size > MAX_PROGRESS_MESSAGE_BYTES:
            raise InvalidRequest(
                f"progress message has {size} bytes, "
                f"the limit is {MAX_PROGRESS_MESSAGE_BYTES}"
            )
        check_text("progress message", self.message)


@frozen
class JobProgress:
    """The newest progress of a job; `fence` names the claim that wrote it."""

    current: int
    total: int
    message: str | None
    fence: int
    updated_at_ms: int


def storable_text(text: str) -> str:
    """Replace what PostgreSQL text cannot hold, NUL and lone surrogates, by U+FFFD."""
    if text.isascii():
        return text.replace("\0", "\ufffd")
    replaced = text.replace("\0", "\ufffd")
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in replaced)


def cut_text(text: str, limit_bytes: int) -> str:
    """Cut to a number of bytes without splitting a character."""
    raw = text.encode()
    if len(raw) <= limit_bytes:
        return text
    return raw[:limit_bytes].decode(errors="ignore")


def _stored_error(error: str | None) -> str | None:
    if error is None:
        return None
    if not isinstance(error, str):
        raise InvalidRequest(f"error must be str or None, got {type(error).__name__}")
    return cut_text(storable_text(error), MAX_ERROR_BYTES)


def _stored_logs(logs: Sequence[str]) -> tuple[str, ...]:
    if logs == ():
        return ()
    _check_sequence("logs", logs)
    lines = tuple(logs)
    for line in lines:
        if not isinstance(line, str):
            raise InvalidRequest(f"logs must hold str, got {type(line).__name__}")
    return tuple(storable_text(line) for line in lines)


def _check_code(name: str, code: str) -> None:
    if type(code) is not str or not _CODE.fullmatch(code):
        raise InvalidRequest(
            f"{name} is {code!r}, allowed are up to {MAX_CODE_BYTES} of [A-Z0-9_]"
        )


def _check_reason(code: str) -> None:
    check_text("reason_code", code)
    if len(code.encode()) > MAX_CODE_BYTES:
        raise InvalidRequest(
            f"reason_code has {len(code.encode())} bytes, the limit is {MAX_CODE_BYTES}"
        )


@frozen(kw_only=True)
class Ack:
    """How one attempt ended; a value that exists can be stored.

    Attributes:
        lease: proof of the claim.
        outcome: any but `LEASE_LOST`, which belongs to the reclaimer.
        error: text for the history, cut to 8,192 bytes; NUL is replaced.
        delay_ms: for snooze required and above 0; for retry an override of the backoff
            (0 is none); for rate_limited how long the rate class pauses.
        logs: lines for the history entry.
        actual_weight: what the work really cost; None leaves the estimate.
        latency_ms: length of the attempt.
        error_code: up to 64 of [A-Z0-9_].
        reason_code: why a terminal state was reached, instead of the default.
        result: stored with a success, readable by `store.results`.
    """

    lease: LeaseRef
    outcome: Outcome
    error: str | None = field(default=None, converter=_stored_error)
    delay_ms: int | None = None
    logs: tuple[str, ...] = field(default=(), converter=_stored_logs)
    actual_weight: int | None = None
    latency_ms: int | None = None
    error_code: str = ""
    reason_code: str = ""
    result: JobResult | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.lease, LeaseRef):
            raise InvalidRequest("lease must be a LeaseRef")
        if not isinstance(self.outcome, Outcome):
            raise InvalidRequest(f"outcome must be an Outcome, got {self.outcome!r}")
        if self.outcome is Outcome.LEASE_LOST:
            raise InvalidRequest("outcome lease_lost belongs to the reclaimer")
        if self.delay_ms is not None:
            check_int("delay_ms", self.delay_ms, 0, MAX_RELATIVE_MS)
        if self.outcome is Outcome.SNOOZE and not self.delay_ms:
            raise InvalidRequest("outcome snooze needs delay_ms above 0")
        for name in ("actual_weight", "latency_ms"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_INT32)
        _check_code("error_code", self.error_code)
        _check_reason(self.reason_code)
        if self.result is not None and not isinstance(self.result, JobResult):
            raise InvalidRequest("result must be a JobResult or None")
        if self.result is not None and self.outcome is not Outcome.SUCCESS:
            raise InvalidRequest("result needs outcome success")
