"""`headgate dash`: the terminal dashboard."""

from __future__ import annotations

import sys

import click

from headgate_sync.cli.errors import USAGE, Failed
from headgate_sync.cli.session import Command, Session, pass_session
from headgate_sync.cli.values import DURATION


@click.command(cls=Command)
@click.option("--every", type=DURATION, default="2s", show_default=True)
@pass_session
def dash(session: Session, every: int) -> None:
    """Show queues and workers on this terminal, as they change.

    Keys: p pauses or resumes the queue under the cursor, r looks at once, q or Ctrl-C
    quits.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Failed("dash needs a terminal", USAGE)
    try:
        from headgate_sync.cli.dashboard import Dashboard
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise Failed(
            "dash needs textual: pip install 'headgate_sync[dash]'", USAGE
        ) from None
    control = session.connect()
    control.now_ms()  # a mistake is told before the screen is taken
    Dashboard(control, every).run()
