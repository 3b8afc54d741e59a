"""`headgate rate`, `headgate limit` and `headgate quarantine`."""

from __future__ import annotations

from typing import Any

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import ControlClient, Json
from headgate_sync.cli.errors import missing
from headgate_sync.cli.session import (
    Group,
    Session,
    chosen,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.text import instant, span
from headgate_sync.cli.values import BUDGET, DURATION
from headgate_sync.policy import OnSaturated, Scope

_CLASSES: output.Columns = {
    "name": "name",
    "budgets": lambda c: ", ".join(map(_budget, c["budgets"])),
    "tokens": lambda c: ", ".join(str(b["tokens_available"]) for b in c["budgets"]),
    "waiting": "jobs_waiting",
    "paused": lambda c: "yes" if c["paused"] else _until(c),
    "reason": "pause_reason",
}


def _budget(budget: Json) -> str:
    return f"{budget['limit']}/{span(budget['window_ms'])} burst {budget['burst']}"


def _until(found: Json) -> str:
    until_ms = found["paused_until_ms"]
    return "no" if until_ms is None else f"until {instant(until_ms)}"


@click.group(cls=Group)
def rate() -> None:
    """Rate classes: budgets that the whole fleet shares."""


def _class(control: ControlClient, name: str) -> Json:
    for found in control.rate_classes():
        if found["name"] == name:
            return found
    raise missing("rate class", name)


@rate.command("ls")
@pass_session
def rate_ls(session: Session) -> None:
    """List all rate classes."""
    output.items(session, session.connect().rate_classes(), _CLASSES)


@rate.command("set")
@click.argument("name")
@click.option("--limit", type=int, required=True, help="Tokens per window.")
@click.option("--window", type=DURATION, required=True, help="Such as 1s or 1h.")
@click.option("--burst", type=int, help="Tokens at most; else the limit.")
@click.option(
    "--also",
    type=BUDGET,
    multiple=True,
    metavar="LIMIT/WINDOW[/BURST]",
    help="A further budget, which must have room too: 1000/1h, or with a burst "
    "1000/1h/50. May be repeated; without it the stored ones stay.",
)
@click.option("--only", is_flag=True, help="Remove the further budgets.")
@click.option("--paused", is_flag=True, help="Let nothing pass until `rate resume`.")
@pass_session
def rate_set(session: Session, name: str, also: Any, only: bool, **asked: Any) -> None:
    """Create or change a rate class.

    `rate set mail --limit 10 --window 1s --also 1000/1h` lets ten start per second and
    a thousand per hour.
    """
    if only and also:
        raise click.UsageError("--only and --also exclude each other")
    limit, burst = asked["limit"], asked["burst"]
    fields: Json = {
        "limit": limit,
        "window_ms": asked["window"],
        "burst": max(limit, 1) if burst is None else burst,
        "paused": asked["paused"],
    }
    if only or also:
        fields["further"] = list(also)
    control = session.connect()
    control.set_rate_class(name, fields)
    output.record(session, _class(control, name), _CLASSES)


def _switch(control: ControlClient, found: Json, paused: bool) -> None:
    """Set the lasting pause of a class, whose budgets stay."""
    if not found["budgets"]:
        raise click.UsageError(f"{found['name']} has no budget: pause it with --for")
    first = found["budgets"][0]
    control.set_rate_class(
        found["name"],
        {name: first[name] for name in ("limit", "window_ms", "burst")}
        | {"paused": paused},
    )


@rate.command("pause")
@click.argument("name")
@click.option("--for", "for_ms", type=DURATION, help="Else until `rate resume`.")
@click.option("--reason", default="", help="Shown with a pause --for a time.")
@pass_session
def rate_pause(session: Session, name: str, for_ms: int | None, reason: str) -> None:
    """Let no more jobs of a class start.

    A pause without --for takes the tokens: after it the class refills from nothing.
    """
    if reason and for_ms is None:
        raise click.UsageError("--reason needs --for")
    control = session.connect()
    if for_ms is None:
        _switch(control, _class(control, name), True)
    else:
        control.pause_rate_class(name, for_ms, reason)
    output.record(session, _class(control, name), _CLASSES)


@rate.command("resume")
@click.argument("name")
@pass_session
def rate_resume(session: Session, name: str) -> None:
    """End every pause of a class."""
    control = session.connect()
    found = _class(control, name)
    if found["paused"]:
        _switch(control, found, False)
    if found["paused_until_ms"] is not None:
        control.resume_rate_class(name)
    output.record(session, _class(control, name), _CLASSES)


@rate.command("rm")
@click.argument("name")
@yes_option
@pass_session
def rate_rm(session: Session, name: str, yes: bool) -> None:
    """Remove a class: jobs that name it become unlimited."""
    confirm(f"delete rate class {name}, so that its jobs are not limited", yes)
    waiting = session.connect().delete_rate_class(name)
    output.record(session, {"name": name, "deleted": True, "jobs_waiting": waiting})


@click.group(cls=Group)
def limit() -> None:
    """Concurrency limits: at most so many running jobs of something."""


_LIMITS: output.Columns = {
    "name": "name",
    "scope": "scope",
    "queue": "queue",
    "rate class": "rate_class",
    "most": "max_concurrent",
    "when full": "on_saturated",
}


@limit.command("ls")
@pass_session
def limit_ls(session: Session) -> None:
    """List all concurrency limits."""
    output.items(session, session.connect().ceilings(), _LIMITS)


@limit.command("set")
@click.argument("name")
@click.option("--max", "most", type=int, required=True, help="Running jobs at most.")
@click.option("--scope", type=click.Choice([s.value for s in Scope]))
@click.option("--queue", help="For the scopes partition (the default) and queue.")
@click.option("--rate-class", help="For the scope class.")
@click.option("--when-full", type=click.Choice([s.value for s in OnSaturated]))
@pass_session
def limit_set(session: Session, name: str, most: int, **asked: Any) -> None:
    """Create or change a limit. What it counts cannot be changed: delete it first."""
    fields = chosen(
        max_concurrent=most,
        scope=asked["scope"],
        queue=asked["queue"],
        rate_class=asked["rate_class"],
        on_saturated=asked["when_full"],
    )
    control = session.connect()
    control.set_ceiling(name, fields)
    for found in control.ceilings():
        if found["name"] == name:
            return output.record(session, found, _LIMITS)
    raise missing("limit", name)


@limit.command("rm")
@click.argument("name")
@yes_option
@pass_session
def limit_rm(session: Session, name: str, yes: bool) -> None:
    """Remove a limit."""
    confirm(f"delete concurrency limit {name}", yes)
    session.connect().delete_ceiling(name)
    output.record(session, {"name": name, "deleted": True})


@click.group(cls=Group)
def quarantine() -> None:
    """Quarantine: jobs whose content killed their workers."""


@quarantine.command("ls")
@pass_session
def quarantine_ls(session: Session) -> None:
    """List all fingerprints in quarantine, the newest first."""
    columns: output.Columns = {
        "fingerprint": "fingerprint",
        "kind": "kind",
        "crashes": "crash_count",
        "since": "quarantined_at_ms",
        "reason": "reason",
    }
    output.items(session, session.connect().quarantine(), columns)


@quarantine.command()
@click.argument("fingerprint")
@pass_session
def release(session: Session, fingerprint: str) -> None:
    """Let jobs of a fingerprint run again."""
    released = session.connect().release(fingerprint)
    output.record(session, {"fingerprint": fingerprint, "released_jobs": released})
