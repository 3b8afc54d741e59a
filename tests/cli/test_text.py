"""What a terminal is sent, whatever producers and servers put into their texts."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.cli.text import cell, instant, named, span
from headgate_sync.durations import duration_ms
from headgate_sync.loggers import OneLine, visible
from tests.builders import envelope
from tests.cli.conftest import told

HOSTILE = "a\x1b[31m\x9b2J\x07\r\n\t\u202e\u2066[bold]x[/bold] :boom: 漢字"


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_prints_on_one_line_and_steers_nothing(text):
    shown = visible(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


@given(st.recursive(st.none() | st.text() | st.floats() | st.integers(), st.lists))
def test_every_cell_is_printable(value):
    assert cell(value).isprintable()
    assert cell({"\x1b": value}).isprintable()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("at_ms", 0, "1970-01-01T00:00:00Z"),
        ("scheduled_at_ms", 1_500, "1970-01-01T00:00:01.500Z"),
        ("paused_until_ms", 60_000, "1970-01-01T00:01:00Z"),
        ("last_enqueued_ms", None, "-"),
        ("next_run_ms", 60_000, "1970-01-01T00:01:00Z"),
        ("deadline_ms", 0, "-"),
        ("timeout_ms", 600_000, "10m"),
        ("timeout_ms", 0, "-"),
        ("latency_ms", 0, "0ms"),
        ("beat_ms", 10_000, "10s"),
        ("attempt", 3, "3"),
        ("args_ms", "text", "text"),
        ("progress", {"updated_at_ms": 0}, "updated_at_ms=1970-01-01T00:00:00Z"),
    ],
)  # fmt: skip
def test_a_table_shows_times_as_their_names_say(name, value, shown):
    assert named(name, value) == shown


def test_no_table_of_a_command_shows_bare_milliseconds(run, pg):
    """JSON has them as they are stored; people read instants and durations."""
    pg.enqueue([envelope("a", delay_ms=90_000, timeout_ms=600_000)])
    run("cron", "set", "s", "--kind", "k", "--spec", "0 8 * * *", "--timeout", "5m")
    for words in (["job", "show", "a"], ["job", "explain", "a"], ["cron", "show", "s"]):
        table = run("-o", "table", *words).stdout
        rows = dict(line.split(maxsplit=1) for line in table.splitlines())
        at = {n: v.strip() for n, v in rows.items() if n.endswith("_ms")}
        assert at
        assert not any(value.isdigit() for value in at.values()), at
    assert told(run("job", "show", "a"))["timeout_ms"] == 600_000


def test_hostile_texts_reach_a_table_as_what_they_are(run, pg):
    pg.enqueue([envelope("a", partition_key=HOSTILE, headers={HOSTILE: HOSTILE})])
    pg.inspect.set_queue_paused(HOSTILE, True)
    for words in (["queue", "ls"], ["job", "show", "a", "--payload"], ["stats"]):
        text = run("-o", "table", *words).stdout
        assert text.replace("\n", "").isprintable()
        assert (
            r"a\x1b[31m\x9b2J\x07\r\n\t\u202e\u2066[bold]x[/bold] :boom: 漢字" in text
        )


def test_json_is_ascii_and_gives_hostile_texts_back(run, pg):
    pg.inspect.set_queue_paused(HOSTILE, True)
    for form in ("json", "jsonl"):
        text = run("-o", form, "queue", "ls").stdout
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
    [found] = told(run("queue", "ls"))
    assert found["queue"] == HOSTILE


def test_hostile_texts_of_errors_and_questions_are_made_visible(run, pg):
    for words in (
        ["job", "show", HOSTILE],
        ["queue", "inspect", HOSTILE],
        ["rate", "rm", HOSTILE, "--yes"],
    ):
        done = run(*words, code=3)
        assert done.stderr.rstrip("\n").isprintable()
    done = run("job", "delete", HOSTILE, code=4)
    assert done.stderr.rstrip("\n").isprintable()


def test_wide_letters_take_two_places_so_that_columns_stay_in_line(run, pg):
    for name in ("漢字", "ab"):
        pg.inspect.set_queue_weight(name, 7)
    header, *lines = run("-o", "table", "queue", "ls").stdout.splitlines()
    place = header.index("unfinished")
    for line in lines:
        cells = "".join(c * (2 if ord(c) > 0x2E80 else 1) for c in line)
        assert cells[place] == "0"
        assert cells[place - 1] == " "


def test_jsonl_is_one_object_in_each_line(run, pg):
    pg.enqueue([envelope("a"), envelope("b")])
    lines = run("-o", "jsonl", "job", "ls").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["b", "a"]


def test_a_table_says_how_to_get_the_next_page(run, pg):
    pg.enqueue([envelope("a"), envelope("b")])
    done = run("-o", "table", "job", "ls", "--limit", "1")
    cursor = done.stderr.split("--cursor ")[1].strip()
    rest = run("-o", "table", "job", "ls", "--limit", "1", "--cursor", cursor)
    assert " available " in rest.stdout
    assert rest.stdout.splitlines()[1].startswith("a ")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0ms"),
        (999, "999ms"),
        (1_500, "1s"),
        (60_000, "1m"),
        (61_000, "1m1s"),
        (90 * 60_000, "1h30m"),
        (8 * 86_400_000 + 3_600_000, "8d1h"),
        (-5, "-5ms"),
        (None, "-"),
    ],
)
def test_a_span_is_told_by_its_two_largest_units(ms, text):
    assert span(ms) == text


def test_a_name_cannot_forge_a_line_of_the_log():
    def line(name, job_id, exc_info=None):
        record = logging.LogRecord(
            name, logging.INFO, "p", 1, "job %s", (job_id,), exc_info
        )
        return OneLine("%(name)s: %(message)s").format(record)

    forged = "a\n2030-01-01 ERROR\x1b[31m"
    assert line("headgate_sync.worker", forged) == (
        r"headgate_sync.worker: job a\n2030-01-01 ERROR\x1b[31m"
    )
    assert line("app", "a\nb") == "app: job a\nb"
    try:
        raise ValueError("why")
    except ValueError:
        told = line("headgate_sync.worker", "a", exc_info=sys.exc_info())
    assert told.splitlines()[-1] == "ValueError: why"


@given(st.integers(1, 10**12))
def test_a_span_can_be_typed_again_and_is_not_longer_than_the_truth(ms):
    assert ms / 2 < duration_ms("it", span(ms)) <= ms


def test_an_instant_is_told_in_utc_and_as_a_number_where_no_calendar_reaches():
    assert instant(1_700_000_000_000) == "2023-11-14T22:13:20Z"
    assert instant(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert instant(2**63 - 1) == str(2**63 - 1)
    assert instant(None) == "-"
