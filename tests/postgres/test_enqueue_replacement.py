"""A duplicate that changes a holder which the gate has set aside."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import (
    UNIQUE_REPLACE_ALL,
    UNIQUE_REPLACE_PAYLOAD,
    UNIQUE_REPLACE_PRIORITY,
)
from headgate_sync.errors import DuplicateJob, FingerprintQuarantined
from headgate_sync.postgres.store import PgStore
from tests.builders import (
    admit,
    claim_one,
    crash,
    enqueue,
    envelope,
    run_one,
)


@pytest.fixture
def store(postgres) -> PgStore:
    """A store whose job `held` is passed over, since its content is quarantined."""
    store = postgres.open_store(crash_limit=1)
    claim = run_one(store, "poison", payload=b"poison")
    enqueue(store, "held", payload=b"poison", unique_key=b"k")
    crash(store, postgres.clock, claim)
    assert admit(store).claims == []
    return store


@pytest.fixture
def mark(admin):
    """Read the gate's mark of the job."""

    def read():
        return admin.execute(
            "SELECT state, gate_hold FROM headgate.headgate_job WHERE id = 'held'"
        ).fetchone()

    assert read() == ("available", "quarantine")
    return read


def replace(store, **fields):
    with pytest.raises(DuplicateJob) as duplicate:
        store.enqueue([envelope("x", unique_key=b"k", **fields)])
    assert duplicate.value.replaced


def test_other_content_lets_the_holder_run(store, mark):
    replace(store, unique_replace=UNIQUE_REPLACE_PAYLOAD, payload=b"good")
    assert mark() == ("available", None)
    assert claim_one(store).envelope.payload == b"good"


def test_another_priority_does_not(store, mark):
    replace(store, unique_replace=UNIQUE_REPLACE_PRIORITY, payload=b"good", priority=9)
    assert mark() == ("available", "quarantine")
    assert admit(store).claims == []


def test_a_debounce_starts_over(store, mark, postgres):
    replace(store, unique_debounce_ms=500, payload=b"good")
    assert mark() == ("scheduled", None)
    postgres.clock.advance_ms(500)
    assert store.promote_due(10) == 1
    assert claim_one(store).envelope.id == "held"


def test_quarantined_content_replaces_nothing(store, mark):
    for wish in ({"unique_replace": UNIQUE_REPLACE_ALL}, {"unique_debounce_ms": 5}):
        with pytest.raises(FingerprintQuarantined):
            store.enqueue([envelope("x", unique_key=b"k", payload=b"poison", **wish)])
    assert mark() == ("available", "quarantine")
