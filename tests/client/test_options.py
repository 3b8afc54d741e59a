"""Options: what each means for the stored job, and which layer wins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import attrs
import pytest

from headgate_sync.app import Headgate
from headgate_sync.client import Client
from headgate_sync.envelope import Envelope
from headgate_sync.errors import InvalidRequest
from headgate_sync.handlers import HANDLER_OPTIONS
from headgate_sync.memory.store import MemStore
from headgate_sync.options import (
    CallKeywords,
    CallOptions,
    TaskKeywords,
    TaskOptions,
    Unique,
)
from headgate_sync.registry import DeclaredKeywords, FunctionKeywords, Registry


def envelope_of(defaults=None, task=None, call=None):
    """The envelope of one task with options on each of the three layers."""

    def work(order_id: int = 1, tenant: str = "acme") -> None: ...

    made = Registry().task("work", **(task or {}))(work)
    client = Client(MemStore(), defaults=TaskOptions(**(defaults or {})))
    return client.envelope(made.using(**(call or {})).job(order_id=7))


@pytest.mark.parametrize(
    ("option", "value", "field", "stored"),
    [
        ("queue", "mail", "queue", "mail"),
        ("queue", "", "queue", "default"),
        ("max_attempts", 3, "max_attempts", 3),
        ("priority", -5, "priority", -5),
        ("timeout", "30s", "timeout_ms", 30_000),
        ("timeout", None, "timeout_ms", 0),
        ("deadline", "1h", "deadline_in_ms", 3_600_000),
        (
            "deadline",
            datetime(2030, 1, 1, tzinfo=UTC),
            "deadline_ms",
            1_893_456_000_000,
        ),
        ("retention", timedelta(days=1), "retention_ms", 86_400_000),
        ("retention", "0s", "retention_ms", 0),
        ("partition", "p", "partition_key", "p"),
        ("partition", "{tenant}", "partition_key", "acme"),
        (
            "partition",
            lambda order_id, tenant: f"{tenant}-{order_id}",
            "partition_key",
            "acme-7",
        ),
        ("rate_class", "smtp-{order_id}", "rate_class", "smtp-7"),
        ("weight", 5, "weight", 5),
        ("tags", ["b", "a"], "tags", ("a", "b")),
        ("headers", {"k": "v"}, "headers", {"k": "v"}),
        ("sticky_worker", "gpu-1", "sticky_worker", "gpu-1"),
        ("unique", "{order_id}", "unique_key", b"7"),
        ("unique", "", "unique_key", b""),
        ("unique", False, "unique_key", None),
        ("unique", Unique("k", window="1h"), "unique_window_ms", 3_600_000),
        ("unique", Unique("k", replace=("payload", "priority")), "unique_replace", 5),
        ("unique", Unique("k", replace="payload"), "unique_replace", 1),
        ("unique", Unique("k", debounce="5s"), "unique_debounce_ms", 5_000),
        ("unique", Unique("k", exclude_kind=True), "unique_exclude_kind", True),
    ],
)
def test_an_option_fills_its_field_from_every_layer(option, value, field, stored):
    for layer in ("defaults", "task", "call"):
        envelope = envelope_of(**{layer: {option: value}})
        assert getattr(envelope, field) == stored, layer


@pytest.mark.parametrize(
    ("option", "value", "field", "stored"),
    [
        ("id", "r-42", "id", "r-42"),
        ("delay", "5m", "delay_ms", 300_000),
        (
            "run_at",
            datetime(2030, 1, 1, tzinfo=UTC),
            "scheduled_at_ms",
            1_893_456_000_000,
        ),
        ("pending", True, "pending", True),
    ],
)
def test_some_options_belong_to_one_call(option, value, field, stored):
    assert getattr(envelope_of(call={option: value}), field) == stored
    with pytest.raises(
        InvalidRequest, match=f"task work: unknown option {option}; known are"
    ):
        envelope_of(task={option: value})


def test_the_nearest_layer_wins_and_none_switches_off():
    layers = {"defaults": {"timeout": "1s", "queue": "d"}, "task": {"timeout": "2s"}}
    assert envelope_of(**layers).timeout_ms == 2_000
    assert envelope_of(**layers).queue == "d"
    assert envelope_of(**layers, call={"timeout": "3s"}).timeout_ms == 3_000
    assert envelope_of(**layers, call={"timeout": None}).timeout_ms == 0
    assert envelope_of(**layers, call={"queue": "default"}).queue == "default"
    assert envelope_of(task={"unique": True}, call={"unique": None}).unique_key is None


def test_without_options_a_job_has_the_library_defaults():
    envelope = envelope_of()
    assert (envelope.queue, envelope.max_attempts, envelope.weight) == (
        "default",
        25,
        1,
    )
    assert (envelope.timeout_ms, envelope.deadline_ms, envelope.retention_ms) == (
        0,
        0,
        0,
    )
    assert len(envelope.id) == 26


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"timeout": 30}, "timeout is 30: say the unit"),
        ({"timeout": "0s"}, "timeout is '0s', the minimum is 1 ms"),
        ({"deadline": datetime(2030, 1, 1)}, "deadline has no time zone"),
        ({"weight": 0}, "weight is 0, the minimum is 1"),
        ({"weight": -1}, "weight is -1"),
        ({"max_attempts": 0}, "max_attempts is 0, the minimum is 1"),
        ({"max_attempts": -1}, "max_attempts is -1"),
        ({"priority": "high"}, "priority must be int, got str"),
        ({"queue": "q" * 256}, "queue has 256 bytes, the limit is 255"),
        ({"queue": None}, "queue must be str"),
        ({"tags": ["x"] * 2}, "tags must not repeat"),
        ({"tags": "x"}, "tags must be a sequence"),
        ({"tags": [str(n) for n in range(33)]}, "tags has 33 entries, the limit is 32"),
        ({"headers": {"a": 1}}, "headers must be str"),
        ({"sticky_worker": "ä"}, "sticky_worker must be ASCII"),
        ({"partition": 5}, "partition must be text or a callable, got int"),
        ({"partition": "{"}, "template .{3} has a { without its partner"),
        (
            {"partition": "{nope}"},
            r"partition: \{nope\} names no payload value; known are order_id, tenant",
        ),
        ({"unique": b"key"}, "unique must be text or a callable, got bytes"),
        ({"unique": "{nope}"}, r"unique: \{nope\} names no payload value"),
        (
            {"nope": 1},
            "unknown option nope; known are queue, .*, retry, is_failure, result_codec",
        ),
        ({"retry": 5}, "retry must be callable, got int"),
        ({"is_failure": 5}, "is_failure must be callable, got int"),
    ],
)
def test_a_bad_option_is_refused_at_the_declaration(options, fault):
    registry = Registry()

    def work(order_id: int = 1, tenant: str = "acme") -> None: ...

    with pytest.raises(InvalidRequest, match=f"^task work: {fault}"):
        registry.task("work", **options)(work)
    assert registry.kinds() == frozenset()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"delay": "1s", "run_at": datetime(2030, 1, 1, tzinfo=UTC)},
            "exclude each other",
        ),
        ({"delay": -1}, "delay is -1: say the unit"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at has no time zone"),
        ({"id": ""}, "id must not be empty"),
        ({"retry": lambda info: 1}, "unknown option retry"),
        ({"partition": "{nope}"}, "names no payload value"),
        ({"pending": True, "delay": "1s"}, "pending"),
    ],
)
def test_a_bad_option_of_a_call_is_refused_before_its_job_is_made(options, fault):
    task = Registry().task("work")(lambda order_id: None)
    with pytest.raises(InvalidRequest, match=f"^task work: .*{fault}"):
        task.using(**options)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: Unique("k", window=3600), "unique window is 3600: say the unit"),
        (lambda: Unique("k", debounce=5), "unique debounce is 5: say the unit"),
        (
            lambda: Unique("k", replace=("queue",)),
            "cannot replace 'queue', only payload",
        ),
        (lambda: Unique(5), "unique must be text or a callable, got int"),
        (lambda: CallOptions(unique=Unique("k", window="1h", debounce="1s")), None),
    ],
)
def test_a_unique_rule_is_checked_when_it_is_made(make, fault):
    if fault is None:
        make()
        return
    with pytest.raises(InvalidRequest, match=fault):
        make()


def test_rules_that_exclude_each_other_are_refused_at_the_enqueue():
    with pytest.raises(InvalidRequest, match="task work: unique_debounce_ms needs"):
        envelope_of(call={"unique": Unique("k", window="1h", debounce="1s")})


def test_a_digest_covers_the_payload_with_its_defaults():
    def one(order_id: int, tenant: str = "acme") -> None: ...

    task = Registry().task("one", unique=True)(one)
    client = Client(MemStore())
    keys = {
        client.envelope(job).unique_key
        for job in (task.job(7), task.job(order_id=7), task.job(7, tenant="acme"))
    }
    assert len(keys) == 1
    assert {len(key) for key in keys if key} == {32}
    assert client.envelope(task.job(8)).unique_key not in keys


@pytest.mark.parametrize(
    ("keywords", "read"),
    [
        (TaskKeywords, attrs.fields_dict(TaskOptions)),
        (CallKeywords, attrs.fields_dict(CallOptions)),
        (
            FunctionKeywords,
            {*attrs.fields_dict(TaskOptions), *HANDLER_OPTIONS, "isolated"},
        ),
        (
            DeclaredKeywords,
            {*FunctionKeywords.__annotations__, "version", "aliases", "codec"},
        ),
    ],
)
def test_what_type_checkers_know_of_options_is_what_is_read(keywords, read):
    assert keywords.__required_keys__ == frozenset()
    assert keywords.__optional_keys__ == set(read)


@pytest.mark.parametrize("make", [Headgate, Client])
def test_defaults_of_another_kind_are_refused_at_once(make):
    with pytest.raises(InvalidRequest, match="defaults must be TaskOptions, got dict"):
        make(MemStore(), defaults={"queue": "mail"})


def test_an_identity_of_another_kind_is_refused_though_nobody_asks_for_it():
    store = MemStore()
    with pytest.raises(InvalidRequest, match="identity must be an Identity, got str"):
        Client(store).enqueue(Envelope(id="a", kind="k"), identity="ada")
    assert store.inspect.get_job("a") is None
