"""Queues at a glance: rates, ages, quiet groups, history and partitions."""

from __future__ import annotations

import pytest

from headgate_sync.backlog import HistoryBucket
from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.policy import Ceiling, RateClassConfig
from tests.builders import (
    admit,
    bring_to,
    enqueue,
    envelope,
    run_one,
    steer,
)

# A whole minute, so that windows begin where the tests say.
T = 1_700_000_040_000 - 1_700_000_040_000 % 60_000


@pytest.fixture
def at_a_minute(store, clock):
    clock.freeze_at(T)
    return store


def stats(store, queue="q"):
    [found] = steer(store).queue_stats(queues=[queue])
    return found


def load(store, number, **fields):
    """Enqueue many jobs in batches."""
    ids = [f"{fields.get('partition_key', '')}-{n}" for n in range(number)]
    for start in range(0, number, 1000):
        enqueue(store, *ids[start : start + 1000], **fields)


def finish(store, number, queue="q"):
    """Run jobs of a queue to their success."""
    while number > 0:
        claims = admit(store, queues=(queue,), capacity=min(number, 200)).claims
        store.ack_batch(
            [Ack(lease=c.lease_ref, outcome=Outcome.SUCCESS) for c in claims]
        )
        assert claims
        number -= len(claims)


def test_an_empty_idle_queue_is_no_special_case(store):
    steer(store).set_queue_paused("q", False)
    [found] = steer(store).queue_stats()
    assert (found.queue, found.unfinished_jobs, found.time_to_drain_ms) == ("q", 0, 0)
    assert (found.arrival_rate, found.drain_rate) == (0.0, 0.0)
    assert (found.oldest_available_ms, found.max_unfinished_jobs) == (None, None)
    assert (dict(found.by_state.counts), found.by_state.approximate) == ({}, False)
    assert found.memory_bytes is None


def test_rates_are_divided_by_the_true_length_of_the_window(at_a_minute, clock):
    store = at_a_minute
    load(store, 600, partition_key="a")
    clock.advance_ms(60_000)
    load(store, 590, partition_key="b")
    clock.advance_ms(59_000)
    assert stats(store).arrival_rate == 10.0
    clock.advance_ms(1_000)
    assert stats(store).arrival_rate == 590 / 60
    clock.advance_ms(60_000)
    assert stats(store).arrival_rate == 0.0


@pytest.mark.parametrize(
    ("earlier", "arriving", "drained", "expected"),
    [(1200, 120, 720, 60_000), (240, 720, 720, None), (600, 0, 0, None)],
)
def test_time_to_drain_is_the_backlog_over_what_it_shrinks_by(
    at_a_minute, clock, earlier, arriving, drained, expected
):
    store = at_a_minute
    load(store, earlier, partition_key="a")
    clock.advance_ms(180_000)
    load(store, arriving, partition_key="b")
    finish(store, drained)
    clock.advance_ms(0)
    found = stats(store)
    assert found.unfinished_jobs == earlier + arriving - drained
    assert found.drain_rate == drained / 60
    assert found.time_to_drain_ms == expected


def test_a_job_is_as_old_as_its_schedule(at_a_minute, clock):
    store = at_a_minute
    store.enqueue([envelope("young", scheduled_at_ms=T, priority=9)])
    store.enqueue([envelope("old", scheduled_at_ms=T - 4_200)])
    bring_to(store, clock, "later", State.SCHEDULED)
    assert stats(store).oldest_available_ms == 4_200
    clock.advance_ms(100)
    assert stats(store).oldest_available_ms == 4_300
    admit(store)
    assert stats(store).oldest_available_ms is None


@pytest.mark.parametrize(
    ("arrivals", "noisy"),
    [
        ({"a": 100, "b": 10, "c": 10}, {"a"}),
        ({"a": 4, "b": 2}, set()),
        ({"a": 5, "b": 2}, {"a"}),
        ({"a": 1}, set()),
        ({"a": 1000}, set()),
        ({"a": 100, "b": 100, "c": 1}, set()),
    ],
)
def test_quiet_groups_leave_the_noisy_partitions_out(at_a_minute, arrivals, noisy):
    store = at_a_minute
    for key, number in arrivals.items():
        load(store, number, partition_key=key, scheduled_at_ms=T - number)
    quiet = stats(store).quiet_groups
    calm = {key: n for key, n in arrivals.items() if key not in noisy}
    assert quiet.noisy_partitions == len(noisy)
    assert quiet.arrival_rate == sum(calm.values()) / 60
    assert quiet.oldest_available_ms == max(calm.values())
    assert not quiet.approximate
    shown = {p.partition_key for p in steer(store).partitions("q") if p.noisy}
    assert shown == noisy


def test_the_quiet_backlog_drains_whatever_the_noisy_tenant_does(at_a_minute, clock):
    store = at_a_minute
    load(store, 30, partition_key="calm", priority=9)
    clock.advance_ms(180_000)
    load(store, 200, partition_key="loud")
    load(store, 6, partition_key="other", priority=9)
    finish(store, 12)
    found = stats(store)
    assert found.time_to_drain_ms is None
    quiet = found.quiet_groups
    taken = {p.partition_key: p.waiting for p in steer(store).partitions("q")}
    calm = taken.get("calm", 0) + taken.get("other", 0)
    done = 36 - calm
    expected = None if done <= 6 else calm * 60_000 // (done - 6)
    assert quiet.time_to_drain_ms == expected


def test_queues_come_by_name_and_go_on_from_a_cursor(store):
    for name in ("b", "Z", "é", "a", "a/b"):
        enqueue(store, name, queue=name)
    names = [q.queue for q in steer(store).queue_stats()]
    assert names == ["Z", "a", "a/b", "b", "é"]
    assert [q.queue for q in steer(store).queue_stats(2)] == ["Z", "a"]
    assert [q.queue for q in steer(store).queue_stats(2, "a")] == ["a/b", "b"]
    assert steer(store).queue_stats(2, "é") == []


def test_a_queue_is_known_by_its_settings_its_limit_or_its_past(store, clock):
    enqueue(store, "gone", queue="used")
    steer(store).delete_job("gone")
    steer(store).set_queue_weight("weighted", 3)
    steer(store).set_enqueue_limit("closed", 0)
    admit(store, queues=("asked",))
    found = {q.queue: q for q in steer(store).queue_stats()}
    assert sorted(found) == ["closed", "used", "weighted"]
    assert found["weighted"].weight == 3
    assert found["closed"].max_unfinished_jobs == 0
    clock.advance_ms(86_400_000)
    assert len(steer(store).queue_stats()) == 3


def test_a_name_that_was_never_used_is_an_empty_queue(store):
    assert stats(store, "nowhere").unfinished_jobs == 0
    assert steer(store).queue_stats() == []
    assert steer(store).queue_stats(queues=[]) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.queue_stats(0),
        lambda s: s.queue_stats(201),
        lambda s: s.queue_stats(cursor="nul\0"),
        lambda s: s.queue_stats(queues=["x"] * 201),
        lambda s: s.queue_stats(queues=[""]),
        lambda s: s.history("q", 0, 59_999),
        lambda s: s.history("q", -1),
        lambda s: s.history("q", True),
        lambda s: s.history("", 0),
        lambda s: s.partitions("x" * 256),
        lambda s: s.counts("\ud800"),
        lambda s: s.set_queue_weight("q", 0),
    ],
)
def test_an_impossible_question_is_refused(store, call):
    with pytest.raises(InvalidRequest):
        call(steer(store))


def test_history_tells_what_came_and_how_it_ended(at_a_minute, clock):
    store = at_a_minute
    ends = ("success", "retry", "skip", "undecodable", "revoke", "snooze")
    enqueue(store, *ends)
    clock.advance_ms(60_000)
    claims = admit(store).claims
    store.ack_batch(
        [
            Ack(
                lease=claim.lease_ref,
                outcome=Outcome(claim.envelope.id),
                latency_ms=100,
                delay_ms=1 if claim.envelope.id == "snooze" else None,
            )
            for claim in claims
        ]
    )
    later = HistoryBucket(
        at_ms=T + 60_000,
        arrived=0,
        completed=1,
        failed=2,
        retried=1,
        latency_ms_sum=500,
        latency_count=5,
    )
    first = HistoryBucket(at_ms=T, arrived=6, completed=0)
    assert steer(store).history("q", 0) == [first, later]
    assert steer(store).history("q", T + 1) == [later]
    assert steer(store).history("other", 0) == []
    [both] = steer(store).history("q", 0, 3_600_000)
    assert (both.at_ms, both.arrived, both.completed) == (T - T % 3_600_000, 6, 1)


@pytest.mark.parametrize("verdict", ["discard", "cancel_incoming"])
def test_history_counts_what_a_full_ceiling_sent_away(at_a_minute, verdict):
    store = at_a_minute
    steer(store).upsert_concurrency_limit(
        Ceiling(
            name="c", queue="q", scope="queue", max_concurrent=1, on_saturated=verdict
        )
    )
    enqueue(store, *"abc")
    admit(store)
    [found] = steer(store).history("q", 0)
    assert (found.admission_rejections, found.failed) == (2, 0)


def test_partitions_are_ordered_by_what_waits(store):
    load(store, 2, partition_key="b")
    load(store, 2, partition_key="a")
    load(store, 3, partition_key="c")
    steer(store).set_partition_quantum("q", "own", 5)
    shown = [(p.partition_key, p.waiting) for p in steer(store).partitions("q")]
    assert shown == [("c", 3), ("a", 2), ("b", 2), ("own", 0)]
    assert steer(store).partitions("q")[-1].quantum_override == 5
    assert steer(store).partitions("other") == []


def test_a_partition_counts_its_running_jobs_until_they_end(store):
    claim = run_one(store, "a", partition_key="p")
    [seen] = steer(store).partitions("q")
    assert (seen.waiting, seen.inflight) == (0, 1)
    store.ack(claim.lease_ref, Outcome.SUCCESS)
    assert all(p.inflight == 0 for p in steer(store).partitions("q"))


def test_a_rate_class_tells_how_many_jobs_wait_for_it(store):
    steer(store).upsert_rate_class(
        RateClassConfig(name="c", limit=1, window_ms=1000, burst=1)
    )
    enqueue(store, "a", "b", rate_class="c")
    enqueue(store, "c", rate_class="other")
    [found] = steer(store).rate_classes()
    assert found.jobs_waiting == 2
    admit(store)
    [found] = steer(store).rate_classes()
    assert found.jobs_waiting == 1


def test_small_states_are_counted_however_many_jobs_the_others_have(store, clock):
    bring_to(store, clock, "lost", State.ARCHIVED)
    load(store, 3_000)
    assert dict(stats(store).by_state.counts) == {"archived": 1, "available": 3_000}
    assert dict(steer(store).counts().counts) == {"archived": 1, "available": 3_000}
    names = ["q", *(f"x{n}" for n in range(199))]
    page = steer(store).queue_stats(queues=names)
    # One large unfinished state alone follows from the counter.
    assert page[0].by_state == stats(store).by_state
    assert page[0].unfinished_jobs == 3_000


def test_the_last_unfinished_state_follows_from_the_counter(store):
    load(store, 300)
    store.enqueue([envelope(f"later{n}", delay_ms=60_000) for n in range(150)])
    names = ["q", *(f"x{n}" for n in range(19))]
    page = steer(store).queue_stats(queues=names)
    assert dict(page[0].by_state.counts) == {"available": 300, "scheduled": 150}
    assert not page[0].by_state.approximate


def test_two_large_states_are_lower_bounds_in_the_sample_of_a_page(store):
    load(store, 300)
    store.enqueue([envelope(f"later{n}", delay_ms=60_000) for n in range(300)])
    names = ["q", *(f"x{n}" for n in range(199))]
    page = steer(store).queue_stats(queues=names)
    assert dict(page[0].by_state.counts) == {"available": 5, "scheduled": 45}
    assert page[0].by_state.approximate
    assert page[0].unfinished_jobs == 600
    assert dict(stats(store).by_state.counts) == {"available": 300, "scheduled": 300}
    assert not stats(store).by_state.approximate
