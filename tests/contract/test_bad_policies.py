"""Policies that make no sense: an error that says what is wrong, and no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.inspection import Inspect
from headgate_sync.policy import BudgetConfig, Ceiling, RateClassConfig
from tests.backends import unchanged_by
from tests.builders import admit, enqueue, steer
from tests.scenarios.gate import ceiling, rate_class

LONG = "é" * 128  # 256 bytes
BIG = 2**63


def budget(**fields: Any) -> BudgetConfig:
    return BudgetConfig(**{"limit": 1, "window_ms": 1_000, "burst": 1, **fields})


def upsert_class(**fields: Any) -> Callable[[Inspect], Any]:
    values = {"name": "c", "limit": 1, "window_ms": 1_000, "burst": 1, **fields}
    return lambda inspect: inspect.upsert_rate_class(RateClassConfig(**values))


def upsert_ceiling(**fields: Any) -> Callable[[Inspect], Any]:
    values = {"name": "limit", "queue": "q", "max_concurrent": 1, **fields}
    return lambda inspect: inspect.upsert_concurrency_limit(Ceiling(**values))


def call(name: str, *arguments: Any) -> Callable[[Inspect], Any]:
    return lambda inspect: getattr(inspect, name)(*arguments)


# What is asked for, and what the error has to say: field, value, limit.
BAD: dict[str, tuple[Callable[[Inspect], Any], tuple[str, ...]]] = {
    "queue weight 0": (call("set_queue_weight", "q", 0), ("weight", "0", "1")),
    "queue weight -1": (call("set_queue_weight", "q", -1), ("weight", "-1", "1")),
    "queue weight huge": (
        call("set_queue_weight", "q", 2**31),
        ("weight", str(2**31), str(2**31 - 1)),
    ),
    "queue weight text": (call("set_queue_weight", "q", "2"), ("weight",)),
    "queue weight bool": (call("set_queue_weight", "q", True), ("weight",)),
    "enqueue limit -1": (call("set_enqueue_limit", "q", -1), ("limit", "-1", "0")),
    "enqueue limit huge": (
        call("set_enqueue_limit", "q", BIG),
        ("limit", str(BIG), str(BIG - 1)),
    ),
    "rate limit -1": (upsert_class(limit=-1), ("limit", "-1", "0")),
    "rate limit huge": (
        upsert_class(limit=2**31),
        ("limit", str(2**31), str(2**31 - 1)),
    ),
    "rate limit float": (upsert_class(limit=1.5), ("limit",)),
    "window 0": (upsert_class(window_ms=0), ("window_ms", "0", "1")),
    "window -5": (upsert_class(window_ms=-5), ("window_ms", "-5", "1")),
    "burst 0": (upsert_class(burst=0), ("burst", "0", "1")),
    "burst huge": (
        upsert_class(burst=2**31),
        ("burst", str(2**31), str(2**31 - 1)),
    ),
    "burst times window": (
        upsert_class(burst=2**31 - 1, window_ms=2**32),
        ("burst", "window_ms", str((2**31 - 1) * 2**32), str(2**62)),
    ),
    "paused 1": (upsert_class(paused=1), ("paused",)),
    "further window 0": (
        lambda inspect: upsert_class(further=(budget(window_ms=0),))(inspect),
        ("window_ms", "0", "1"),
    ),
    "five budgets": (
        lambda inspect: upsert_class(further=(budget(),) * 4)(inspect),
        ("budgets", "5", "4"),
    ),
    "pause of 0 ms": (call("pause_rate_class", "c", 0), ("delay_ms", "0", "1")),
    "pause of a day and more": (
        call("pause_rate_class", "c", 86_400_001),
        ("delay_ms", "86400001", "86400000"),
    ),
    "ceiling 0": (upsert_ceiling(max_concurrent=0), ("max_concurrent", "0", "1")),
    "ceiling -1": (upsert_ceiling(max_concurrent=-1), ("max_concurrent", "-1", "1")),
    "ceiling huge": (
        upsert_ceiling(max_concurrent=2**31),
        ("max_concurrent", str(2**31), str(2**31 - 1)),
    ),
    "strategy drop": (
        upsert_ceiling(on_saturated="drop"),
        ("on_saturated", "drop", "cancel_incoming"),
    ),
    "scope world": (
        upsert_ceiling(scope="world"),
        ("scope", "world", "partition, queue, class"),
    ),
    "ceiling without queue": (upsert_ceiling(queue=""), ("queue", "empty")),
    "ceiling of a class with a queue": (
        upsert_ceiling(scope="class", rate_class="c"),
        ("class", "queue"),
    ),
    "ceiling of a queue with a class": (
        upsert_ceiling(rate_class="c"),
        ("partition", "rate_class"),
    ),
    "ceiling that moves": (upsert_ceiling(queue="r"), ("limit", "something else")),
    "share 0": (
        call("set_partition_quantum", "q", "p", 0),
        ("quantum", "0", "1"),
    ),
    "share huge": (
        call("set_partition_quantum", "q", "p", 1_000_001),
        ("quantum", "1000001", "1000000"),
    ),
}
NAMED: dict[str, Callable[[Any], Callable[[Inspect], Any]]] = {
    "queue of a weight": lambda name: call("set_queue_weight", name, 1),
    "queue of a pause": lambda name: call("set_queue_paused", name, True),
    "queue of an enqueue limit": lambda name: call("set_enqueue_limit", name, 1),
    "queue of a share": lambda name: call("set_partition_quantum", name, "p", 1),
    "class": lambda name: upsert_class(name=name),
    "class deleted": lambda name: call("delete_rate_class", name),
    "class paused": lambda name: call("pause_rate_class", name, 1),
    "class resumed": lambda name: call("resume_rate_class", name),
    "ceiling": lambda name: upsert_ceiling(name=name),
    "ceiling deleted": lambda name: call("delete_concurrency_limit", name),
    "queue of a ceiling": lambda name: upsert_ceiling(queue=name),
    "class of a ceiling": lambda name: upsert_ceiling(
        scope="class", queue="", rate_class=name
    ),
}
BAD_NAMES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ("", ("empty",)),
    "too long": (LONG, ("256", "255")),
    "NUL": ("a\0b", ("NUL",)),
    "half a character": ("\ud800", ()),
    "bytes": (b"q", ()),
    "None": (None, ()),
}
# Not the name of a row but a key within a queue: empty is a key like any other.
KEYS: dict[str, Callable[[Any], Callable[[Inspect], Any]]] = {
    "partition of a share": lambda key: call("set_partition_quantum", "q", key, 1),
    "reason of a pause": lambda text: call("pause_rate_class", "c", 1, text),
}


def refusal(store, backend, bad: Callable[[Inspect], Any]) -> str:
    """The text of the refusal, which left nothing behind."""
    rate_class(store, "c", "5/1000", 5)
    ceiling(store, 3, "queue")
    enqueue(store, "a", "b", rate_class="c")
    admit(store, capacity=1)
    error = unchanged_by(backend, lambda: bad(steer(store)))
    assert type(error) is InvalidRequest, repr(error)
    return str(error)


@pytest.mark.parametrize("case", BAD)
def test_a_policy_out_of_range_is_refused(store, backend, case):
    bad, wanted = BAD[case]
    text = refusal(store, backend, bad)
    assert [part for part in wanted if part not in text] == [], text


@pytest.mark.parametrize("bad", BAD_NAMES)
@pytest.mark.parametrize("what", NAMED)
def test_a_name_that_no_policy_can_have_is_refused(store, backend, what, bad):
    name, wanted = BAD_NAMES[bad]
    text = refusal(store, backend, NAMED[what](name))
    assert [part for part in wanted if part not in text] == [], text


@pytest.mark.parametrize("bad", [b for b in BAD_NAMES if b != "empty"])
@pytest.mark.parametrize("what", KEYS)
def test_a_text_that_cannot_be_stored_is_refused(store, backend, what, bad):
    name, wanted = BAD_NAMES[bad]
    text = refusal(store, backend, KEYS[what](name))
    assert [part for part in wanted if part not in text] == [], text


def test_both_stores_refuse_in_the_same_words(memory, postgres):
    calls = [bad for bad, _ in BAD.values()]
    for make in (*NAMED.values(), *KEYS.values()):
        calls += [make(name) for name, _ in BAD_NAMES.values()]
    stores = [backend.make_store() for backend in (memory, postgres)]
    for store in stores:
        ceiling(store, 3, "queue")
    for bad in calls:
        told = []
        for store in stores:
            try:
                told.append(repr(bad(steer(store))))
            except InvalidRequest as error:
                told.append(str(error))
        assert told[0] == told[1]
