"""What the worker gets from the registry: how to turn one claimed job into one call."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NewType, Union

from attrs import frozen

from headgate_sync.codec import Codec
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    CodecError,
    ExtractionError,
    InvalidRequest,
    MalformedPayload,
)
from headgate_sync.lease import JobResult
from headgate_sync.scalars import SIMPLE, Form, Mismatch

if TYPE_CHECKING:
    from headgate_sync.context import JobContext

RetryPolicy = Callable[[Any], Any]
FailureTest = Callable[[Exception], bool]

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
class Given:
    """What injected parameters are made from; one per attempt."""

    context: JobContext
    envelope: Envelope
    worker: WorkerInfo


Injector = Callable[[Given], object]


def _attempt(given: Given) -> Attempt:
    envelope = given.envelope
    return Attempt(envelope.attempt, envelope.crash_attempt, envelope.max_attempts)


def injector_of(annotation: object) -> Injector | None:
    """How to fill a parameter with this annotation; None when it is payload.

    `X | None` counts as X, so that a handler can also be called without a worker.
    """
    # The context and the client stand on the worker's side, which needs this module.
    from headgate_sync.client.bound import JobClient
    from headgate_sync.context import JobContext

    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(members) == 1:
            annotation = members[0]
    injectors: tuple[tuple[object, Injector], ...] = (
        (JobContext, lambda given: given.context),
        (JobClient, lambda given: given.context.client),
        (Envelope, lambda given: given.envelope),
        (Attempt, _attempt),
        (TaskId, lambda given: TaskId(given.envelope.id)),
        (WorkerInfo, lambda given: given.worker),
    )
    return next((fill for kind, fill in injectors if kind is annotation), None)


@frozen(kw_only=True)
class Binding:
    """A kind with its handler.

    Attributes:
        kind: main kind of the task, also when the job came under an alias.
        name: the handler's full name, for logs.
        version: present schema version of the task; 1 for a handler of raw envelopes.
        retry: delay before the next attempt; None leaves it to the worker.
        is_failure: whether an exception consumes an attempt; None is the worker's rule.
        declares_result: the handler is annotated to return something.
    """

    kind: str
    name: str
    version: int
    retry: RetryPolicy | None
    is_failure: FailureTest | None
    declares_result: bool
    _function: Callable[..., Any]
    _decode: Callable[[Envelope], dict[str, object]]
    _injectors: Mapping[str, Injector]
    _result: Form
    _result_codec: Codec

    def decode(self, envelope: Envelope) -> dict[str, object]:
        """The payload as arguments of the handler, upcast to the present version.

        Raises:
            CodecError: the payload cannot become the handler's values; its cause is
                what the codec, a class or an upcaster raised.
        """
        try:
            return self._decode(envelope)
        except CodecError:
            raise
        except Mismatch as mismatch:
            raise MalformedPayload(f"task {self.kind}: {mismatch}") from mismatch
        except Exception as error:
            raise MalformedPayload(
                f"task {self.kind}: {type(error).__name__}"
            ) from error

    def inject(self, given: Given) -> dict[str, object]:
        """The arguments that do not come from the payload, filled from left to right.

        Raises:
            ExtractionError: one could not be filled; the handler must not be entered.
        """
        filled: dict[str, object] = {}
        for name, fill in self._injectors.items():
            try:
                filled[name] = fill(given)
            except Exception as error:
                raise ExtractionError("parameter", f"{name}: {error}") from error
        return filled

    def call(
        self, arguments: Mapping[str, object], injected: Mapping[str, object]
    ) -> object:
        """Run the handler; whatever it raises comes out unchanged."""
        return self._function(**arguments, **injected)

    def encode_result(self, value: object) -> JobResult | None:
        """What to store of a return value: None for None, bytes as they are.

        Raises:
            InvalidRequest: the value is none of the handler's annotation, or too large.
        """
        if value is None:
            return None
        if isinstance(value, bytes):
            return JobResult(self.version, value)
        try:
            data = self._result_codec.encode(self._result.encode(value))
        except (Mismatch, InvalidRequest, RecursionError) as error:
            raise InvalidRequest(f"task {self.kind}: result: {error}") from error
        return JobResult(self.version, data)

    def decode_result(self, result: JobResult) -> object:
        """Read what `encode_result` wrote.

        Raises:
            MalformedPayload: the bytes are none of this handler's results.
        """
        if self._result is SIMPLE[bytes]:
            return result.data
        try:
            return self._result.decode(self._result_codec.decode(result.data))
        except Mismatch as mismatch:
            raise MalformedPayload(
                f"task {self.kind}: result: {mismatch}"
            ) from mismatch
