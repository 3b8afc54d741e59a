"""The versions of the schema, the ledger of what was applied, the check at start."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any

import psycopg
from attrs import frozen
from psycopg import sql
from psycopg.pq import TransactionStatus

from headgate_sync.errors import BackendError, ConfigurationError
from headgate_sync.postgres.database import DEFAULT_SCHEMA, Session, translate
from headgate_sync.postgres.sql import Statements

MIN_SERVER_VERSION = 130_000
CREATE_TRIES = 10

_FOLDER = resources.files("headgate_sync.postgres.migrations")
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.up\.sql")
_BEGIN = (
    b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL statement_timeout = 0"
    b"; SET LOCAL lock_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
    b"; SET LOCAL search_path = pg_catalog"
)
# Unique violation of a catalogue's index, duplicate schema, table or object: a session
# of the same moment has just created it.
_JUST_CREATED = frozenset({"23505", "42P06", "42P07", "42710"})
_NOT_ALLOWED = "42501"


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

    def __str__(self) -> str:
        return f"version={self.number} name={self.name}"

    def text(self, direction: str) -> str:
        """The file that leads to this version ("up") or back from it ("down")."""
        file = _FOLDER.joinpath(f"{self.number:04}_{self.name}.{direction}.sql")
        return file.read_text("utf-8")


@frozen
class Status:
    """A version and when it was applied; None while it is missing."""

    version: Version
    applied_at_ms: int | None

    def __str__(self) -> str:
        applied = "no" if self.applied_at_ms is None else str(self.applied_at_ms)
        return f"{self.version} checksum={self.version.checksum} applied={applied}"


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


def migrate_up(
    target: str | psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA
) -> list[Version]:
    """Bring a schema to the newest version, and create it when it is missing.

    Each version and its row in the ledger are one transaction, under a lock on the
    ledger; any number of callers at the same moment apply each version once.

    Args:
        target: conninfo, or a connection without an open transaction.
        schema: created when the role may; others in the database are left alone.

    Returns:
        The versions that this call applied, in order.

    Raises:
        ConfigurationError: the server is too old, the role lacks a right, or what is
            there is not what this release would have written; it was not changed.
        StoreUnavailable: the database did not answer.
    """
    with _session(target, schema) as session:
        _create_ledger(session, schema)
        applied = []
        while (version := _apply_next(session, schema)) is not None:
            applied.append(version)
        return applied


def migrate_down(
    target: str | psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA
) -> list[Version]:
    """Remove everything that this package has in a schema, all jobs included.

    The schema itself stays, since others may use it.

    Returns:
        The versions taken back, newest first; empty when there was nothing.

    Raises:
        ConfigurationError: the ledger is not one of this release; nothing was removed.
    """
    with _session(target, schema) as session:
        if not _State.of(session, schema).has_ledger:
            return []
        with _transaction(session):
            session.rows("ledger_lock")
            history = _history(session)
            check_history(history, schema)
            gone = [versions()[row.number - 1] for row in reversed(history)]
            for version in gone:
                session.command(_render(version.text("down"), schema))
            session.rows("ledger_drop")
        return gone


def status(
    target: str | psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA
) -> list[Status]:
    """Every version of this release with the instant of its application.

    Raises:
        ConfigurationError: the ledger is not one of this release.
    """
    with _session(target, schema) as session:
        state = _State.of(session, schema)
        history = _history(session) if state.has_ledger else []
        check_history(history, schema)
        instants = {row.number: row.applied_at_ms for row in history}
        return [Status(version, instants.get(version.number)) for version in versions()]


def check_schema(session: Session, schema: str) -> None:
    """Check that this release can work on a schema; reads only.

    Raises:
        ConfigurationError: missing or older, with the command to run; or newer, or not
            what this release would have written; or the server is too old.
    """
    state = _State.of(session, schema)
    check_server(state.server_version, state.encoding)
    history = _history(session) if state.has_ledger else []
    check_history(history, schema)
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
class _State:
    """What there is before anything is read from a table of ours."""

    has_schema: bool
    has_ledger: bool
    has_jobs: bool
    server_version: int
    encoding: str

    @classmethod
    def of(cls, session: Session, schema: str) -> _State:
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


@contextmanager
def _session(target: str | psycopg.Connection[Any], schema: str) -> Iterator[Session]:
    """An autocommit session; a lent connection goes back as it came."""
    statements = Statements(schema)
    if isinstance(target, str):
        try:
            connection = psycopg.connect(target, autocommit=True)
        except psycopg.Error as error:
            raise translate(error) from error
        with connection:
            yield Session(connection, statements)
        return
    if target.pgconn.transaction_status != TransactionStatus.IDLE:
        raise ConfigurationError("migrations need a connection without a transaction")
    before = target.autocommit
    target.autocommit = True
    try:
        yield Session(target, statements)
    finally:
        if not target.closed:
            target.autocommit = before


@contextmanager
def _transaction(session: Session) -> Iterator[None]:
    session.command(_BEGIN)
    try:
        yield
    except BaseException:
        if not session.connection.closed:
            session.command(b"ROLLBACK")
        raise
    session.command(b"COMMIT")


def _render(text: str, schema: str) -> bytes:
    source = sql.SQL(text)
    return source.format(schema=sql.Identifier(schema)).as_bytes(None)


def _history(session: Session) -> list[Applied]:
    return [Applied(*row) for row in session.rows("ledger_rows")]


def _create_ledger(session: Session, schema: str) -> None:
    """Create schema and ledger unless they are there.

    IF NOT EXISTS does not help two sessions that create one name at the same moment:
    the later one fails on the catalogue's own index, and finds the object when it looks
    again.
    """
    for _ in range(CREATE_TRIES):
        state = _State.of(session, schema)
        check_server(state.server_version, state.encoding)
        if state.has_ledger:
            return
        if state.has_jobs:
            raise ConfigurationError(
                f"schema {schema} has a table headgate_job and no ledger of versions: "
                "it was not made by `headgate migrate up`"
            )
        try:
            with _transaction(session):
                if not state.has_schema:
                    session.rows("ledger_schema")
                session.rows("ledger_create")
        except BackendError as error:
            if error.sqlstate == _NOT_ALLOWED:
                raise _not_allowed(schema, state, error) from error
            if error.sqlstate not in _JUST_CREATED:
                raise
    raise ConfigurationError(f"schema {schema}: the ledger of versions keeps vanishing")


def _not_allowed(schema: str, state: _State, error: BackendError) -> ConfigurationError:
    if state.has_schema:
        return ConfigurationError(f"schema {schema}: {error.message}")
    create = sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)).as_string(None)
    return ConfigurationError(
        f"the role may not create schema {schema}; an administrator must run: {create}"
    )


def _apply_next(session: Session, schema: str) -> Version | None:
    """Apply the first missing version; None when there is none.

    The ledger is read after its lock was obtained, so that whoever waited finds the
    version that the other session applied.
    """
    with _transaction(session):
        session.rows("ledger_lock")
        history = _history(session)
        check_history(history, schema)
        if len(history) == len(versions()):
            return None
        version = versions()[len(history)]
        session.command(_render(version.text("up"), schema))
        session.rows(
            "ledger_append",
            version=version.number,
            name=version.name,
            checksum=version.checksum,
        )
        return version
