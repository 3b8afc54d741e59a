"""`Schedule`: a job that comes again, and what became of each of its ticks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from attrs import Attribute, evolve, field, fields, frozen

from headgate_sync.cron import MAX_TICKS, validate
from headgate_sync.envelope import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    DEFAULT_SCHEMA_VERSION,
    DEFAULT_WEIGHT,
    MAX_INT32,
    MAX_INT64,
    Envelope,
    check_bytes,
    check_int,
    check_text,
    fingerprint,
)
from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    StoreError,
    StoreUnavailable,
)

MAX_SCHEDULE_ID_BYTES = 128
MAX_REASON_BYTES = 64
MAX_SCHEDULE_EVENTS = 100

_ID = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-")


class OnMissed(StrEnum):
    """Which ticks fire when several are due."""

    SKIP = "skip"
    RUN_ONCE = "run_once"
    BACKFILL = "backfill"


class TickOutcome(StrEnum):
    """What became of a tick."""

    ENQUEUED = "enqueued"
    DEDUPLICATED = "deduplicated"
    FAILED = "failed"
    SKIPPED = "skipped"


def check_no_zone(options: Mapping[str, Any]) -> None:
    """Refuse the option that other schedulers have for what the spec says here.

    Raises:
        InvalidRequest: it was given; the text shows where the zone goes.
    """
    for name in ("tz", "timezone"):
        if name in options:
            raise InvalidRequest(
                f"unknown option {name}: the zone is a part of the spec, as in "
                "'CRON_TZ=Europe/Berlin 0 9 * * *'"
            )


class FireStatus(StrEnum):
    """How a call of `fire_ticks` ended."""

    FIRED = "fired"
    STOPPED = "stopped"
    LOST = "lost"


@frozen
class PeriodicOrigin:
    """The schedule and the tick that a job comes from."""

    schedule_id: str
    tick_ms: int

    @classmethod
    def of(cls, schedule_id: str, tick_ms: int) -> PeriodicOrigin | None:
        """The origin of a job with these two fields; None without a schedule."""
        return cls(schedule_id, tick_ms) if schedule_id else None


def check_schedule_id(schedule_id: object) -> str:
    """Check the id of a schedule.

    Raises:
        InvalidRequest: the text names the id and the whole rule.
    """
    text = check_text("schedule id", schedule_id)
    if not 1 <= len(text) <= MAX_SCHEDULE_ID_BYTES or not _ID.issuperset(text):
        raise InvalidRequest(
            f"invalid schedule id `{text}`: 1-{MAX_SCHEDULE_ID_BYTES} characters "
            "of [A-Za-z0-9_.:-]"
        )
    return text


def _on_missed(value: object) -> OnMissed:
    try:
        return OnMissed(value)  # type: ignore[arg-type]
    except ValueError:
        allowed = ", ".join(OnMissed)
        raise InvalidRequest(f"on_missed is {value!r}, allowed is {allowed}") from None


def _queue(queue: str) -> str:
    return DEFAULT_QUEUE if queue == "" else queue


def _tags(tags: Iterable[str]) -> tuple[str, ...]:
    return tags if isinstance(tags, str) else tuple(tags)  # type: ignore[return-value]


@frozen(kw_only=True)
class ScheduleDef:
    """What a schedule shall enqueue, and when.

    Attributes:
        spec: kept in its canonical form; see `cron.validate`.
        on_missed: "skip" and "run_once" fire the newest of several due ticks,
            "backfill" the `backfill_limit` newest, each as a job of its own.
        backfill_limit: 0 to 1,000; 0 counts as 1.
        kind, payload, schema_version, queue, partition_key, rate_class, weight,
            priority, max_attempts, timeout_ms, retention_ms, headers, tags,
            sticky_worker: of each job, as in `Envelope`.

    Raises:
        SpecError: the spec cannot be used.
        InvalidRequest: another field breaks a rule; the text names it.
    """

    kind: str
    spec: str = field(converter=validate)
    payload: bytes = b""
    schema_version: int = DEFAULT_SCHEMA_VERSION
    queue: str = field(default=DEFAULT_QUEUE, converter=_queue)
    partition_key: str = ""
    rate_class: str = ""
    weight: int = DEFAULT_WEIGHT
    priority: int = 0
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    timeout_ms: int = 0
    retention_ms: int = 0
    headers: Mapping[str, str] = field(factory=dict)
    tags: tuple[str, ...] = field(default=(), converter=_tags)
    sticky_worker: str = ""
    on_missed: OnMissed = field(default=OnMissed.SKIP, converter=_on_missed)
    backfill_limit: int = 0

    def __attrs_post_init__(self) -> None:
        check_text("kind", self.kind)
        check_bytes("payload", self.payload)
        # In an envelope 0 stands for the default; here it would be read differently.
        for name in ("schema_version", "weight", "max_attempts"):
            check_int(name, getattr(self, name), 1, MAX_INT32)
        check_int("backfill_limit", self.backfill_limit, 0, MAX_TICKS)
        # Every other rule belongs to the envelope. What it froze and sorted is kept, so
        # that a sent and a stored schedule are equal.
        sample = self.envelope(id="schedule")
        object.__setattr__(self, "headers", sample.headers)
        object.__setattr__(self, "tags", sample.tags)

    def envelope(self, **others: Any) -> Envelope:
        """A job as this enqueues it.

        Args:
            **others: its id, and what distinguishes it besides.

        Raises:
            InvalidRequest: the stored schedule breaks a rule of jobs.
        """
        return Envelope(
            **{name: getattr(self, name) for name in JOB_FIELDS},
            fingerprint=fingerprint(self.kind, self.payload),
            **others,
        )

    @classmethod
    def from_envelope(cls, envelope: Envelope, **others: Any) -> ScheduleDef:
        """The definition whose jobs are like this one.

        Args:
            envelope: its id is not looked at.
            **others: spec, on_missed and backfill_limit.

        Raises:
            InvalidRequest: the job has what a schedule cannot give to each of its jobs:
                a unique key, a deadline, a start, or pending.
        """
        carried = {
            "unique": envelope.unique_key is not None,
            "deadline": envelope.deadline_ms or envelope.deadline_in_ms,
            "run_at or delay": envelope.scheduled_at_ms or envelope.delay_ms,
            "pending": envelope.pending,
        }
        for name, given in carried.items():
            if given:
                raise InvalidRequest(
                    f"a schedule cannot carry the option {name}; "
                    "switch it off for its jobs with None"
                )
        return cls(**{name: getattr(envelope, name) for name in JOB_FIELDS}, **others)

    def preview(self, schedule_id: str) -> Envelope:
        """The job that stands for all of a schedule's where rules look at it."""
        return self.envelope(id=f"schedule:{schedule_id}")

    @property
    def cap(self) -> int:
        """How many of the due ticks fire at most."""
        if self.on_missed is OnMissed.BACKFILL:
            return max(1, self.backfill_limit)
        return 1

    def same_definition(self, other: ScheduleDef) -> bool:
        """Whether both enqueue the same at the same instants."""
        return all(getattr(self, n) == getattr(other, n) for n in DEFINITION_FIELDS)


# The fields that go into each job as they are.
JOB_FIELDS = (
    "kind", "payload", "schema_version", "queue", "partition_key", "rate_class",
    "weight", "priority", "max_attempts", "timeout_ms", "retention_ms", "headers",
    "tags", "sticky_worker",
)  # fmt: skip
DEFINITION_FIELDS = tuple(attribute.name for attribute in fields(ScheduleDef))


def _check_id(_: object, __: Attribute[str], value: str) -> None:
    check_schedule_id(value)


@frozen(kw_only=True)
class Schedule(ScheduleDef):
    """A schedule as it is stored.

    Attributes:
        id: 1 to 128 characters of `[A-Za-z0-9_.:-]`.
        next_run_ms: the next tick that has not fired.
        last_enqueued_ms: store time of the last advance; None before the first.
        paused: nothing fires. None, for `upsert_schedule` only, keeps what is stored.
    """

    id: str = field(validator=_check_id)
    next_run_ms: int
    last_enqueued_ms: int | None = None
    paused: bool | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_int("next_run_ms", self.next_run_ms, 1, MAX_INT64)
        if type(self.paused) not in (bool, type(None)):
            raise InvalidRequest("paused must be bool or None")

    @classmethod
    def from_stored(cls, values: Iterable[object]) -> Self:
        """Rebuild a value from a row, in the order of `SCHEDULE_FIELDS`.

        Nothing is checked: the row may have been changed by hand, and one that cannot
        be used must not hide the others.
        """
        schedule = object.__new__(cls)
        for name, value in zip(SCHEDULE_FIELDS, values, strict=True):
            object.__setattr__(schedule, name, value)
        return schedule

    def with_state(self, **changes: object) -> Self:
        """The same schedule with other fields, as unchecked as `from_stored`."""
        values = [changes.get(name, getattr(self, name)) for name in SCHEDULE_FIELDS]
        return self.from_stored(values)

    @classmethod
    def of(cls, schedule_id: str, definition: ScheduleDef, **others: Any) -> Self:
        """A definition under an id, with its state."""
        defined = {name: getattr(definition, name) for name in DEFINITION_FIELDS}
        return cls(id=schedule_id, **defined, **others)

    def job(self, tick_ms: int, *, least_retention_ms: int = 0) -> Envelope:
        """The job of one tick; its id and its unique key name schedule and tick.

        Raises:
            InvalidRequest: the stored schedule breaks a rule of jobs.
        """
        made = self.envelope(
            id=f"sched-{self.id}-{tick_ms}",
            unique_key=f"sched:{self.id}:{tick_ms}".encode(),
            periodic_schedule_id=self.id,
            periodic_tick_ms=tick_ms,
        )
        if made.retention_ms >= least_retention_ms:
            return made
        return evolve(made, retention_ms=least_retention_ms)


SCHEDULE_FIELDS = tuple(attribute.name for attribute in fields(Schedule))


@frozen(kw_only=True)
class ScheduleEvent:
    """One line of the audit trail of a schedule.

    Attributes:
        event_id, recorded_at_ms: given by the store when it takes the event in.
        job_id: the job that stands for the tick; "" when there is none.
        reason: a stable word of at most 64 bytes, never text of an error.
    """

    schedule_id: str = field(validator=_check_id)
    tick_ms: int
    job_id: str
    outcome: TickOutcome = field(converter=TickOutcome)
    reason: str
    event_id: int = 0
    recorded_at_ms: int = 0

    def __attrs_post_init__(self) -> None:
        check_int("tick_ms", self.tick_ms, 1, MAX_INT64)
        check_text("job_id", self.job_id)
        size = len(check_text("reason", self.reason).encode())
        if size > MAX_REASON_BYTES:
            raise InvalidRequest(
                f"reason has {size} bytes, the limit is {MAX_REASON_BYTES}"
            )


@frozen
class FiredTick:
    """What became of one tick."""

    tick_ms: int
    job_id: str
    outcome: TickOutcome
    reason: str

    @property
    def is_done(self) -> bool:
        """Whether the schedule may go on; a tick that failed stays due."""
        return self.outcome is not TickOutcome.FAILED

    def event(self, schedule_id: str) -> ScheduleEvent:
        """The line of the audit trail."""
        return ScheduleEvent(
            schedule_id=schedule_id,
            tick_ms=self.tick_ms,
            job_id=self.job_id,
            outcome=self.outcome,
            reason=self.reason,
        )


@frozen
class FireResult:
    """The answer of `fire_ticks`.

    Attributes:
        status: "fired"; "stopped" at a tick that stays due; "lost" when the schedule is
            not at `from_ms`, paused, gone, or just being fired by somebody else.
        ticks: in order, up to the one that stopped the call.
    """

    status: FireStatus
    ticks: tuple[FiredTick, ...] = ()


def fired(tick: Envelope, refusal: StoreError | None) -> FiredTick:
    """What the store's answer to the enqueue of a tick means for its schedule."""
    job_id, outcome = tick.id, TickOutcome.FAILED
    match refusal:
        case None:
            outcome, reason = TickOutcome.ENQUEUED, "accepted"
        case DuplicateJob():
            job_id = refusal.existing_id
            outcome, reason = TickOutcome.DEDUPLICATED, "unique_key"
        case IdConflict():
            job_id = refusal.job_id
            outcome, reason = TickOutcome.DEDUPLICATED, "id_conflict"
        case FingerprintQuarantined():
            outcome, reason = TickOutcome.SKIPPED, "quarantined"
        case Backpressure():
            reason = "backpressure"
        case StoreUnavailable():
            reason = "store_unavailable"
        case InvalidRequest():
            reason = "invalid_request"
        case _:
            reason = "store_error"
    return FiredTick(tick.periodic_tick_ms, job_id, outcome, reason)


def check_fire(
    schedule_id: str, from_ms: int, to_ms: int, ticks: Sequence[Envelope]
) -> None:
    """Check the arguments of `fire_ticks`.

    Raises:
        InvalidRequest: no tick or too many, ticks of another schedule, out of order, or
            at or after the next anchor.
    """
    check_schedule_id(schedule_id)
    check_int("from_ms", from_ms, 1, MAX_INT64)
    check_int("to_ms", to_ms, 1, MAX_INT64)
    if not 1 <= len(ticks) <= MAX_TICKS:
        raise InvalidRequest(f"ticks has {len(ticks)} entries, allowed is 1 to 1,000")
    for tick in ticks:
        if not isinstance(tick, Envelope):
            raise InvalidRequest(f"ticks must hold Envelope, got {type(tick).__name__}")
    instants = [tick.periodic_tick_ms for tick in ticks]
    if any(tick.periodic_schedule_id != schedule_id for tick in ticks):
        raise InvalidRequest(f"ticks must be jobs of schedule {schedule_id}")
    if instants != sorted(set(instants)):
        raise InvalidRequest("ticks must be in order, each once")
    if to_ms <= instants[-1]:
        raise InvalidRequest(f"to_ms is {to_ms}, it must be after the last tick")
