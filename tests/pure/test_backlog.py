"""Counts by state out of samples."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from headgate_sync.backlog import (
    FIRST_SHARE,
    MAX_PAGE_SAMPLE,
    MAX_SAMPLE,
    SAMPLE_ORDER,
    UNFINISHED_ORDER,
    sample_of_page,
    sampled,
    sure_below,
)

numbers = st.dictionaries(
    st.sampled_from(SAMPLE_ORDER),
    st.integers(0, 20) | st.integers(0, 2 * MAX_SAMPLE),
)
BIG = 600_000


def test_a_backlog_is_counted_exactly_beside_smaller_states():
    there = {"available": BIG, "scheduled": 4_000, "retryable": 2_500, "running": 16}
    found = sampled(there, MAX_SAMPLE)
    assert (dict(found.counts), found.approximate) == (there, False)


def test_finished_jobs_beyond_the_sample_are_a_lower_bound():
    found = sampled({"available": BIG, "completed": BIG, "archived": 3}, MAX_SAMPLE)
    assert found.counts["available"] == BIG
    assert found.counts["archived"] == 3
    assert found.counts["completed"] == MAX_SAMPLE - 3
    assert found.approximate


def test_of_two_large_unfinished_states_neither_is_known():
    found = sampled({"available": BIG, "scheduled": BIG}, MAX_SAMPLE)
    assert found.counts == {"available": 5_000, "scheduled": MAX_SAMPLE - 5_000}
    assert found.approximate


@given(numbers, st.sampled_from([1, 2, 7, 200]))
@example({"available": FIRST_SHARE}, 1)
@example(dict.fromkeys(SAMPLE_ORDER, MAX_SAMPLE // 10), 1)
def test_figures_are_exact_or_lower_bounds_within_the_sample(there, queues):
    most = sample_of_page(queues)
    found = sampled(there, most)
    true = {state: jobs for state, jobs in there.items() if jobs}
    assert found.counts.keys() == true.keys()
    assert all(found.counts[state] <= jobs for state, jobs in true.items())
    if not found.approximate:
        assert found.counts == true
    short = [state for state, jobs in true.items() if found.counts[state] < jobs]
    assert all(found.counts[state] >= sure_below(queues) for state in short)
    # What was looked at, which is all but the one figure that follows from a counter.
    looked = sorted(found.counts.values())
    assert sum(looked) <= most or sum(looked[:-1]) <= most
    assert sum(state in UNFINISHED_ORDER for state in short) != 1


def test_a_page_is_counted_by_less_than_one_queue_alone():
    assert sample_of_page(1) == MAX_SAMPLE
    assert 200 * sample_of_page(200) <= MAX_PAGE_SAMPLE
