"""Upkeep of a database: indexes, vacuum, deleting by age. None of it goes over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from headgate_sync.cli import output
from headgate_sync.cli.errors import Failed
from headgate_sync.cli.session import (
    Command,
    Group,
    Session,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.shapes import plain
from headgate_sync.cli.values import DURATION
from headgate_sync.lifecycle import TERMINAL, State

# One statement of a sweep: short, so that nobody waits for its locks.
BATCH = 1_000


@click.command(cls=Command)
@pass_session
def indexes(session: Session) -> None:
    """Show size and use of the indexes; one of a mostly dead table wants a rebuild."""
    columns: output.Columns = {
        "index": "name",
        "bytes": "bytes",
        "scans": "scans",
        "live rows": "live_tuples",
        "dead rows": "dead_tuples",
    }
    found = session.store().maintenance.index_health()
    output.items(session, map(plain, found), columns)


@click.command(cls=Command)
@click.argument("name")
@pass_session
def reindex(session: Session, name: str) -> None:
    """Rebuild an index while everything goes on; takes long on a large table."""
    session.store().maintenance.reindex_concurrently(name)
    output.record(session, {"index": name, "rebuilt": True})


@click.command(cls=Command)
@pass_session
def vacuum(session: Session) -> None:
    """Vacuum and analyse the tables, those that are busy left out."""
    found = [plain(table) for table in session.store().maintenance.vacuum()]
    output.items(session, found, {"table": "table", "done": "ok", "why not": "error"})
    if not all(table["ok"] for table in found):
        raise Failed("not every table was vacuumed")


@click.group(cls=Group)
def trim() -> None:
    """Delete finished jobs, or their history, by age; in small steps."""


def _cutoff_ms(inspect: Any, older_than_ms: int) -> int:
    now_ms: int = inspect.store_now_ms()
    return max(0, now_ms - older_than_ms)


@trim.command()
@click.option("--older-than", type=DURATION, required=True, help="Ended so long ago.")
@click.option(
    "--state",
    "states",
    type=click.Choice(sorted(state.value for state in TERMINAL)),
    multiple=True,
    default=["completed"],
    show_default=True,
    help="May be repeated.",
)
@yes_option
@pass_session
def jobs(session: Session, older_than: int, states: Any, yes: bool) -> None:
    """Delete jobs that ended long ago.

    Those that succeeded are archived first where their queue has an archive.
    """
    confirm(f"delete jobs that are {' or '.join(states)}", yes)
    inspect = session.store().inspect
    cutoff_ms = _cutoff_ms(inspect, older_than)
    others = [state for state in states if state != State.COMPLETED]
    sweeps: list[Callable[[], int]] = []
    if len(others) < len(states):
        sweeps.append(lambda: inspect.archive_completed_older_than(cutoff_ms, BATCH))
    if others:
        sweeps.append(lambda: inspect.delete_terminal(others, cutoff_ms, BATCH))
    total = 0
    for sweep in sweeps:
        deleted = BATCH
        while deleted == BATCH:
            deleted = sweep()
            total += deleted
    output.record(session, {"deleted_jobs": total})


@trim.command()
@click.option("--older-than", type=DURATION, required=True, help="Ended so long ago.")
@yes_option
@pass_session
def history(session: Session, older_than: int, yes: bool) -> None:
    """Forget the attempts of jobs that succeeded long ago; the jobs stay."""
    confirm("forget the attempts of jobs that succeeded", yes)
    inspect = session.store().inspect
    cutoff_ms = _cutoff_ms(inspect, older_than)
    total, removed = 0, 1
    while removed:
        removed, _ = inspect.trim_history(cutoff_ms, BATCH)
        total += removed
    output.record(session, {"removed_attempts": total})
