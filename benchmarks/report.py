"""What a benchmark measured, as text for people and as one JSON line for programs."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence

import psycopg
from attrs import define, field, frozen

from headgate_sync import __version__

_SETTINGS = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
    "autovacuum",
)


@frozen
class Spread:
    """Median of some runs with their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@define
class Report:
    """Figures and ratios of one benchmark; ratios are what travels between machines."""

    benchmark: str
    sizes: dict[str, int]
    figures: dict[str, float] = field(factory=dict)
    ratios: dict[str, float] = field(factory=dict)
    _ranges: dict[str, Spread] = field(factory=dict)

    def figure(self, name: str, values: Sequence[float]) -> float:
        """Record the median of one figure over the runs and return it."""
        spread = Spread.of(values)
        self.figures[name] = round(spread.median, 4)
        self._ranges[name] = spread
        return spread.median

    def ratio(self, name: str, ours: Sequence[float], bare: Sequence[float]) -> None:
        """Record the median of ours / bare, pair by pair, since the machine drifts."""
        pairs = [a / b for a, b in zip(ours, bare, strict=True)]
        self.ratios[name] = round(statistics.median(pairs), 3)

    def text(self) -> str:
        """The report for people."""
        lines = [self.benchmark + ": " + _pairs(self.sizes)]
        for name, spread in self._ranges.items():
            lines.append(
                f"  {name:44} {spread.median:>12,.2f}"
                f"   [{spread.low:,.2f} .. {spread.high:,.2f}]"
            )
        lines += [f"  {name:44} {ratio:>12.3f}" for name, ratio in self.ratios.items()]
        return "\n".join(lines)

    def json(self, versions: Mapping[str, str], settings: Mapping[str, str]) -> str:
        """The report as one line."""
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "versions": dict(versions),
                "settings": dict(settings),
                "sizes": self.sizes,
                "figures": self.figures,
                "ratios": self.ratios,
            }
        )


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def versions_and_settings(url: str) -> tuple[dict[str, str], dict[str, str]]:
    """What the figures belong to."""
    versions = {
        "headgate_sync": __version__,
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
    }
    with psycopg.connect(url) as connection:
        row = connection.execute("SHOW server_version").fetchone()
        assert row is not None
        versions["postgresql"] = row[0]
        settings = {}
        for name in _SETTINGS:
            row = connection.execute(f"SHOW {name}").fetchone()
            assert row is not None
            settings[name] = row[0]
    return versions, settings
