"""Function and class tasks: what they accept, what they store, what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Annotated, Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate_sync.client import Client
from headgate_sync.context import JobContext
from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import ConfigurationError, InvalidRequest, MalformedPayload
from headgate_sync.injection import Attempt, TaskId, WorkerInfo
from headgate_sync.memory.store import MemStore
from headgate_sync.registry import Registry
from headgate_sync.request import JobRequest
from headgate_sync.task import task, task_of
from tests.client import typing_only
from tests.client.payloads import TEXT, TYPED_VALUES, Address
from tests.client.shop_tasks import send_receipt


def declare(function, **options):
    return Registry().task("work", **options)(function)


def sent(request: JobRequest) -> Envelope:
    return Client(MemStore()).envelope(request)


# Function tasks


def test_a_function_task_stays_a_function():
    assert send_receipt(None, 7, "acme") == "acme:7"
    assert send_receipt.fn(None, 7) == "acme:7"
    assert send_receipt.__name__ == "send_receipt"
    assert send_receipt.__doc__ == "Send a receipt."
    assert send_receipt.__module__ == "tests.client.shop_tasks"
    assert str(inspect.signature(send_receipt)).startswith("(ctx")
    assert hash(send_receipt) == hash(send_receipt)


def test_a_function_task_pickles_by_reference():
    assert pickle.loads(pickle.dumps(send_receipt)) is send_receipt
    assert copy.deepcopy(send_receipt) is send_receipt


def test_arguments_are_stored_by_name_without_the_injected_ones():
    for request in (
        send_receipt.job(42, tenant="b"),
        send_receipt.job(42, "b"),
        send_receipt.job(tenant="b", order_id=42),
    ):
        assert sent(request).payload == b'{"order_id":42,"tenant":"b"}'


def test_defaults_are_not_stored():
    assert sent(send_receipt.job(42)).payload == b'{"order_id":42}'


def test_the_fingerprint_covers_kind_and_payload():
    envelope = sent(send_receipt.job(42))
    assert envelope.fingerprint == fingerprint("receipt:send", envelope.payload)


def test_injected_parameters_may_stand_anywhere():
    def work(
        a: int,
        ctx: JobContext,
        b: str,
        attempt: Attempt | None = None,
        *,
        id: TaskId,
        who: WorkerInfo,
        envelope: Envelope,
    ) -> None: ...

    assert sent(declare(work).job(1, "x")).payload == b'{"a":1,"b":"x"}'


def test_no_option_name_can_shadow_a_parameter():
    def work(id: int, queue: str, tags: list[str], priority: int = 0) -> None: ...

    made = declare(work, queue="mail", priority=3)
    envelope = sent(made.job(id=1, queue="q", tags=["a"]))
    assert envelope.payload == b'{"id":1,"queue":"q","tags":["a"]}'
    assert (envelope.queue, envelope.priority, envelope.tags) == ("mail", 3, ())


@pytest.mark.parametrize(
    ("args", "kwargs", "fault"),
    [
        ((), {"order_id": "42"}, "order_id: expected int, got str"),
        ((), {}, "missing a required argument: 'order_id'"),
        ((42,), {"order_id": 42}, "multiple values for argument 'order_id'"),
        ((42,), {"x": 1}, "got an unexpected keyword argument 'x'"),
        ((1, "a", 2), {}, "too many positional arguments"),
        ((1,), {"ctx": None}, "got an unexpected keyword argument 'ctx'$"),
        ((1,), {"delay": "5m"}, r".*'delay'; options go through using\(delay=...\)$"),
        ((1, None), {}, "tenant: expected str, got None"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(args, kwargs, fault):
    with pytest.raises(InvalidRequest, match=f"^task receipt:send: {fault}"):
        send_receipt.job(*args, **kwargs)


def test_a_request_does_not_change_with_what_it_was_made_from():
    items = [1]
    request = declare(lambda items: None).job(items)
    items.append(2)
    assert sent(request).payload == b'{"items":[1]}'


def test_what_has_no_end_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match=r"^task work: .* nested more than"):
        declare(lambda items: None).job(endless)


async def asynchronous() -> None: ...


class Reports:
    def send(self, month: int) -> None: ...


def generator():
    yield 1


async def async_generator():
    yield 1


def star(*args): ...


def double_star(**kwargs): ...


def positional(a, /): ...


def transaction(tx: int): ...


def unknown(a: complex): ...


def defaulted(ctx: JobContext = 3): ...  # type: ignore[assignment]


def unknown_result() -> complex: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (asynchronous, "not async def"),
        (generator, "not a generator"),
        (async_generator, "not an async generator"),
        (Reports.send, "not a method"),
        (star, r"\*args cannot be carried"),
        (double_star, r"\*\*kwargs cannot be carried"),
        (positional, "a is positional-only"),
        (transaction, "tx is reserved"),
        (unknown, "a: no form for complex: a payload carries .* of a model its id$"),
        (unknown_result, "result: no form for complex"),
        (defaulted, "ctx is filled by the worker, its default must be None"),
        (len, "a handler is a function, got builtin_function_or_method"),
        (
            typing_only.pay,
            "Money is imported under TYPE_CHECKING only; import it at run time",
        ),
        (typing_only.run, "JobContext is imported under TYPE_CHECKING only"),
    ],
)
def test_a_function_that_cannot_be_a_handler_is_refused_whole(function, fault):
    registry = Registry()
    with pytest.raises(InvalidRequest, match=f"^task work: .*{fault}"):
        registry.task("work", aliases=["old"])(function)
    assert registry.kinds() == frozenset()
    registry.task("work", aliases=["old"])(lambda: None)


def test_annotations_may_name_local_classes():
    @attrs.frozen
    class Order:
        id: int

    @Registry().task("work")
    def work(order: Order) -> Order: ...  # type: ignore[empty-body]

    assert sent(work.job(Order(1))).payload == b'{"order":{"id":1}}'


def test_a_name_that_comes_later_is_looked_up_at_the_first_enqueue():
    registry = Registry()

    @registry.task("work", partition="{order.id}")
    def work(order: Order) -> None: ...

    with pytest.raises(
        InvalidRequest, match="task work: the annotations use Order, which"
    ):
        work.job(1)
    with pytest.raises(InvalidRequest, match="Order"):
        registry.check()

    @attrs.frozen
    class Order:
        id: int

    registry.check()
    assert sent(work.job(Order(5))).partition_key == "5"


def test_a_template_of_late_annotations_is_checked_when_they_arrive():
    registry = Registry()

    @registry.task("work", partition="{order.nope}")
    def work(order: Order) -> None: ...

    @attrs.frozen
    class Order:
        id: int

    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"\{order.nope\} .*; known are id"):
            registry.check()


def test_metadata_of_an_annotation_does_not_change_the_payload():
    def work(a: Annotated[int, "of cents"]) -> None: ...

    assert sent(declare(work).job(1)).payload == b'{"a":1}'


@pytest.mark.parametrize(
    ("partition", "value", "fault"),
    [
        ("{tenant}", None, r"partition: \{tenant\} is None, which names nothing"),
        ("{tenant}", 0.5, r"partition: \{tenant\} is float"),
        ("{tenant}", "x" * 300, "partition_key has 300 bytes, the limit is 255"),
        (lambda tenant: 5, "x", "partition must be str, the callable returned int"),
    ],
)
def test_a_payload_that_cannot_name_its_group_is_refused(partition, value, fault):
    def work(tenant: str | float | None) -> None: ...

    with pytest.raises(InvalidRequest, match=f"^task work: {fault}"):
        sent(declare(work, partition=partition).job(value))


def test_a_template_uses_the_default_of_a_missing_argument():
    assert sent(send_receipt.job(7)).partition_key == "acme"
    seen = []

    def work(a: int, b: str = "x") -> None: ...

    made = declare(work, partition=lambda **given: seen.append(given) or "p")
    sent(made.job(1))
    assert seen == [{"a": 1, "b": "x"}]


@settings(max_examples=100)
@given(TYPED_VALUES)
def test_what_is_enqueued_is_what_the_handler_gets(typed):
    annotation, value = typed

    def work(first: int, value) -> None: ...

    work.__annotations__["value"] = annotation
    registry = Registry()
    made = registry.task("work")(work)
    binding = registry.resolve("work")
    assert binding is not None
    assert binding.decode(sent(made.job(1, value))) == {"first": 1, "value": value}


@given(st.dictionaries(TEXT, st.integers()))
def test_equal_payloads_have_equal_fingerprints(value):
    made = declare(lambda a: None)
    turned = dict(reversed(list(value.items())))
    assert sent(made.job(value)).fingerprint == sent(made.job(turned)).fingerprint


def test_a_codec_of_ones_own_carries_plain_values():
    class Reversed:
        def encode(self, value):
            return repr(value).encode()[::-1]

        def decode(self, data):
            return eval(data[::-1])

    registry = Registry()

    def work(at: int, address: Address) -> None: ...

    made = registry.task("work", codec=Reversed())(work)
    envelope = sent(made.job(1, Address("x")))
    assert envelope.payload[::-1].startswith(b"{'at': 1, 'address': {'street': 'x'")
    binding = registry.resolve("work")
    assert binding is not None
    assert binding.decode(envelope) == {"at": 1, "address": Address("x")}


@pytest.mark.parametrize("option", ["codec", "result_codec"])
def test_what_is_no_codec_is_refused_at_the_declaration(option):
    registry = Registry()
    with pytest.raises(InvalidRequest, match=rf"task work: {option}: str has no"):
        registry.task("work", **{option: "json"})(lambda: None)
    assert registry.kinds() == frozenset()


def test_a_payload_that_the_codec_loses_is_refused_at_the_enqueue():
    class Lossy:
        def encode(self, value):
            return b""

        def decode(self, data):
            raise MalformedPayload("nothing there")

    with pytest.raises(InvalidRequest, match="task work: nothing there"):
        declare(lambda a: None, codec=Lossy()).job(1)


def test_a_task_outside_of_a_facade_says_where_to_enqueue():
    with pytest.raises(ConfigurationError, match="task work belongs to no facade"):
        declare(lambda: None).enqueue()


def test_a_request_shows_no_payload():
    request = declare(lambda secret: None).job("hunter2")
    assert "hunter2" not in repr(request)


# Class tasks


def test_a_payload_class_stays_itself():
    @attrs.frozen
    class Deliver:
        recipient: str

    assert task("mail.deliver")(Deliver) is Deliver
    found = task_of(Deliver)
    assert found is not None
    assert found.kind == "mail.deliver"


def test_dataclasses_and_attrs_classes_are_payloads():
    @task("d")
    @dataclasses.dataclass
    class D:
        value: int

    @task(
        "a",
        version=3,
        queue="q",
        partition="{value}",
        unique=lambda job: f"u{job.value}",
    )
    @attrs.define
    class A:
        value: int

    client = Client(MemStore())
    assert client.envelope(D(1)).payload == b'{"value":1}'
    envelope = client.envelope(A(2), delay="1s")
    assert (envelope.schema_version, envelope.queue, envelope.delay_ms) == (
        3,
        "q",
        1_000,
    )
    assert (envelope.partition_key, envelope.unique_key) == ("2", b"u2")


def test_a_subclass_is_no_task_by_itself():
    @task("parent")
    @attrs.frozen
    class Parent:
        value: int

    class Child(Parent):
        pass

    with pytest.raises(InvalidRequest, match="Child is no job"):
        Client(MemStore()).envelope(Child(1))


def test_other_classes_are_refused():
    class Plain:
        pass

    with pytest.raises(
        InvalidRequest, match="Plain is neither an attrs class nor a dataclass"
    ):
        task("plain")(Plain)

    @attrs.frozen
    class Bad:
        value: complex

    with pytest.raises(InvalidRequest, match="task bad: no form for complex"):
        task("bad")(Bad)
    assert task_of(Bad) is None
    with pytest.raises(InvalidRequest, match="a function needs a registry"):
        task("function")(lambda: None)  # type: ignore[type-var]


def test_a_class_is_one_task():
    @task("first")
    @attrs.frozen
    class Once:
        value: int

    with pytest.raises(InvalidRequest, match="task second: Once is task first already"):
        task("second")(Once)


def test_an_instance_with_a_wrong_field_is_refused_by_name():
    @task("fields")
    @attrs.frozen
    class Fields:
        value: int
        inner: list[Address] = attrs.field(factory=list)

    client = Client(MemStore())
    with pytest.raises(
        InvalidRequest, match=r"^task fields: value: expected int, got str"
    ):
        client.envelope(Fields("x"))  # type: ignore[arg-type]
    with pytest.raises(
        InvalidRequest, match=r"inner\[0\].street: expected str, got int"
    ):
        client.envelope(Fields(1, [Address(5)]))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="task fields: unknown option nope"):
        client.envelope(Fields(1), nope=1)
    with pytest.raises(
        InvalidRequest, match=r"partition: \{nope\} names no payload value"
    ):
        client.envelope(Fields(1), partition="{nope}")


def test_a_class_may_name_a_class_that_comes_later():
    @task("late")
    @attrs.frozen
    class Late:
        other: Other

    with pytest.raises(
        InvalidRequest, match="task late: the annotations use Other, which"
    ):
        Client(MemStore()).envelope(Late(1))  # type: ignore[arg-type]

    @attrs.frozen
    class Other:
        value: int

    assert (
        Client(MemStore()).envelope(Late(Other(1))).payload == b'{"other":{"value":1}}'
    )
