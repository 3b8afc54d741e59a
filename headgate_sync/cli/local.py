"""`headgate demo` and `headgate embedded`: a database of this machine."""

from __future__ import annotations

from pathlib import Path

import click

from headgate_sync.cli import output
from headgate_sync.cli.control import Json
from headgate_sync.cli.errors import FAILED
from headgate_sync.cli.session import (
    Group,
    LocalCommand,
    LocalListing,
    Session,
    confirm,
    pass_session,
    yes_option,
)
from headgate_sync.errors import ConfigurationError
from headgate_sync.settings import Settings


@click.command(cls=LocalCommand)
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Python files to index; else the standard library.",
)
@click.pass_context
def demo(ctx: click.Context, files: Path | None) -> None:
    """Index Python files with workers of which one is killed.

    Works in a schema of its own, which it drops, on the database of
    HEADGATE_DATABASE_URL or DATABASE_URL, else on the development server.
    """
    import os

    from headgate_sync.demo.run import run_demo
    from headgate_sync.postgres.database import read_address

    if files is not None and not files.is_dir():
        raise ConfigurationError(f"--files: {files} is no directory")
    settings = Settings.read(os.environ.get)
    ctx.ensure_object(Session).named_by = settings.named_by
    url = settings.url
    if url is None:
        from headgate_sync.embedded import EmbeddedServer

        server = EmbeddedServer.start()
        ctx.call_on_close(server.close)
        click.echo(f"embedded PostgreSQL in {server.data_dir}", err=True)
        url = server.url
    read_address(url)
    report = run_demo(url, files)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        ctx.exit(FAILED)


@click.group(cls=Group)
def embedded() -> None:
    """The development server, which runs while a process uses it."""


def _runs(server: Json) -> str:
    version = server["runs"]
    return f"{server['directory']} {f'runs {version}' if version else 'does not run'}"


@embedded.command(cls=LocalListing)
@pass_session
def status(session: Session) -> None:
    """Show the development servers, and whether they run.

    One line each, and JSON where --output asks for it.
    """
    from headgate_sync.embedded import installed

    found = [{"directory": str(path), "runs": version} for path, version in installed()]
    output.lines(session, found, _runs)
    if not found:
        click.echo("there is no embedded database", err=True)


@embedded.command(cls=LocalCommand)
@yes_option
def rm(yes: bool) -> None:
    """Delete the development database, unless a process uses it."""
    from headgate_sync.embedded import remove

    confirm("delete the development database", yes)
    gone = remove()
    click.echo(f"removed {gone}" if gone else "there is no embedded database")
