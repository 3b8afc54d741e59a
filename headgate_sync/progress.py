"""Shows how a batch goes: a bar on a terminal, else one line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate_sync.client.batch_values import BatchProgress

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_INTERVAL_S = 5.0

Display = Callable[[BatchProgress], None]


def batch_display() -> Display:
    """A bar where stderr is a terminal and `rich` is there, else plain lines."""
    if sys.stderr.isatty():
        try:
            import rich.progress  # noqa: F401
        except ImportError:
            pass  # the lines need nothing
        else:
            return BatchBar()
    return BatchLines()


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def describe(at: BatchProgress) -> str:
    """One line about a batch."""
    parts = [f"{at.sent} sent", f"{at.done} done", f"{at.failed} failed"]
    parts += [f"{at.rate:.0f}/s", f"{_duration(at.left_seconds)} left"]
    if at.waiting_for:
        parts.append(f"waiting for {at.waiting_for}")
    return f"batch {at.batch_id}: {', '.join(parts)}"


class BatchLines:
    """A line every 5 s, one when something is waited for, and one before each rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = clock() + LINE_INTERVAL_S
        self._said = ""
        self._waiting_for = ""

    def __call__(self, at: BatchProgress) -> None:
        waits = bool(at.waiting_for) and at.waiting_for != self._waiting_for
        if not (at.resting or waits or self._clock() >= self._due_s):
            return
        self._due_s = self._clock() + LINE_INTERVAL_S
        self._waiting_for = at.waiting_for
        line = describe(at)
        if line != self._said:
            self._said = line
            print(line, file=sys.stderr, flush=True)


class BatchBar:
    """A bar that is drawn while somebody works on the batch, and then left standing."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __call__(self, at: BatchProgress) -> None:
        if self._bar is None:
            if at.resting:
                return
            self._bar = _started(at.batch_id)
        self._bar.update(
            self._bar.task_ids[0],
            completed=at.done,
            total=max(at.sent + at.buffered, 1),
            rate=f"{at.rate:.0f}/s",
            left=f"{_duration(at.left_seconds)} left",
            more=_more(at),
        )
        if at.resting:
            self._bar.stop()
            self._bar = None


def _more(at: BatchProgress) -> str:
    failed = f"{at.failed} failed" if at.failed else ""
    waits = f"waiting for {at.waiting_for}" if at.waiting_for else ""
    return " ".join(filter(None, (failed, waits)))


def _started(batch_id: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    made = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[more]}"),
        console=Console(stderr=True),
    )
    made.add_task(batch_id, total=1, rate="", left="", more="")
    made.start()
    return made
