"""Jobs and application rows in one commit: transactions, own and borrowed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from headgate_sync.envelope import Envelope, check_text
from headgate_sync.errors import (
    BackendError,
    InvalidRequest,
    StoreError,
    StoreUnavailable,
)
from headgate_sync.lease import Ack, Checkpoint, LeaseRef
from headgate_sync.lifecycle import Outcome
from headgate_sync.postgres.acks import Acker
from headgate_sync.postgres.database import Database, Session
from headgate_sync.postgres.enqueue import Intake
from headgate_sync.store import TxHandle
from headgate_sync.validation import check_type

MAX_EFFECT_KEY_BYTES = 1024

_OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


class PgTx:
    """A transaction of one store on one thread, the store's own or a borrowed one."""

    def __init__(
        self,
        owner: PgTransactional,
        session: Session,
        checkout: AbstractContextManager[Session] | None,
    ) -> None:
        self._owner = owner
        self._session = session
        self._checkout = checkout
        self._thread = threading.current_thread()
        self._finished = False
        self._unfinished: weakref.finalize[Any, PgTx] | None = None

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The driver's connection, for the application's own statements."""
        return self._session.connection


class PgTransactional:
    """`Transactional` on PostgreSQL.

    A borrowed connection keeps its settings, its row factory and its transaction:
    nothing is begun, committed or rolled back on it, and a refusal is an answer of the
    database, not an error that would abort the transaction.
    """

    def __init__(self, db: Database, intake: Intake, acker: Acker) -> None:
        self._db = db
        self._intake = intake
        self._acker = acker

    def begin_tx(self) -> TxHandle:
        """Open a transaction on a pooled connection, which it keeps to its end.

        A handle that is dropped unfinished closes its connection, which rolls back; its
        place in the pool is free again with the next call of this store.

        Raises:
            StoreUnavailable: no connection became free in time, or the server is away.
        """
        return self._begin()

    def commit_tx(self, tx: TxHandle) -> None:
        """Commit and give the connection back.

        Raises:
            InvalidRequest: the handle is joined, finished, or not of this store and
                thread.
            BackendError: the transaction had failed or ended before; nothing is
                committed.
            StoreUnavailable: the connection was lost: what happened is not known.
        """
        own = self._own(tx)
        try:
            status = own.connection.pgconn.transaction_status
            if status in (TransactionStatus.INERROR, TransactionStatus.IDLE):
                # COMMIT would answer with a silent ROLLBACK, or a mere warning.
                raise BackendError("the transaction failed or ended before its commit")
            own._session.command(b"COMMIT")
        finally:
            _finish(own)

    def rollback_tx(self, tx: TxHandle) -> None:
        """Roll back and give the connection back.

        A connection that is lost by now was rolled back by the server.

        Raises:
            InvalidRequest: the handle is joined, finished, or not of this store and
                thread.
        """
        _finish(self._own(tx))

    @contextmanager
    def transaction(self) -> Iterator[TxHandle]:
        """Begin; commit at the end of the block, roll back on an exception.

        Raises:
            StoreUnavailable: see `begin_tx` and `commit_tx`.
        """
        tx = self._begin()
        try:
            yield tx
        except BaseException:
            if not tx._finished:
                self.rollback_tx(tx)
            raise
        if not tx._finished:
            self.commit_tx(tx)

    def join(self, connection: Any) -> TxHandle:
        """Lend a caller's transaction; the caller alone ends it.

        An idle connection without autocommit may be lent too: the driver opens the
        transaction with the first statement.

        Raises:
            InvalidRequest: no `psycopg.Connection`, closed, busy, in autocommit without
                an open transaction, or in an aborted transaction.
        """
        if not isinstance(connection, psycopg.Connection):
            raise InvalidRequest(
                "only a psycopg.Connection (psycopg 3) can be joined, got "
                f"{type(connection).__module__}.{type(connection).__qualname__}"
            )
        _check_lent(connection)
        return PgTx(self, self._db.session(connection), None)

    def owns(self, tx: TxHandle) -> bool:
        """Whether the handle came from this object."""
        return isinstance(tx, PgTx) and tx._owner is self

    def enqueue_tx(self, tx: TxHandle, batch: Sequence[Envelope]) -> None:
        """`Store.enqueue` inside the transaction; its commit shows the jobs.

        Limits of queues count what is committed and the transaction's own jobs. They
        are not locked, so that a slow transaction stops nobody; transactions that are
        open at the same time can together exceed a limit by the jobs they hold.

        Raises:
            StoreConflict: at once, without further tries: another transaction collided.
                The transaction has failed.
        """
        self._intake.enqueue_on(self._usable(tx), batch)

    def claim_effect(self, tx: TxHandle, key: str) -> bool:
        """Claim a key once for ever; False when it was claimed before.

        Waits for another open transaction that claims the same key.

        Args:
            key: 1 to 1,024 bytes.
        """
        size = len(check_text("key", key).encode())
        if not 1 <= size <= MAX_EFFECT_KEY_BYTES:
            raise InvalidRequest(
                f"key has {size} bytes, allowed are 1 to {MAX_EFFECT_KEY_BYTES}"
            )
        return bool(self._usable(tx).rows("claim_effect", key=key))

    def checkpoint_tx(
        self, tx: TxHandle, lease: LeaseRef, checkpoint: Checkpoint
    ) -> None:
        """`Store.checkpoint` inside the transaction.

        Raises:
            LeaseRejected: the caller does not hold the job; the transaction is usable.
        """
        check_type("lease", lease, LeaseRef)
        check_type("checkpoint", checkpoint, Checkpoint)
        self._acker.checkpoint_on(self._usable(tx), lease, checkpoint)

    def complete_tx(
        self, tx: TxHandle, lease: LeaseRef, *, actual_weight: int | None = None
    ) -> None:
        """Ack success inside the transaction: effects and completion are one commit.

        Raises:
            LeaseRejected: the caller does not hold the job; the transaction is usable.
        """
        ack = Ack(lease=lease, outcome=Outcome.SUCCESS, actual_weight=actual_weight)
        self._acker.ack_on(self._usable(tx), ack)

    def _begin(self) -> PgTx:
        checkout = self._db.checkout()
        connection = checkout.__enter__().connection
        try:
            session = self._db.session_of_own(connection)
        except BaseException:
            checkout.__exit__(None, None, None)
            raise
        tx = PgTx(self, session, checkout)
        tx._unfinished = weakref.finalize(
            tx, _abandon, self._db, connection, checkout, os.getpid()
        )
        tx._unfinished.atexit = False
        return tx

    def _checked(self, tx: TxHandle) -> PgTx:
        if not isinstance(tx, PgTx) or not self.owns(tx):
            raise InvalidRequest("the transaction handle is not of this store")
        if tx._thread is not threading.current_thread():
            raise InvalidRequest("the transaction handle belongs to another thread")
        return tx

    def _own(self, tx: TxHandle) -> PgTx:
        """A handle that may be ended here."""
        own = self._unended(tx)
        if own._checkout is None:
            raise InvalidRequest("a joined transaction is ended by its owner alone")
        return own

    def _unended(self, tx: TxHandle) -> PgTx:
        checked = self._checked(tx)
        if checked._finished:
            raise InvalidRequest("the transaction handle is finished")
        return checked

    def _usable(self, tx: TxHandle) -> Session:
        """The session of a handle whose transaction can take one more statement."""
        unended = self._unended(tx)
        if unended._checkout is not None and unended.connection.closed:
            raise StoreUnavailable("the connection of the transaction was lost")
        _check_lent(unended.connection)
        return unended._session


_ABORTED = "the transaction is aborted by an error: roll it back first"


def _check_lent(connection: psycopg.Connection[Any]) -> None:
    """Check that a statement would become part of the owner's transaction."""
    if connection.closed:
        raise InvalidRequest("the connection is closed")
    if connection.pgconn.pipeline_status:
        _settle_pipeline(connection)
    match connection.pgconn.transaction_status:
        case TransactionStatus.INERROR:
            raise InvalidRequest(_ABORTED)
        case TransactionStatus.ACTIVE:
            raise InvalidRequest("the connection is busy with another statement")
        case TransactionStatus.IDLE if connection.autocommit:
            raise InvalidRequest(
                "no open transaction: the connection is in autocommit mode, "
                "so the job would be committed alone; begin a transaction first"
            )


def _settle_pipeline(connection: psycopg.Connection[Any]) -> None:
    """Wait for what the owner has queued; only then is the state known."""
    try:
        with connection.pipeline() as pipeline:
            pipeline.sync()
    except psycopg.Error as error:
        raise InvalidRequest(_ABORTED) from error


def _finish(tx: PgTx) -> None:
    """End a handle: roll back what is still open and give the connection back."""
    assert tx._checkout is not None
    assert tx._unfinished is not None
    tx._finished = True
    tx._unfinished.detach()
    try:
        if tx.connection.pgconn.transaction_status in _OPEN:
            with suppress(StoreError):  # the pool throws the connection away
                tx._session.command(b"ROLLBACK")
    finally:
        tx._checkout.__exit__(None, None, None)


def _abandon(
    db: Database,
    connection: psycopg.Connection[Any],
    checkout: AbstractContextManager[Session],
    pid: int,
) -> None:
    """Close the connection of a handle that nobody can finish any more."""
    if os.getpid() == pid:
        connection.pgconn.finish()
        db.discard(checkout)
    else:
        _of_the_parent.append(checkout)


# What a forked child got from open handles. It must neither close the sockets nor give
# the connections back to a pool, which would talk over them: it keeps them, unused.
_of_the_parent: list[AbstractContextManager[Session]] = []
