"""Handler parameters that the worker fills in, found by their annotations."""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NewType, TypeVar, Union

from attrs import frozen

from headgate_sync.callables import is_asynchronous
from headgate_sync.envelope import Envelope
from headgate_sync.errors import ExtractionError, InvalidRequest
from headgate_sync.loggers import guarded
from headgate_sync.signals import Control

if TYPE_CHECKING:
    from headgate_sync.context import JobContext

logger = guarded(__name__)

T = TypeVar("T")

TaskId = NewType("TaskId", str)
"""Annotate a handler parameter with it to receive the id of the job."""


@frozen
class Attempt:
    """Annotate a handler parameter with it to receive how often the job ran before.

    Attributes:
        attempt: failures that the handler returned; 0 in the first run.
        crash_attempt: leases lost.
        max_attempts: failures after which the job is archived.
    """

    attempt: int
    crash_attempt: int
    max_attempts: int


@frozen(kw_only=True)
class WorkerInfo:
    """Annotate a handler parameter with it to receive who runs the job."""

    worker_id: str
    queues: tuple[str, ...]
    capacity: int


@frozen(kw_only=True)
class Metadata:
    """Annotate a handler parameter with it to receive what surrounds the payload."""

    queue: str
    partition_key: str
    rate_class: str
    weight: int
    priority: int
    schema_version: int
    headers: Mapping[str, str]


@frozen
class Meta:
    """`Annotated[T, Meta(function)]`: a parameter made from the `Metadata` alone."""

    function: Callable[[Metadata], Any]


@frozen
class Depends:
    """`Annotated[T, Depends(function)]`: a parameter that another function makes.

    The function may itself take parameters that the worker fills in. It is called once
    per attempt, however many parameters ask for it. A generator function yields the
    value; the rest of it runs after the handler and before the outcome is settled, with
    the handler's exception raised at its `yield`.
    """

    function: Callable[..., Any]


class Data:
    """`Annotated[T, Data]`: the attempt's value of exactly this type, or the worker's.

    The values are those of `JobContext.set_data` and `WorkerConfig.extensions`.
    """


@frozen(kw_only=True)
class Given:
    """What injected parameters are made from; one per attempt."""

    context: JobContext
    envelope: Envelope
    worker: WorkerInfo


Injector = Callable[[Given], object]


class Dependencies:
    """What was opened for one call of a handler, and how to end it."""

    def __init__(self) -> None:
        self._made: dict[Callable[..., Any], object] = {}
        self._exits: list[Callable[..., object]] = []

    def get(self, function: Callable[..., Any], call: Callable[[], Any]) -> object:
        """The value of a function, made at the first call."""
        if function not in self._made:
            value = call()
            if inspect.isgeneratorfunction(function):
                value = self.enter(contextlib.contextmanager(lambda: value)())
            self._made[function] = value
        return self._made[function]

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager, which `close` leaves."""
        value = manager.__enter__()
        self._exits.append(manager.__exit__)
        return value

    def close(self, error: BaseException | None, jobs: Sequence[Envelope]) -> None:
        """Leave what was entered, the newest first.

        Each sees the exception of what it surrounds. To suppress one changes nothing:
        the call has failed, and what is outside must not commit it.

        Args:
            error: the handler's. It says more than a later one, which is then logged.
            jobs: those of the call, for the log.

        Raises:
            BaseException: one of them failed, after a handler that did not.
        """
        try:
            self._leave(error)
        except BaseException as other:
            if error is None:
                raise
            if other is not error:
                logger.exception(
                    "job %s: a dependency or context manager failed after its handler",
                    ", ".join(f"{job.id} (queue {job.queue})" for job in jobs),
                )

    def _leave(self, error: BaseException | None) -> None:
        # No `ExitStack`: it hides a suppressed exception from those outside, and its
        # frame keeps what they raise, which is then left for the collector.
        if not self._exits:
            return
        leave = self._exits.pop()
        try:
            if error is None:
                leave(None, None, None)
            else:
                leave(type(error), error, error.__traceback__)
        except BaseException as other:
            self._leave(other)
            raise
        self._leave(error)


def _attempt(given: Given) -> Attempt:
    envelope = given.envelope
    return Attempt(envelope.attempt, envelope.crash_attempt, envelope.max_attempts)


def _metadata(given: Given) -> Metadata:
    envelope = given.envelope
    return Metadata(
        queue=envelope.queue,
        partition_key=envelope.partition_key,
        rate_class=envelope.rate_class,
        weight=envelope.weight,
        priority=envelope.priority,
        schema_version=envelope.schema_version,
        headers=dict(envelope.headers),
    )


def injector_of(
    where: str, annotation: object, scope: Mapping[str, object]
) -> Injector | None:
    """How to fill a parameter with this annotation; None when it is payload.

    `X | None` counts as X, so that a handler can also be called without a worker.

    Args:
        where: task and parameter, for error texts.
        scope: names that annotations of a dependency may use besides its own.

    Raises:
        InvalidRequest: a dependency has a parameter that nothing fills.
        NameError: an annotation of a dependency cannot be evaluated yet.
    """
    # The context and the client stand on the worker's side, which needs this module.
    from headgate_sync.client.bound import JobClient
    from headgate_sync.context import JobContext

    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(members) == 1:
            annotation = members[0]
    if typing.get_origin(annotation) is typing.Annotated:
        kind, *marks = typing.get_args(annotation)
        for mark in marks:
            if mark is Data or isinstance(mark, Data):
                return _data(kind)
            if isinstance(mark, Meta):
                return _meta(mark)
            if isinstance(mark, Depends):
                return _depends(where, mark.function, scope, ())
    injectors: tuple[tuple[object, Injector], ...] = (
        (JobContext, lambda given: given.context),
        (JobClient, lambda given: given.context.client),
        (Envelope, lambda given: given.envelope),
        (Attempt, _attempt),
        (Metadata, _metadata),
        (TaskId, lambda given: TaskId(given.envelope.id)),
        (WorkerInfo, lambda given: given.worker),
    )
    return next((fill for kind, fill in injectors if kind is annotation), None)


def _data(kind: Any) -> Injector:
    def fill(given: Given) -> object:
        try:
            return given.context.data(kind)
        except LookupError as error:
            raise ExtractionError("data", str(error)) from error

    return fill


def _meta(mark: Meta) -> Injector:
    def fill(given: Given) -> object:
        try:
            return mark.function(_metadata(given))
        except Control:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise ExtractionError("meta", text) from error

    return fill


def _depends(
    where: str,
    function: Callable[..., Any],
    scope: Mapping[str, object],
    above: tuple[Callable[..., Any], ...],
) -> Injector:
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or is_asynchronous(function):
        raise InvalidRequest(f"{where}: {name} is no plain function to depend on")
    if function in above:
        raise InvalidRequest(f"{where}: {name} depends on itself")
    fills = _fills(f"{where}: {name}", function, scope, (*above, function))

    def fill(given: Given) -> object:
        def call() -> object:
            return function(**{key: make(given) for key, make in fills.items()})

        try:
            return given.context.dependencies().get(function, call)
        except (Control, ExtractionError):
            raise
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"
            raise ExtractionError("depends", text) from error

    return fill


def _fills(
    where: str,
    function: Callable[..., Any],
    scope: Mapping[str, object],
    above: tuple[Callable[..., Any], ...],
) -> dict[str, Injector]:
    hints = typing.get_type_hints(function, localns=dict(scope), include_extras=True)
    fills: dict[str, Injector] = {}
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints.get(parameter.name, parameter.empty)
        nested = next(
            (m for m in typing.get_args(annotation)[1:] if isinstance(m, Depends)), None
        )
        inside = f"{where}: {parameter.name}"
        if nested is not None:
            fill: Injector | None = _depends(inside, nested.function, scope, above)
        else:
            fill = injector_of(inside, annotation, scope)
        if fill is not None:
            fills[parameter.name] = fill
        elif parameter.default is parameter.empty:
            raise InvalidRequest(f"{inside}: nothing fills this parameter")
    return fills
