"""Any text in any place of a command is done or refused in one line, in both modes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from headgate_sync.cli.main import headgate
from tests.builders import enqueue

# What is no UTF-8 on a command line arrives as a lone surrogate.
HOSTILE = ("\udcff", "\x1b[31m\r\nX: y")
IN_NAMES = (*HOSTILE, "", "..", "'; DROP TABLE x; --", "9" * 30)
# These serve, read no text that is stored, or have tests of their own.
OTHERS = {"api", "console", "dash", "demo", "embedded", "migrate"}
LOCAL = {"worker check", "cron sync", "indexes", "reindex", "vacuum", "trim jobs"}
SHARED = {"output", "database_url", "schema", "api", "token", "help", "yes"}
BY_TYPE = {"duration": "1d", "instant": "1000", "integer": "1", "integer range": "1"}
BY_NAME = {"spec": "@every:60000", "most": "1", "payload": "{}"}


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        if path or name not in OTHERS:
            yield from commands(found, (*path, name))


FOUND = [
    (path, command)
    for path, command in commands(headgate)
    if " ".join(path) not in LOCAL | {"trim history"}
]


def fine(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.Choice):
        return str(next(iter(parameter.type.choices)))
    name = str(parameter.name)
    return BY_TYPE.get(parameter.type.name, BY_NAME.get(name, "a"))


def calls(path: tuple[str, ...], command: click.Command) -> Iterator[list[str]]:
    """The command with each hostile text in each of its places, the others fine."""
    known = [p for p in command.params if p.name not in SHARED]
    needed = {p: fine(p) for p in known if p.required}
    guarded = ["--yes"] if any(p.name == "yes" for p in command.params) else []
    for place in known:
        if getattr(place, "is_flag", False):
            continue
        named = isinstance(place, click.Argument)
        for text in IN_NAMES if named else HOSTILE:
            given = {**needed, place: text}
            options = [
                f"{p.opts[-1]}={given[p]}"
                for p in known
                if isinstance(p, click.Option) and p in given
            ]
            words = [
                given[p] for p in known if isinstance(p, click.Argument) and p in given
            ]
            yield [*path, *options, *guarded, *words]


@pytest.mark.parametrize(
    ("path", "command"), FOUND, ids=[" ".join(path) for path, _ in FOUND]
)
def test_a_hostile_word_is_done_or_refused(run, pg, path, command):
    """Never a traceback, and nothing that steers the terminal of who mistyped."""
    enqueue(pg, "a")
    for words in calls(path, command):
        done = run(*words, code=None)
        assert done.exit_code in (0, 1, 2, 3), words
        assert "internal error" not in done.stderr, words
        if done.exit_code in (1, 3):
            assert done.stderr.rstrip("\n").isprintable(), words


def test_a_warning_of_the_package_is_one_line_too(pg, database_url):
    """A worker may have any name, and the one that a job is pinned to is told."""
    words = ["job", "enqueue", "k", "--payload", "{}", "--sticky-worker", "w\n\x1b[31m"]
    done = subprocess.run(
        [sys.executable, "-m", "headgate_sync", *words, "--url", database_url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert r"pinned to worker w\n\x1b[31m" in done.stderr
