"""When schedules fire: vectors, a brute-force reference, and laws."""

from __future__ import annotations

import calendar
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headgate_sync import cron
from headgate_sync.cron import due_ticks, is_tick, next_after, validate
from headgate_sync.errors import InvalidRequest, SpecError

VECTORS = json.loads(Path(__file__).with_name("cron_vectors.json").read_text())
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
START_MS = 1_750_000_000_000
ZONES = (
    "Africa/Cairo", "Africa/Casablanca", "America/Asuncion", "America/Havana",
    "America/New_York", "America/Nuuk", "America/Santiago", "America/St_Johns",
    "Asia/Beirut", "Asia/Gaza", "Asia/Jerusalem", "Asia/Tehran", "Atlantic/Azores",
    "Australia/Adelaide", "Australia/Lord_Howe", "Europe/Berlin", "Europe/Dublin",
    "Europe/London", "Pacific/Auckland", "Pacific/Chatham",
)  # fmt: skip


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def ticks(spec: str, after_ms: int, count: int) -> list[int]:
    found = []
    for _ in range(count):
        after_ms = next_after(spec, after_ms)
        found.append(after_ms)
    return found


# Vectors


@pytest.mark.parametrize("row", VECTORS["conformance"] + VECTORS["derived"], ids=str)
def test_the_next_tick_is_the_one_of_the_vector(row):
    assert next_after(row["spec"], row["after_ms"]) == row["next_ms"]


def test_all_vectors_are_there():
    sizes = {name: len(rows) for name, rows in VECTORS.items()}
    assert sizes == {
        "conformance": 81, "derived": 37, "reject": 36, "due_ticks": 8, "nicknames": 7,
    }  # fmt: skip


@pytest.mark.parametrize("row", VECTORS["reject"], ids=lambda row: row["spec"])
def test_a_spec_of_the_reject_list_is_refused(row):
    with pytest.raises(SpecError) as raised:
        validate(row["spec"])
    if row["reason"].startswith("unknown timezone"):
        assert str(raised.value) == row["reason"]


@pytest.mark.parametrize("row", VECTORS["due_ticks"], ids=lambda row: row["why"])
def test_the_due_ticks_are_those_of_the_vector(row):
    began_s = time.perf_counter()
    found = due_ticks(row["spec"], row["first_ms"], row["now_ms"], row["cap"])
    assert found == row["ticks"]
    assert time.perf_counter() - began_s < 1.0


@pytest.mark.parametrize("name", VECTORS["nicknames"])
def test_a_nickname_is_stored_as_what_it_stands_for(name):
    assert validate(name) == VECTORS["nicknames"][name]
    assert validate(f"CRON_TZ=Europe/Berlin {name}") == (
        f"CRON_TZ=Europe/Berlin {VECTORS['nicknames'][name]}"
    )


# Texts


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("* * * *", "bad cron `* * * *`: want 5 fields, or 6 with seconds"),
        (
            "0 0 1 1 * * 2027",
            "bad cron `0 0 1 1 * * 2027`: want 5 fields, or 6 with seconds",
        ),
        ("60 * * * *", "bad cron `60 * * * *`: bad minute"),
        ("0 0 * * FRI-MON", "bad cron `0 0 * * FRI-MON`: bad day-of-week"),
        ("0 22-2 * * *", "bad cron `0 22-2 * * *`: bad hour"),
        ("0 0 1 NOV-FEB *", "bad cron `0 0 1 NOV-FEB *`: bad month"),
        ("0 0 LW * *", "bad cron `0 0 LW * *`: 'LW' is no field"),
        ("٣ * * * *", "bad cron `٣ * * * *`: '٣' is no field"),
        ("0 0 31 2 *", "cron `0 0 31 2 *` has no future occurrence"),
        ("0 0 30 feb *", "cron `0 0 30 feb *` has no future occurrence"),
        ("0 0 31 4,6,9,11 *", "cron `0 0 31 4,6,9,11 *` has no future occurrence"),
        ("0 0 */31 * 1#5", "cron `0 0 */31 * 1#5` has no future occurrence"),
        ("@every:x", "bad @every spec `@every:x`"),
        (
            "@every 5x",
            ("bad @every spec `@every 5x`: @every period is '5x', "
            "expected a duration: 500ms, 30s, 1h30m, 7d"),
        ),
        ("@every:0", "@every period must be >= 1ms"),
        ("@every 0s", "@every period must be >= 1ms"),
        (timedelta(0), "@every period must be >= 1ms"),
        (timedelta(microseconds=10), "@every period must be >= 1ms"),
        (
            "CRON_TZ=UTC @every:1000",
            ("`@every` is epoch-aligned UTC and takes no CRON_TZ: "
            "`CRON_TZ=UTC @every:1000`"),
        ),
        ("CRON_TZ=Mars/Phobos 0 9 * * *", "unknown timezone `Mars/Phobos`"),
        ("CRON_TZ=../etc/passwd 0 9 * * *", "unknown timezone `../etc/passwd`"),
        (300, "spec must be text or timedelta, got int"),
        (None, "spec must be text or timedelta, got NoneType"),
        ("0 0 * * " + "1," * 1024 + "1", "spec has 2057 bytes, the limit is 1024"),
    ],
)  # fmt: skip
def test_a_refusal_quotes_the_spec_and_says_why(spec, text):
    with pytest.raises(SpecError) as raised:
        validate(spec)
    assert str(raised.value) == text
    assert isinstance(raised.value, InvalidRequest)


@pytest.mark.parametrize(
    ("spec", "stored"),
    [
        ("  0\t9   * *  mon-Fri ", "0 9 * * MON-FRI"),
        ("CRON_TZ=Europe/Berlin   0 9 1 jan *", "CRON_TZ=Europe/Berlin 0 9 1 JAN *"),
        ("0 0 l * *", "0 0 L * *"),
        ("0 0 * * 5l", "0 0 * * 5L"),
        ("0 0 * * wed#2", "0 0 * * WED#2"),
        ("007 * * * *", "007 * * * *"),
        ("5-05/2,1-11/2 0-0/3 * * fri-FRI/2", "5,1-11/2 0 * * FRI"),
        ("@every:000300", "@every:300"),
        ("@every 5m", "@every:300000"),
        ("@every 1h30m", "@every:5400000"),
        (timedelta(minutes=5), "@every:300000"),
        ("CRON_TZ=UTC 0 0 * * *", "CRON_TZ=UTC 0 0 * * *"),
    ],
)
def test_one_form_is_stored(spec, stored):
    assert validate(spec) == stored
    assert validate(stored) == stored


@pytest.mark.parametrize("spec", ["0 0 31 2 *", "0 0 30 2 *", "0 0 */31 * 1#5"])
def test_an_impossible_date_is_refused_in_no_time(spec):
    cron.parse.cache_clear()
    began_s = time.perf_counter()
    with pytest.raises(SpecError):
        validate(spec)
    assert time.perf_counter() - began_s < 1.0


def test_all_weekday_spellings_mean_the_same_days():
    monday = ms("2026-06-01")

    def days(field: str) -> set[int]:
        found = ticks(f"0 0 * * {field}", monday - 1, 14)
        return {(tick - monday) // DAY_MS % 7 for tick in found}

    assert days("0") == days("7") == days("SUN") == {6}
    assert days("5-7") == {4, 5, 6}
    assert days("MON-SAT") == {0, 1, 2, 3, 4, 5}
    assert days("SUN-SAT") == set(range(7))
    for wrapping in ("MON-SUN", "FRI-MON"):
        with pytest.raises(SpecError):
            validate(f"0 0 * * {wrapping}")


def test_a_step_over_a_range_of_one_value_goes_no_further_than_the_range():
    noon = ms("2026-06-01T12:00")
    once = [tick - noon for tick in ticks("15-15/10 12 * * *", noon - 1, 2)]
    assert once == [15 * 60_000, 15 * 60_000 + DAY_MS]
    open_ended = [tick - noon for tick in ticks("15/20 12 * * *", noon - 1, 3)]
    assert open_ended == [15 * 60_000, 35 * 60_000, 55 * 60_000]
    for wrong in ("5-5/0", "1-1/2/3", "3-1-1/2", "*/1-1/2", "1-1/2-5", "70-70/2"):
        with pytest.raises(SpecError):
            validate(f"{wrong} * * * *")


def test_both_day_fields_mean_either_unless_one_begins_with_a_star():
    def dates(spec: str) -> list[str]:
        found = ticks(spec, ms("2026-01-01") - 1, 8)
        return [datetime.fromtimestamp(t / 1000, UTC).strftime("%m-%d") for t in found]

    assert dates("0 12 1 * 1") == [
        "01-01", "01-05", "01-12", "01-19", "01-26", "02-01", "02-02", "02-09",
    ]  # fmt: skip
    assert dates("0 6 */2 * 6") == [
        "01-03", "01-17", "01-31", "02-07", "02-21", "03-07", "03-21", "04-11",
    ]  # fmt: skip


# Time zones


@pytest.mark.parametrize(
    ("spec", "after", "expected"),
    [
        # The week of the change is not skipped.
        ("CRON_TZ=Europe/Berlin 0 12 * * 0", 1_774_526_400_000, 1_774_778_400_000),
        # A wall clock that the day does not have.
        ("CRON_TZ=Europe/Berlin 30 2 * * *", 1_774_699_200_000, 1_774_830_600_000),
        # Over a month border with another offset.
        (
            "CRON_TZ=America/New_York * * * 4 *",
            ms("2026-02-15"),
            ms("2026-04-01T04:00:00"),
        ),
        # 2100 is no leap year.
        ("0 0 29 2 *", 3_981_312_000_000, 4_233_686_400_000),
        # A day that Samoa never had.
        (
            "CRON_TZ=Pacific/Apia 0 12 * * *",
            ms("2011-12-29T22:00"),
            ms("2011-12-30T22:00"),
        ),
        # After the first of two equal hours, and in the second.
        (
            "CRON_TZ=America/New_York 0 * * * *",
            ms("2024-11-03T05:00"),
            ms("2024-11-03T07:00"),
        ),
        (
            "CRON_TZ=America/New_York */30 * * * * *",
            ms("2024-11-03T05:59:30"),
            ms("2024-11-03T07:00"),
        ),
        (
            "CRON_TZ=America/New_York 30 1 * * *",
            ms("2024-11-03T06:10"),
            ms("2024-11-04T06:30"),
        ),
    ],
)
def test_a_change_of_the_offset_is_met_as_promised(spec, after, expected):
    assert next_after(spec, after) == expected


def test_the_seconds_of_a_day_that_a_zone_skipped_are_passed_over():
    spec = "CRON_TZ=Pacific/Apia * * * * * *"
    before = ms("2011-12-30T09:59:59")
    assert next_after(spec, before) == before + 1_000


def test_an_hour_that_a_zone_always_skips_is_found_out_within_years():
    """The last Sunday of March, half past two: there is none in Berlin, ever."""
    spec = "CRON_TZ=Europe/Berlin 30 2 * 3 7L"
    looked_at = []

    class Counting(cron.CronSim):
        def __next__(self):
            looked_at.append(found := super().__next__())
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cron, "CronSim", Counting)
        with pytest.raises(SpecError, match="has no future occurrence"):
            next_after(spec, START_MS)
        assert 10 < len(looked_at) < 16
        assert due_ticks(spec, START_MS, START_MS + DAY_MS, 9) == [START_MS]
    # The clock before is there each year, and that of a leap day within eight.
    assert next_after("CRON_TZ=Europe/Berlin 59 1 * 3 7L", START_MS)
    assert next_after("CRON_TZ=Europe/Berlin 30 2 29 2 *", 3_920_000_000_000)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("fields", ["30 1 * * *", "17 * * * *", "0 0 * * *"])
def test_ticks_rise_through_many_changes(zone, fields):
    """Neither a repeated time nor a stuck search, for years of both changes."""
    spec = f"CRON_TZ={zone} {fields}"
    found = ticks(spec, ms("2024-01-01"), 1_000)
    assert all(a < b for a, b in pairwise(found))


def changes(zone: str) -> list[int]:
    """Instants of 2019 to 2026, to the minute, at which the offset changes."""
    found, info = [], ZoneInfo(zone)
    at = datetime(2019, 1, 1, tzinfo=UTC)
    offset = at.astimezone(info).utcoffset()
    while at.year < 2027:
        later = at + timedelta(hours=6)
        if later.astimezone(info).utcoffset() != offset:
            low = at
            while later - low > timedelta(minutes=1):
                middle = low + (later - low) / 2
                middle = middle.replace(second=0, microsecond=0)
                if middle.astimezone(info).utcoffset() == offset:
                    low = middle
                else:
                    later = middle
            found.append(int(later.timestamp()) * 1000)
            offset = later.astimezone(info).utcoffset()
        at = max(at + timedelta(hours=6), later)
    return found


CHANGES = [(zone, at_ms) for zone in ZONES for at_ms in changes(zone)]


@st.composite
def fields(
    draw: st.DrawFn, low: int, high: int, many: bool = True
) -> tuple[str, set[int]]:
    """A field of an expression, and the numbers that it stands for."""
    kind = draw(st.sampled_from(["star", "step", "value", "range", "list"]))
    if kind == "star":
        return "*", set(range(low, high + 1))
    if kind == "step":
        step = draw(st.integers(1, 40))
        return f"*/{step}", set(range(low, high + 1, step))
    first = draw(st.integers(low, high))
    if kind == "value":
        return str(first), {first}
    if kind == "range":
        last = draw(st.integers(first, high))
        step = draw(st.integers(1, 5))
        if first == last:
            return f"{first}-{last}", {first}
        return f"{first}-{last}/{step}", set(range(first, last + 1, step))
    chosen = draw(st.lists(st.integers(low, high), min_size=2, max_size=4))
    return ",".join(map(str, chosen)), set(chosen)


@st.composite
def specs(draw: st.DrawFn) -> tuple[str, object]:
    """Five fields, and whether a wall clock matches them."""
    minute, hour, day, month, weekday = (
        draw(fields(*bounds)) for bounds in ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    )

    def matches(wall: datetime) -> bool:
        by_date = wall.day in day[1]
        by_weekday = wall.isoweekday() % 7 in weekday[1]
        if day[0].startswith("*") or weekday[0].startswith("*"):
            of_day = by_date and by_weekday
        else:
            of_day = by_date or by_weekday
        return (
            wall.minute in minute[1]
            and wall.hour in hour[1]
            and wall.month in month[1]
            and of_day
        )

    text = " ".join(part[0] for part in (minute, hour, day, month, weekday))
    return text, matches


def brute(zone: str, matches, from_ms: int, to_ms: int) -> list[int]:
    """Every minute that shows a matching wall clock for the first time."""
    info, found = ZoneInfo(zone), []
    for at_ms in range(from_ms, to_ms, 60_000):
        utc = datetime.fromtimestamp(at_ms // 1000, UTC)
        local = utc.astimezone(info)
        if local.fold == 0 and matches(local):
            found.append(at_ms)
    return found


@given(spec=specs(), change=st.sampled_from(CHANGES), jitter_ms=st.integers(0, 59_999))
def test_around_a_change_the_ticks_are_those_of_brute_force(spec, change, jitter_ms):
    (fields, matches), (zone, at_ms) = spec, change
    text = f"CRON_TZ={zone} {fields}"
    try:
        validate(text)
    except SpecError:
        assume(False)
    from_ms, to_ms = at_ms - 36 * HOUR_MS, at_ms + 36 * HOUR_MS
    expected = brute(zone, matches, from_ms, to_ms)
    found = []
    for tick in cron.parse(text).after(from_ms - 1):
        if tick >= to_ms:
            break
        found.append(tick)
    assert found == expected
    # From any instant in between, forwards and backwards.
    middle = at_ms + jitter_ms - 30_000
    later = [tick for tick in expected if tick > middle]
    if later:
        assert next_after(text, middle) == later[0]
    earlier = [tick for tick in expected if tick <= middle]
    newest = list(islice(cron.parse(text).until(middle), len(earlier)))
    assert newest == earlier[::-1]


@given(
    spec=specs(),
    zone=st.sampled_from(("", *(f"CRON_TZ={z} " for z in ZONES))),
    at_ms=st.integers(ms("1990-01-01"), ms("2090-01-01")),
    cap=st.integers(1, 12),
)
def test_due_ticks_are_the_newest_of_an_enumeration(spec, zone, at_ms, cap):
    text = zone + spec[0]
    try:
        validate(text)
    except SpecError:
        assume(False)
    run = ticks(text, at_ms, 20)
    assert all(a < b for a, b in zip([at_ms, *run], run, strict=False))
    assert all(is_tick(text, tick) for tick in run)
    # The answer is the same from anywhere between two ticks.
    for low, high in pairwise(run):
        assert next_after(text, (low + high) // 2) == high
        assert next_after(text, high - 1) == high
    now_ms = run[14] + (run[15] - run[14]) // 2
    assert due_ticks(text, run[0], now_ms, cap) == run[:15][-cap:]
    assert due_ticks(text, run[0], run[0], cap) == [run[0]]
    assert due_ticks(text, now_ms + 1, now_ms, cap) == []
    off_grid = run[0] - 1
    assume(off_grid > at_ms)
    assert due_ticks(text, off_grid, now_ms, 1_000)[0] == off_grid


@given(spec=specs(), at_ms=st.integers(ms("1970-01-02"), ms("2090-01-01")))
def test_the_zone_utc_changes_nothing(spec, at_ms):
    try:
        validate(spec[0])
    except SpecError:
        assume(False)
    assert next_after(f"CRON_TZ=UTC {spec[0]}", at_ms) == next_after(spec[0], at_ms)


@given(
    period_ms=st.integers(1, 10**12),
    after_ms=st.integers(-(10**14), 10**14),
    cap=st.integers(1, 20),
    many=st.integers(0, 30),
)
def test_intervals_are_multiples_of_their_period(period_ms, after_ms, cap, many):
    spec = f"@every:{period_ms}"
    tick = next_after(spec, after_ms)
    assert tick % period_ms == 0
    assert after_ms < tick <= after_ms + period_ms
    now_ms = tick + many * period_ms
    expected = [tick + n * period_ms for n in range(many + 1)][-cap:]
    assert due_ticks(spec, tick, now_ms, cap) == expected


def test_every_second_of_three_days_around_both_changes():
    for at_ms in (ms("2026-03-29T01:00"), ms("2026-10-25T01:00")):
        info, expected = ZoneInfo("Europe/Berlin"), []
        for at in range(at_ms - 90 * 60_000, at_ms + 150 * 60_000, 1_000):
            local = datetime.fromtimestamp(at // 1000, UTC).astimezone(info)
            if local.fold == 0 and local.second % 20 == 0 and local.hour in (1, 2, 3):
                expected.append(at)
        spec = "CRON_TZ=Europe/Berlin */20 * 1-3 * * *"
        found = cron.parse(spec).after(at_ms - 90 * 60_000 - 1)
        assert list(islice(found, len(expected))) == expected


@pytest.mark.parametrize(
    "zone", ["Australia/Sydney", "America/St_Johns", "Pacific/Apia"]
)
def test_the_zone_of_the_host_plays_no_part(zone):
    program = (
        "import time; time.tzset();"
        "from headgate_sync.cron import next_after as n;"
        "at = 1774500000000; out = []\n"
        "for spec in ('*/15 * * * *', 'CRON_TZ=Europe/Berlin 30 2 * * *', '@daily'):\n"
        "    t = at\n"
        "    for _ in range(200): t = n(spec, t); out.append(t)\n"
        "print(hash(tuple(out)))"
    )

    def run(host: str) -> str:
        environ = {**os.environ, "TZ": host, "PYTHONHASHSEED": "0"}
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environ, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert run(zone) == run("UTC")


def test_without_a_zone_database_every_zone_is_unknown_and_utc_specs_work():
    program = (
        "import sys; sys.modules['tzdata'] = None;"
        "from headgate_sync.cron import next_after, validate\n"
        "print(next_after('@daily', 0))\n"
        "try: validate('CRON_TZ=Europe/Berlin 0 9 * * *')\n"
        "except ValueError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONTZPATH": ""},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert told == "86400000\nunknown timezone `Europe/Berlin`\n"


# Edges


@pytest.mark.parametrize("year", [2028, 2096])
def test_a_leap_day_is_a_day_like_others(year):
    leap = ms(f"{year}-02-29T10:00")
    assert next_after("0 9 * * *", leap) == ms(f"{year}-03-01T09:00")
    assert next_after("0 11 29 2 *", leap) == ms(f"{year}-02-29T11:00")
    assert next_after("0 0 L 2 *", leap - DAY_MS) == ms(f"{year}-02-29")


def test_the_rarest_day_is_found_or_refused_at_once_and_never_later():
    """29 February on a Sunday comes after 40 years at worst."""
    spec, at_ms = "0 0 29 2 */7", ms("2000-01-01")
    for _ in range(20):
        at_ms = next_after(spec, at_ms)
        day = datetime(1970, 1, 1) + timedelta(milliseconds=at_ms)
        assert (day.month, day.day, day.weekday()) == (2, 29, calendar.SUNDAY)


@pytest.mark.parametrize("spec", ["* * * * *", "CRON_TZ=Asia/Tokyo * * * * * *"])
@pytest.mark.parametrize("at_ms", [2**62, 2**63 - 1, 253_402_300_799_999, -(2**62)])
def test_beyond_the_calendar_there_are_no_ticks_and_no_crash(spec, at_ms):
    with pytest.raises(SpecError, match="no future occurrence"):
        next_after(spec, at_ms)
    assert due_ticks(spec, at_ms, at_ms, 3) == [at_ms]
    assert is_tick(spec, at_ms) is False


@pytest.mark.parametrize("cap", [0, -1, 1_001, True])
def test_a_cap_out_of_range_is_refused(cap):
    with pytest.raises(InvalidRequest, match="cap"):
        due_ticks("@daily", 0, 1, cap)


def test_a_thousand_ticks_of_ten_years_of_seconds_are_found_from_the_end():
    spec, now_ms = "* * * * * *", ms("2026-06-01T12:00:00.500")
    found = due_ticks(spec, ms("2016-01-01"), now_ms, 1_000)
    assert found == [now_ms - 500 - n * 1_000 for n in range(999, -1, -1)]


@given(text=st.text(alphabet="0123456789*/,-#LW? @SUNMOTECRZ=_\t\n\0é", max_size=40))
def test_any_text_is_a_spec_with_ticks_or_a_spec_error(text):
    try:
        stored = validate(text)
    except SpecError:
        return
    assert validate(stored) == stored
    assert next_after(stored, 0) > 0
