"""A refusal reads alike on both stores: same class, same facts, same text."""

from __future__ import annotations

import pytest

from headgate_sync.errors import StoreError
from headgate_sync.lease import (
    Ack,
    Checkpoint,
    JobResult,
    LeaseRef,
    ProgressUpdate,
)
from headgate_sync.lifecycle import Outcome, State
from tests.builders import (
    admit,
    bring_to,
    crash,
    enqueue,
    envelope,
    envelopes,
    run_one,
    steer,
)

STALE = LeaseRef("running", "other", 1)
GONE = LeaseRef("gone", "lease", 1)

REFUSALS = {
    "id conflict": lambda s: s.enqueue([envelope("waiting", payload=b"other")]),
    "id twice": lambda s: s.enqueue([envelope("x"), envelope("x")]),
    "too many jobs": lambda s: s.enqueue(envelopes(*map(str, range(1001)))),
    "no envelope": lambda s: s.enqueue(["text"]),
    "replace in a batch": lambda s: s.enqueue(
        [envelope("x"), envelope("y", unique_key=b"k", unique_replace=1)]
    ),
    "quarantined": lambda s: s.enqueue([envelope("x", fingerprint="poison")]),
    "full": lambda s: s.enqueue([envelope("x", queue="full")]),
    "duplicate": lambda s: s.enqueue([envelope("x", unique_key=b"held")]),
    "duplicate in a batch": lambda s: s.enqueue(
        [envelope("x", unique_key=b"new"), envelope("y", unique_key=b"new")]
    ),
    "replaced": lambda s: s.enqueue(
        [envelope("x", unique_key=b"held", unique_replace=4, priority=3)]
    ),
    "lease length of an admit": lambda s: admit(s, lease_ms=0),
    "capacity": lambda s: admit(s, capacity=-1),
    "stale ack": lambda s: s.ack(STALE, Outcome.SUCCESS),
    "ack of a missing job": lambda s: s.ack(GONE, Outcome.SUCCESS),
    "ack of a waiting job": lambda s: s.ack(
        LeaseRef("waiting", "l", 1), Outcome.SUCCESS
    ),
    "lease_lost": lambda s: s.ack(STALE, Outcome.LEASE_LOST),
    "snooze without a delay": lambda s: s.ack(STALE, Outcome.SNOOZE),
    "too many acks": lambda s: s.ack_batch(
        [Ack(lease=STALE, outcome=Outcome.SKIP)] * 1001
    ),
    "lease length of a renewal": lambda s: s.renew([STALE], lease_ms=0),
    "stale checkpoint": lambda s: s.checkpoint(STALE, Checkpoint()),
    "checkpoint of a missing job": lambda s: s.checkpoint(GONE, Checkpoint()),
    "stale output": lambda s: s.outputs.write_job_output(STALE, JobResult(1, b"")),
    "stale progress": lambda s: s.progress.write_job_progress(
        STALE, ProgressUpdate(1, 2)
    ),
    "stale result": lambda s: s.results.ack_success_with_result(
        STALE, JobResult(1, b"")
    ),
    "limit of a reclaim": lambda s: s.reclaim_expired(0),
    "limit of a promotion": lambda s: s.promote_due(10_000_000),
    "limit of an eviction": lambda s: s.evict_retained(True),
    "lease length of a duty": lambda s: s.claim_duty("d", "h", 0),
    "name of a duty": lambda s: s.claim_duty("\0", "h", 1),
    "holder of a duty": lambda s: s.release_duty("d", "h" * 256),
    "ticked duty": lambda s: s.duty_tick("h", ["d" * 256], 1),
    "promotion of a waiting job": lambda s: steer(s).promote_job("waiting"),
    "promotion of a missing job": lambda s: steer(s).promote_job("gone"),
    "retry of a completed job": lambda s: steer(s).operator_retry("done"),
    "retry against a held key": lambda s: steer(s).operator_retry("stopped"),
    "cancel of a completed job": lambda s: steer(s).operator_cancel("done"),
    "deletion of a running job": lambda s: steer(s).delete_job("running"),
    "edit of a running job": lambda s: steer(s).edit_payload(
        "running", b"", schema_version=1, fingerprint=""
    ),
    "edit with a bad version": lambda s: steer(s).edit_payload(
        "waiting", b"", schema_version=-1, fingerprint=""
    ),
    "edit with a bad fingerprint": lambda s: steer(s).edit_payload(
        "waiting", b"", schema_version=1, fingerprint="\0"
    ),
    "reschedule of an available job": lambda s: steer(s).reschedule_job("waiting", 5),
    "reschedule to a bad instant": lambda s: steer(s).reschedule_job("waiting", -1),
    "schedule of an available job": lambda s: steer(s).schedule_pending("waiting", 5),
    "release of an unknown fingerprint": lambda s: steer(s).quarantine_release("?"),
    "limit of a sweep": lambda s: steer(s).quarantine_sweep(0),
    "page of a list": lambda s: steer(s).quarantine_list(201),
    "too many ids": lambda s: steer(s).get_jobs(list(map(str, range(1001)))),
    "limit of a queue": lambda s: steer(s).set_enqueue_limit("q", -1),
    "weight of a queue": lambda s: steer(s).set_queue_weight("q", 0),
    "name of a queue": lambda s: steer(s).set_queue_paused("", True),
    "kinds": lambda s: steer(s).distinct_kinds(0),
}


def prepare(backend):
    """The same history on each store."""
    store, clock = backend.make_store(crash_limit=1), backend.clock
    crash(store, clock, run_one(store, "poisoned", fingerprint="poison"))
    bring_to(store, clock, "done", State.COMPLETED)
    bring_to(store, clock, "stopped", State.CANCELLED, unique_key=b"held")
    run_one(store, "running")
    enqueue(store, "waiting", unique_key=b"held")
    steer(store).set_enqueue_limit("full", 0)
    return store


@pytest.mark.parametrize("name", REFUSALS)
def test_both_stores_refuse_in_the_same_words(memory, postgres, name):
    told = []
    for backend in (memory, postgres):
        store = prepare(backend)
        with pytest.raises(StoreError) as caught:
            REFUSALS[name](store)
        told.append((type(caught.value), str(caught.value), vars(caught.value)))
    assert told[0] == told[1]
