"""The check that a store is what it says it is, tried on stores that are not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.store import (
    CAPABILITIES,
    Caps,
    Store,
    derived_caps,
    validate_store_capabilities,
)


def _methods(protocol: type) -> dict[str, Any]:
    """The methods of a protocol and of those it is made from."""
    members = inspect.getmembers(protocol, inspect.isfunction)
    return {name: member for name, member in members if not name.startswith("_")}


def _implementation(protocol: type) -> type:
    """A class with the methods of a protocol, for their signatures alone."""
    return type(f"Some{protocol.__name__}", (), _methods(protocol))


class Everything(_implementation(Store)):
    """A store with all capabilities."""

    def __init__(self) -> None:
        for name, protocol in CAPABILITIES.items():
            setattr(self, name, _implementation(protocol)())

    def caps(self) -> Caps:
        return derived_caps(self)


def replaced(owner: Any, name: str, function: Any) -> None:
    """Give one object another method."""
    setattr(owner, name, function.__get__(owner))


@pytest.mark.parametrize("missing", [None, *CAPABILITIES])
def test_a_whole_store_passes_with_or_without_a_capability(missing):
    store = Everything()
    if missing is not None:
        setattr(store, missing, None)
    validate_store_capabilities(store)


@pytest.mark.parametrize(
    ("absent", "caps"),
    [
        ((), Caps.TRANSACTIONAL | Caps.NOTIFYING | Caps.INSPECT),
        (("transactional", "notifying"), Caps.INSPECT),
        (("inspect",), Caps.TRANSACTIONAL | Caps.NOTIFYING),
        (tuple(CAPABILITIES), Caps(0)),
    ],
)
def test_caps_follow_from_the_properties(absent, caps):
    store = Everything()
    for name in absent:
        setattr(store, name, None)
    assert derived_caps(store) == store.caps() == caps
    assert [int(cap) for cap in Caps] == [1, 2, 4]


@pytest.mark.parametrize("caps", [Caps(0), Caps.INSPECT, Caps.TRANSACTIONAL])
def test_a_store_that_claims_other_caps_is_found(caps):
    store = Everything()
    replaced(store, "caps", lambda self: caps)
    with pytest.raises(InvalidRequest, match="caps does not follow"):
        validate_store_capabilities(store)


METHODS = [("store", name) for name in _methods(Store)] + [
    (label, name) for label, port in CAPABILITIES.items() for name in _methods(port)
]


@pytest.mark.parametrize(("label", "method"), METHODS)
def test_a_missing_method_is_named(label, method):
    store = Everything()
    setattr(store if label == "store" else getattr(store, label), method, None)
    with pytest.raises(InvalidRequest) as raised:
        validate_store_capabilities(store)
    assert raised.value.message == f"{label} lacks {method}"


def test_every_capability_has_methods():
    assert {label for label, _ in METHODS} == {"store", *CAPABILITIES}
    assert {("inspect", "get_job"), ("inspect", "rate_classes")} <= set(METHODS)


@pytest.mark.parametrize(
    ("label", "method", "function"),
    [
        ("store", "renew", lambda self, leases, lease_ms: []),
        ("store", "renew", lambda self, leases, *, ms: []),
        ("store", "promote_due", lambda self, limit=100: 0),
        ("store", "evict_retained", lambda self: 0),
        ("store", "admit", lambda self, request, now_ms: []),
        ("results", "read_result", lambda self, id: None),
        ("inspect", "get_job", lambda self, job_id, *, include_payload=True: None),
        ("inspect", "get_job", lambda self, *args, **kwargs: None),
    ],
)
def test_another_signature_is_found(label, method, function):
    store = Everything()
    owner = store if label == "store" else getattr(store, label)
    replaced(owner, method, function)
    with pytest.raises(InvalidRequest) as raised:
        validate_store_capabilities(store)
    assert raised.value.message == (
        f"{label}.{method} has another signature than the port"
    )
