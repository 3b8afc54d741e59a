"""A pause holds from the moment its call returns, whoever asks and whenever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headgate_sync.lifecycle import Outcome
from headgate_sync.policy import RateClassConfig
from tests.builders import admit, envelope, steer
from tests.concurrency.threads import together

ASKING = 4
ROUNDS = 8
JOBS = 400


class Phases:
    """The phase of the test, and how many admissions began in it and have ended."""

    def __init__(self) -> None:
        self.number = 0  # odd: the pause is on, and its call has returned
        self.over = False
        self.calls = 0
        self.changed = threading.Condition()

    def begin(self) -> None:
        """Begin the next phase."""
        with self.changed:
            self.number += 1
            self.calls = 0

    def last(self) -> None:
        """Wait until the phase has seen a few admissions from begin to end."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.calls >= 2 * ASKING, 60)

    def asked(self, number: int) -> None:
        """Count an admission that began in the phase of this number."""
        with self.changed:
            self.calls += number == self.number
            self.changed.notify()


def pause_queue(store: Any, paused: bool) -> None:
    steer(store).set_queue_paused("q", paused)


def pause_class(store: Any, paused: bool) -> None:
    config = RateClassConfig(
        name="c", limit=10**6, window_ms=1, burst=10**6, paused=paused
    )
    steer(store).upsert_rate_class(config)


@pytest.mark.parametrize("pause", [pause_queue, pause_class])
def test_no_admission_that_begins_after_a_pause_gets_anything(
    store: Any, clock: Any, pause: Callable[[Any, bool], None]
) -> None:
    pause(store, False)
    store.enqueue([envelope(f"j{n}", rate_class="c") for n in range(JOBS)])
    phases, mistakes, got = Phases(), list[str](), list[int]()

    def ask(worker: str) -> None:
        while not phases.over:
            number = phases.number
            batch = admit(store, worker=worker, capacity=1)
            got.append(len(batch.claims))
            if number % 2 and number == phases.number:
                mistakes.extend(claim.envelope.id for claim in batch.claims)
            for claim in batch.claims:
                store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
            phases.asked(number)

    def steer_it() -> None:
        try:
            for _ in range(ROUNDS):
                pause(store, True)
                phases.begin()
                phases.last()
                phases.begin()
                pause(store, False)
                clock.advance_ms(1_000)
                phases.last()
        finally:
            phases.over = True

    together([steer_it, *(lambda n=n: ask(f"w{n}") for n in range(ASKING))])
    assert mistakes == []
    assert sum(got) > ROUNDS
