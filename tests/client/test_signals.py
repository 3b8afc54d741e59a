"""Signals of handlers: the durations in them are checked where they are raised."""

from __future__ import annotations

from datetime import timedelta

import pytest

from headgate_sync.errors import InvalidRequest
from headgate_sync.signals import Control, RateLimited, Revoke, Skip, Snooze


def test_a_snooze_carries_milliseconds():
    assert Snooze("5m").delay_ms == 300_000
    assert Snooze(timedelta(seconds=1)).delay_ms == 1_000


@pytest.mark.parametrize(
    "delay", ["0s", timedelta(0), timedelta(microseconds=999), timedelta(seconds=-1)]
)
def test_a_snooze_below_a_millisecond_is_left_to_the_worker(delay):
    assert Snooze(delay).delay_ms == 0


@pytest.mark.parametrize("delay", [300, 0.5, None, "soon"])
def test_a_snooze_without_a_duration_is_a_fault_of_the_handler(delay):
    with pytest.raises(InvalidRequest, match="delay"):
        Snooze(delay)


def test_a_rate_limit_may_say_for_how_long():
    assert RateLimited().retry_after_ms is None
    assert RateLimited("2s").retry_after_ms == 2_000
    for wrong in (2, "0s", timedelta(microseconds=1)):
        with pytest.raises(InvalidRequest, match="retry_after"):
            RateLimited(wrong)


def test_a_skip_says_why():
    assert Skip("no such user").reason == "no such user"
    with pytest.raises(InvalidRequest, match="reason must be str, got int"):
        Skip(3)


def test_all_of_them_are_control_and_none_is_an_error_of_ours():
    for signal in (Snooze("1s"), Skip("x"), Revoke(), RateLimited()):
        assert isinstance(signal, Control)
