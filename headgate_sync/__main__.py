"""The command line: `python -m headgate_sync`, also installed as `headgate`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from headgate_sync import __version__
from headgate_sync.errors import ConfigurationError, HeadgateError
from headgate_sync.settings import DATABASE_URL, EMBEDDED, FALLBACK_URL, Settings


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
    migrate.add_argument("action", choices=("up", "status", "down"))
    migrate.add_argument("--url", help="default: HEADGATE_DATABASE_URL, DATABASE_URL")
    migrate.add_argument("--schema", help="default: HEADGATE_SCHEMA, else headgate")
    migrate.add_argument(
        "--yes", action="store_true", help="confirm `down`: it drops every job"
    )

    cron = commands.add_parser("cron", help="schedules")
    actions = cron.add_subparsers(dest="action", required=True)
    sync = actions.add_parser(
        "sync", help="write the schedules that an application declares"
    )
    sync.add_argument("app", metavar="APP", help="module:attribute, as for a worker")
    sync.add_argument(
        "--prune",
        action="store_true",
        help="delete those below --prefix that are not declared any more",
    )
    sync.add_argument("--prefix", help="beginning of the ids that --prune may delete")

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
    if url is not None:
        return _migrate_at(url, schema, arguments)
    if not settings.embedded:
        raise ConfigurationError(
            f"no database: give --url or set {DATABASE_URL} or {FALLBACK_URL}, "
            f"or {EMBEDDED}=1 for the development database"
        )
    from headgate_sync.embedded import EmbeddedServer

    with EmbeddedServer.start(settings.data_dir) as server:
        return _migrate_at(server.url, schema, arguments)


def _migrate_at(url: str, schema: str, arguments: argparse.Namespace) -> int:
    from headgate_sync.postgres import migrate

    if arguments.action == "status":
        for line in migrate.status(url, schema=schema):
            print(line)
        return 0
    if arguments.action == "down":
        if not arguments.yes:
            raise ConfigurationError(
                f"migrate down drops every job of schema {schema}; confirm with --yes"
            )
        migrate.migrate_down(url, schema=schema)
        print(f"schema {schema} holds no tables of headgate any more")
        return 0
    for version in migrate.migrate_up(url, schema=schema):
        print(f"applied {version}")
    print(f"schema {schema} is current")
    return 0


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
