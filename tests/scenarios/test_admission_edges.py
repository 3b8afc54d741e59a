"""Limits at their edges: holders that die, windows that end, crowds on one token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate_sync.errors import LeaseRejected
from headgate_sync.lifecycle import Outcome
from headgate_sync.retry import DEFAULT_RETRY_CAP_MS
from tests.backends import Backend, Clock
from tests.builders import DAY_MS, claim_one, crash, enqueue
from tests.scenarios.gate import (
    admit,
    ceiling,
    fill,
    ids,
    inflight,
    rate_class,
    served,
    tokens,
)


def test_the_slot_of_a_holder_that_died_is_free_after_its_lease(
    store, backend: Backend, clock: Clock
):
    """A full ceiling does not keep the reclaim from freeing it."""
    ceiling(store, 1, "queue")
    fill(store, "A", 2)
    claim = claim_one(store)
    assert ids(admit(store)) == []
    crash(store, clock, claim)
    assert inflight(backend, "A") == 0
    assert ids(admit(store)) == ["A-2"]


def test_late_and_repeated_acks_free_no_second_slot(
    store, backend: Backend, clock: Clock
):
    ceiling(store, 2, "queue")
    fill(store, "A", 5)
    lost, done = admit(store).claims
    store.ack(done.lease_ref, Outcome.SUCCESS)
    store.ack(done.lease_ref, Outcome.SUCCESS)
    crash(store, clock, lost)
    with pytest.raises(LeaseRejected):
        store.ack(lost.lease_ref, Outcome.SUCCESS)
    assert inflight(backend, "A") == 0
    assert len(admit(store)) == 2
    assert inflight(backend, "A") == 2


def test_an_urgent_job_that_was_taken_back_is_next_after_its_backoff(
    store, clock: Clock
):
    enqueue(store, "urgent", priority=10)
    crash(store, clock, claim_one(store))
    fill(store, "fresh", 500, partition_key="")
    clock.advance_ms(DEFAULT_RETRY_CAP_MS)
    store.promote_due(10)
    assert ids(admit(store, 1)) == ["urgent"]


def test_an_empty_class_takes_nothing_from_the_capacity_of_another(store):
    rate_class(store, "empty", "0/1000", 1)
    rate_class(store, "open", "1000/1000", 1000)
    fill(store, "spends", 1, rate_class="empty")
    admit(store, 1)
    fill(store, "blocked", 300, rate_class="empty")
    fill(store, "runs", 300, rate_class="open", scheduled_at_ms=9)
    assert served(admit(store, 64)) == {"runs": 64}


@pytest.mark.parametrize("window_ms", [200, 1_000, 60_000])
def test_each_of_many_windows_gives_its_limit_and_no_more(
    store, clock: Clock, window_ms
):
    rate_class(store, "c", f"4/{window_ms}", 4)
    fill(store, "job", 240, rate_class="c", partition_key="")
    assert len(admit(store)) == 4
    passed = []
    for _ in range(50):
        clock.advance_ms(window_ms)
        passed.append(len(admit(store, 10, quantum=0)))
    assert passed == [4] * 50


def test_a_drained_class_gives_its_rate_to_any_number_of_workers(store, clock: Clock):
    rate_class(store, "c", "8/1000", 8)
    fill(store, "job", 200, rate_class="c", partition_key="")
    assert len(admit(store)) == 8
    with ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            clock.advance_ms(1_000)
            batches = threads.map(lambda n: admit(store, 3, worker=f"w{n}"), range(8))
            taken = sum(len(batch) for batch in batches)
            # Whoever could not get hold of the queue in time came back without.
            taken += len(admit(store, 10))
            assert taken == 8


def test_of_many_that_ask_for_the_last_token_one_gets_it(store, clock: Clock):
    rate_class(store, "c", "1/1000", 1)
    fill(store, "job", 60, rate_class="c", partition_key="")
    with ThreadPoolExecutor(16) as threads:
        for _ in range(20):
            batches = list(threads.map(lambda n: admit(store, 1), range(16)))
            taken = [len(batch) for batch in batches]
            assert sorted(taken) == [0] * 15 + [1]
            clock.advance_ms(1_000)


def test_a_long_idle_time_fills_a_budget_once(store, clock: Clock):
    """Across the end of a day, a month and a year, and seven weeks."""
    rate_class(store, "c", "5/1000", 5)
    fill(store, "job", 100, rate_class="c", partition_key="")
    new_year_ms = 1_767_225_600_000
    for at_ms in (
        new_year_ms - 1,
        new_year_ms,
        new_year_ms + 31 * DAY_MS,
        new_year_ms + 80 * DAY_MS,
    ):
        clock.freeze_at(at_ms)
        expected = tokens(store, "c")
        assert 0 <= expected <= 5
        assert len(admit(store)) == expected
        assert tokens(store, "c") == 0
    clock.advance_ms(49 * DAY_MS)
    assert tokens(store, "c") == 5
    assert len(admit(store)) == 5
