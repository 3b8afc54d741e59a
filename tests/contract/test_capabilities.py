"""A store is what it says it is."""

from __future__ import annotations

import pytest

from headgate_sync.store import (
    CAPABILITIES,
    Caps,
    derived_caps,
    validate_store_capabilities,
)
from tests.backends import unchanged_by


def test_every_method_of_the_port_is_there_with_its_signature(store):
    validate_store_capabilities(store)


def test_a_capability_is_there_exactly_where_it_is_promised(backend, store):
    missing = {name for name in CAPABILITIES if getattr(store, name) is None}
    assert missing == set(backend.lacks)


def test_the_number_follows_from_the_properties(backend, store):
    assert store.caps() == derived_caps(store)
    assert (Caps.TRANSACTIONAL in store.caps()) == (backend.name == "postgres")
    assert Caps.INSPECT in store.caps()
    assert Caps.NOTIFYING not in store.caps()


@pytest.mark.needs("maintenance")
def test_folding_changes_nothing_that_a_caller_can_see(backend, store, clock):
    from headgate_sync.lifecycle import Outcome
    from tests.builders import admit, enqueue

    for partition in ("x", "y"):
        enqueue(store, f"{partition}1", f"{partition}2", partition_key=partition)
    claims = admit(store, capacity=3).claims
    store.ack(claims[0].lease_ref, Outcome.SUCCESS)
    store.ack(claims[1].lease_ref, Outcome.RETRY)
    before = backend.snapshot()
    assert store.maintenance.gate_fold(1_000) > 0
    assert backend.snapshot() == before
    assert store.maintenance.gate_fold(1_000) == 0
    assert unchanged_by(backend, lambda: store.maintenance.gate_fold(1_000)) is None


@pytest.mark.needs("maintenance")
def test_reconciling_true_counters_corrects_nothing(backend, store):
    from tests.builders import admit, enqueue

    enqueue(store, "a", "b")
    admit(store, capacity=1)
    before = backend.snapshot()
    assert store.maintenance.gate_reconcile(100) == 0
    assert backend.snapshot() == before
