"""The command line: `python -m headgate_sync`, also installed as `headgate`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from headgate_sync import __version__
from headgate_sync.errors import ConfigurationError, HeadgateError
from headgate_sync.settings import DATABASE_URL, EMBEDDED, FALLBACK_URL, Settings

T = TypeVar("T")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headgate", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="index Python files with workers of which one is killed"
    )
    demo.add_argument(
        "--files", type=Path, metavar="DIR", help="default: the standard library"
    )

    migrate = commands.add_parser("migrate", help="create, update or drop the schema")
    migrate.add_argument("action", choices=sorted(_MIGRATE))
    migrate.add_argument("--url", help="default: HEADGATE_DATABASE_URL, DATABASE_URL")
    migrate.add_argument("--schema", help="default: HEADGATE_SCHEMA, else headgate")
    migrate.add_argument("--target-version", type=int, metavar="N", help="up, down")
    migrate.add_argument("--max-steps", type=int, metavar="N", help="up, down")
    migrate.add_argument("--dry-run", action="store_true", help="up, down")
    migrate.add_argument(
        "--yes", "--confirm", action="store_true", help="confirm `down` or `adopt`"
    )
    migrate.add_argument("--version", type=int, metavar="N", help="get, adopt")
    migrate.add_argument("--down", action="store_true", help="get: the way back")
    migrate.add_argument("--role", help="grants: a role of the server")
    migrate.add_argument("--as", dest="as_role", help="grants: what it shall act as")
    migrate.add_argument("--apply", action="store_true", help="grants: run them too")

    embedded = commands.add_parser("embedded", help="the development database")
    embedded.add_argument("action", choices=("remove",))
    worker = commands.add_parser("worker", help="look after a worker process")
    actions = worker.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="exit 0 if a worker is well, else 1")
    check.add_argument("path", type=Path, help="what it was given as --ready-file")
    check.add_argument("--max-age", default="60s", metavar="DURATION")
    return parser


def _configured_url(given: str | None = None) -> str | None:
    environ = os.environ
    return given or environ.get("HEADGATE_DATABASE_URL") or environ.get("DATABASE_URL")


def _demo(arguments: argparse.Namespace) -> int:
    from headgate_sync.demo.run import run_demo

    if arguments.files is not None and not arguments.files.is_dir():
        raise ConfigurationError(f"--files: {arguments.files} is no directory")
    url = _configured_url()
    if url is not None:
        report = run_demo(url, arguments.files)
    else:
        from headgate_sync.embedded import EmbeddedServer

        with EmbeddedServer.start() as server:
            print(f"embedded PostgreSQL in {server.data_dir}", file=sys.stderr)
            report = run_demo(server.url, arguments.files)
    print("\n".join(report.lines()))
    return 0 if report.ok else 1


def _migrate(arguments: argparse.Namespace) -> int:
    settings = Settings.read(os.environ.get)
    schema = arguments.schema or settings.schema
    url = arguments.url or settings.url
    action = _MIGRATE[arguments.action]
    if arguments.action == "get":
        return _print(action("", schema, arguments))
    if arguments.action == "grants" and not arguments.apply:
        return _print(action("", schema, arguments))
    if url is not None:
        return _print(action(url, schema, arguments))
    if not settings.embedded:
        raise ConfigurationError(
            f"no database: give --url or set {DATABASE_URL} or {FALLBACK_URL}, "
            f"or {EMBEDDED}=1 for the development database"
        )
    from headgate_sync.embedded import EmbeddedServer

    with EmbeddedServer.start(settings.data_dir) as server:
        return _print(action(server.url, schema, arguments))


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line)
    return 0


def _up(url: str, schema: str, given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    return schema_commands.up(
        url,
        schema,
        target=given.target_version,
        max_steps=given.max_steps,
        dry_run=given.dry_run,
    )


def _down(url: str, schema: str, given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    if not given.yes and not given.dry_run:
        raise ConfigurationError(
            f"migrate down drops jobs of schema {schema}; confirm with --yes"
        )
    return schema_commands.down(
        url,
        schema,
        target=given.target_version or 0,
        max_steps=given.max_steps,
        dry_run=given.dry_run,
    )


def _validate(url: str, schema: str, _given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    return schema_commands.validate(url, schema)


def _version(url: str, schema: str, _given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    return schema_commands.version(url, schema)


def _list(url: str, schema: str, _given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    return schema_commands.listing(url, schema)


def _get(_url: str, schema: str, given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    return schema_commands.get(
        schema, _needed(given.version, "--version"), "down" if given.down else "up"
    )


def _adopt(url: str, schema: str, given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    version = _needed(given.version, "--version")
    if not given.yes:
        raise ConfigurationError("migrate adopt writes the ledger; confirm with --yes")
    return schema_commands.adopt(url, schema, version=version)


def _grants(url: str, schema: str, given: argparse.Namespace) -> Iterable[str]:
    from headgate_sync import schema_commands

    return schema_commands.grants(
        url or None,
        schema,
        role=_needed(given.role, "--role"),
        as_role=_needed(given.as_role, "--as"),
    )


def _needed(value: T | None, option: str) -> T:
    if value is None:
        raise ConfigurationError(f"this command needs {option}")
    return value


_MIGRATE: dict[str, Callable[[str, str, argparse.Namespace], Iterable[str]]] = {
    "adopt": _adopt,
    "down": _down,
    "get": _get,
    "grants": _grants,
    "list": _list,
    "status": _list,
    "up": _up,
    "validate": _validate,
    "version": _version,
}


def _embedded(_arguments: argparse.Namespace) -> int:
    from headgate_sync.embedded import remove

    removed = remove()
    print(f"removed {removed}" if removed else "there is no embedded database")
    return 0


def _cron(arguments: argparse.Namespace) -> int:
    from headgate_sync.deploy import sync_schedules
    from headgate_sync.worker.__main__ import AppFailed

    try:
        report = sync_schedules(
            arguments.app, prune=arguments.prune, prefix=arguments.prefix
        )
    except AppFailed as failed:
        traceback.print_exception(failed.__cause__)
        return 2
    for what in ("created", "changed", "unchanged", "deleted"):
        for schedule_id in getattr(report, what):
            print(f"{what} {schedule_id}")
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    from headgate_sync.durations import duration_ms
    from headgate_sync.worker.readyfile import complaint

    max_age_ms = duration_ms("--max-age", arguments.max_age)
    said = complaint(arguments.path, max_age_ms=max_age_ms)
    if said is None:
        return 0
    print(f"headgate: {said}", file=sys.stderr)
    return 1


_COMMANDS = {
    "cron": _cron,
    "demo": _demo,
    "migrate": _migrate,
    "embedded": _embedded,
    "worker": _worker,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; a mistake in the set-up is one line and exit code 2."""
    arguments = _parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
