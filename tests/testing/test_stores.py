"""The checks that a store has to pass, and that a bad store does not."""

from __future__ import annotations

import pytest

from headgate_sync import Headgate, MemStore
from headgate_sync.testing import assert_enqueue_backpressure, assert_sticky_routing


def test_a_crowd_of_pinned_jobs_hides_nothing(store):
    assert_sticky_routing(store)
    assert_sticky_routing(Headgate(store))


def test_a_bounded_queue_takes_what_its_bound_says(store):
    assert_enqueue_backpressure(store)
    assert_enqueue_backpressure(Headgate(store))


def test_a_store_that_hides_jobs_fails():
    class Blind(MemStore):
        def admit(self, request):
            batch = super().admit(request)
            return type(batch)(units=batch.units[:1])

    with pytest.raises(AssertionError, match="worker-a must get"):
        assert_sticky_routing(Blind())


def test_a_store_without_bounds_fails():
    class Boundless(MemStore):
        def enqueue(self, batch):
            self.set_enqueue_limit(batch[0].queue, None)
            super().enqueue(batch)

    with pytest.raises(AssertionError, match="jobs refused: 0, expected 39"):
        assert_enqueue_backpressure(Boundless())
