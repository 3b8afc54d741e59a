"""`headgate api`: the control API as a process of its own."""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

import click

from headgate_sync.cli.errors import USAGE


@click.command()
@click.option("--app", metavar="APP", help="module:attribute of a Headgate.")
@click.option("--address", help="host:port or unix:/path [HEADGATE_API_ADDR].")
@click.option("--auth", help="module:callable; else HEADGATE_API_TOKEN.")
@click.option("--read-only", is_flag=True, help="Refuse changes [HEADGATE_READ_ONLY].")
@click.pass_context
def api(
    ctx: click.Context,
    app: str | None,
    address: str | None,
    auth: str | None,
    read_only: bool,
) -> None:
    """Serve the control API until SIGTERM, on 127.0.0.1:8091.

    Without an authentication hook an address that others reach is refused.
    """
    from headgate_sync.api.server import serve
    from headgate_sync.app import Headgate
    from headgate_sync.worker.__main__ import AppFailed, load_app

    sys.path.insert(0, str(Path.cwd()))
    logging.getLogger("headgate_sync").setLevel(logging.INFO)
    try:
        facade = Headgate.from_env() if app is None else load_app(app)
    except AppFailed as failed:
        traceback.print_exception(failed.__cause__)
        ctx.exit(USAGE)
    with facade:
        serve(facade, address=address, auth=auth, read_only=read_only or None)
