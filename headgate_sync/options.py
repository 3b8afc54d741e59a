"""Options of a job: what a task, a client and a call may say, and which one wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypedDict, TypeVar

import attrs
from attrs import frozen

from headgate_sync.binding import RetryPolicy
from headgate_sync.durations import duration_ms, instant_ms
from headgate_sync.envelope import (
    UNIQUE_REPLACE_MAX_ATTEMPTS,
    UNIQUE_REPLACE_PAYLOAD,
    UNIQUE_REPLACE_PRIORITY,
    UNIQUE_REPLACE_SCHEDULED_AT,
    Envelope,
)
from headgate_sync.errors import InvalidRequest
from headgate_sync.identity import Identity, check_identity
from headgate_sync.templates import parse_template
from headgate_sync.validation import listed

Duration = timedelta | str
Text = str | Callable[..., str]
OptionsT = TypeVar("OptionsT", bound="JobOptions")

REPLACEABLE = {
    "payload": UNIQUE_REPLACE_PAYLOAD,
    "scheduled_at": UNIQUE_REPLACE_SCHEDULED_AT,
    "priority": UNIQUE_REPLACE_PRIORITY,
    "max_attempts": UNIQUE_REPLACE_MAX_ATTEMPTS,
}


class Unset(Enum):
    """The value of an option that nobody set, so that None can mean "none"."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET


def _names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else listed("unique replace", names)


def _off_or_ms(name: str, value: object) -> int:
    """A duration, or 0 for "off": zero is the same in every unit."""
    return 0 if value == 0 and type(value) is int else duration_ms(name, value)


@frozen
class Unique:
    """A unique key with its rules.

    Attributes:
        key: text or template, True for a digest of the payload, or a callable that gets
            the payload and returns the text.
        window: 0 holds the key while the job lives, a duration for this long from the
            enqueue.
        replace: what a duplicate writes to the waiting holder: any of "payload",
            "scheduled_at", "priority", "max_attempts".
        debounce: each duplicate moves the waiting holder this far into the future and
            replaces its payload; 0 is off.
        exclude_kind: the key is shared by all kinds.
    """

    key: Text | Literal[True]
    window: Duration | int = 0
    replace: tuple[str, ...] = attrs.field(default=(), converter=_names_of)
    debounce: Duration | int = 0
    exclude_kind: bool = False

    def __attrs_post_init__(self) -> None:
        if self.key is not True:
            _check_text("unique", self.key)
        for name in self.replace:
            if name not in REPLACEABLE:
                raise InvalidRequest(
                    f"unique: cannot replace {name!r}, only {', '.join(REPLACEABLE)}"
                )
        self.fields()

    def fields(self) -> dict[str, Any]:
        """The envelope fields beside the key."""
        return {
            "unique_window_ms": _off_or_ms("unique window", self.window),
            "unique_replace": sum(REPLACEABLE[name] for name in set(self.replace)),
            "unique_debounce_ms": _off_or_ms("unique debounce", self.debounce),
            "unique_exclude_kind": self.exclude_kind,
        }


def _check_text(name: str, value: object) -> None:
    if isinstance(value, str):
        parse_template(value)
    elif not callable(value):
        raise InvalidRequest(
            f"{name} must be text or a callable, got {type(value).__name__}"
        )


@frozen(kw_only=True)
class JobOptions:
    """Options that a task may declare, a producer may default and a call may set.

    Durations are a `timedelta` or text such as "30s". None switches an option off.

    Attributes:
        queue: where the job waits.
        max_attempts: failures after which the job is archived.
        priority: higher first, within one queue.
        timeout: limit of one attempt.
        deadline: limit over all attempts: an aware `datetime`, or a duration from the
            enqueue.
        retention: how long the finished job is kept; None deletes it on success.
        partition: the fairness group; text, template or callable.
        rate_class: name of the fleet-wide budget; text, template or callable.
        weight: estimated cost in units of the rate class, 1 or more.
        tags: labels.
        headers: text pairs.
        sticky_worker: the only worker that may run the job.
        unique: template, callable, True or `Unique`.
    """

    queue: str | Unset = UNSET
    max_attempts: int | Unset = UNSET
    priority: int | Unset = UNSET
    timeout: Duration | Unset | None = UNSET
    deadline: Duration | datetime | Unset | None = UNSET
    retention: Duration | Unset | None = UNSET
    partition: Text | Unset | None = UNSET
    rate_class: Text | Unset | None = UNSET
    weight: int | Unset = UNSET
    tags: Sequence[str] | Unset = UNSET
    headers: Mapping[str, str] | Unset = UNSET
    sticky_worker: str | Unset | None = UNSET
    unique: Text | bool | Unique | Unset | None = UNSET

    def __attrs_post_init__(self) -> None:
        for name in ("partition", "rate_class"):
            value = getattr(self, name)
            if value is not None and value is not UNSET:
                _check_text(name, value)
        for name in ("weight", "max_attempts"):
            if getattr(self, name) == 0:
                raise InvalidRequest(f"{name} is 0, the minimum is 1")
        if isinstance(self.max_attempts, int) and self.max_attempts < 0:
            raise InvalidRequest(
                f"max_attempts is {self.max_attempts}, the minimum is 1"
            )
        unique_of(self.unique)
        # Every other rule belongs to the envelope; a sample of one applies it now.
        Envelope(id="sample", kind="sample", **envelope_fields(self.given))

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The options that are set, by name."""
        return {
            name: value
            for name in option_names(type(self))
            if (value := getattr(self, name)) is not UNSET
        }


@frozen(kw_only=True)
class TaskOptions(JobOptions):
    """Options of a task, or defaults of a client.

    Attributes:
        retry: delay before the next attempt: a tenacity wait object, or a callable.
            Among a facade's defaults it is that of the workers made there.
    """

    retry: RetryPolicy | Unset | None = UNSET

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if (
            self.retry is not UNSET
            and self.retry is not None
            and not callable(self.retry)
        ):
            raise InvalidRequest(
                f"retry must be callable, got {type(self.retry).__name__}"
            )


@frozen(kw_only=True)
class CallOptions(JobOptions):
    """Options of one call.

    Attributes:
        id: the caller's own id for the job; a fresh one otherwise.
        identity: who enqueues, for the client's authorizer.
        delay: earliest start, from the enqueue.
        run_at: earliest start, as an aware `datetime`.
        pending: durable, but not to run until an operator promotes it.
    """

    id: str | Unset | None = UNSET
    identity: Identity | Unset | None = UNSET
    delay: Duration | Unset | None = UNSET
    run_at: datetime | Unset | None = UNSET
    pending: bool | Unset = UNSET

    def __attrs_post_init__(self) -> None:
        if self.id == "":
            raise InvalidRequest("id must not be empty")
        if self.identity is not UNSET:
            check_identity(self.identity)
        if self.delay not in (UNSET, None) and self.run_at not in (UNSET, None):
            raise InvalidRequest("delay and run_at exclude each other")
        super().__attrs_post_init__()


# The same as keywords, so that editors know them and type checkers check them.


class JobKeywords(TypedDict, total=False):
    """`JobOptions` as keywords."""

    queue: str
    max_attempts: int
    priority: int
    timeout: Duration | None
    deadline: Duration | datetime | None
    retention: Duration | None
    partition: Text | None
    rate_class: Text | None
    weight: int
    tags: Sequence[str]
    headers: Mapping[str, str]
    sticky_worker: str | None
    unique: Text | bool | Unique | None


class TaskKeywords(JobKeywords, total=False):
    """`TaskOptions` as keywords."""

    retry: RetryPolicy | None


class CallKeywords(JobKeywords, total=False):
    """`CallOptions` as keywords."""

    id: str | None
    identity: Identity | None
    delay: Duration | None
    run_at: datetime | None
    pending: bool


def option_names(kind: type[JobOptions]) -> tuple[str, ...]:
    """The options that a class has."""
    return tuple(field.name for field in attrs.fields(kind))


def make_options(
    kind: type[OptionsT],
    where: str,
    options: Mapping[str, Any],
    *,
    also: Sequence[str] = (),
) -> OptionsT:
    """Build options from keywords.

    Raises:
        InvalidRequest: an unknown option, with the known ones, or a bad value; the text
            begins with `where`. `also` names options that another reader takes.
    """
    if not options and kind is CallOptions:
        return NO_OPTIONS  # type: ignore[return-value]
    known = option_names(kind)
    for name in options:
        if name not in known:
            raise InvalidRequest(
                f"{where}: unknown option {name}; "
                f"known are {', '.join((*known, *also))}"
            )
    try:
        return kind(**options)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}") from None


def merged(layers: Iterable[JobOptions]) -> dict[str, Any]:
    """One value per option, from the first layer that sets it."""
    values: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.given.items():
            values.setdefault(name, value)
    return values


def unique_of(value: object) -> Unique | None:
    """Read the option `unique`; None and False are off."""
    if value is UNSET or value is None or value is False:
        return None
    return value if isinstance(value, Unique) else Unique(value)  # type: ignore[arg-type]


_PLAIN = ("queue", "max_attempts", "priority", "weight", "tags", "headers", "pending")


def envelope_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The envelope fields of merged options, but for those filled from the payload."""
    fields = {name: values[name] for name in _PLAIN if name in values}
    if values.get("sticky_worker") is not None:
        fields["sticky_worker"] = values["sticky_worker"]
    for name, minimum_ms in (("timeout", 1), ("retention", 0), ("delay", 0)):
        if values.get(name) is not None:
            fields[f"{name}_ms"] = duration_ms(
                name, values[name], minimum_ms=minimum_ms
            )
    deadline = values.get("deadline")
    if isinstance(deadline, datetime):
        fields["deadline_ms"] = instant_ms("deadline", deadline)
    elif deadline is not None:
        fields["deadline_in_ms"] = duration_ms("deadline", deadline)
    if values.get("run_at") is not None:
        fields["scheduled_at_ms"] = instant_ms("run_at", values["run_at"])
    return fields


def check_defaults(defaults: object) -> None:
    """Refuse what is no `TaskOptions`.

    Raises:
        InvalidRequest: the text names the type.
    """
    if not isinstance(defaults, TaskOptions):
        raise InvalidRequest(
            f"defaults must be TaskOptions, got {type(defaults).__name__}"
        )


NO_OPTIONS = CallOptions()
NO_DEFAULTS = TaskOptions()
