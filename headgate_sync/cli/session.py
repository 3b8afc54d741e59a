"""What the global options say, the connection of a command, and the shared guards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click
from attrs import define

from headgate_sync.cli.control import ControlClient
from headgate_sync.cli.errors import REFUSED, Failed, fail
from headgate_sync.errors import ConfigurationError, HeadgateError
from headgate_sync.loggers import visible
from headgate_sync.settings import (
    DATABASE_URL,
    EMBEDDED,
    FALLBACK_URL,
    Settings,
    normal_url,
)

API = "HEADGATE_API"
TOKEN = "HEADGATE_TOKEN"  # the name of a variable


@define
class Session:
    """The global options of one call; None is "not given".

    Attributes:
        output: "table", "json" or "jsonl".
        named_by: the option or variable from which a database was taken.
    """

    output: str | None = None
    database_url: str | None = None
    schema: str | None = None
    api: str | None = None
    token: str | None = None
    named_by: str | None = None

    def form(self) -> str:
        """How to print: what was asked for, else by where it goes."""
        return self.output or ("table" if sys.stdout.isatty() else "json")

    def connect(self) -> ControlClient:
        """Open what the command works on; it is closed when the command ends.

        Raises:
            ConfigurationError: neither a database nor an API is named, or both are.
        """
        if self.api is not None and self.database_url is not None:
            raise ConfigurationError("give --api or --database-url, not both")
        api = self.api
        if api is None and self.database_url is None:
            api = os.environ.get(API) or None
        if api is not None:
            from headgate_sync.cli.remote import HttpControl

            return HttpControl(api, self.token or os.environ.get(TOKEN) or None)
        from headgate_sync.cli.direct import DirectControl

        return DirectControl(self.store())

    def store(self) -> Any:
        """The store of the database; for what no API offers.

        Raises:
            ConfigurationError: no database is named.
        """
        from headgate_sync.postgres.store import PgStore
        from headgate_sync.postgres.unpooled import Unpooled

        url, schema = self.database()
        store = PgStore(Unpooled(url), schema, heartbeat_connection=False)
        click.get_current_context().call_on_close(store.close)
        return store

    def database(self, *, migrated: bool = True) -> tuple[str, str]:
        """Address and schema of the database.

        Args:
            migrated: a development server that this starts shall have the tables.

        Raises:
            ConfigurationError: none is named, or an API is.
        """
        if self.api is not None:
            raise ConfigurationError("this command needs the database itself, no --api")
        settings = Settings.read(os.environ.get)
        schema = self.schema or settings.schema
        url = normal_url(self.database_url) or settings.url
        self.named_by = "--database-url" if self.database_url else settings.named_by
        if url is not None:
            from headgate_sync.postgres.database import read_address

            read_address(url)
            return url, schema
        if not settings.embedded:
            raise ConfigurationError(
                f"no database: give --database-url or set {DATABASE_URL} or "
                f"{FALLBACK_URL}, or {EMBEDDED}=1 for the development database; "
                f"an API is named by --api or {API}"
            )
        from headgate_sync.embedded import EmbeddedServer
        from headgate_sync.postgres.migrate import migrate_up

        server = EmbeddedServer.start(settings.data_dir)
        click.get_current_context().call_on_close(server.close)
        if migrated:
            migrate_up(server.url, schema)
        return server.url, schema


pass_session: Callable[[Any], Any] = click.make_pass_decorator(Session, ensure=True)


def confirm(question: str, yes: bool) -> None:
    """Let a destructive command go on only when somebody wants it.

    Raises:
        Failed: the answer is no, or nobody can be asked.
    """
    question = visible(question)
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failed(f"{question}? confirm with --yes; nothing was changed", REFUSED)
    if not click.confirm(f"{question}?", err=True):
        raise Failed("nothing was changed", REFUSED)


def yes_option(command: Any) -> Any:
    """The option `--yes` of a destructive command."""
    return click.option("--yes", is_flag=True, help="Do it without asking.")(command)


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        setattr(context.ensure_object(Session), parameter.name or "", value)


def shared_options() -> list[click.Parameter]:
    """The global options; they may stand before and behind the command's name."""
    texts = {
        "--database-url": f"Database to work on; else {DATABASE_URL}, {FALLBACK_URL}.",
        "--schema": "Where its tables are; else HEADGATE_SCHEMA, else headgate.",
        "--api": f"Work on this HTTP control API instead; else {API}.",
        "--token": f"Bearer token of the API; better as {TOKEN}, where nobody sees it.",
    }
    options: list[click.Parameter] = [
        click.Option(
            ["-o", "--output"],
            type=click.Choice(["table", "json", "jsonl"]),
            expose_value=False,
            callback=_keep,
            help="Else a table on a terminal and JSON elsewhere.",
        )
    ]
    for name, text in texts.items():
        names = [name, "--url"] if name == "--database-url" else [name]
        options.append(
            click.Option(
                [*names, name.removeprefix("--").replace("-", "_")],
                expose_value=False,
                callback=_keep,
                help=text,
            )
        )
    return options


class Command(click.Command):
    """A command that works on the jobs of a database or an API.

    Attributes:
        takes: the global options that mean something to it.
    """

    takes = frozenset({"output", "database_url", "schema", "api", "token"})

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += [one for one in shared_options() if one.name in self.takes]

    def invoke(self, context: click.Context) -> Any:
        """Run it, unless it was told to work on what it does not look at."""
        session = context.ensure_object(Session)
        for option in shared_options():
            name = option.name or ""
            if name not in {*self.takes, "output"} and getattr(session, name):
                raise click.UsageError(
                    f"{context.command_path} takes no {option.opts[0]}", context
                )
        return super().invoke(context)


class ServerCommand(Command):
    """A command that serves a database to others."""

    takes = frozenset({"database_url", "schema"})


class LocalCommand(Command):
    """A command of this machine, or of an application that has its own database."""

    takes = frozenset()


class LocalListing(LocalCommand):
    """One of these that tells of several things."""

    takes = frozenset({"output"})


class Group(click.Group):
    """A noun: a group of commands, which know the global options."""

    command_class = Command
    group_class = type

    def invoke(self, context: click.Context) -> Any:
        """Run a command; an error of the package ends it in one line."""
        try:
            return super().invoke(context)
        except HeadgateError as error:
            fail(error, context.ensure_object(Session).named_by)


def chosen(**values: Any) -> Mapping[str, Any]:
    """What was given, without what was not."""
    return {name: value for name, value in values.items() if value not in (None, ())}
