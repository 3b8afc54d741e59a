"""Quarantined jobs, sticky jobs and jobs that are not due: who is drawn at all."""

from __future__ import annotations

import pytest

from headgate_sync.lifecycle import Outcome
from tests.backends import Backend, Clock
from tests.builders import claim_one, crash_until_quarantined, enqueue, state_of, steer
from tests.scenarios.gate import admit, fill, ids, rate_class, served


def quarantine(store, clock: Clock, fingerprint: str) -> None:
    """Register a fingerprint the only way there is: a job of it crashes too often."""
    enqueue(store, f"kills-{fingerprint}", fingerprint=fingerprint, queue="crashes")
    claim = claim_one(store, queues=("crashes",))
    crash_until_quarantined(store, clock, claim)


def test_quarantined_jobs_are_passed_over_and_stay_untouched(
    store, backend: Backend, clock: Clock
):
    fill(store, "bomb", 5, partition_key="p", fingerprint="fp")
    fill(store, "ok", 5, partition_key="p")
    quarantine(store, clock, "fp")
    batch = admit(store)
    assert ids(batch) == [f"ok-{n}" for n in range(1, 6)]
    assert batch.refused == {"quarantine": 5}
    bomb = backend.snapshot().jobs["bomb-1"]
    assert (bomb["state"], bomb["lease_id"], bomb["fence"]) == ("available", None, 0)
    assert ids(admit(store)) == []
    assert admit(store).refused == {}


def test_passed_over_heads_use_up_no_capacity(store, clock: Clock):
    fill(store, "bomb", 10, partition_key="p", fingerprint="fp")
    fill(store, "good", 10, partition_key="p")
    quarantine(store, clock, "fp")
    assert ids(admit(store, 5)) == [f"good-{n}" for n in range(1, 6)]


def test_more_heads_than_a_call_passes_over_are_got_rid_of_in_several(
    store, clock: Clock
):
    fill(store, "bomb", 600, partition_key="p", fingerprint="fp")
    fill(store, "good", 1, partition_key="p", scheduled_at_ms=9)
    quarantine(store, clock, "fp")
    assert [ids(admit(store)) for _ in range(3)] == [[], [], ["good-1"]]


@pytest.mark.parametrize(
    "held", [{"fingerprint": "fp"}, {"rate_class": "c", "weight": 6}]
)
def test_partitions_of_jobs_that_cannot_pass_hide_no_other(store, clock: Clock, held):
    """They are more than a call of this capacity looks at."""
    rate_class(store, "c", "1/1000", 5)
    for n in range(30):
        fill(store, f"p{n:02}", 1, **held)
    fill(store, "z", 1)
    quarantine(store, clock, "fp")
    assert ids(admit(store, 1, quantum=0)) == ["z-1"]


def test_a_release_makes_held_jobs_admissible_at_once(store, clock: Clock):
    fill(store, "bomb", 3, fingerprint="fp")
    quarantine(store, clock, "fp")
    assert ids(admit(store)) == []
    steer(store).quarantine_release("fp")
    assert ids(admit(store)) == ["bomb-1", "bomb-2", "bomb-3"]


def test_a_new_fingerprint_frees_a_held_job(store, clock: Clock):
    fill(store, "bomb", 1, fingerprint="fp")
    quarantine(store, clock, "fp")
    assert ids(admit(store)) == []
    steer(store).edit_payload("bomb-1", b"mended", schema_version=1, fingerprint="ok")
    assert ids(admit(store)) == ["bomb-1"]


def test_a_backlog_pinned_to_another_worker_hides_nothing(store):
    fill(
        store,
        "other",
        1500,
        partition_key="",
        sticky_worker="w-b",
        priority=10_000,
    )
    enqueue(store, "mine", sticky_worker="w-a", priority=50)
    enqueue(store, "free", priority=1)
    assert ids(admit(store, 2, worker="w-a")) == ["mine", "free"]
    assert ids(admit(store, 2, worker="w-c")) == []
    assert ids(admit(store, 1, worker="w-b")) == ["other-1"]


def test_a_pinned_job_stays_pinned(store):
    enqueue(store, "mine", sticky_worker="w-a")
    [claim] = admit(store, worker="w-a").claims
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    assert ids(admit(store, worker="w-b")) == []
    assert ids(admit(store, worker="w-a")) == ["mine"]


def test_a_worker_without_identity_gets_only_unpinned_jobs(store):
    enqueue(store, "pinned", sticky_worker="w-a")
    enqueue(store, "free")
    assert ids(admit(store, worker="")) == ["free"]


def test_pinned_and_free_jobs_of_a_partition_share_its_quantum(store):
    fill(store, "mine", 3, partition_key="A", sticky_worker="w-a")
    fill(store, "free", 3, partition_key="A")
    fill(store, "B", 3)
    assert served(admit(store, worker="w-a", quantum=2)) == {"A": 2, "B": 2}


def test_only_available_jobs_are_drawn(store, clock: Clock):
    enqueue(store, "due")
    enqueue(store, "future", delay_ms=1000)
    enqueue(store, "pending", pending=True)
    assert ids(admit(store)) == ["due"]
    clock.advance_ms(1000)
    assert ids(admit(store)) == []
    store.promote_due(10)
    assert ids(admit(store)) == ["future"]
    steer(store).promote_job("pending")
    assert ids(admit(store)) == ["pending"]
    assert state_of(store, "pending") == "running"
