"""`headgate bulk`: one verb for many jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import ControlClient, Json
from headgate_sync.cli.errors import FAILED, Failed
from headgate_sync.cli.session import (
    Group,
    Session,
    chosen,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.cli.values import DURATION
from headgate_sync.loggers import visible

_POLL_S = 0.5
_OPEN = ("pending", "running")


def wait_option(command: Any) -> Any:
    """The option of commands that start an operation."""
    return click.option(
        "--wait/--no-wait", default=True, help="Follow the operation to its end."
    )(command)


def follow(
    session: Session, control: ControlClient, operation: Json, *, wait: bool
) -> None:
    """Print an operation, at its end if that is waited for.

    Over a database this carries the operation on by itself, so that it ends without any
    worker; over HTTP the workers behind the API do.

    Raises:
        Failed: the operation did.
    """
    told = None
    while wait and operation["status"] in _OPEN:
        touched = control.carry_on()
        operation = control.operation(operation["id"])
        if operation["status"] in _OPEN:
            if operation["affected"] != told:
                told = operation["affected"]
                most = operation["total_estimated"]
                click.echo(visible(f"{told} of {most} jobs"), err=True)
            if not touched:
                time.sleep(_POLL_S)  # another process has it, and tells nobody
    output.record(session, operation)
    if operation["status"] == "failed":
        raise Failed(f"operation {operation['id']} failed", FAILED)


@click.group(cls=Group)
def bulk() -> None:
    """One verb for all jobs of a queue, state, kind, partition or age.

    Without --apply this only estimates how many jobs it would be. Jobs that are
    enqueued after the start are not touched.
    """


@bulk.command()
@click.argument("operation")
@wait_option
@pass_session
def show(session: Session, operation: str, wait: bool) -> None:
    """Follow an operation that was started before."""
    control = session.connect()
    follow(session, control, control.operation(operation), wait=wait)


def _verb(action: str, does: str, *, destroys: bool) -> None:
    def run(session: Session, apply: bool, wait: bool, yes: bool, **asked: Any) -> None:
        selector = chosen(
            queue=asked["queue"],
            state=asked["state"],
            kind=asked["kind"],
            partition_key=asked["partition"],
            older_than_ms=asked["older_than"],
        )
        if not selector:
            raise click.UsageError(
                "which jobs? give --queue, --state, --kind, --partition or --older-than"
            )
        if apply and destroys:
            named = ", ".join(f"{k} {v}" for k, v in selector.items())
            confirm(f"{action} all jobs of {named}", yes)
        control = session.connect()
        started = control.start_operation(action, selector, dry_run=not apply)
        follow(session, control, started, wait=wait)

    command: Callable[..., None] = pass_session(run)
    for option in (
        click.option("--queue"),
        click.option("--state"),
        click.option("--kind"),
        click.option("--partition"),
        click.option("--older-than", type=DURATION, help="Enqueued so long ago."),
        click.option("--apply", is_flag=True, help="Do it; else only estimate."),
        wait_option,
        yes_option,
    )[::-1]:
        command = option(command)
    bulk.command(action, help=does)(command)


_verb(
    "retry",
    "Give archived, cancelled or undecodable jobs one more run.",
    destroys=False,
)
_verb("cancel", "Cancel unfinished jobs.", destroys=True)
_verb("delete", "Delete jobs that do not run.", destroys=True)
