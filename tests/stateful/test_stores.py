"""The state machine on each store, and on both side by side."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import StoreMachine


@pytest.mark.parametrize(
    "names", [("memory",), ("postgres",), ("memory", "postgres")], ids="+".join
)
def test_any_sequence_of_calls_ends_as_the_table_says(request, record_property, names):
    backends = [request.getfixturevalue(name) for name in names]
    taken: Counter[str] = Counter()

    class Machine(StoreMachine):
        def __init__(self):
            super().__init__(backends)

        def teardown(self):
            taken.update(self.model.taken)

    run_state_machine_as_test(Machine, settings=hypothesis.settings())
    record_property("transitions", dict(taken))
