"""The arithmetic of admission, by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.errors import InvalidRequest
from headgate_sync.policy import (
    DEFICIT_CAP,
    LEDGER_LAG,
    MAX_UNITS,
    MIN_UNITS,
    NEVER_MS,
    WINDOW_MAX,
    Budget,
    BudgetConfig,
    Delay,
    OnSaturated,
    Poll,
    Service,
    automatic_quantum,
    is_noisy,
    next_delay,
    reweighted,
    settled_deficit,
    window_size,
    with_lag,
)

CONFIGS = st.builds(
    BudgetConfig, st.integers(0, 1000), st.integers(1, 100_000), st.integers(1, 1000)
)


def budget(
    tokens: int = 5, *, limit: int = 5, window_ms: int = 1000, burst: int = 5
) -> Budget:
    return Budget(
        limit=limit,
        window_ms=window_ms,
        burst=burst,
        units=tokens * window_ms,
        refilled_at_ms=0,
    )


# The window and the shares


@pytest.mark.parametrize(
    ("capacity", "quantum", "lanes"),
    [
        (16, 0, 48),
        (16, 1, 48),
        (16, 4, 24),
        (16, 1000, 18),
        (1, 0, 18),
        (10_000, 1, 256),
    ],
)
def test_a_window_holds_twice_what_fills_the_capacity(capacity, quantum, lanes):
    assert window_size(capacity, quantum) == lanes
    assert lanes <= WINDOW_MAX


@pytest.mark.parametrize(
    ("capacity", "partitions", "quantum"),
    [(6, 1, 6), (12, 3, 4), (16, 48, 1), (7, 3, 3), (5, 0, 5)],
)
def test_automatic_shares_cut_the_capacity_evenly(capacity, partitions, quantum):
    assert automatic_quantum(capacity, partitions) == quantum


@pytest.mark.parametrize(
    ("inflight", "noisy"),
    [
        ([5, 1, 1], [0]),
        ([2, 1], []),
        ([3, 1], [0]),
        ([2, 0], [0]),
        ([1, 0], []),
        ([9], []),
        ([4, 2, 2], []),
        ([5, 2, 2], [0]),
    ],
)
def test_noisy_is_more_than_twice_the_mean_of_the_peers(inflight, noisy):
    found = [
        place
        for place, running in enumerate(inflight)
        if is_noisy(running, sum(inflight) - running, len(inflight))
    ]
    assert found == noisy


@given(
    deficit=st.integers(0, 4000),
    quantum=st.integers(1, 1000),
    taken=st.integers(0, 5000),
)
def test_credit_is_spent_capped_and_lost_when_idle(deficit, quantum, taken):
    kept = settled_deficit(deficit, quantum, taken, emptied=False)
    assert 0 <= kept <= DEFICIT_CAP * quantum
    assert kept <= max(0, deficit + quantum - taken)
    assert settled_deficit(deficit, quantum, taken, emptied=True) == 0


# The service ledger


def test_service_is_compared_without_rounding():
    third, more = Service(1, 3), Service(333_333_333_334, 1_000_000_000_001)
    assert third.is_behind(more)
    assert not more.is_behind(third)
    assert not third.is_behind(Service(2, 6))


def test_an_idle_queue_is_at_most_the_lag_behind():
    services = [Service(1_000_000, 1), Service(0, 1), Service(0, 3)]
    assert with_lag(services) == [
        1_000_000,
        1_000_000 - LEDGER_LAG,
        3_000_000 - LEDGER_LAG,
    ]
    assert with_lag([Service(5, 2), Service(0, 1)]) == [5, 0]
    assert with_lag([]) == []


@given(
    decisions=st.integers(0, 10**12), old=st.integers(1, 1000), new=st.integers(1, 1000)
)
def test_a_new_weight_leaves_the_position(decisions, old, new):
    moved = reweighted(decisions, old, new)
    assert moved * old <= decisions * new < (moved + 1) * old


# Budgets


@given(
    config=CONFIGS,
    steps=st.lists(st.integers(0, 5000), max_size=20),
    spent=st.integers(0, 1000),
)
def test_many_small_refills_equal_one_large_one(config, steps, spent):
    stepped = direct = config.full(0).charged(min(spent, config.burst))
    now_ms = 0
    for step_ms in steps:
        now_ms += step_ms
        stepped = stepped.at(now_ms)
    assert stepped.units == direct.at(now_ms).units


@given(
    config=CONFIGS, draws=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 9)))
)
def test_no_interval_gives_more_than_burst_and_rate(config, draws):
    current, now_ms, spent = config.full(0), 0, 0
    for step_ms, weight in draws:
        now_ms += step_ms
        current = current.at(now_ms)
        if current.fits(weight):
            current = current.charged(weight)
            spent += weight
    assert spent * config.window_ms <= (
        config.burst * config.window_ms + now_ms * config.limit
    )


@given(config=CONFIGS, weight=st.integers(1, 1000), spent=st.integers(0, 2000))
def test_the_wait_is_exact_to_the_millisecond(config, weight, spent):
    current = config.full(0).charged(spent)
    wait_ms = current.wait_ms(weight)
    if wait_ms is None:
        assert config.limit == 0
        assert not current.at(10**9).fits(weight)
    elif weight <= config.burst:
        assert current.at(wait_ms).fits(weight)
        assert wait_ms == 0 or not current.at(wait_ms - 1).fits(weight)


def test_a_clock_that_steps_back_changes_nothing():
    later = budget(2).at(500)
    assert later.at(100) is later
    assert later.at(500) is later


def test_tokens_are_rounded_down_in_debt_too():
    assert budget(0).charged(1).at(100).tokens == -1
    assert budget(0).at(399).tokens == 1
    assert budget(0).at(400).tokens == 2


def test_a_free_step_passes_a_budget_in_debt():
    assert budget(-3).fits(0)
    assert not budget(-3).fits(1)
    assert budget(-3).wait_ms(0) == 0


def test_settling_gives_back_at_most_up_to_the_burst():
    assert budget(0).settled(3, 1).tokens == 2
    assert budget(5).settled(3, 0).tokens == 5
    assert budget(0).settled(1, 7).tokens == -6


def test_a_debt_stays_within_what_a_database_can_hold():
    wide = budget(0, window_ms=2**40, burst=1)
    assert wide.settled(0, 2**31 - 1).units == MIN_UNITS


def test_a_change_keeps_tokens_and_never_adds_any():
    assert budget(5).resized(BudgetConfig(5, 3000, 9)).tokens == 5
    assert budget(5).resized(BudgetConfig(5, 1000, 3)).tokens == 3
    assert budget(-5, window_ms=3).resized(BudgetConfig(1, 2, 9)).units == -10
    assert budget(0).charged(1).resized(BudgetConfig(1, 7, 9)).units == -7


def test_a_paused_budget_stands_still_without_credit():
    paused = budget(3).steered(100, paused=True)
    assert (paused.tokens, paused.refilled_at_ms) == (0, NEVER_MS)
    assert paused.at(10**12) is paused
    resumed = paused.steered(10_000, paused=False)
    assert (resumed.at(10_000).tokens, resumed.at(11_000).tokens) == (0, 5)
    assert budget(-2).steered(0, paused=True).tokens == -2


def test_the_largest_budget_fits_and_the_next_does_not():
    assert BudgetConfig(1, 2**62, 1).full(0).units == MAX_UNITS
    with pytest.raises(InvalidRequest, match=r"burst \* window_ms"):
        BudgetConfig(1, 2**61, 3)


# Ceilings


def test_the_most_careful_strategy_is_the_strongest():
    strongest_first = sorted(OnSaturated, key=lambda one: -one.strength)
    assert strongest_first == [
        OnSaturated.QUEUE,
        OnSaturated.DISCARD,
        OnSaturated.CANCEL_INCOMING,
        OnSaturated.CANCEL_RUNNING,
    ]


# Polling


def test_an_idle_worker_waits_longer_up_to_the_ceiling():
    waits, current_ms = [], 50
    for _ in range(7):
        delay = next_delay(0, False, current_ms, Poll(jitter=0), draw=0.5)
        current_ms = delay.base_ms
        waits.append(delay.wait_ms)
    assert waits == [100, 200, 400, 800, 1600, 2000, 2000]


@pytest.mark.parametrize(("admitted", "woken"), [(1, False), (0, True)])
def test_work_and_signals_reset_the_wait(admitted, woken):
    assert next_delay(admitted, woken, 1600, Poll(), draw=0.9) == Delay(50, 50)


def test_jitter_shortens_and_survives_at_the_ceiling():
    assert next_delay(0, False, 2000, Poll(), draw=0.0) == Delay(2000, 2000)
    assert next_delay(0, False, 2000, Poll(), draw=0.5) == Delay(2000, 1800)


@pytest.mark.parametrize(
    ("retry_after_ms", "wait_ms"), [(None, 400), (30, 30), (0, 1), (9000, 400)]
)
def test_a_class_that_reopens_cuts_the_wait(retry_after_ms, wait_ms):
    delay = next_delay(
        0, False, 200, Poll(jitter=0), draw=0, retry_after_ms=retry_after_ms
    )
    assert delay == Delay(400, wait_ms)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"floor_ms": 0}, "floor_ms is 0"),
        ({"ceiling_ms": 10}, "ceiling_ms is 10"),
        ({"multiplier": 1.0}, "multiplier is 1.0"),
        ({"jitter": 1.5}, "jitter is 1.5"),
    ],
)
def test_a_poll_that_cannot_work_is_refused(fields, text):
    with pytest.raises(InvalidRequest, match=text):
        Poll(**fields)
