"""Leads a schema from version to version, and takes over what is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from attrs import frozen
from psycopg import sql
from psycopg.pq import TransactionStatus

from headgate_sync.errors import BackendError, ConfigurationError, StoreConflict
from headgate_sync.postgres import manifest, roles
from headgate_sync.postgres.database import (
    DEFAULT_SCHEMA,
    NOT_ALLOWED,
    Database,
    Pool,
    Session,
    no_transaction_timeout,
    translate,
)
from headgate_sync.postgres.ledger import (
    State,
    Status,
    Version,
    check_history,
    check_server,
    history_of,
    read_history,
    versions,
)
from headgate_sync.postgres.sql import Statements

CREATE_TRIES = 10
LOCK_TIMEOUT_MS = 5_000
LOCK_TRIES = 5

Target = str | Pool | psycopg.Connection[Any]

_BEGIN = (
    b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL statement_timeout = 0"
    b"; SET LOCAL lock_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
    b"; SET LOCAL search_path = pg_catalog"
    b"; SET LOCAL quote_all_identifiers = off"  # definitions are compared as texts
)
# Unique violation of a catalogue's index, duplicate schema, table or object: a session
# of the same moment has just created it.
_JUST_CREATED = frozenset({"23505", "42P06", "42P07", "42710"})


@frozen(kw_only=True)
class Validity:
    """A schema that this release knows, as far as it is made.

    Attributes:
        current: the version of the schema; 0 where nothing is.
        latest: the newest version of this release.
    """

    current: int
    latest: int

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to apply."""
        return self.current == self.latest


def migrate_up(
    where: Target,
    schema: str = DEFAULT_SCHEMA,
    *,
    target: int | None = None,
    max_steps: int | None = None,
    dry_run: bool = False,
    lock_timeout_ms: int = LOCK_TIMEOUT_MS,
) -> list[Version]:
    """Bring a schema to a version, and create it when it is missing.

    Each version and its row in the ledger are one transaction, under a lock on the
    ledger; any number of callers at the same moment apply each version once. A version
    that is safe beside running programs waits for a lock no longer than its time, so
    that nobody queues behind it for long, and is tried five times. The newest version
    is compared with the manifest before it is committed. Recorded grants are given
    again with each version.

    Args:
        where: conninfo, a pool, or a connection without an open transaction.
        schema: created when the role may; others in the database are left alone.
        target: the version to reach; None is the newest.
        max_steps: apply no more versions than this.
        dry_run: check everything and apply nothing.
        lock_timeout_ms: how long a version that is online-safe waits for a lock.

    Returns:
        The versions that this call applied, or would apply, in order.

    Raises:
        ConfigurationError: the server is too old, the role lacks a right, the target is
            out of range, or what is there is not what this release would have written;
            it was not changed.
        StoreConflict: five tries of an online-safe version found a table locked; what
            was applied before it stays.
        StoreUnavailable: the database did not answer.
    """
    _check_target(target)
    _check_count("max_steps", max_steps)
    _check_count("lock_timeout_ms", lock_timeout_ms)
    newest = versions()[-1].number
    wanted = newest if target is None else target
    if not 0 <= wanted <= newest:
        raise ConfigurationError(
            f"target version {wanted}: this release has versions 1 to {newest}"
        )
    with _session(where, schema) as session:
        current = _current(session, schema)
        if wanted < current:
            raise ConfigurationError(
                f"schema {schema} is at version {current}, above target {wanted}: "
                "`headgate migrate down` leads there"
            )
        if max_steps is not None:
            wanted = min(wanted, current + max_steps)
        if dry_run or current == wanted:
            return list(versions()[current:wanted])
        _create_ledger(session, schema)
        applied = []
        while (
            step := _apply_next(session, schema, wanted, lock_timeout_ms)
        ) is not None:
            applied.append(step)
        return applied


def migrate_down(
    where: Target,
    schema: str = DEFAULT_SCHEMA,
    *,
    target: int = 0,
    max_steps: int | None = None,
    dry_run: bool = False,
) -> list[Version]:
    """Take versions back, with the data that only they hold; by default all of them.

    Work for when nothing runs: each version is one transaction that waits for its
    locks. At version 0 nothing of this package is left, all jobs are gone, and so are
    the recorded grants. The schema itself stays, since others may use it.

    Args:
        where: conninfo, a pool, or a connection without an open transaction.
        target: the version to end at.
        max_steps: take no more versions back than this.
        dry_run: check everything and remove nothing.

    Returns:
        The versions taken back, newest first; empty when there was nothing.

    Raises:
        ConfigurationError: the target is above the present version, or the ledger is
            not one of this release; nothing was removed.
    """
    _check_target(target)
    _check_count("max_steps", max_steps)
    with _session(where, schema) as session:
        current = _current(session, schema)
        if not 0 <= target <= current:
            raise ConfigurationError(
                f"schema {schema} is at version {current}: down cannot lead to {target}"
            )
        wanted = target if max_steps is None else max(target, current - max_steps)
        if dry_run:
            return list(reversed(versions()[wanted:current]))
        gone = []
        while (step := _revert_next(session, schema, wanted)) is not None:
            gone.append(step)
        return gone


def status(where: Target, schema: str = DEFAULT_SCHEMA) -> list[Status]:
    """Every version of this release with the instant of its application.

    Raises:
        ConfigurationError: the ledger is not one of this release.
    """
    with _session(where, schema) as session:
        instants = {
            row.number: row.applied_at_ms for row in read_history(session, schema)[1]
        }
        return [Status(version, instants.get(version.number)) for version in versions()]


def validity(where: Target, schema: str = DEFAULT_SCHEMA) -> Validity:
    """Tell at which version a schema is, by its ledger alone.

    Raises:
        ConfigurationError: the ledger is not one of this release, or there are tables
            without a ledger.
    """
    with _session(where, schema) as session:
        current = _current(session, schema)
        return Validity(current=current, latest=versions()[-1].number)


def validate(where: Target, schema: str = DEFAULT_SCHEMA) -> Validity:
    """Check the ledger and, at the newest version, everything in the schema.

    Raises:
        ConfigurationError: the ledger is not one of this release, there are tables
            without a ledger, or the schema differs from the manifest; the text names
            up to ten differences.
    """
    with _session(where, schema) as session:
        current = _current(session, schema)
        if current == versions()[-1].number:
            with _transaction(session):
                _check_manifest(session, schema)
        return Validity(current=current, latest=versions()[-1].number)


def adopt(where: Target, schema: str = DEFAULT_SCHEMA, *, version: int) -> None:
    """Book versions as applied over tables that are there already; runs none of them.

    For a schema that came from a dump without its ledger, or from a reviewed script.

    Args:
        version: what the tables are; only the newest can be checked, so only that.

    Raises:
        ConfigurationError: another version, a ledger with rows, no tables, or tables
            that are not exactly those of the manifest; nothing was written.
    """
    newest = versions()[-1].number
    if version != newest:
        raise ConfigurationError(
            f"version {version} cannot be adopted: this release can check tables of "
            f"version {newest} only"
        )
    with _session(where, schema) as session, _transaction(session):
        state = State.of(session, schema)
        check_server(state.server_version, state.encoding)
        if not state.has_jobs:
            raise ConfigurationError(
                f"schema {schema} has no tables to adopt: run `headgate migrate up`"
            )
        if not state.has_ledger:
            session.rows("ledger_create")
        if not state.has_grants:
            session.rows("grant_create")
        session.rows("ledger_lock")
        if history_of(session):
            raise ConfigurationError(f"schema {schema} has a ledger already")
        _check_manifest(session, schema)
        for step in versions():
            _book(session, step)


@contextmanager
def _session(where: Target, schema: str) -> Iterator[Session]:
    """An autocommit session; a lent connection goes back as it came."""
    statements = Statements(schema)
    if isinstance(where, str):
        try:
            connection = psycopg.connect(where, autocommit=True)
        except psycopg.Error as error:
            raise translate(error) from error
        with connection:
            yield Session(connection, statements)
        return
    if not isinstance(where, psycopg.Connection):
        with Database(where, schema).checkout() as session:
            yield session
        return
    if where.pgconn.transaction_status != TransactionStatus.IDLE:
        raise ConfigurationError("migrations need a connection without a transaction")
    before = where.autocommit
    where.autocommit = True
    try:
        yield Session(where, statements)
    finally:
        if not where.closed:
            where.autocommit = before


@contextmanager
def _transaction(session: Session) -> Iterator[None]:
    session.command(_BEGIN + no_transaction_timeout(session.connection))
    try:
        yield
    except BaseException:
        if not session.connection.closed:
            session.command(b"ROLLBACK")
        raise
    session.command(b"COMMIT")


def render(text: str, schema: str) -> bytes:
    """The text of a version for a schema."""
    source = sql.SQL(text)
    return source.format(schema=sql.Identifier(schema)).as_bytes(None)


def _current(session: Session, schema: str) -> int:
    """The version of a schema, 0 where nothing is; refuses tables without a ledger."""
    state, history = read_history(session, schema)
    if state.has_jobs and not history:
        raise _unversioned(schema, state)
    return len(history)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigurationError(f"{name} {value!r}: must be an integer from 1 on")


def _check_target(value: int | None) -> None:
    if value is not None and type(value) is not int:
        raise ConfigurationError(f"target version {value!r}: must be an integer")


def _check_manifest(session: Session, schema: str) -> None:
    difference = manifest.difference(manifest.read(session, schema))
    if difference:
        raise ConfigurationError(
            f"schema {schema} is not what version {versions()[-1].number} of this "
            f"release makes; it lacks (-) or has instead (+): {difference}"
        )


def _unversioned(schema: str, state: State) -> ConfigurationError:
    ledger = "an empty ledger" if state.has_ledger else "no ledger of versions"
    return ConfigurationError(
        f"schema {schema} has a table headgate_job and {ledger}: it was not made by "
        "`headgate migrate up`; `headgate migrate adopt` takes it over if it is "
        "exactly what this release makes"
    )


def _create_ledger(session: Session, schema: str) -> None:
    """Create schema and ledger unless they are there.

    IF NOT EXISTS does not help two sessions that create one name at the same moment:
    the later one fails on the catalogue's own index, and finds the object when it looks
    again.
    """
    for _ in range(CREATE_TRIES):
        state = State.of(session, schema)
        check_server(state.server_version, state.encoding)
        if state.has_ledger:
            return
        if state.has_jobs:
            raise _unversioned(schema, state)
        try:
            with _transaction(session):
                if not state.has_schema:
                    session.rows("ledger_schema")
                session.rows("ledger_create")
                session.rows("grant_create")
        except BackendError as error:
            if error.sqlstate == NOT_ALLOWED:
                raise _not_allowed(schema, state, error) from error
            if error.sqlstate not in _JUST_CREATED:
                raise
    raise ConfigurationError(f"schema {schema}: the ledger of versions keeps vanishing")


def _not_allowed(schema: str, state: State, error: BackendError) -> ConfigurationError:
    if state.has_schema:
        return ConfigurationError(f"schema {schema}: {error.message}")
    create = sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)).as_string(None)
    return ConfigurationError(
        f"the role may not create schema {schema}; an administrator must run: {create}"
    )


def _apply_next(
    session: Session, schema: str, target: int, lock_timeout_ms: int
) -> Version | None:
    """Apply the first missing version; None when there is none up to the target.

    Raises:
        StoreConflict: the tries are used up.
    """
    for _ in range(LOCK_TRIES - 1):
        try:
            return _try_next(session, schema, target, lock_timeout_ms)
        except StoreConflict:
            # The roll-back has let everybody pass who waited behind this step.
            continue
    return _try_next(session, schema, target, lock_timeout_ms)


def _try_next(
    session: Session, schema: str, target: int, lock_timeout_ms: int
) -> Version | None:
    """One try of the first missing version.

    The ledger is read after its lock was obtained, so that whoever waited finds the
    version that the other session applied.
    """
    with _transaction(session):
        session.rows("ledger_lock")
        history = history_of(session)
        check_history(history, schema)
        if len(history) >= target:
            return None
        version = versions()[len(history)]
        if version.online_safe:
            # Not before the lock of the ledger: another deployer may take its time.
            session.command(b"SET LOCAL lock_timeout = %d" % lock_timeout_ms)
        session.command(render(version.text("up"), schema))
        _book(session, version)
        roles.give_again(session, schema)
        if version is versions()[-1]:
            _check_manifest(session, schema)
        return version


def _revert_next(session: Session, schema: str, target: int) -> Version | None:
    """Take the newest version back; None when none is above the target."""
    if not State.of(session, schema).has_ledger:
        return None
    with _transaction(session):
        session.rows("ledger_lock")
        history = history_of(session)
        check_history(history, schema)
        if len(history) > target:
            version = versions()[len(history) - 1]
            session.command(render(version.text("down"), schema))
            session.rows("ledger_remove", version=version.number)
            return version
        if not history:
            session.rows("grant_drop")
            session.rows("ledger_drop")
        return None


def _book(session: Session, version: Version) -> None:
    session.rows(
        "ledger_append",
        version=version.number,
        name=version.name,
        checksum=version.checksum,
    )


def grant(
    where: Target, schema: str = DEFAULT_SCHEMA, *, role: str, as_role: str
) -> None:
    """Let a role of the server act as one of ours, now and in later versions.

    Rights are only added. What is given is recorded, and `migrate_up` gives the role
    what later versions bring.

    Args:
        role: of the server; it must exist.
        as_role: `producer`, `worker`, `operator` or `reader`.

    Raises:
        ConfigurationError: no such role, or the schema is not made.
        BackendError: whoever asks does not own the schema.
    """
    with _session(where, schema) as session:
        if _current(session, schema) == 0:
            raise ConfigurationError(
                f"schema {schema} has no tables: run `headgate migrate up`"
            )
        with _transaction(session):
            session.rows("ledger_lock")
            roles.give(session, schema, role, as_role)
