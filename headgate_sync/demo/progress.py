"""A progress bar: `rich` on a terminal, else one plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_PLAIN_INTERVAL_S = 5.0


class ProgressBar(Protocol):
    """Shows done of total with rate and time left."""

    def update(self, done: int) -> None:
        """Set how many are done."""
        ...

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        ...


class _PlainBar:
    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._started = time.monotonic()
        self._next = self._started + _PLAIN_INTERVAL_S
        self._done = 0

    def update(self, done: int) -> None:
        self._done = done
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_INTERVAL_S
            self.show()

    def show(self) -> None:
        seconds = max(time.monotonic() - self._started, 1e-6)
        rate = self._done / seconds
        left = f"{(self._total - self._done) / rate:.0f} s" if rate else "?"
        self.note(
            f"{self._label}: {self._done}/{self._total}, {rate:.0f}/s, {left} left"
        )

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _RichBar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress = progress
        self._task = task

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def note(self, text: str) -> None:
        self._progress.console.print(text)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[ProgressBar]:
    """Show progress on stderr for the length of the block."""
    if sys.stderr.isatty():
        try:
            from rich import progress as rich
            from rich.console import Console
        except ImportError:
            pass  # the plain lines below need nothing
        else:
            columns = (
                rich.TextColumn("{task.description:>8}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                _speed_column(rich),
                rich.TimeRemainingColumn(),
            )
            with rich.Progress(*columns, console=Console(stderr=True)) as progress:
                yield _RichBar(progress, progress.add_task(label, total=total))
            return
    bar = _PlainBar(label, total)
    yield bar
    bar.show()


def _speed_column(rich: Any) -> Any:
    class Speed(rich.ProgressColumn):  # type: ignore[misc]
        """Jobs per second; unknown until the first ones are done."""

        def render(self, task: Any) -> Any:
            from rich.text import Text

            return Text(f"{task.speed or 0:.0f}/s")

    return Speed()
