"""`headgate api` and `headgate console`: each as a process of its own."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from headgate_sync.cli.errors import USAGE


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
    return click.pass_context(command)


@click.command()
@_options
def api(ctx: click.Context, **options: Any) -> None:
    """Serve the control API until SIGTERM, on 127.0.0.1:8091.

    Without an authentication hook an address that others reach is refused.
    """
    _serve(ctx, "headgate_sync.api.server", **options)


@click.command()
@_options
def console(ctx: click.Context, **options: Any) -> None:
    """Serve the web console until SIGTERM, on 127.0.0.1:8091.

    The control API is below /api/v1 of it. Without an authentication hook an address
    that others reach is refused.
    """
    _serve(ctx, "headgate_sync.console.server", **options)


def _serve(
    ctx: click.Context,
    server: str,
    *,
    app: str | None,
    address: str | None,
    auth: str | None,
    read_only: bool,
) -> None:
    from headgate_sync.app import Headgate
    from headgate_sync.worker.__main__ import AppFailed, load_app

    serve = importlib.import_module(server).serve
    sys.path.insert(0, str(Path.cwd()))
    logging.getLogger("headgate_sync").setLevel(logging.INFO)
    # Else a line for each request that waits for a thread.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        facade = Headgate.from_env() if app is None else load_app(app)
    except AppFailed as failed:
        traceback.print_exception(failed.__cause__)
        ctx.exit(USAGE)
    with facade:
        serve(facade, address=address, auth=auth, read_only=read_only or None)
