"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from headgate_sync.cli.control import Json
from headgate_sync.cli.session import Session
from headgate_sync.cli.text import cell, named
from headgate_sync.loggers import visible

# A column is a key, or what makes its text of a whole item.
Columns = dict[str, str | Callable[[Json], Any]]
# Wider than any table: what is not a terminal gets one line per item.
_UNBOUNDED = 100_000


def _dump(value: Any, *, indent: int | None = None) -> None:
    # ASCII: neither a terminal nor another encoding can make anything of it but text.
    click.echo(json.dumps(value, indent=indent))


def items(session: Session, found: Iterable[Json], columns: Columns) -> None:
    """Print a list."""
    found = list(found)
    form = session.form()
    if form == "json":
        _dump(found, indent=2)
    elif form == "jsonl":
        for item in found:
            _dump(item)
    else:
        table(
            list(columns),
            [[made(item, c) for c in columns.values()] for item in found],
        )


def lines(session: Session, found: Iterable[Json], told: Callable[[Json], str]) -> None:
    """Print a line for each, and JSON only where --output asks for it."""
    if session.output in ("json", "jsonl"):
        items(session, found, {})
        return
    for item in found:
        click.echo(told(item))


def page(session: Session, found: Json, name: str, columns: Columns) -> None:
    """Print a page of a list, and how to get the next one."""
    if session.form() == "json":
        _dump(found, indent=2)
        return
    items(session, found[name], columns)
    if found["next_cursor"] is not None:
        click.echo(f"more: --cursor {visible(str(found['next_cursor']))}", err=True)


def record(session: Session, found: Json, fields: Columns | None = None) -> None:
    """Print one thing, in a table one field per line.

    Args:
        session: of the command.
        found: the whole of it.
        fields: what a table shows; None is everything.
    """
    form = session.form()
    if form != "table":
        _dump(found, indent=2 if form == "json" else None)
        return
    shown = fields or {name: name for name in found}
    table(
        [], [[visible(title), made(found, column)] for title, column in shown.items()]
    )


def made(item: Json, column: str | Callable[[Json], Any]) -> str:
    """The text of one cell, made visible."""
    if isinstance(column, str):
        return named(column, item.get(column))
    return cell(column(item))


def table(titles: list[str], lines: list[list[str]]) -> None:
    """Print a table; the texts have to be visible already."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = sys.stdout
    width = None if out.isatty() else _UNBOUNDED
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    shown = Table(
        box=None, show_header=bool(titles), pad_edge=False, header_style="bold"
    )
    for title in titles or ["", ""]:
        shown.add_column(title, overflow="fold")
    for line in lines:
        shown.add_row(*map(Text, line))
    console.print(shown)
