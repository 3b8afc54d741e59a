"""The archive of deleted jobs. None of it goes over HTTP."""

from __future__ import annotations

import click

from headgate_sync.cli import output
from headgate_sync.cli.session import (
    Group,
    Session,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.shapes import plain
from headgate_sync.cli.text import span
from headgate_sync.cli.values import DURATION


@click.group(cls=Group)
def archive() -> None:
    """Copies of jobs that are deleted because of their age, by month."""


@archive.command("ls")
@pass_session
def archive_ls(session: Session) -> None:
    """List the queues whose jobs are copied."""
    found = session.store().maintenance.archive_policies()
    columns: output.Columns = {
        "queue": "queue",
        "kept for": lambda policy: span(policy["retention_ms"]),
    }
    output.items(session, map(plain, found), columns)


@archive.command("set")
@click.argument("queue")
@click.argument("retention", type=DURATION)
@pass_session
def archive_set(session: Session, queue: str, retention: int) -> None:
    """Copy a queue's jobs from now on; each copy is kept for RETENTION, as 90d."""
    session.store().maintenance.set_archive_policy(queue, retention)
    output.record(session, {"queue": queue, "retention_ms": retention})


@archive.command("clear")
@click.argument("queue")
@pass_session
def archive_clear(session: Session, queue: str) -> None:
    """Copy no further jobs of a queue; the copies that are there stay."""
    session.store().maintenance.clear_archive_policy(queue)
    output.record(session, {"queue": queue, "retention_ms": None})


@archive.command("prune")
@click.argument("month")
@yes_option
@pass_session
def archive_prune(session: Session, month: str, yes: bool) -> None:
    """Remove the copies of a month, YYYYMM in UTC, when none is to be kept longer."""
    confirm(f"remove the copies of {month}", yes)
    removed = session.store().maintenance.prune_archive_month(month)
    output.record(session, {"month": month, "removed_copies": removed})
