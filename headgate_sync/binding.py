"""What the worker gets from the registry: how to turn one claimed job into one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import frozen

from headgate_sync.codec import Codec
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    CodecError,
    ExtractionError,
    InvalidRequest,
    MalformedPayload,
)
from headgate_sync.forks import ForksEndHere
from headgate_sync.injection import Given, Injector
from headgate_sync.lease import JobResult
from headgate_sync.scalars import ANY, SIMPLE, Form, Mismatch
from headgate_sync.signals import Control
from headgate_sync.steps import StepPlan

if TYPE_CHECKING:
    from headgate_sync.context import JobContext
    from headgate_sync.worker.isolated import IsolatedProcess

T = TypeVar("T")
# What is annotated so leaves bytes alone; nothing else comes from a handler of None.
AS_BYTES = (SIMPLE[bytes], SIMPLE[type(None)])
RetryPolicy = Callable[[Any], Any]
FailureTest = Callable[[Exception], bool]


@frozen
class BatchJob(Generic[T]):
    """One job of a call of a batch handler; each is settled on its own.

    Attributes:
        ctx: its attempt.
        args: its payload.
    """

    ctx: JobContext
    envelope: Envelope
    args: T


@frozen(kw_only=True)
class BatchPlan:
    """How jobs are put together for a batch handler.

    Attributes:
        max_size: the most jobs of one call.
        max_delay_ms: how long the first of them waits for others.
    """

    max_size: int
    max_delay_ms: int


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
        async_cancel: whether an exception may strike its thread; None is the worker's
            rule.
        steps: what the task says about its steps.
        batch: the handler takes many jobs in one call.
        isolated: the handler runs in a process of its own.
    """

    kind: str
    name: str
    version: int
    retry: RetryPolicy | None
    is_failure: FailureTest | None
    declares_result: bool
    async_cancel: bool | None
    steps: StepPlan
    batch: BatchPlan | None
    isolated: IsolatedProcess | None
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
            except (Control, ExtractionError):
                raise
            except Exception as error:
                raise ExtractionError("parameter", f"{name}: {error}") from error
        return filled

    def call(
        self, arguments: Mapping[str, object], injected: Mapping[str, object]
    ) -> object:
        """Run the handler; whatever it raises comes out unchanged."""
        with ForksEndHere():
            return self._function(**arguments, **injected)

    def call_batch(self, jobs: list[BatchJob[Any]]) -> object:
        """Run a batch handler; whatever it raises comes out unchanged."""
        with ForksEndHere():
            return self._function(jobs)

    def encode_result(self, value: object) -> JobResult | None:
        """What to store of a return value: None for None.

        Bytes are stored as they are, where the annotation says bytes or nothing.

        Raises:
            InvalidRequest: the value is none of the handler's annotation, or too large.
        """
        if value is None:
            return None
        if isinstance(value, bytes) and self._result in (SIMPLE[bytes], ANY):
            return JobResult(self.version, value)
        try:
            data = self._result_codec.encode(self._result.encode(value))
        except (Mismatch, InvalidRequest, RecursionError) as error:
            raise InvalidRequest(f"task {self.kind}: result: {error}") from error
        return JobResult(self.version, data)

    def decode_result(self, result: JobResult) -> object:
        """Read what `encode_result` wrote, or bytes that the handler recorded itself.

        Raises:
            MalformedPayload: the bytes are none of this handler's results.
        """
        if self._result in AS_BYTES:
            return result.data
        try:
            return self._result.decode(self._result_codec.decode(result.data))
        except Mismatch as mismatch:
            raise MalformedPayload(
                f"task {self.kind}: result: {mismatch}"
            ) from mismatch
