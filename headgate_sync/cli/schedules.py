"""`headgate cron`: schedules."""

from __future__ import annotations

import traceback
from typing import Any

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import ControlClient, Json
from headgate_sync.cli.errors import USAGE, missing
from headgate_sync.cli.session import (
    Group,
    LocalListing,
    Session,
    chosen,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.values import DURATION, PAYLOAD
from headgate_sync.schedule import OnMissed

_SCHEDULES: output.Columns = {
    "id": "id",
    "spec": "spec",
    "kind": "kind",
    "queue": "queue",
    "next": "next_run_ms",
    "last": "last_enqueued_ms",
    "missed": "on_missed",
    "paused": lambda s: bool(s["paused"]),
}


@click.group(cls=Group)
def cron() -> None:
    """Schedules: jobs that come again."""


def _named(control: ControlClient, schedule_id: str) -> Json:
    for found in control.schedules():
        if found["id"] == schedule_id:
            return found
    raise missing("schedule", schedule_id)


@cron.command("ls")
@pass_session
def ls(session: Session) -> None:
    """List all schedules."""
    output.items(session, session.connect().schedules(), _SCHEDULES)


@cron.command()
@click.argument("id")
@pass_session
def show(session: Session, id: str) -> None:
    """Show one schedule."""
    output.record(session, _named(session.connect(), id))


@cron.command("set")
@click.argument("id")
@click.option("--kind", required=True)
@click.option(
    "--spec",
    required=True,
    help="Such as `0 8 * * *`, `CRON_TZ=Europe/Berlin 0 8 * * *` or `@every 15m`.",
)
@click.option(
    "--payload",
    type=PAYLOAD,
    metavar="@FILE|@-|TEXT",
    default=b"",
    help="What KIND expects, as `{}`; else nothing, which no function can read.",
)
@click.option("--queue", help="Else `default`, whatever the task says.")
@click.option("--priority", type=int)
@click.option("--partition")
@click.option("--rate-class")
@click.option("--weight", type=int)
@click.option("--max-attempts", type=int)
@click.option("--timeout", type=DURATION, help="Of one attempt.")
@click.option("--retention", type=DURATION, help="How long finished jobs are kept.")
@click.option("--schema-version", type=int)
@click.option("--tag", multiple=True)
@click.option("--sticky-worker")
@click.option("--on-missed", type=click.Choice([m.value for m in OnMissed]))
@click.option("--backfill-limit", type=int)
@click.option("--paused/--running", default=None, help="Else as it is.")
@pass_session
def set_(session: Session, id: str, payload: bytes, **asked: Any) -> None:
    """Create or replace a schedule; with the spec it has, the next tick stays."""
    fields = chosen(
        kind=asked["kind"],
        spec=asked["spec"],
        queue=asked["queue"],
        priority=asked["priority"],
        partition_key=asked["partition"],
        rate_class=asked["rate_class"],
        weight=asked["weight"],
        max_attempts=asked["max_attempts"],
        timeout_ms=asked["timeout"],
        retention_ms=asked["retention"],
        schema_version=asked["schema_version"],
        tags=asked["tag"],
        sticky_worker=asked["sticky_worker"],
        on_missed=asked["on_missed"],
        backfill_limit=asked["backfill_limit"],
        paused=asked["paused"],
    )
    control = session.connect()
    control.set_schedule(id, payload, fields)
    output.record(session, _named(control, id), _SCHEDULES)


@cron.command()
@click.argument("id")
@pass_session
def pause(session: Session, id: str) -> None:
    """Let no tick fire until `cron resume`."""
    session.connect().pause_schedule(id, True)
    output.record(session, {"id": id, "paused": True})


@cron.command()
@click.argument("id")
@pass_session
def resume(session: Session, id: str) -> None:
    """Let ticks fire again; the schedule says what becomes of the missed ones."""
    session.connect().pause_schedule(id, False)
    output.record(session, {"id": id, "paused": False})


@cron.command()
@click.argument("id")
@yes_option
@pass_session
def rm(session: Session, id: str, yes: bool) -> None:
    """Remove a schedule; its jobs and events stay."""
    confirm(f"delete schedule {id}", yes)
    session.connect().delete_schedule(id)
    output.record(session, {"id": id, "deleted": True})


@cron.command()
@click.argument("id")
@pass_session
def run(session: Session, id: str) -> None:
    """Enqueue the schedule's job once more, now; its ticks are left alone."""
    output.record(session, session.connect().run_schedule(id))


@cron.command()
@click.argument("id")
@click.option("--limit", type=click.IntRange(1, 100), default=30, show_default=True)
@click.option("--cursor", help="Of the page before.")
@pass_session
def events(session: Session, id: str, limit: int, cursor: str | None) -> None:
    """Show what became of the newest ticks."""
    found = session.connect().schedule_events(id, cursor=cursor, limit=limit)
    columns: output.Columns = {
        "tick": "tick_ms",
        "outcome": "outcome",
        "job": "job_id",
        "reason": "reason",
        "recorded": "recorded_at_ms",
    }
    output.page(session, found, "events", columns)


@cron.command(cls=LocalListing)
@click.argument("app")
@click.option(
    "--prune",
    is_flag=True,
    help="Delete those below --prefix that are not declared any more.",
)
@click.option("--prefix", help="Beginning of the ids that --prune may delete.")
@click.pass_context
def sync(ctx: click.Context, app: str, prune: bool, prefix: str | None) -> None:
    """Write the schedules that an application declares.

    APP is module:attribute, as for a worker; its database is the application's own. One
    line for each schedule, and JSON where --output asks for it.
    """
    from headgate_sync.deploy import sync_schedules
    from headgate_sync.worker.__main__ import AppFailed

    try:
        report = sync_schedules(app, prune=prune, prefix=prefix)
    except AppFailed as failed:
        traceback.print_exception(failed.__cause__)
        ctx.exit(USAGE)
    output.lines(
        ctx.ensure_object(Session),
        [
            {"id": schedule_id, "done": what}
            for what in ("created", "changed", "unchanged", "deleted")
            for schedule_id in getattr(report, what)
        ],
        lambda one: f"{one['done']} {one['id']}",
    )
