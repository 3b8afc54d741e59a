"""How a batch is shown: lines, or a bar that leaves the terminal as it was."""

from __future__ import annotations

import io
import sys

import pytest

from headgate_sync.client.batch_values import BatchProgress
from headgate_sync.progress import BatchBar, BatchLines, batch_display, describe
from tests.worker.rig import Steps


def at(**facts):
    return BatchProgress(
        **{
            "batch_id": "b", "sent": 10, "done": 4, "failed": 1, "buffered": 2,
            "rate": 2.0, "left_seconds": 3.0, "waiting_for": "", "resting": False,
            **facts,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "batch b: 10 sent, 4 done, 1 failed, 2/s, 0:03 left"),
        (
            {"waiting_for": "room in q", "left_seconds": None},
            "batch b: 10 sent, 4 done, 1 failed, 2/s, ? left, waiting for room in q",
        ),
        (
            {"left_seconds": 7_322.4},
            "batch b: 10 sent, 4 done, 1 failed, 2/s, 2:02:02 left",
        ),
    ],
)
def test_a_line_says_how_a_batch_stands(facts, text):
    assert describe(at(**facts)) == text


def test_lines_come_every_five_seconds_and_when_something_is_waited_for(capsys):
    clock = Steps()
    show = BatchLines(clock)

    def told(seconds, **facts):
        clock.advance(seconds)
        show(at(**facts))
        return capsys.readouterr().err.count("\n")

    assert told(4.9) == 0
    assert told(0.2, done=5) == 1
    assert told(4.9, done=6) == 0
    assert told(0.0, waiting_for="room in q") == 1
    assert told(1.0, waiting_for="room in q") == 0
    assert told(0.0, done=9, resting=True) == 1
    assert told(0.0, done=9, resting=True) == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_that_ends_with_the_work(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    show = batch_display()
    assert isinstance(show, BatchBar)
    show(at(resting=True))
    assert terminal.getvalue() == ""
    show(at(waiting_for="room in q"))
    show(at(done=10, sent=10, buffered=0, resting=True))
    drawn = terminal.getvalue()
    assert "10/10" in drawn
    assert "1 failed" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor
    show(at())
    show(at(resting=True))
    assert terminal.getvalue().count("\x1b[?25h") == 2


def test_without_a_terminal_there_are_lines():
    assert isinstance(batch_display(), BatchLines)
