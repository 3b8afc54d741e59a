"""The circuit breaker: closed, open, half open, and never moved by an old permit."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headgate_sync.client.circuit import CircuitBreaker, CircuitSnapshot, CircuitState
from headgate_sync.errors import (
    BackendError,
    Backpressure,
    CircuitRejected,
    DuplicateJob,
    InvalidRequest,
    StoreConflict,
    StoreUnavailable,
)
from tests.worker.rig import Steps

OPEN, CLOSED, HALF_OPEN = (
    CircuitState.OPEN,
    CircuitState.CLOSED,
    CircuitState.HALF_OPEN,
)


@pytest.fixture
def clock():
    return Steps()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(
        failure_threshold=2,
        recovery_timeout=timedelta(milliseconds=100),
        half_open_max_calls=2,
        clock=clock,
    )


def call(breaker, error=None):
    """One call of a store that answers, or raises."""
    with breaker.permit():
        if error is not None:
            raise error


def fail(breaker):
    with pytest.raises(StoreUnavailable):
        call(breaker, StoreUnavailable("away"))


def opened(breaker):
    fail(breaker)
    fail(breaker)


def test_two_failures_open_it_for_the_recovery_time(breaker, clock):
    opened(breaker)
    assert breaker.snapshot() == CircuitSnapshot(state=OPEN, retry_after_ms=100)
    clock.advance(0.099)
    assert breaker.snapshot().retry_after_ms == 1
    with pytest.raises(CircuitRejected) as caught:
        call(breaker)
    assert (caught.value.state, caught.value.retry_after_ms) == ("open", 1)
    clock.advance(0.001)
    assert breaker.snapshot() == CircuitSnapshot(state=HALF_OPEN)


def test_half_open_admits_no_more_probes_than_it_needs(breaker, clock):
    opened(breaker)
    clock.advance(0.1)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(breaker.permit())
        second.enter_context(breaker.permit())
        with pytest.raises(CircuitRejected) as caught:
            call(breaker)
        assert (caught.value.state, caught.value.retry_after_ms) == ("half_open", 0)
        with pytest.raises(LookupError), second.pop_all():
            raise LookupError
        call(breaker)
        assert breaker.snapshot() == CircuitSnapshot(
            state=HALF_OPEN, half_open_successes=1, half_open_in_flight=1
        )
    assert breaker.snapshot() == CircuitSnapshot(state=CLOSED)


def test_an_answer_starts_the_count_again(breaker):
    fail(breaker)
    call(breaker)
    fail(breaker)
    assert breaker.snapshot() == CircuitSnapshot(state=CLOSED, consecutive_failures=1)


def test_a_late_probe_of_an_earlier_phase_changes_nothing(breaker, clock):
    opened(breaker)
    clock.advance(0.1)
    with breaker.permit():
        fail(breaker)
    assert breaker.snapshot() == CircuitSnapshot(state=OPEN, retry_after_ms=100)


def test_a_probe_that_fails_opens_it_for_the_whole_time_again(breaker, clock):
    opened(breaker)
    clock.advance(0.15)
    fail(breaker)
    assert breaker.snapshot() == CircuitSnapshot(state=OPEN, retry_after_ms=100)


@pytest.mark.parametrize(
    "error",
    [
        DuplicateJob("a"),
        Backpressure("q", limit=1, current=1, incoming=1),
        BackendError("odd"),
        StoreConflict("again"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_proves_that_the_store_is_there(breaker, error):
    fail(breaker)
    with pytest.raises(type(error)):
        call(breaker, error)
    assert breaker.snapshot().consecutive_failures == 0


@pytest.mark.parametrize("error", [InvalidRequest("no"), LookupError(), SystemExit()])
def test_what_was_raised_before_the_store_was_asked_is_no_verdict(breaker, error):
    fail(breaker)
    with pytest.raises(type(error)):
        call(breaker, error)
    assert breaker.snapshot().consecutive_failures == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"failure_threshold": 0},
        {"half_open_max_calls": 0},
        {"recovery_timeout": timedelta(microseconds=10)},
        {"recovery_timeout": "0s"},
        {"recovery_timeout": 60},
        {"failure_threshold": True},
    ],
)
def test_a_setting_that_means_nothing_is_refused(bad):
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        CircuitBreaker(**bad)


def test_a_forked_child_starts_closed_and_is_not_locked(breaker):
    opened(breaker)
    inside, leave = threading.Event(), threading.Event()

    def clock():
        inside.set()
        leave.wait(20)
        return 1.0

    held = CircuitBreaker(clock=clock)
    thread = threading.Thread(target=held.snapshot)
    thread.start()
    inside.wait(20)
    child = os.fork()
    if child == 0:
        leave.set()
        states = {breaker.snapshot().state, held.snapshot().state}
        os._exit(0 if states == {CLOSED} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    leave.set()
    thread.join()
    assert breaker.snapshot().state is OPEN


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against the rules, with permits that end in any order."""

    THRESHOLD, RECOVERY_MS, PROBES = 3, 50, 2

    def __init__(self):
        super().__init__()
        self.now_ms = 7_000
        self.breaker = CircuitBreaker(
            failure_threshold=self.THRESHOLD,
            recovery_timeout=timedelta(milliseconds=self.RECOVERY_MS),
            half_open_max_calls=self.PROBES,
            clock=lambda: self.now_ms / 1000,
        )
        self.phase, self.state = 0, CLOSED
        self.failures = self.successes = self.in_flight = self.until_ms = 0
        self.permits = []

    def enter(self, state):
        self.phase += 1
        self.state = state
        self.failures = self.successes = self.in_flight = self.until_ms = 0

    def pass_time(self):
        if self.state is OPEN and self.now_ms >= self.until_ms:
            self.enter(HALF_OPEN)

    @rule(by_ms=st.integers(0, 120))
    def advance(self, by_ms):
        self.now_ms += by_ms

    @rule()
    def take(self):
        self.pass_time()
        expected = None
        if self.state is OPEN:
            expected = ("open", self.until_ms - self.now_ms)
        elif self.state is HALF_OPEN and self.successes + self.in_flight >= self.PROBES:
            expected = ("half_open", 0)
        permit = self.breaker.permit()
        if expected is not None:
            with pytest.raises(CircuitRejected) as caught:
                permit.__enter__()
            assert (caught.value.state, caught.value.retry_after_ms) == expected
            return
        permit.__enter__()
        self.in_flight += self.state is HALF_OPEN
        self.permits.append((permit, self.phase))

    @precondition(lambda self: self.permits)
    @rule(data=st.data(), verdict=st.sampled_from(["good", "bad", "none"]))
    def give_back(self, data, verdict):
        place = data.draw(st.integers(0, len(self.permits) - 1))
        permit, phase = self.permits.pop(place)
        error = {
            "good": None,
            "bad": StoreUnavailable("away"),
            "none": KeyboardInterrupt(),
        }[verdict]
        with suppress(StoreUnavailable, KeyboardInterrupt):
            permit.__exit__(type(error) if error else None, error, None)
        if phase != self.phase:
            return
        probing = self.state is HALF_OPEN
        self.in_flight -= probing
        if verdict == "bad":
            self.failures += 1
            if probing or self.failures == self.THRESHOLD:
                self.enter(OPEN)
                self.until_ms = self.now_ms + self.RECOVERY_MS
        elif verdict == "good":
            self.failures = 0
            self.successes += probing
            if probing and self.successes == self.PROBES:
                self.enter(CLOSED)

    @invariant()
    def stands_as_the_rules_say(self):
        self.pass_time()
        assert self.breaker.snapshot() == CircuitSnapshot(
            state=self.state,
            consecutive_failures=self.failures,
            half_open_successes=self.successes,
            half_open_in_flight=self.in_flight,
            retry_after_ms=max(self.until_ms - self.now_ms, 0),
        )


TestBreaker = BreakerMachine.TestCase
