"""The versions of the schema and the ledger of what was applied; only reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from attrs import frozen

from headgate_sync.errors import ConfigurationError
from headgate_sync.postgres.database import Session

MIN_SERVER_VERSION = 130_000
ONLINE_SAFE = "-- Online-safe:"

_FOLDER = resources.files("headgate_sync.postgres.migrations")
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.up\.sql")


@frozen
class Version:
    """One version of the schema, as this release knows it.

    Attributes:
        checksum: SHA-256 of the file as it lies there, so that it is the same for every
            schema name.
    """

    number: int
    name: str
    checksum: str

    @property
    def online_safe(self) -> bool:
        """Whether the way to this version may be run beside programs that are at work.

        It takes no lock for long: it only adds, or replaces functions.
        """
        return self.text("up").startswith(ONLINE_SAFE)

    def __str__(self) -> str:
        safe = "yes" if self.online_safe else "no"
        return f"version={self.number} name={self.name} online_safe={safe}"

    def text(self, direction: str) -> str:
        """The file that leads to this version ("up") or back from it ("down")."""
        file = _FOLDER.joinpath(f"{self.number:04}_{self.name}.{direction}.sql")
        return file.read_text("utf-8")


@frozen
class Status:
    """A version and when it was applied; None while it is missing."""

    version: Version
    applied_at_ms: int | None


@frozen
class Applied:
    """A row of the ledger."""

    number: int
    name: str
    checksum: str
    applied_at_ms: int


@cache
def versions() -> tuple[Version, ...]:
    """The versions of this release, in order."""
    found = []
    for file in _FOLDER.iterdir():
        match = _FILE.fullmatch(file.name)
        if match is not None:
            checksum = hashlib.sha256(file.read_bytes()).hexdigest()
            found.append(Version(int(match[1]), match[2], checksum))
    return tuple(sorted(found, key=lambda version: version.number))


def check_schema(session: Session, schema: str) -> None:
    """Check that this release can work on a schema; reads only.

    Raises:
        ConfigurationError: missing or older, with the command to run; or newer, or not
            what this release would have written; or the server is too old.
    """
    _, history = read_history(session, schema)
    newest = versions()[-1].number
    if len(history) < newest:
        found = f"is at version {len(history)}" if history else "has no tables"
        raise ConfigurationError(
            f"schema {schema} {found}, this release needs version {newest}: "
            "run `headgate migrate up`"
        )


def check_history(history: Sequence[Applied], schema: str) -> None:
    """Check that a ledger is a beginning of the versions that this release knows.

    Raises:
        ConfigurationError: a gap, an unknown newer version, another name or checksum.
    """
    for place, row in enumerate(history, start=1):
        if row.number != place:
            raise ConfigurationError(
                f"schema {schema}: the ledger has a gap, version {place} is missing"
            )
        if place > len(versions()):
            raise ConfigurationError(
                f"schema {schema}: the database is newer than this release: it is at "
                f"version {history[-1].number}, this release knows {len(versions())}"
            )
        version = versions()[place - 1]
        if (row.name, row.checksum) != (version.name, version.checksum):
            raise ConfigurationError(
                f"schema {schema}: version {place} was applied as {row.name} "
                f"{row.checksum}, this release has {version.name} {version.checksum}"
            )


@frozen
class State:
    """What there is before anything is read from a table of ours."""

    has_schema: bool
    has_ledger: bool
    has_jobs: bool
    has_grants: bool
    server_version: int
    encoding: str

    @classmethod
    def of(cls, session: Session, schema: str) -> State:
        return cls(*session.rows("schema_state", schema_name=schema)[0])


def check_server(version: int, encoding: str) -> None:
    """Check what only another server can change.

    Args:
        version: as in `server_version_num`.
        encoding: of the database.

    Raises:
        ConfigurationError: older than PostgreSQL 13, or not UTF-8.
    """
    if version < MIN_SERVER_VERSION:
        raise ConfigurationError(
            f"PostgreSQL {version // 10_000} is too old, this package needs "
            f"{MIN_SERVER_VERSION // 10_000} or later"
        )
    if encoding != "UTF8":
        raise ConfigurationError(
            f"the database has encoding {encoding}, this package needs UTF8"
        )


def history_of(session: Session) -> list[Applied]:
    """The rows of a ledger that exists, in order and as they are."""
    return [Applied(*row) for row in session.rows("ledger_rows")]


def read_history(session: Session, schema: str) -> tuple[State, list[Applied]]:
    """What there is, and what was applied, checked; nothing without a ledger.

    In this order: a version comes with its row, so that whoever has seen the tables of
    the first one finds its row, also while other sessions apply it.
    """
    state = State.of(session, schema)
    check_server(state.server_version, state.encoding)
    history = history_of(session) if state.has_ledger else []
    check_history(history, schema)
    return state, history
