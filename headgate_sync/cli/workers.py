"""`headgate worker` and `headgate cluster`."""

from __future__ import annotations

from pathlib import Path

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import Json
from headgate_sync.cli.errors import Failed
from headgate_sync.cli.session import (
    Command,
    Group,
    LocalCommand,
    Session,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.values import DURATION
from headgate_sync.workers import COMMANDS, is_late

_NONE = "none"
_ENDS = ("restart", "terminate")
WORKERS: output.Columns = {
    "worker": "worker_id",
    "host": "host",
    "pid": "pid",
    "queues": "queues",
    "busy": lambda w: f"{w['inflight']}/{w['concurrency']}",
    "status": "status",
    "duties": "duties_active",
    "heard of": "heartbeat_at_ms",
    "asked to": "pending_command",
}


def marked(found: list[Json], now_ms: int) -> list[Json]:
    """The same workers; the status of those that are probably dead says `late`."""
    return [
        one | {"status": f"{one['status']}, late"}
        if is_late(one["heartbeat_at_ms"], one["beat_ms"], now_ms)
        else one
        for one in found
    ]


@click.group(cls=Group)
def worker() -> None:
    """Worker processes: list, steer, probe."""


@worker.command("ls")
@pass_session
def ls(session: Session) -> None:
    """List workers that were heard of within the last 15 minutes."""
    control = session.connect()
    found = control.workers()
    if session.form() == "table":
        found = marked(found, control.now_ms())
    output.items(session, found, WORKERS)


@worker.command()
@click.argument("id")
@click.argument("command", type=click.Choice([*COMMANDS, _NONE]))
@yes_option
@pass_session
def signal(session: Session, id: str, command: str, yes: bool) -> None:
    """Ask a worker to do something; it hears of it with its next beat.

    `quiet` takes no more jobs, `resume` takes them again, `restart` ends when its jobs
    have ended, `terminate` ends and hands unfinished jobs back, `resign` leaves the
    upkeep to others, `none` takes back what was not heard of yet.
    """
    if command in _ENDS:
        confirm(f"{command} worker {id}", yes)
    session.connect().signal(id, None if command == _NONE else command)
    output.record(session, {"worker_id": id, "pending_command": command})


@worker.command(cls=LocalCommand)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--max-age", type=DURATION, default="60s", show_default=True)
def check(path: Path, max_age: int) -> None:
    """End with 0 if a worker is well, else with 1 and a line that says why.

    PATH is what the worker was given as --ready-file. Needs no database.
    """
    from headgate_sync.worker.readyfile import complaint

    said = complaint(path, max_age_ms=max_age)
    if said is not None:
        raise Failed(said)


@click.command(cls=Command)
@pass_session
def cluster(session: Session) -> None:
    """Show the fleet as a whole, and the queues that nobody serves."""
    found = session.connect().cluster()
    if session.form() != "table":
        output.record(session, found)
        return
    output.record(
        session, found, {n: n for n in found if n not in ("queues", "now_ms")}
    )
    if found["queues"]:
        click.echo()
        columns: output.Columns = {
            "queue": "queue",
            "workers": "live_workers",
            "late": "late_workers",
        }
        output.items(session, found["queues"], columns)
