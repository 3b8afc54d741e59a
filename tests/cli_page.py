"""Renders `docs/cli.md` from the help of the commands: `python -m tests.cli_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from headgate_sync.cli.main import headgate
from headgate_sync.cli.session import shared_options

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

INTRODUCTION = """\
# Command line

`headgate`, or `python -m headgate_sync`, comes with the extra `cli`, and with `dash` for the dashboard. Workers have a
command of their own, [`python -m headgate_sync.worker`](worker.md), which needs no
extra.

Commands look at a database, or at an HTTP control API; what they do and print is the
same. `--api` and `--database-url` say which, else `HEADGATE_API`, else
`HEADGATE_DATABASE_URL` or `DATABASE_URL`. `archive`, `indexes`, `migrate`, `reindex`,
`vacuum` and `trim` need the database itself, `api` and `console` serve one, and
`cron sync` uses the one of the application. An address that a command does not look at
is refused.

```sh
headgate stats
headgate job ls queue:mail state:archived --limit 10
headgate job explain 01J9ZKQ4W2
headgate bulk retry --queue mail --state archived          # says how many it would be
headgate bulk retry --queue mail --state archived --apply
headgate -o jsonl job ls state:archived | jq -r .id
HEADGATE_TOKEN=... headgate stats --api https://ops.example.com/headgate
```

## Rules of all commands

| | |
|---|---|
| output | `--output table`, `json` or `jsonl`; else a table on a terminal and JSON elsewhere. JSON has the shapes of the HTTP API, in ASCII; `jsonl` is one object per line. `migrate`, `cron sync` and `embedded` print lines, and their lists as JSON where it is asked for |
| foreign text | control characters, line ends and marks of writing direction are written out (`\\x1b`) in tables and errors: no name in a queue can steer a terminal |
| payloads | only `job show --payload` prints payload, headers, result, output and cursor: as text where they are UTF-8, else in base64; the field `..._encoding` says which |
| durations | `500ms`, `30s`, `1h30m`, `7d` |
| instants | milliseconds since 1970, or RFC 3339: `2030-01-31T08:00:00Z`; tables show instants in UTC and durations with their units, JSON milliseconds |
| what deletes, cancels or ends | asks on a terminal; elsewhere it needs `--yes` and is otherwise refused |
| errors | one line on the standard error; after a mistake in the call a second one names the help of the command |
| over HTTP | a request may take 30 s and an answer 8 MiB; redirects are not followed, nothing is repeated, every change has an idempotency key of its own |

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed: the database or the API did not answer, or said no, also to a value that it does not take |
| 2 | a mistake in the call or in the set-up |
| 3 | there is no such job, queue, class, schedule, worker |
| 4 | refused: not confirmed, read-only, a role without the right |
| 130 | interrupted |

`bulk` and `queue rm --force` start an operation and follow it. Over a database the
command does the work itself if no worker is quicker; over HTTP workers have to be there.
Interrupting it does not end the operation: `bulk show ID` follows it again.

The terminal must be trusted with the token: `--token` can be seen in the list of
processes, `HEADGATE_TOKEN` cannot.

Global options, before or behind the command's name:
"""  # noqa: E501


def commands(
    group: click.Group, context: click.Context, path: str
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """All commands below a group, with how they are called."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, parent=context, info_name=name)
        yield f"{path} {name}", command, inner
        if isinstance(command, click.Group):
            yield from commands(command, inner, f"{path} {name}")


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """One line per option that is not global."""
    shared = {option.name for option in shared_options()}
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.name in shared:
            continue
        record = parameter.get_help_record(context)
        if record is not None:
            names, text = record
            yield f"- `{names}`" + (f": {text}" if text else "")


def paragraphs(command: click.Command) -> str:
    """The help of a command, one line per paragraph."""
    parts = (command.help or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


def render() -> str:
    """The page."""
    context = click.Context(headgate, info_name="headgate")
    lines = [INTRODUCTION]
    for option in shared_options():
        record = option.get_help_record(context)
        assert record is not None
        lines.append(f"- `{record[0]}`: {record[1]}")
    for path, command, inner in commands(headgate, context, "headgate"):
        is_noun = len(path.split()) == 2
        usage = " ".join(
            piece
            for piece in command.collect_usage_pieces(inner)
            if piece != "[OPTIONS]" and not isinstance(command, click.Group)
        )
        title = f"`{path} {usage}".rstrip() + "`"
        lines += ["", f"{'##' if is_noun else '###'} {title}", "", paragraphs(command)]
        given = list(options(command, inner))
        if given:
            lines += ["", *given]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
