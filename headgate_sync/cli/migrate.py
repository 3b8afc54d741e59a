"""`headgate migrate`: create, update or drop the schema."""

from __future__ import annotations

import click

from headgate_sync.cli.session import Group, Session, pass_session, yes_option
from headgate_sync.cli.text import visible


@click.group(cls=Group)
def migrate() -> None:
    """Create, update or drop the tables of a schema."""


@migrate.command()
@pass_session
def up(session: Session) -> None:
    """Bring the schema to the version of this release."""
    from headgate_sync.postgres.migrate import migrate_up

    url, schema = session.database(migrated=False)
    for version in migrate_up(url, schema=schema):
        click.echo(f"applied {version}")
    click.echo(f"schema {visible(schema)} is current")


@migrate.command()
@pass_session
def status(session: Session) -> None:
    """Show every version of this release, and when it was applied."""
    from headgate_sync.postgres import migrate as versions

    url, schema = session.database(migrated=False)
    for line in versions.status(url, schema=schema):
        click.echo(str(line))


@migrate.command()
@yes_option
@pass_session
def down(session: Session, yes: bool) -> None:
    """Drop the tables, with every job."""
    from headgate_sync.postgres.migrate import migrate_down

    if not yes:
        raise click.UsageError("migrate down drops every job; confirm with --yes")
    url, schema = session.database(migrated=False)
    migrate_down(url, schema=schema)
    click.echo(f"schema {visible(schema)} holds no tables of headgate any more")
