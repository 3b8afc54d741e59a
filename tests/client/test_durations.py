"""The grammar of durations and instants."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.durations import duration_ms, instant_ms
from headgate_sync.envelope import MAX_RELATIVE_MS
from headgate_sync.errors import InvalidRequest


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("500ms", 500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        ("1m1ms", 60_001),
        ("1d2h3m4s5ms", 93_784_005),
        (timedelta(seconds=30), 30_000),
        (timedelta(microseconds=1_999), 1),
    ],
)
def test_texts_and_timedeltas_become_milliseconds(value, expected):
    assert duration_ms("timeout", value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        "30",
        "s",
        "1.5s",
        "-1s",
        "+1s",
        "1 s",
        " 1s",
        "1s ",
        "1m1h",
        "1s1s",
        "1w",
        "1S",
        "١s",
    ],
)
def test_other_texts_are_refused(value):
    with pytest.raises(InvalidRequest, match=r"^timeout is .* expected a duration"):
        duration_ms("timeout", value)


@pytest.mark.parametrize("value", [30, 0, 1.5, -1])
def test_a_bare_number_is_asked_for_its_unit(value):
    with pytest.raises(InvalidRequest, match=r"^timeout is .*: say the unit"):
        duration_ms("timeout", value)


@pytest.mark.parametrize("value", [None, True, b"1s", object()])
def test_other_types_are_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="must be a timedelta or text, got"):
        duration_ms("timeout", value)


@pytest.mark.parametrize("minimum_ms", [0, 1])
def test_a_duration_that_vanishes_is_never_raised_to_the_minimum(minimum_ms):
    with pytest.raises(InvalidRequest, match="the minimum is 1 ms"):
        duration_ms("delay", timedelta(microseconds=999), minimum_ms=minimum_ms)


@pytest.mark.parametrize("zero", ["0s", "0ms", timedelta(0)])
def test_zero_is_allowed_only_where_it_means_something(zero):
    assert duration_ms("retention", zero, minimum_ms=0) == 0
    with pytest.raises(InvalidRequest, match="the minimum is 1 ms"):
        duration_ms("timeout", zero)


def test_a_negative_duration_is_refused():
    with pytest.raises(InvalidRequest, match="cannot be negative"):
        duration_ms("delay", timedelta(seconds=-1), minimum_ms=0)


def test_a_thousand_years_are_the_limit():
    assert duration_ms("delay", f"{MAX_RELATIVE_MS}ms") == MAX_RELATIVE_MS
    with pytest.raises(InvalidRequest, match="the limit is"):
        duration_ms("delay", f"{MAX_RELATIVE_MS + 1}ms")


def test_a_naive_datetime_is_refused():
    with pytest.raises(InvalidRequest, match="run_at has no time zone"):
        instant_ms("run_at", datetime(2030, 1, 1))


@pytest.mark.parametrize("value", ["2030-01-01", 1_900_000_000, None])
def test_an_instant_is_a_datetime(value):
    with pytest.raises(InvalidRequest, match="run_at must be a datetime"):
        instant_ms("run_at", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2026, 3, 29, 2, 0, tzinfo=UTC), 1_774_749_600_000),
        (
            datetime(2026, 3, 29, 4, 0, tzinfo=ZoneInfo("Europe/Berlin")),
            1_774_749_600_000,
        ),
        (
            datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
            1_792_888_200_000,
        ),
        (
            datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
            1_792_891_800_000,
        ),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Kathmandu")), 1_767_204_900_000),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("America/St_Johns")), 1_767_238_200_000),
        (datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=14))), 1_767_175_200_000),
    ],
)
def test_zones_and_both_sides_of_a_fold_are_read_right(value, expected):
    assert instant_ms("run_at", value) == expected


def test_an_instant_before_the_epoch_is_refused():
    with pytest.raises(InvalidRequest, match="after 1970"):
        instant_ms("deadline", datetime(1970, 1, 1, tzinfo=UTC))


@given(st.integers(1, MAX_RELATIVE_MS))
def test_every_whole_number_of_milliseconds_survives(ms):
    assert duration_ms("delay", f"{ms}ms") == ms
    assert duration_ms("delay", timedelta(milliseconds=ms)) == ms
