"""The order in which the rows of MemStore find jobs, against a sorted list."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.memory.ordered import Ordered

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9), st.integers(0, 5)),
        st.tuples(st.just("discard"), st.integers(0, 9), st.none()),
        st.tuples(st.just("take"), st.none(), st.integers(0, 5)),
    ),
    max_size=300,
)


@given(steps)
def test_the_first_is_always_the_smallest_that_is_still_there(sequence):
    order: Ordered[str] = Ordered()
    model: dict[int, int] = {}
    for step, seq, key in sequence:
        if step == "put":
            order.put((key, seq, f"job {seq}"))
            model[seq] = key
        elif step == "discard":
            order.discard(seq)
            model.pop(seq, None)
        elif found := order.first(until=key):
            first = min(model, key=lambda seq: (model[seq], seq))
            assert found == f"job {first}"
            assert model.pop(first) <= key
            order.discard(first)
        else:
            assert not model or min(model.values()) > key
        assert len(order) == len(model)
    ascending = sorted(model, key=lambda seq: (model[seq], seq))
    assert list(order) == [f"job {seq}" for seq in ascending]
    assert sorted(order.jobs()) == sorted(order)
    assert order.first() == (f"job {ascending[0]}" if ascending else None)


def test_moving_jobs_about_for_ever_takes_no_more_room():
    order: Ordered[str] = Ordered()
    tracemalloc.start()
    try:
        for key in range(20_000):
            order.put((key, key % 50, "job"))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(order) == 50
    assert size < 100_000, "every forgotten place is still kept"
