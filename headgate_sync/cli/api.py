"""`headgate api` and `headgate console`: each as a process of its own."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headgate_sync.cli.errors import USAGE
from headgate_sync.cli.session import ServerCommand, Session, pass_session
from headgate_sync.settings import DATABASE_URL

if TYPE_CHECKING:
    from headgate_sync.app import Headgate


def _options(command: Any) -> Any:
    for option in (
        click.option(
            "--read-only", is_flag=True, help="Refuse changes [HEADGATE_READ_ONLY]."
        ),
        click.option("--auth", help="module:callable; else HEADGATE_API_TOKEN."),
        click.option(
            "--address", "--addr", help="host:port or unix:/path [HEADGATE_API_ADDR]."
        ),
        click.option("--app", metavar="APP", help="module:attribute of a Headgate."),
    ):
        command = option(command)
    return pass_session(command)


@click.command(cls=ServerCommand)
@_options
def api(session: Session, **options: Any) -> None:
    """Serve the control API until SIGTERM, on 127.0.0.1:8091.

    Without an authentication hook an address that others reach is refused.
    """
    _serve(session, "headgate_sync.api.server", **options)


@click.command(cls=ServerCommand)
@_options
def console(session: Session, **options: Any) -> None:
    """Serve the web console until SIGTERM, on 127.0.0.1:8091.

    The control API is below /api/v1 of it. Without an authentication hook an address
    that others reach is refused.
    """
    _serve(session, "headgate_sync.console.server", **options)


def _facade(session: Session, app: str | None) -> Headgate:
    """What is served: an application's, or a database."""
    from headgate_sync.app import Headgate
    from headgate_sync.worker.__main__ import load_app

    named = session.database_url
    if app is None:
        environ = os.environ if named is None else {**os.environ, DATABASE_URL: named}
        return Headgate.from_env(environ, schema=session.schema)
    if named is not None or session.schema is not None:
        raise click.UsageError("an --app has a database of its own: give one of both")
    return load_app(app)


def _serve(
    session: Session,
    server: str,
    *,
    app: str | None,
    address: str | None,
    auth: str | None,
    read_only: bool,
) -> None:
    from headgate_sync.worker.__main__ import AppFailed

    serve = importlib.import_module(server).serve
    sys.path.insert(0, str(Path.cwd()))
    logging.getLogger("headgate_sync").setLevel(logging.INFO)
    # Else a line for each request that waits for a thread.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        facade = _facade(session, app)
    except AppFailed as failed:
        traceback.print_exception(failed.__cause__)
        click.get_current_context().exit(USAGE)
    with facade:
        serve(facade, address=address, auth=auth, read_only=read_only or None)
