"""When a schedule fires: cron expressions, intervals, and the instants they name.

Fields are read and stepped by the library cronsim on naive wall clocks. What a wall
clock means in a time zone is decided here: one that does not exist has no tick, one
that exists twice has one tick, at its first instant.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from itertools import islice

from attrs import frozen
from cronsim import CronSim, CronSimError

from headgate_sync.durations import duration_ms
from headgate_sync.envelope import check_int
from headgate_sync.errors import InvalidRequest, SpecError

MAX_SPEC_BYTES = 1_024
MAX_ZONE_BYTES = 64
MAX_BARREN = timedelta(days=12 * 366)
"""How long a zone may skip every clock of a spec. Leap days are up to 8 years apart, so
nothing comes after this: the spec names an hour that the zone leaves out each year."""
MAX_TICKS = 1_000

NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)
_MILLISECOND = timedelta(milliseconds=1)
_BLANKS = re.compile(r"[ \t]+")
_ZONE = re.compile(r"[A-Z][A-Za-z0-9_+-]*(?:/[A-Z][A-Za-z0-9_+-]*)*")
_FIELD = re.compile(r"[0-9A-Z*,/#-]+")
# The library also knows the last weekday of a month and steps of the last day.
_FOREIGN = re.compile(r"LW|L/")
# A range of one value is that value; the library steps from it to the end of the field.
_ONE_VALUE = re.compile(r"(?<![^,])0*([0-9A-Z]+)-0*\1/0*[1-9][0-9]*(?![^,])")
_EVERY = "@every"


@frozen
class Every:
    """Multiples of a period since the epoch, so that all nodes agree on them."""

    text: str
    period_ms: int

    def after(self, after_ms: int) -> Iterator[int]:
        """All ticks strictly after an instant, in order."""
        tick_ms = (after_ms // self.period_ms + 1) * self.period_ms
        while True:
            yield tick_ms
            tick_ms += self.period_ms

    def until(self, at_ms: int) -> Iterator[int]:
        """All ticks up to an instant, newest first."""
        tick_ms = at_ms // self.period_ms * self.period_ms
        while True:
            yield tick_ms
            tick_ms -= self.period_ms


@frozen
class Cron:
    """An expression of five or six fields on the wall clock of a zone.

    Without a zone the wall clock is UTC. Ticks end where the calendar ends, and where
    the expression matches no day for fifty years.
    """

    text: str
    fields: str
    zone: zoneinfo.ZoneInfo | None

    def after(self, after_ms: int) -> Iterator[int]:
        """All ticks strictly after an instant, in order."""
        return self._real(
            lambda: self._wall(after_ms), lambda tick_ms: tick_ms > after_ms
        )

    def until(self, at_ms: int) -> Iterator[int]:
        """All ticks up to an instant, newest first."""
        return self._real(
            # The library begins below what it is given.
            lambda: self._newest_wall(at_ms) + _SECOND,
            lambda tick_ms: tick_ms <= at_ms,
            reverse=True,
        )

    def _real(
        self,
        start: Callable[[], datetime],
        is_wanted: Callable[[int], bool],
        *,
        reverse: bool = False,
    ) -> Iterator[int]:
        """The instants of wall clocks that the zone has."""
        barren_from: datetime | None = None
        try:
            for wall in CronSim(self.fields, start(), reverse=reverse):
                tick_ms = self._instant(wall)
                if tick_ms is not None and is_wanted(tick_ms):
                    yield tick_ms
                    barren_from = None
                elif barren_from is None:
                    barren_from = wall
                elif abs(wall - barren_from) > MAX_BARREN:
                    return
        except OverflowError:
            return  # the end of the calendar

    def _wall(self, at_ms: int) -> datetime:
        """What the clock on the wall shows, in whole seconds."""
        utc = _EPOCH + timedelta(seconds=at_ms // 1000)
        if self.zone is None:
            return utc
        return _naive(utc.replace(tzinfo=UTC).astimezone(self.zone))

    def _newest_wall(self, at_ms: int) -> datetime:
        """The latest wall clock whose first instant is not after `at_ms`.

        While an hour repeats, all of it was shown before.
        """
        utc = _EPOCH + timedelta(seconds=at_ms // 1000)
        if self.zone is None:
            return utc
        local = utc.replace(tzinfo=UTC).astimezone(self.zone)
        first, second = (local.replace(fold=fold).utcoffset() for fold in (0, 1))
        assert first is not None
        assert second is not None
        return _naive(local) + (first - second if local.fold else timedelta())

    def _instant(self, wall: datetime) -> int | None:
        """The first instant at which the wall shows this; None where it never does."""
        if self.zone is None:
            return (wall - _EPOCH) // _MILLISECOND
        utc = wall.replace(tzinfo=self.zone).astimezone(UTC)
        if _naive(utc.astimezone(self.zone)) != wall:
            return None
        return (_naive(utc) - _EPOCH) // _MILLISECOND


def _naive(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None, fold=0)


Spec = Every | Cron


def validate(spec: str | timedelta) -> str:
    """Check a spec and bring it to the one form that is stored.

    Nicknames are expanded, names are upper case, one blank stands between fields, and
    intervals are `@every:` with milliseconds; a zone stays in front.

    Args:
        spec: five or six fields, a nickname, `@every 5m`, `@every:300000`, or a
            `timedelta`; the first two also behind `CRON_TZ=Zone/Name`.

    Raises:
        SpecError: the text quotes the spec and says what is wrong with it.
    """
    if isinstance(spec, timedelta):
        return _every(spec).text
    if type(spec) is not str:
        raise SpecError(f"spec must be text or timedelta, got {type(spec).__name__}")
    return parse(spec).text


@lru_cache(maxsize=1024)
def parse(spec: str) -> Spec:
    """Read a spec; see `validate`."""
    size = len(spec.encode("utf-8", "surrogatepass"))
    if size > MAX_SPEC_BYTES:
        raise SpecError(f"spec has {size} bytes, the limit is {MAX_SPEC_BYTES}")
    text, prefix, zone = spec.strip(" \t"), "", None
    if text.startswith("CRON_TZ="):
        prefix, _, text = _BLANKS.sub(" ", text).partition(" ")
        zone = _zone(prefix.removeprefix("CRON_TZ="))
        prefix += " "
    if text.startswith(_EVERY):
        if prefix:
            raise SpecError(
                f"`@every` is epoch-aligned UTC and takes no CRON_TZ: `{spec}`"
            )
        return _read_every(spec, text)
    fields = _fields(spec, NICKNAMES.get(text, text))
    return Cron(prefix + fields, fields, zone)


def _read_every(spec: str, text: str) -> Every:
    rest = text.removeprefix(_EVERY)
    if re.fullmatch(r":-?[0-9]{1,18}", rest):
        if int(rest[1:]) < 1:
            raise SpecError("@every period must be >= 1ms")
        rest = f" {int(rest[1:])}ms"
    if rest[:1] not in (" ", "\t"):
        raise SpecError(f"bad @every spec `{spec}`")
    return _every(rest.strip(" \t"), f" `{spec}`")


def _every(period: timedelta | str, quoted: str = "") -> Every:
    if isinstance(period, timedelta) and period < _MILLISECOND:
        raise SpecError("@every period must be >= 1ms")
    try:
        period_ms = duration_ms("@every period", period, minimum_ms=0)
    except InvalidRequest as error:
        raise SpecError(f"bad @every spec{quoted}: {error.message}") from None
    if period_ms < 1:
        raise SpecError("@every period must be >= 1ms")
    return Every(f"{_EVERY}:{period_ms}", period_ms)


def _fields(spec: str, text: str) -> str:
    parts = [
        _ONE_VALUE.sub(r"\1", part) for part in _BLANKS.split(text.upper()) if part
    ]
    if len(parts) not in (5, 6):
        raise SpecError(f"bad cron `{spec}`: want 5 fields, or 6 with seconds")
    fields = " ".join(parts)
    for part in parts:
        if not part.isascii() or not _FIELD.fullmatch(part) or _FOREIGN.search(part):
            raise SpecError(f"bad cron `{spec}`: {part!r} is no field")
    try:
        CronSim(fields, _EPOCH)
    except CronSimError as error:
        if _is_impossible_date(parts):
            raise _never(spec) from None
        detail = str(error)
        raise SpecError(
            f"bad cron `{spec}`: {detail[:1].lower()}{detail[1:]}"
        ) from None
    # A combination of days that no month has is found by looking for one.
    if next(iter(CronSim(fields, datetime(2000, 1, 1))), None) is None:
        raise _never(spec)
    return fields


def _is_impossible_date(parts: list[str]) -> bool:
    """Whether each field alone is right, and only day and month do not go together."""
    *_, day, month, weekday = parts
    for fields in (f"{parts[-4]} {day} * {weekday}", f"* * {month} *"):
        try:
            CronSim(" ".join([*parts[:-4], fields]), _EPOCH)
        except CronSimError:
            return False
    return True


def _never(spec: str) -> SpecError:
    return SpecError(f"cron `{spec}` has no future occurrence")


@cache
def _zones() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones())


def _zone(name: str) -> zoneinfo.ZoneInfo:
    # The set decides, not the file: a file system may ignore case.
    if len(name) <= MAX_ZONE_BYTES and _ZONE.fullmatch(name) and name in _zones():
        return zoneinfo.ZoneInfo(name)
    raise SpecError(f"unknown timezone `{name}`")


def next_after(spec: str, after_ms: int) -> int:
    """The first tick strictly after an instant.

    Raises:
        SpecError: the spec is none, or it has no tick before the year 10,000.
    """
    tick_ms = next(parse(spec).after(after_ms), None)
    if tick_ms is None:
        raise _never(spec)
    return tick_ms


def is_tick(spec: str, at_ms: int) -> bool:
    """Whether the spec fires at exactly this instant."""
    return next(parse(spec).after(at_ms - 1), None) == at_ms


def due_ticks(spec: str, first_ms: int, now_ms: int, cap: int) -> list[int]:
    """The newest ticks of an interval in time, oldest first.

    Args:
        spec: see `validate`.
        first_ms: counts as a tick also where the spec has none.
        now_ms: the last instant that counts.
        cap: most ticks, 1 to 1,000; of more that are due the newest are given.

    Raises:
        SpecError: the spec is none.
    """
    check_int("cap", cap, 1, MAX_TICKS)
    parsed = parse(spec)
    if first_ms > now_ms:
        return []
    newest = []
    for tick_ms in islice(parsed.until(now_ms), cap):
        if tick_ms <= first_ms:
            break
        newest.append(tick_ms)
    if len(newest) < cap:
        newest.append(first_ms)
    return newest[::-1]
