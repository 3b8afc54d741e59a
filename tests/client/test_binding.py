"""From a stored job to a call: decoding, upcasting, injected parameters, results."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from headgate_sync.binding import Binding
from headgate_sync.client import JobClient
from headgate_sync.context import JobContext
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    ExtractionError,
    InvalidRequest,
    MalformedPayload,
    UnknownSchemaVersion,
)
from headgate_sync.injection import Attempt, Given, TaskId, WorkerInfo
from headgate_sync.lease import JobResult
from headgate_sync.registry import Registry

WORKER = WorkerInfo(worker_id="w", queues=("a", "b"), capacity=4)


def bound(registry: Registry, kind: str = "work") -> Binding:
    found = registry.resolve(kind)
    assert found is not None
    return found


def function_binding(function, **options) -> Binding:
    registry = Registry()
    registry.task("work", **options)(function)
    return bound(registry)


def stored(payload: bytes, version: int = 1, **fields: Any) -> Envelope:
    return Envelope(
        id="job-1", kind="work", payload=payload, schema_version=version, **fields
    )


@pytest.fixture
def deliver():
    """A payload class of version 3 with its handler and an upcaster from version 1."""
    registry = Registry()

    @registry.task("work", version=3, aliases=["old:work"])
    @attrs.frozen
    class Deliver:
        recipient: str
        locale: str

    @registry.upcaster(Deliver, 1)
    def from_1(data: bytes) -> Deliver:
        assert data == b'{"address":"ada@x"}'
        return Deliver("ada@x", "en")

    @registry.handler(Deliver)
    def handle(job: Deliver) -> str:
        return job.recipient

    return bound(registry, "old:work"), Deliver


def test_an_older_payload_is_upcast_for_the_handler_alone(deliver):
    binding, kind = deliver
    envelope = stored(b'{"address":"ada@x"}')
    assert binding.decode(envelope) == {"job": kind("ada@x", "en")}
    assert binding.call(binding.decode(envelope), {}) == "ada@x"
    assert (envelope.schema_version, envelope.payload) == (1, b'{"address":"ada@x"}')


@pytest.mark.parametrize("version", [2, 4])
def test_a_version_without_an_upcaster_is_unknown(deliver, version):
    with pytest.raises(
        UnknownSchemaVersion, match=f"no upcaster from version {version} to 3"
    ) as e:
        deliver[0].decode(stored(b"{}", version))
    assert e.value.version == version


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b'{"recipient":"x"}', "locale: missing"),
        (b'{"recipient":"x","locale":1}', "locale: expected str, got int"),
        (b'{"recipient":"x","locale":"y","z":1}', "unknown field 'z'"),
        (b"[]", "expected Deliver, got list"),
        (b"{", "no JSON in UTF-8"),
        (b"\xff", "no JSON in UTF-8"),
    ],
)
def test_a_payload_of_another_shape_is_malformed(deliver, payload, fault):
    with pytest.raises(MalformedPayload, match=fault):
        deliver[0].decode(stored(payload, 3))


@pytest.mark.parametrize(
    ("upcast", "fault"),
    [
        (lambda data: 1 / 0, "task work: ZeroDivisionError"),
        (
            lambda data: {"recipient": "x"},
            "the upcaster returned dict, expected Deliver",
        ),
    ],
)
def test_an_upcaster_that_fails_leaves_the_job_undecodable(deliver, upcast, fault):
    binding, kind = deliver
    Registry().upcaster(kind, 2)(upcast)
    with pytest.raises(MalformedPayload, match=fault):
        binding.decode(stored(b"{}", 2))


def test_an_upcaster_is_declared_once_and_for_another_version(deliver):
    registry, kind = Registry(), deliver[1]
    with pytest.raises(InvalidRequest, match="version 1 has an upcaster already"):
        registry.upcaster(kind, 1)(lambda data: None)
    with pytest.raises(InvalidRequest, match="3 is the present version"):
        registry.upcaster(kind, 3)(lambda data: None)
    with pytest.raises(InvalidRequest, match="from_version"):
        registry.upcaster(kind, 0)(lambda data: None)
    with pytest.raises(InvalidRequest, match="is no task"):
        registry.upcaster(int, 1)


def test_a_new_parameter_with_a_default_reads_old_payloads():
    binding = function_binding(lambda a, b=2: (a, b))
    assert binding.call(binding.decode(stored(b'{"a":1}')), {}) == (1, 2)


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"{}", "c: missing"),
        (b'{"a":1}', "unknown argument 'a'"),
        (b'{"a":1,"c":2}', "unknown argument 'a'"),
        (b'{"c":"x"}', "c: expected int, got str"),
        (b"[1]", "expected an object of arguments"),
    ],
)
def test_a_renamed_parameter_needs_a_new_version(payload, fault):
    def work(c: int) -> None: ...

    with pytest.raises(MalformedPayload, match=f"^task work: .*{fault}"):
        function_binding(work).decode(stored(payload))


def test_an_upcaster_of_a_function_returns_its_arguments():
    registry = Registry()

    @registry.task("work", version=2)
    def work(order_id: int, note: str = "") -> None: ...

    @registry.upcaster(work, 1)
    def from_1(data: bytes) -> dict[str, Any]:
        return {"order_id": int(data)} if data != b"0" else {"order_id": "0"}

    assert bound(registry).decode(stored(b"17")) == {"order_id": 17}
    with pytest.raises(MalformedPayload, match="order_id: expected int, got str"):
        bound(registry).decode(stored(b"0"))
    registry.upcaster(work, 3)(lambda data: {"id": 1})
    with pytest.raises(MalformedPayload, match="unknown argument 'id'"):
        bound(registry).decode(stored(b"", 3))


def test_injected_parameters_are_filled_by_annotation():
    def work(
        first: int,
        ctx: JobContext,
        attempt: Attempt,
        who: WorkerInfo,
        job_id: TaskId,
        envelope: Envelope | None = None,
    ):
        return first, ctx, attempt, who, job_id, envelope

    registry = Registry()
    registry.task("work")(work)
    binding = bound(registry)
    envelope = stored(b'{"first":1}', attempt=2, crash_attempt=1, max_attempts=5)
    context: Any = object()
    injected = binding.inject(Given(context=context, envelope=envelope, worker=WORKER))
    assert list(injected) == ["ctx", "attempt", "who", "job_id", "envelope"]
    assert binding.call(binding.decode(envelope), injected) == (
        1, context, Attempt(2, 1, 5), WORKER, "job-1", envelope,
    )  # fmt: skip


def test_a_parameter_that_cannot_be_filled_stops_before_the_handler():
    def work(client: JobClient) -> None: ...

    class Broken:
        @property
        def client(self) -> Any:
            raise ValueError("no client here")

    given = Given(context=Broken(), envelope=stored(b"{}"), worker=WORKER)  # type: ignore[arg-type]
    with pytest.raises(ExtractionError, match="client: no client here"):
        function_binding(work).inject(given)


def test_what_the_handler_raises_comes_out_unchanged():
    error = ValueError("mine")

    def work() -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        function_binding(work).call({}, {})
    assert caught.value is error


def test_policies_of_the_handler_win_over_those_of_the_task():
    registry = Registry()

    def of_task(info: Any) -> int:
        return 1

    def of_handler(info: Any) -> int:
        return 2

    @registry.task("work", retry=of_task)
    @attrs.frozen
    class Job:
        value: int

    registry.handler(Job, is_failure=bool)(lambda job: None)
    assert bound(registry).retry is of_task
    assert bound(registry).is_failure is bool

    other = Registry()
    other.handler(Job, retry=of_handler)(lambda job: None)
    assert bound(other).retry is of_handler
    assert (
        function_binding(lambda: None, retry=of_task, is_failure=bool).retry is of_task
    )
    assert function_binding(lambda: None).retry is None


def test_a_result_is_encoded_by_its_annotation():
    @attrs.frozen
    class Receipt:
        number: int

    registry = Registry()

    @registry.task("work", version=2)
    def work() -> Receipt | None: ...

    binding = bound(registry)
    assert binding.declares_result
    result = binding.encode_result(Receipt(7))
    assert result == JobResult(2, b'{"number":7}')
    assert binding.decode_result(result) == Receipt(7)
    assert binding.encode_result(None) is None
    with pytest.raises(
        InvalidRequest, match="task work: result: expected Receipt or None"
    ):
        binding.encode_result(7)
    with pytest.raises(MalformedPayload, match="task work: result: number: missing"):
        binding.decode_result(JobResult(2, b"{}"))


def test_a_result_without_annotation_is_plain_json():
    binding = function_binding(lambda: None)
    assert not binding.declares_result
    assert binding.encode_result({"b": 1, "a": [2]}) == JobResult(1, b'{"a":[2],"b":1}')


@pytest.mark.parametrize("annotation", [bytes, bytes | None])
def test_bytes_are_a_result_as_they_are(annotation):
    def work(): ...

    work.__annotations__["return"] = annotation
    binding = function_binding(work)
    result = binding.encode_result(b"\x00\xff")
    assert result == JobResult(1, b"\x00\xff")
    assert binding.decode_result(result) == b"\x00\xff"


def test_bytes_among_others_are_a_result_of_the_annotation():
    def work() -> list[int] | bytes: ...  # type: ignore[empty-body]

    binding = function_binding(work)
    for value in (b"\x00\xff", [1]):
        assert binding.decode_result(binding.encode_result(value)) == value


@pytest.mark.parametrize("annotation", [str, None])
def test_bytes_that_are_not_annotated_are_refused_before_nobody_can_read_them(
    annotation,
):
    def work(): ...

    work.__annotations__["return"] = annotation
    with pytest.raises(InvalidRequest, match=r"work: result: expected .*, got bytes"):
        function_binding(work).encode_result(b"x")


def test_what_a_handler_of_no_result_recorded_is_read_as_it_is():
    def work(ctx: JobContext) -> None: ...

    binding = function_binding(work)
    assert binding.decode_result(JobResult(1, b"\xff")) == b"\xff"


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        (n for n in ()),
        lambda: None,
        {"a": b"x"},
        float("nan"),
        "\ud800",
    ],
)
def test_a_result_that_cannot_be_stored_says_so(value):
    with pytest.raises(InvalidRequest, match=r"^task work: result: "):
        function_binding(lambda: None).encode_result(value)
