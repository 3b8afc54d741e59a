"""Pool, transactions and error translation: everything that touches the driver."""

from __future__ import annotations

import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ConnStatus, DiagnosticField, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row
from psycopg_pool import PoolClosed

from headgate_sync.errors import (
    BackendError,
    ConfigurationError,
    StoreClosed,
    StoreConflict,
    StoreError,
    StoreUnavailable,
)
from headgate_sync.loggers import guarded
from headgate_sync.postgres.sql import PREPARED, Statements

logger = guarded(__name__)

T = TypeVar("T")
Row = tuple[Any, ...]

DEFAULT_SCHEMA = "headgate"
CONFLICT_TRIES = 3
_LAST = (b"FATAL", b"PANIC")  # severities after which a session is over

# Role, database and pool may have set defaults for queries of their own: an isolation
# that fails under load, time limits that turn a long sweep into an outage, names that
# hide the server's functions. A transaction that meets them brings its own settings.
_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_OWN_SETTINGS = (
    b"; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0"
    b"; SET LOCAL idle_in_transaction_session_timeout = 0"
    b"; SET LOCAL search_path = pg_catalog; SET LOCAL client_encoding = 'UTF8'"
)
# Whoever looks waits for nobody, is stopped before it costs much, and reads by index
# whatever the planner believes of tables that were never analysed.
_LOOK = (
    b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL lock_timeout = 1000"
    b"; SET LOCAL idle_in_transaction_session_timeout = 0"
    b"; SET LOCAL search_path = pg_catalog; SET LOCAL client_encoding = 'UTF8'"
    b"; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
    b"; SET LOCAL random_page_cost = 0; SET LOCAL jit = off"
    b"; SET LOCAL statement_timeout = %d"
)
LOOK_TIMEOUT_MS = 5_000
_IS_PLAIN = b"""
SELECT pg_catalog.current_setting('default_transaction_isolation') = 'read committed'
  AND pg_catalog.current_setting('default_transaction_read_only') = 'off'
  AND pg_catalog.current_setting('statement_timeout') = '0'
  AND pg_catalog.current_setting('lock_timeout') = '0'
  AND pg_catalog.current_setting('idle_in_transaction_session_timeout') = '0'
  AND COALESCE(pg_catalog.current_setting('transaction_timeout', true), '0') = '0'
  AND pg_catalog.current_setting('client_encoding') = 'UTF8'
  AND pg_catalog.strpos(pg_catalog.current_setting('search_path'), 'pg_catalog') = 0,
  pg_catalog.pg_backend_pid()
"""
# Statements that share a cursor. It holds the arguments and the rows of the last one,
# which is too much of a batch: up to 16 MiB for each connection of a pool.
_SHARING = PREPARED - {"enqueue", "enqueue_alike"}
_COMMIT = b"COMMIT"
_ROLLBACK = b"ROLLBACK"

_CONFLICTS = frozenset({"40001", "40P01", "55P03"})
READ_ONLY = "25006"
NOT_SUPPORTED = "0A000"  # as a standby says to a BEGIN ... READ WRITE
_OUTAGES = frozenset({READ_ONLY, "25P03", "25P04", "57014"})
_OUTAGE_CLASSES = ("08", "53", "57P0", "58")
UNIQUE_VIOLATION = "23505"
NOT_ALLOWED = "42501"
NO_SCHEMA = "3F000"
QUERY_CANCELED = "57014"

_READ_ONLY_TX = (
    "the transaction that was handed over is read-only: begin it READ WRITE, on a "
    "server that is no standby"
)
_STANDBY = (
    "the server takes no writes, as a standby does not: give the address of the "
    "primary, or several hosts with target_session_attrs=read-write"
)


class LookedTooLong(StoreUnavailable):
    """A statement that only reads was stopped at its time limit."""


def translate(error: BaseException) -> StoreError:
    """The store's error for what the driver or the pool raised, by SQLSTATE.

    Without a SQLSTATE an operational error (refused, lost, pool empty) is an outage;
    anything else is a fault of the statement. The text is the server's message and its
    hint: the details quote rows, so payloads, and the context whole statements.
    """
    if isinstance(error, StoreError):
        return error
    # One that its owner has yet to open is raised as the same, and may be waited for.
    if isinstance(error, PoolClosed) and "not open yet" not in str(error):
        return StoreClosed(str(error))
    sqlstate = getattr(error, "sqlstate", None)
    text = " ".join(_said(error).split()) or type(error).__name__
    if sqlstate is None:
        if isinstance(
            error, psycopg.OperationalError | psycopg.InterfaceError | OSError
        ):
            return StoreUnavailable(text)
        return BackendError(text)
    if sqlstate in _CONFLICTS:
        return StoreConflict(text, sqlstate=sqlstate)
    if sqlstate in _OUTAGES or sqlstate.startswith(_OUTAGE_CLASSES):
        return StoreUnavailable(text)
    return BackendError(text, sqlstate=sqlstate)


def _said(error: BaseException) -> str:
    diagnosis = getattr(error, "diag", None)
    if diagnosis is None or not diagnosis.message_primary:
        return str(error)
    hint = diagnosis.message_hint
    return (
        f"{diagnosis.message_primary} ({hint})" if hint else diagnosis.message_primary
    )


def read_address(
    conninfo: str, name: str = "the database address"
) -> Mapping[str, Any]:
    """The parts of a URL or of a list of keywords.

    Raises:
        ConfigurationError: neither; the text does not quote it, for it may hold a
            password.
    """
    try:
        parts = conninfo_to_dict(conninfo)
    except (psycopg.ProgrammingError, AttributeError, TypeError, UnicodeError):
        raise ConfigurationError(
            f"{name} cannot be read: expected postgresql://user@host/name "
            "or keywords such as host=... dbname=..."
        ) from None
    for host in str(parts.get("host") or "").split(","):
        # The driver would name the end of a password as a host that it cannot find.
        if "@" in host and not host.startswith(("/", "@")):
            raise ConfigurationError(
                f"{name} has an @ in its host: in a password it is written as %40"
            )
    return parts


class Pool(Protocol):
    """What lends connections; a `ConnectionPool` of the driver is one."""

    @property
    def max_size(self) -> int: ...

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]: ...

    def putconn(self, conn: psycopg.Connection[Any], /) -> None: ...


def no_transaction_timeout(connection: psycopg.Connection[Any]) -> bytes:
    """What lifts a role's limit for whole transactions, where the server knows one."""
    if connection.pgconn.server_version < 170_000:
        return b""
    return b"; SET LOCAL transaction_timeout = 0"


class _Utf8Loader(Loader):
    """Reads the text that the driver leaves as bytes, for want of an encoding."""

    def load(self, data: Buffer) -> str:
        """The text of a value."""
        return bytes(data).decode()


# As the driver has them, whatever an application taught its own connections.
_ADAPTERS = AdaptersMap(psycopg.adapters)
_ASCII_ADAPTERS = AdaptersMap(_ADAPTERS)
for _name in ("text", "name"):
    _ASCII_ADAPTERS.register_loader(_name, _Utf8Loader)


class _Cursor(psycopg.Cursor[Row]):
    """Reads and writes values by the driver's rules, not by those of the connection."""

    @property
    def adapters(self) -> AdaptersMap:
        """What the cursor translates values with."""
        encoding = self.connection.pgconn.parameter_status(b"client_encoding")
        return _ASCII_ADAPTERS if encoding == b"SQL_ASCII" else _ADAPTERS


class Session:
    """Runs statement files on one connection; sets nothing and ends no transaction.

    Attributes:
        plain: whether the connection's defaults suit a statement without BEGIN; None
            before somebody asked.
        prepares: whether the server that answers keeps what was prepared.
        borrowed: the connection is a caller's, and so is its transaction.
    """

    __slots__ = (
        "_cursor", "_statements", "borrowed", "connection", "plain", "prepares",
    )  # fmt: skip

    def __init__(
        self, connection: psycopg.Connection[Any], statements: Mapping[str, bytes]
    ) -> None:
        self.connection = connection
        self.plain: bool | None = None
        self.prepares = True
        self.borrowed = False
        self._statements = statements
        # An own cursor: the connection's row factory belongs to its owner. What it
        # learns of types with the first statement it knows with the next, which is a
        # third of the driver's work; so the frequent statements share one.
        self._cursor: psycopg.Cursor[Row] | None = None

    def rows(self, name: str, /, **params: Any) -> list[Row]:
        """Run the statement file of this name and return its rows.

        Raises:
            StoreError: translated; the driver's error is the cause.
        """
        text = self._statements[name]
        prepare = None if self.prepares and name in PREPARED else False
        if name not in _SHARING:
            return self._run(self._new_cursor(), text, params, prepare=prepare)
        if self._cursor is None:
            self._cursor = self._new_cursor()
        return self._run(self._cursor, text, params, prepare=prepare)

    def command(self, text: bytes) -> list[Row]:
        """Run a control statement such as SAVEPOINT, which has no arguments."""
        return self._run(self._new_cursor(), text, None, prepare=False)

    def _new_cursor(self) -> psycopg.Cursor[Row]:
        return _Cursor(self.connection, row_factory=tuple_row)

    def _run(
        self,
        cursor: psycopg.Cursor[Row],
        text: bytes,
        params: dict[str, Any] | None,
        *,
        prepare: bool | None,
    ) -> list[Row]:
        try:
            cursor.execute(text, params, prepare=prepare)
            if self.connection.pgconn.pipeline_status:
                # The owner's pipeline holds answers back until it is synchronised.
                with self.connection.pipeline() as pipeline:
                    pipeline.sync()
            return cursor.fetchall() if cursor.rownumber is not None else []
        except (psycopg.Error, UnicodeError) as error:
            raise self._told(error, text) from error

    def _told(self, error: Exception, text: bytes) -> StoreError:
        """The error of a statement, with what to do about it where that is known."""
        sqlstate = getattr(error, "sqlstate", None)
        if sqlstate == READ_ONLY or (
            sqlstate == NOT_SUPPORTED and text.startswith(_BEGIN)
        ):
            return StoreUnavailable(_READ_ONLY_TX if self.borrowed else _STANDBY)
        told = translate(error)
        return self._explained(told) if isinstance(told, BackendError) else told

    def _explained(self, told: BackendError) -> BackendError:
        """The same error with what to do about it, where that is known."""
        why = told.message
        info = self.connection.info
        if told.sqlstate == NOT_ALLOWED:
            text = (
                f"role {info.user} lacks a right: {why}; the owner of the "
                "schema gives it with `headgate migrate grants`"
            )
        elif told.sqlstate == NO_SCHEMA:
            text = f"{why} in database {info.dbname}: " + (
                "a transaction that is handed over must be one on the database of the "
                "queue"
                if self.borrowed
                else "`headgate migrate up` makes one, or it has another name"
            )
        else:
            return told
        return BackendError(text, sqlstate=told.sqlstate)


def is_alive(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has not hung up on an idle connection; costs no round trip.

    After a restart every idle connection of a pool is dead, and says so to a reader.
    """
    pgconn = connection.pgconn
    if pgconn.status != ConnStatus.OK:
        return False
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    return not poll.poll(0) or _goes_on(pgconn, poll)


def _goes_on(pgconn: PGconn, poll: select.poll) -> bool:
    """Whether what the server said meanwhile is not its end.

    A server process says why it ends some time before its stream ends.
    """
    heard = pgconn.notice_handler
    last_words: list[PGresult] = []

    def hear(said: PGresult) -> None:
        if said.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) in _LAST:
            last_words.append(said)
        elif heard is not None:
            heard(said)

    pgconn.notice_handler = hear
    try:
        while poll.poll(0):
            pgconn.consume_input()
            pgconn.is_busy()  # takes in what came
    except psycopg.Error:
        return False
    finally:
        pgconn.notice_handler = heard
    return bool(pgconn.status == ConnStatus.OK) and not last_words


class Database:
    """One pool and one schema; statements by name, transactions of the store's own.

    Nothing here depends on, or changes, the session: a pooled connection goes back with
    the attributes it came with.

    Args:
        pool: opened and closed by its owner.
        schema: where the tables are.
        pool_timeout_ms: how long to wait for a connection; None is the pool's own time.
        verify: called once with a session before anything else is run.
    """

    def __init__(
        self,
        pool: Pool,
        schema: str = DEFAULT_SCHEMA,
        *,
        pool_timeout_ms: int | None = None,
        verify: Callable[[Session], None] | None = None,
    ) -> None:
        self.pool = pool
        self.schema = schema
        self.statements = Statements(schema)
        self._wait_s = None if pool_timeout_ms is None else pool_timeout_ms / 1000
        self._verify = verify
        self._pid = os.getpid()
        # Connections by the thread that took them; None unless somebody debugs.
        self._holders: Counter[int] | None = (
            Counter() if os.environ.get("HEADGATE_DEBUG") == "1" else None
        )
        self._discarded: SimpleQueue[AbstractContextManager[Session]] = SimpleQueue()
        self._sessions: dict[psycopg.Connection[Any], Session] = {}

    def rows(self, name: str, /, **params: Any) -> list[Row]:
        """Run one statement file as its own transaction and return its rows.

        Raises:
            StoreUnavailable: no connection, or it was lost: what happened is not known.
            StoreConflict: three tries collided with other transactions.
            BackendError: the statement failed.
        """

        def once() -> list[Row]:
            with self.checkout() as session:
                return self.rows_on(session.connection, name, params)

        return self._retried(once)

    def run(self, work: Callable[[Session], T]) -> T:
        """Run `work` in one transaction, again from the start when it collides.

        Raises:
            StoreConflict: three tries collided.
        """

        def once() -> T:
            with self.transaction() as session:
                return work(session)

        return self._retried(once)

    def look(self, name: str, /, **params: Any) -> list[Row]:
        """Run one statement file that only reads, as `looking` says.

        Raises:
            LookedTooLong: it was stopped.
        """
        return self.looking(lambda session: session.rows(name, **params))

    def looking(
        self, work: Callable[[Session], T], *, timeout_ms: int | None = None
    ) -> T:
        """Run `work` on one state of the database, each statement for 5 s at most.

        Raises:
            LookedTooLong: a statement was stopped.
        """

        begin = _LOOK % (timeout_ms or LOOK_TIMEOUT_MS)

        def once() -> T:
            try:
                with self.checkout() as session, self._own(session, begin):
                    return work(session)
            except StoreUnavailable as error:
                if getattr(error.__cause__, "sqlstate", None) == QUERY_CANCELED:
                    raise LookedTooLong(str(error)) from error
                raise

        return self._retried(once)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A READ COMMITTED, read-write transaction; commits unless the block raises."""
        with self.checkout() as session, self._own(session):
            yield session

    def session(self, connection: psycopg.Connection[Any]) -> Session:
        """Run statements on a caller's connection, in the caller's transaction."""
        session = Session(connection, self.statements)
        session.borrowed = True
        self._verified(session)
        return session

    def session_of_own(self, connection: psycopg.Connection[Any]) -> Session:
        """Begin a transaction of the store's own on an idle autocommit connection."""
        session = self._session(connection)
        self._begin(session)
        return session

    def rows_on(
        self, connection: psycopg.Connection[Any], name: str, params: dict[str, Any]
    ) -> list[Row]:
        """`rows`, once, on an idle autocommit connection of any origin."""
        session = self._session(connection)
        if self._is_plain(session):
            self._verified(session)
            return session.rows(name, **params)
        with self._own(session):
            return session.rows(name, **params)

    def _retried(self, once: Callable[[], T]) -> T:
        for _ in range(CONFLICT_TRIES - 1):
            try:
                return once()
            except StoreConflict:
                continue
        return once()

    @contextmanager
    def _own(self, session: Session, begin: bytes | None = None) -> Iterator[None]:
        """A transaction of the store's own around the block."""
        pgconn = session.connection.pgconn
        try:
            self._begin(session, begin)
            yield
            if pgconn.transaction_status != TransactionStatus.INTRANS:
                # COMMIT would answer a failed transaction with a silent ROLLBACK.
                raise BackendError("the transaction ended or failed in its block")
            session.command(_COMMIT)
        except BaseException:
            _roll_back(session)
            raise

    def _begin(self, session: Session, begin: bytes | None = None) -> None:
        plain = self._is_plain(session)
        if begin is None:
            begin = _BEGIN if plain else _BEGIN + _OWN_SETTINGS
        if not plain:
            begin += no_transaction_timeout(session.connection)
        session.command(begin)
        self._verified(session)

    def _is_plain(self, session: Session) -> bool:
        if session.plain is None:
            [(plain, pid)] = session.command(_IS_PLAIN)
            # A pooler names a server of its own making and may hand the next statement
            # to another one, which does not know what this one prepared.
            session.prepares = pid == session.connection.pgconn.backend_pid
            session.plain = bool(plain)
        return session.plain

    def _session(self, connection: psycopg.Connection[Any]) -> Session:
        """The session that is kept for a connection of ours while it is open."""
        session = self._sessions.get(connection)
        if session is None:
            for known in list(self._sessions):
                if known.closed:
                    self._sessions.pop(known, None)
            session = Session(connection, self.statements)
            self._sessions[connection] = session
        return session

    def _verified(self, session: Session) -> None:
        verify = self._verify
        if verify is not None:
            verify(session)
            self._verify = None

    @contextmanager
    def checkout(self, *, wait_s: float | None = None) -> Iterator[Session]:
        """A live pooled connection in autocommit mode, given back as it was.

        Args:
            wait_s: how long to wait for one; None is the store's own time.
        """
        holder = threading.get_ident()
        if self._holders is not None and self._holders[holder]:
            # With every connection of the pool held so, all wait for each other.
            logger.warning(
                "a second connection is taken while this thread holds one, as inside "
                "of once: pass the handle on, or the pool may run dry",
                stack_info=True,
            )
        connection = self._take(self._wait_s if wait_s is None else wait_s)
        autocommit = connection.autocommit
        if self._holders is not None:
            self._holders[holder] += 1
        try:
            if not autocommit:
                connection.autocommit = True
            yield self._session(connection)
        finally:
            if self._holders is not None:
                self._holders[holder] -= 1
            if (
                not autocommit
                and connection.pgconn.transaction_status == TransactionStatus.IDLE
            ):
                connection.autocommit = False
            self.pool.putconn(connection)

    def discard(self, checkout: AbstractContextManager[Session]) -> None:
        """Leave a checkout, whose connection is closed, to be ended by a later call.

        For finalizers, which may run while this very thread holds the pool's lock.
        """
        self._discarded.put(checkout)

    def check_process(self) -> None:
        """Refuse to work in a forked child.

        The sockets are the parent's, and the pool's own threads are not there.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("store used after fork: open it in the child process")

    def _take(self, wait_s: float | None) -> psycopg.Connection[Any]:
        self.check_process()
        while not self._discarded.empty():
            with suppress(Empty):  # another thread was faster
                self._discarded.get_nowait().__exit__(None, None, None)
        try:
            for _ in range(self.pool.max_size):
                connection: psycopg.Connection[Any] = self.pool.getconn(wait_s)
                if is_alive(connection):
                    return connection
                connection.close()
                self.pool.putconn(connection)
            connection = self.pool.getconn(wait_s)
        except psycopg.Error as error:
            raise translate(error) from error
        return connection


def _roll_back(session: Session) -> None:
    """End a failed transaction; the pool throws away a connection that cannot."""
    if session.connection.pgconn.transaction_status in (
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    ):
        with suppress(StoreError):
            session.command(_ROLLBACK)
