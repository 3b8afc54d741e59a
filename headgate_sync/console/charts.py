"""Charts of a queue's history: numbers into coordinates of an inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from headgate_sync.console.text import instant

_SAID = {
    "arrived": "in",
    "completed": "done",
    "failed": "failed",
    "retried": "retried",
    "admission_rejections": "sent away",
}
SERIES = tuple(_SAID)
WIDTH, HEIGHT = 600, 120
SPARK_WIDTH, SPARK_HEIGHT = 120, 28


@frozen(kw_only=True)
class Range:
    """A stretch that is looked at, and the length of its buckets."""

    name: str
    span_ms: int
    bucket_ms: int

    def since_ms(self, now_ms: int) -> int:
        """The start of the first bucket."""
        last = now_ms - now_ms % self.bucket_ms
        return max(0, last - self.span_ms + self.bucket_ms)


HOUR_MS = 3_600_000
RANGES = {
    one.name: one
    for one in (
        Range(name="1h", span_ms=HOUR_MS, bucket_ms=60_000),
        Range(name="6h", span_ms=6 * HOUR_MS, bucket_ms=300_000),
        Range(name="24h", span_ms=24 * HOUR_MS, bucket_ms=900_000),
        Range(name="7d", span_ms=168 * HOUR_MS, bucket_ms=2 * HOUR_MS),
        Range(name="30d", span_ms=720 * HOUR_MS, bucket_ms=24 * HOUR_MS),
    )
}
SPARK = Range(name="2h", span_ms=2 * HOUR_MS, bucket_ms=300_000)


def buckets(
    histories: Iterable[Iterable[Mapping[str, int]]], span: Range, now_ms: int
) -> list[dict[str, int]]:
    """The sum of several histories, bucket by bucket, the empty ones too."""
    since_ms = span.since_ms(now_ms)
    steps = span.span_ms // span.bucket_ms
    filled = {
        at_ms: {"at_ms": at_ms, **dict.fromkeys(SERIES, 0)}
        for at_ms in range(since_ms, since_ms + steps * span.bucket_ms, span.bucket_ms)
    }
    for history in histories:
        for bucket in history:
            into = filled.get(bucket["at_ms"])
            if into is not None:
                for name in SERIES:
                    into[name] += bucket[name]
    return list(filled.values())


def chart(filled: list[dict[str, int]], span: Range) -> dict[str, Any]:
    """Lines of what came and what succeeded, bars of what failed; one scale for all."""
    top = _top(max(max(b["arrived"], b["completed"], b["failed"]) for b in filled))
    step = WIDTH / len(filled)
    columns = [
        {
            "x": f"{place * step:.2f}",
            "bar_x": f"{place * step + step * 0.2:.2f}",
            "bar_height": f"{bucket['failed'] * HEIGHT / top:.2f}",
            "bar_y": f"{HEIGHT - bucket['failed'] * HEIGHT / top:.2f}",
            "failed": bucket["failed"],
            "told": _told(bucket),
        }
        for place, bucket in enumerate(filled)
    ]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "step": f"{step:.2f}",
        "bar_width": f"{step * 0.6:.2f}",
        "columns": columns,
        "arrived": _line([b["arrived"] for b in filled], top, WIDTH, HEIGHT),
        "completed": _line([b["completed"] for b in filled], top, WIDTH, HEIGHT),
        "top": top,
        "bucket_ms": span.bucket_ms,
        "from_ms": filled[0]["at_ms"],
        "totals": {name: sum(b[name] for b in filled) for name in SERIES},
    }


def spark(filled: list[dict[str, int]]) -> dict[str, Any]:
    """Two small lines."""
    top = max(1, *(max(b["arrived"], b["completed"]) for b in filled))
    size = (top, SPARK_WIDTH, SPARK_HEIGHT)
    return {
        "width": SPARK_WIDTH,
        "height": SPARK_HEIGHT,
        "arrived": _line([b["arrived"] for b in filled], *size),
        "completed": _line([b["completed"] for b in filled], *size),
        "totals": {name: sum(b[name] for b in filled) for name in SERIES},
    }


def _told(bucket: Mapping[str, int]) -> str:
    """What a column says when it is pointed at."""
    figures = ", ".join(f"{word} {bucket[name]:,}" for name, word in _SAID.items())
    return f"{instant(bucket['at_ms'])}\n{figures}"


def _line(values: list[int], top: int, width: int, height: int) -> str:
    step = width / len(values)
    return " ".join(
        f"{(place + 0.5) * step:.2f},{height - 1 - value * (height - 2) / top:.2f}"
        for place, value in enumerate(values)
    )


def _top(most: int) -> int:
    """A round number that is not less."""
    size = 10
    while size < most:
        size *= 10
    return next(top for part in (10, 5, 4, 2, 1) if (top := size // part) >= most)
