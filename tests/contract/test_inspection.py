"""Looking at jobs, and steering queues."""

from __future__ import annotations

import pytest

from headgate_sync.envelope import MAX_INT32
from headgate_sync.errors import InvalidRequest
from headgate_sync.inspection import MAX_JOBS
from headgate_sync.lifecycle import Outcome, State
from tests.backends import unchanged_by
from tests.builders import (
    START_MS,
    admit,
    bring_to,
    counts,
    crash,
    enqueue,
    envelope,
    run_one,
    steer,
)


def test_a_missing_job_is_none(store):
    assert steer(store).get_job("nobody") is None


def test_payload_and_headers_are_shown_on_request(store):
    store.enqueue([envelope("a", payload=b"secret", headers={"h": "x"})])
    hidden = steer(store).get_job("a")
    shown = steer(store).get_job("a", include_payload=True)
    assert (hidden.payload, hidden.headers) == (None, None)
    assert (shown.payload, dict(shown.headers)) == (b"secret", {"h": "x"})


def test_a_summary_tells_everything_about_a_job(store):
    store.enqueue(
        [
            envelope(
                "a",
                partition_key="p",
                rate_class="c",
                weight=3,
                priority=-4,
                max_attempts=5,
                timeout_ms=6,
                deadline_ms=7,
                retention_ms=8,
                tags=("t", "s"),
                sticky_worker="w",
                periodic_schedule_id="s",
                periodic_tick_ms=9,
                schema_version=2,
            )
        ]
    )
    found = steer(store).get_job("a")
    assert (found.id, found.kind, found.queue, found.state) == (
        "a",
        "tk:msg",
        "q",
        "available",
    )
    assert (found.partition_key, found.rate_class, found.weight) == ("p", "c", 3)
    assert (found.priority, found.max_attempts, found.schema_version) == (-4, 5, 2)
    assert (found.timeout_ms, found.deadline_ms, found.retention_ms) == (6, 7, 8)
    assert (found.tags, found.sticky_worker) == (("s", "t"), "w")
    assert (found.periodic_schedule_id, found.periodic_tick_ms) == ("s", 9)
    assert (found.enqueued_at_ms, found.scheduled_at_ms) == (START_MS, 1)
    assert (found.fence, found.claimed_by, found.errors) == (0, None, ())
    assert (found.reason_code, found.error_code, found.latency_ms) == ("", "", None)


def test_jobs_come_in_the_order_asked_and_missing_ones_are_left_out(store):
    enqueue(store, "a", "b", "c")
    found = steer(store).get_jobs(["c", "nobody", "a", "c"])
    assert [job.id for job in found][:2] == ["c", "a"]
    assert all(job.payload is None for job in found)
    assert steer(store).get_jobs([]) == []


def test_more_than_a_thousand_jobs_are_refused(store):
    ids = [str(n) for n in range(MAX_JOBS + 1)]
    assert steer(store).get_jobs(ids[:-1]) == []
    with pytest.raises(InvalidRequest, match=str(MAX_JOBS)):
        steer(store).get_jobs(ids)


def test_counts_are_by_state_and_leave_out_what_is_not_there(store, clock):
    assert counts(store) == {}
    bring_to(store, clock, "done", State.COMPLETED)
    bring_to(store, clock, "later", State.SCHEDULED)
    store.enqueue([envelope("elsewhere", queue="other")])
    assert counts(store) == {"completed": 1, "scheduled": 1, "available": 1}
    assert counts(store, "q") == {"completed": 1, "scheduled": 1}
    assert counts(store, "other") == {"available": 1}
    assert steer(store).counts().approximate is False


def test_kinds_of_waiting_jobs_are_sorted(store, clock):
    store.enqueue([envelope("1", kind="b"), envelope("2", kind="B")])
    store.enqueue([envelope("3", kind="a"), envelope("4", kind="b")])
    assert steer(store).distinct_kinds(100) == ["B", "a", "b"]


def test_kinds_may_be_those_of_some_queues(store):
    for number, (kind, queue) in enumerate(["aq", "bq", "br", "cs"]):
        store.enqueue([envelope(str(number), kind=kind, queue=queue)])
    assert steer(store).distinct_kinds(100, queues=["q", "s"]) == ["a", "b", "c"]
    assert steer(store).distinct_kinds(100, queues=("r",)) == ["b"]
    assert steer(store).distinct_kinds(100, queues=[]) == []


def test_the_clock_is_the_stores(store, clock):
    assert steer(store).store_now_ms() == START_MS
    clock.advance_ms(5)
    assert steer(store).store_now_ms() == START_MS + 5


def test_a_crashed_job_is_shown_as_orphaned_for_ever(store, clock):
    crash(store, clock, run_one(store, "a"))
    assert steer(store).get_job("a").orphaned
    clock.advance_ms(1_000)
    store.promote_due(1)
    store.ack(admit(store).claims[0].lease_ref, Outcome.SUCCESS)
    assert steer(store).get_job("a").orphaned


def test_looking_changes_nothing(backend, store, clock):
    bring_to(store, clock, "a", State.RETRYABLE)
    steered = steer(store)
    before = backend.image()
    steered.get_job("a", include_payload=True)
    steered.get_jobs(["a"])
    steered.counts()
    steered.unfinished("q")
    steered.distinct_kinds(10)
    steered.read_checkpoint("a")
    steered.quarantine_list()
    assert backend.image() == before


@pytest.mark.parametrize("weight", [0, -1, MAX_INT32 + 1, True, 1.5])
def test_an_impossible_queue_weight_is_refused(backend, store, weight):
    raised = unchanged_by(backend, lambda: steer(store).set_queue_weight("q", weight))
    assert isinstance(raised, InvalidRequest)
    assert "weight" in str(raised)


@pytest.mark.parametrize("queue", ["nul\0", "lone\ud800", "x" * 256, ""])
def test_a_malformed_queue_name_is_refused(backend, store, queue):
    steered = steer(store)
    for call in (
        lambda: steered.set_queue_paused(queue, True),
        lambda: steered.set_queue_weight(queue, 1),
        lambda: steered.set_enqueue_limit(queue, 1),
    ):
        assert isinstance(unchanged_by(backend, call), InvalidRequest)


def test_a_queues_weight_is_its_share(store):
    for queue in ("a", "b"):
        store.enqueue([envelope(f"{queue}{n}", queue=queue) for n in range(40)])
    steer(store).set_queue_weight("a", 3)
    claims = admit(store, queues=("a", "b"), capacity=40).claims
    taken = [claim.envelope.queue for claim in claims]
    assert (taken.count("a"), taken.count("b")) == (30, 10)
