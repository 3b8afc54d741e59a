"""`headgate migrate`: create, update, check or drop the tables of a schema."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import Json
from headgate_sync.cli.session import Group, Session, pass_session
from headgate_sync.cli.text import instant
from headgate_sync.settings import Settings


@click.group(cls=Group)
def migrate() -> None:
    """Create, update, check or drop the tables of a schema."""


def _steps(command: Any) -> Any:
    for option in (
        click.option("--dry-run", is_flag=True, help="Only say what would be done."),
        click.option("--max-steps", type=int, metavar="N"),
        click.option("--target-version", type=int, metavar="N"),
    ):
        command = option(command)
    return command


def _confirmed(command: Any) -> Any:
    return click.option("--yes", "--confirm", is_flag=True, help="Really do it.")(
        command
    )


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def _schema(session: Session) -> str:
    return session.schema or Settings.read(os.environ.get).schema


@migrate.command()
@_steps
@pass_session
def up(
    session: Session, target_version: int | None, max_steps: int | None, dry_run: bool
) -> None:
    """Bring the schema to the version of this release, or to another."""
    from headgate_sync import schema_commands

    url, schema = session.database(migrated=False)
    _print(
        schema_commands.up(
            url, schema, target=target_version, max_steps=max_steps, dry_run=dry_run
        )
    )


@migrate.command()
@_steps
@_confirmed
@pass_session
def down(
    session: Session,
    target_version: int | None,
    max_steps: int | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Take versions back, all of them unless told; jobs are dropped."""
    from headgate_sync import schema_commands

    if not yes and not dry_run:
        raise click.UsageError("migrate down drops jobs; confirm with --yes")
    url, schema = session.database(migrated=False)
    _print(
        schema_commands.down(
            url,
            schema,
            target=target_version or 0,
            max_steps=max_steps,
            dry_run=dry_run,
        )
    )


@migrate.command()
@pass_session
def validate(session: Session) -> None:
    """Check the ledger, and that the tables are those of their version."""
    from headgate_sync import schema_commands

    _print(schema_commands.validate(*session.database(migrated=False)))


@migrate.command()
@pass_session
def version(session: Session) -> None:
    """Show at which version the schema is."""
    from headgate_sync import schema_commands

    _print(schema_commands.version(*session.database(migrated=False)))


def _line(row: Json) -> str:
    at_ms = row["applied_at_ms"]
    told = {
        "version": row["version"],
        "name": row["name"],
        "checksum": row["checksum"],
        "online_safe": "yes" if row["online_safe"] else "no",
        "applied": "no" if at_ms is None else instant(at_ms),
    }
    return " ".join(f"{name}={value}" for name, value in told.items())


@pass_session
def _listing(session: Session) -> None:
    """Show every version of this release, and when it was applied.

    One line each, and JSON where --output asks for it.
    """
    from headgate_sync.postgres.migrate import status

    found = [
        {
            "version": row.version.number,
            "name": row.version.name,
            "checksum": row.version.checksum,
            "online_safe": row.version.online_safe,
            "applied_at_ms": row.applied_at_ms,
        }
        for row in status(*session.database(migrated=False))
    ]
    output.lines(session, found, _line)


migrate.command("list")(_listing)
migrate.command("status")(_listing)


@migrate.command()
@click.option("--version", "number", type=int, metavar="N", required=True)
@click.option("--down/--up", help="The way back, or the way there.")
@pass_session
def get(session: Session, number: int, down: bool) -> None:
    """Print the SQL of a version; needs no database."""
    from headgate_sync import schema_commands

    direction = "down" if down else "up"
    _print(schema_commands.get(_schema(session), number, direction))


@migrate.command()
@click.option("--version", "number", type=int, metavar="N", required=True)
@_confirmed
@pass_session
def adopt(session: Session, number: int, yes: bool) -> None:
    """Write the ledger of tables that are there without one."""
    from headgate_sync import schema_commands

    if not yes:
        raise click.UsageError("migrate adopt writes the ledger; confirm with --yes")
    url, schema = session.database(migrated=False)
    _print(schema_commands.adopt(url, schema, version=number))


@migrate.command()
@click.option("--role", required=True, help="A role of the server.")
@click.option("--as", "as_role", required=True, help="What it shall act as.")
@click.option("--apply", is_flag=True, help="Run the statements too.")
@pass_session
def grants(session: Session, role: str, as_role: str, apply: bool) -> None:
    """Print what lets a role act as producer, worker, operator or reader."""
    from headgate_sync import schema_commands

    url, schema = None, _schema(session)
    if apply:
        url, schema = session.database(migrated=False)
    _print(schema_commands.grants(url, schema, role=role, as_role=as_role))
