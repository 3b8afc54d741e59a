"""`headgate job`: look at jobs, steer them, enqueue one."""

from __future__ import annotations

from typing import Any

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import Json
from headgate_sync.cli.errors import REFUSED, exit_code
from headgate_sync.cli.session import (
    Group,
    Session,
    chosen,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.text import named, readable
from headgate_sync.cli.values import DURATION, INSTANT, PAYLOAD, typed_bytes
from headgate_sync.errors import HeadgateError
from headgate_sync.loggers import visible
from headgate_sync.validation import check_name

_PARTS = ("result", "output", "progress", "checkpoint")
_DONE = {
    "retry": "retried",
    "cancel": "cancelled",
    "promote": "promoted",
    "delete": "deleted",
}


_JOBS: output.Columns = {
    "id": "id",
    "kind": "kind",
    "queue": "queue",
    "state": "state",
    "attempt": lambda j: f"{j['attempt']}/{j['max_attempts']}",
    "scheduled": "scheduled_at_ms",
    "error": lambda j: j["error_code"] or j["reason_code"],
}
_ATTEMPTS: output.Columns = {
    "at": "at_ms",
    "outcome": "outcome",
    "error": lambda a: (a.get("error") or "").partition("\n")[0],
    "took": "latency_ms",
    "worker": "worker",
}


@click.group(cls=Group)
def job() -> None:
    """Jobs: list, explain, retry, cancel, replay, enqueue."""


@job.command("ls")
@click.argument("query", nargs=-1)
@click.option("--state")
@click.option("--queue")
@click.option("--kind")
@click.option("--partition")
@click.option("--tag", multiple=True, help="The job has it; may be repeated.")
@click.option("--any-tag", multiple=True, help="The job has one of them.")
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True)
@click.option("--cursor", help="Of the page before.")
@pass_session
def ls(session: Session, query: tuple[str, ...], limit: int, **asked: Any) -> None:
    """List jobs, the newest first.

    QUERY is such as `queue:mail state:archived tag:eu welcome`; terms must all hold,
    and one without a colon is how the kind begins.
    """
    fields = chosen(
        state=asked["state"],
        queue=asked["queue"],
        kind=asked["kind"],
        partition_key=asked["partition"],
        tags_all=asked["tag"],
        tags_any=asked["any_tag"],
    )
    found = session.connect().jobs(
        " ".join(query) or None, fields=fields, cursor=asked["cursor"], limit=limit
    )
    output.page(session, found, "jobs", _JOBS)


@job.command()
@click.argument("queue", required=False)
@pass_session
def counts(session: Session, queue: str | None) -> None:
    """Count jobs by state, of one queue or of all."""
    found = session.connect().counts(queue)
    sign = "≥ " if found["count_is_approximate"] else ""
    if session.form() == "table":
        columns: output.Columns = {
            "state": "state",
            "jobs": lambda s: f"{sign}{s['count']}",
        }
        output.items(session, found["counts"], columns)
    else:
        output.record(session, found)


def _opened(part: Json | None, name: str, show: bool) -> Json | None:
    """A part of a job with its bytes as text, or without them."""
    if part is None or name not in part:
        return part
    rest = {key: value for key, value in part.items() if key != name}
    if not show or part[name] is None:
        return rest
    text, encoding = readable(part[name])
    return rest | {name: text, f"{name}_encoding": encoding}


def _is_told(value: Any) -> bool:
    """Whether a table shows it: a checkpoint without steps, for one, says nothing."""
    if isinstance(value, dict):
        return any(part not in (None, "", [], {}, 0) for part in value.values())
    return value not in (None, "", [])


@job.command()
@click.argument("id")
@click.option(
    "--payload",
    is_flag=True,
    help="Show payload, headers and the bytes that the handler left; in base64 where "
    "they are no text.",
)
@pass_session
def show(session: Session, id: str, payload: bool) -> None:
    """Show one job: fields, attempts, result, output, progress, checkpoint."""
    control = session.connect()
    found = _opened(control.job(id, payload=payload), "payload", payload) or {}
    for part in _PARTS:
        name = "cursor" if part == "checkpoint" else "bytes"
        try:
            found[part] = _opened(control.part(id, part), name, payload)
        except HeadgateError as error:
            # Who may not see the contents is still shown the rest.
            if exit_code(error) != REFUSED:
                raise
            found[part] = {"refused": str(error)}
    if session.form() != "table":
        output.record(session, found)
        return
    attempts = found.pop("errors")
    output.record(session, found, {n: n for n in found if _is_told(found[n])})
    if attempts:
        click.echo()
        output.items(session, attempts, _ATTEMPTS)
        _, _, traceback = (attempts[-1].get("error") or "").partition("\n")
        if traceback.strip():
            click.echo()
            for line in traceback.strip().split("\n"):
                click.echo(visible(line))


def _check_new_id(id: str | None) -> None:
    """An API takes an empty id for none and makes one, so that no repeat is found."""
    if id is not None:
        check_name("id", id)


def _fact(name: str, text: str) -> str:
    """A figure of the gate, all of which are texts."""
    return named(name, int(text) if text.isascii() and text.isdecimal() else text)


@job.command()
@click.argument("id")
@pass_session
def explain(session: Session, id: str) -> None:
    """Say why a job runs or waits, by the counters of the gate."""
    found = session.connect().explain(id)
    fields: dict[str, Any] = {
        "state": "state",
        "admissible": "admissible",
        "blocked by": "blocked_by",
        "admitted in": "estimated_admission_ms",
        "workers": "live_workers",
    }
    for name in found["detail"]:
        fields[f"  {name}"] = lambda e, name=name: _fact(name, e["detail"][name])
    output.record(session, found, fields)


def _steer(session: Session, id: str, verb: str) -> None:
    session.connect().steer(id, verb)
    output.record(session, {"id": id, "done": _DONE[verb]})


@job.command()
@click.argument("id")
@pass_session
def retry(session: Session, id: str) -> None:
    """Give an archived, cancelled or undecodable job one more run, now."""
    _steer(session, id, "retry")


@job.command()
@click.argument("id")
@pass_session
def promote(session: Session, id: str) -> None:
    """Make a pending job available now."""
    _steer(session, id, "promote")


@job.command()
@click.argument("id")
@yes_option
@pass_session
def cancel(session: Session, id: str, yes: bool) -> None:
    """Cancel an unfinished job; a worker that runs it loses it."""
    confirm(f"cancel job {id}", yes)
    _steer(session, id, "cancel")


@job.command()
@click.argument("id")
@yes_option
@pass_session
def delete(session: Session, id: str, yes: bool) -> None:
    """Remove a job that does not run, with all that belongs to it."""
    confirm(f"delete job {id}", yes)
    _steer(session, id, "delete")


@job.command()
@click.argument("id")
@click.argument("at", type=INSTANT)
@pass_session
def reschedule(session: Session, id: str, at: int) -> None:
    """Move a waiting job to another instant; the past means now."""
    session.connect().reschedule(id, at)
    output.record(session, {"id": id, "scheduled_at_ms": at})


@job.command()
@click.argument("id")
@click.option("--queue", help="Another queue.")
@click.option("--at", type=INSTANT, help="When it may run; else now.")
@click.option("--new-id", help="Names the new job, so that a repeat makes no second.")
@pass_session
def replay(
    session: Session, id: str, queue: str | None, at: int | None, new_id: str | None
) -> None:
    """Enqueue a new job like one that is there."""
    _check_new_id(new_id)
    fields = chosen(queue=queue, run_at_ms=at, id=new_id)
    output.record(session, session.connect().replay(id, fields))


@job.command()
@click.argument("kind")
@click.option(
    "--payload",
    type=PAYLOAD,
    required=True,
    metavar="@FILE|@-|TEXT",
    help="The bytes, from a file, the standard input or this argument.",
)
@click.option("--id")
@click.option("--queue", help="Else `default`, whatever the task says.")
@click.option("--priority", type=int)
@click.option("--partition")
@click.option("--rate-class")
@click.option("--weight", type=int)
@click.option("--at", type=INSTANT, help="When it may run; else now.")
@click.option("--max-attempts", type=int)
@click.option("--retention", type=DURATION, help="How long it is kept when finished.")
@click.option("--schema-version", type=int)
@click.option("--tag", multiple=True)
@click.option("--sticky-worker")
@click.option("--unique-key", help="Refused while another job of the kind has it.")
@click.option("--pending", is_flag=True, help="Not to run before it is promoted.")
@pass_session
def enqueue(session: Session, kind: str, payload: bytes, **asked: Any) -> None:
    """Put one job in. The payload is sent as it is: it must be what KIND expects."""
    key = asked["unique_key"]
    _check_new_id(asked["id"])
    fields = chosen(
        id=asked["id"],
        queue=asked["queue"],
        priority=asked["priority"],
        partition_key=asked["partition"],
        rate_class=asked["rate_class"],
        weight=asked["weight"],
        scheduled_at_ms=asked["at"],
        max_attempts=asked["max_attempts"],
        retention_ms=asked["retention"],
        schema_version=asked["schema_version"],
        tags=asked["tag"],
        sticky_worker=asked["sticky_worker"],
        unique_key=None if key is None else typed_bytes("unique_key", key),
        pending=asked["pending"] or None,
    )
    output.record(session, session.connect().enqueue(kind, payload, fields))
