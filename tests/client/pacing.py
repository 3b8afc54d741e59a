"""Stepped time for waits, and the world that goes on while somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headgate_sync.client.waiting import Pace
from headgate_sync.events import EventKind, JobEvent
from headgate_sync.lease import JobResult
from headgate_sync.lifecycle import Outcome, State
from tests.builders import admit

ENOUGH = 2_000


class World(Pace):
    """Time that passes only while somebody waits; each wait lets the world turn.

    For tests on one thread: a wait returns at once, after `turn` was called.
    """

    def __init__(self, turn: Callable[[], object] = lambda: None) -> None:
        self.at_s = 1_000.0
        self.turn = turn
        self.waits: list[float] = []

    def now_s(self) -> float:
        return self.at_s

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        assert seconds > 0, "a wait that does not wait spins"
        self.waits.append(seconds)
        assert len(self.waits) < ENOUGH, "nobody ever comes"
        self.at_s += seconds
        self.turn()


class Ticks(Pace):
    """Time that a test steps while other threads wait in it."""

    def __init__(self) -> None:
        self.at_s = 1_000.0
        self._lock = threading.Lock()  # guards the next two fields
        self._conditions: set[threading.Condition] = set()
        self.parked = 0

    def now_s(self) -> float:
        return self.at_s

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        with self._lock:
            self._conditions.add(changed)
            self.parked += 1
        changed.wait(20)
        with self._lock:
            self.parked -= 1

    def step(self, seconds: float) -> None:
        """Let so much time pass for all who wait."""
        self.at_s += seconds
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()


def told(job_id: str, state: str = "completed") -> JobEvent:
    """What a worker of this process tells about the end of an attempt."""
    return JobEvent(
        kind=EventKind.FAILED if state == "retryable" else EventKind.COMPLETED,
        job_id=job_id,
        job_kind="k",
        queue="q",
        attempt=0,
        state=State(state),
        error=None,
        at_ms=1,
    )


def work(
    store: Any,
    *,
    count: int = 10,
    queues: tuple[str, ...] = ("q",),
    outcome: Outcome = Outcome.SUCCESS,
    result: bytes | None = None,
    **ack: Any,
) -> int:
    """Let a worker take up to so many jobs and end them all alike."""
    done = 0
    while done < count:
        claims = admit(store, capacity=min(count - done, 100), queues=queues).claims
        if not claims:
            break
        for claim in claims:
            if result is not None:
                store.results.ack_success_with_result(
                    claim.lease_ref, JobResult(1, result)
                )
            else:
                store.ack(claim.lease_ref, outcome, **ack)
        done += len(claims)
    return done
