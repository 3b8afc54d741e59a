"""The group of all commands; the module of a noun is loaded when it is used."""

from __future__ import annotations

import importlib
import io
import logging
import sys
from collections import UserDict
from typing import Any

import click

from headgate_sync import __version__
from headgate_sync.cli.errors import INTERRUPTED, mistakes_told
from headgate_sync.cli.session import Group, Session, shared_options
from headgate_sync.loggers import OneLine

COMMANDS = {
    "api": "api",
    "archive": "archive",
    "bulk": "bulk",
    "cluster": "workers",
    "console": "api",
    "cron": "schedules",
    "dash": "dash",
    "demo": "local",
    "embedded": "local",
    "indexes": "upkeep",
    "job": "jobs",
    "limit": "limits",
    "migrate": "migrate",
    "quarantine": "limits",
    "queue": "queues",
    "rate": "limits",
    "reindex": "upkeep",
    "stats": "queues",
    "trim": "upkeep",
    "vacuum": "upkeep",
    "worker": "workers",
}


class _Loaded(UserDict[str, Any]):
    """Commands by name, each loaded when it is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        module = importlib.import_module(f"headgate_sync.cli.{self.data[name]}")
        found: click.Command = getattr(module, name)
        return found


class Commands(Group):
    """The root: where mistakes in the call and interrupts end."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Read the global options."""
        with mistakes_told():
            context = super().make_context(*args, **more)
        context.ensure_object(Session)  # one for all commands below
        return context

    def invoke(self, context: click.Context) -> Any:
        """Run a command; an interrupt ends it as a shell expects."""
        try:
            with mistakes_told():
                return super().invoke(context)
        except KeyboardInterrupt:
            context.exit(INTERRUPTED)


@click.group(
    cls=Commands,
    commands=_Loaded(COMMANDS),
    params=shared_options(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="headgate")
def headgate() -> None:
    """Look at and steer jobs, queues, limits, schedules and workers.

    Commands work on a database (--database-url) or on an HTTP control API (--api). They
    end with 0 when it is done, 1 when it failed, 2 for a mistake in the call or the
    set-up, 3 when there is no such thing, and 4 when it was refused.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # letters that it cannot write
            stream.reconfigure(errors="backslashreplace")
    told = logging.StreamHandler()
    told.setFormatter(OneLine("headgate: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[told])
