"""The delays before the next attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.errors import InvalidRequest
from headgate_sync.retry import backoff_ms, check_option

SECONDS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]


@pytest.mark.parametrize(("count", "seconds"), list(enumerate(SECONDS, start=1)))
def test_backoff_doubles_from_one_second_to_one_hour(count, seconds):
    assert backoff_ms(count) == seconds * 1000


@pytest.mark.parametrize("count", [14, 21, 22, 100, 10_000])
def test_backoff_stays_at_its_cap_for_ever(count):
    assert backoff_ms(count) == 3_600_000


def test_doubling_ends_after_twenty_times_even_below_the_cap():
    assert backoff_ms(21, base_ms=1, cap_ms=2**62) == 2**20
    assert backoff_ms(10_000, base_ms=1, cap_ms=2**62) == 2**20
    assert backoff_ms(20, base_ms=1, cap_ms=2**62) == 2**19


def test_base_and_cap_may_be_chosen():
    assert [backoff_ms(n, base_ms=10, cap_ms=35) for n in (1, 2, 3)] == [10, 20, 35]
    assert backoff_ms(1, base_ms=50, cap_ms=35) == 35


@pytest.mark.parametrize(
    ("name", "high"),
    [
        ("retry_base_ms", 30_075_073),
        ("retry_cap_ms", 31_536_000_000_000),
        ("crash_limit", 2**31 - 1),
    ],
)
def test_options_of_a_store_have_a_range(name, high):
    for value in (1, high):
        check_option(name, value)
    for value in (0, -1, high + 1):
        with pytest.raises(InvalidRequest) as raised:
            check_option(name, value)
        assert raised.value.message == f"{name} is {value}, allowed is 1 to {high}"
    with pytest.raises(InvalidRequest):
        check_option(name, 1.5)


@given(st.integers(1, 20_000), st.integers(1, 10**6), st.integers(1, 10**9))
def test_backoff_never_falls_and_never_passes_its_cap(count, base_ms, cap_ms):
    delay = backoff_ms(count, base_ms=base_ms, cap_ms=cap_ms)
    assert 0 < delay <= cap_ms
    assert delay <= backoff_ms(count + 1, base_ms=base_ms, cap_ms=cap_ms)
