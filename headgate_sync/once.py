"""Effects that happen exactly once: the work and the job's completion in one commit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from headgate_sync.attempt import LiveAttempt, Settlement
from headgate_sync.callables import check_ran
from headgate_sync.client.tx import join
from headgate_sync.errors import (
    InvalidRequest,
    LeaseRejected,
    StoreError,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.forks import ForksEndHere
from headgate_sync.loggers import guarded
from headgate_sync.store import Store, Transactional, TxHandle

logger = guarded(__name__)

_SCOPED = "sqlalchemy.orm.scoping.scoped_session"
_SESSION = "sqlalchemy.orm.session.Session"
_CONNECTION = "sqlalchemy.engine.base.Connection"


Settle = Callable[[Transactional, TxHandle], None]


class _Ending(Protocol):
    """A transaction that begins and ends here."""

    def begin(self) -> TxHandle: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


def without_transactions(call: str, store: Store) -> Unsupported:
    """The error of a call that needs a transactional store."""
    return Unsupported(
        "transactional",
        f"{call} needs a transactional store, {type(store).__name__} is none: "
        "use PostgreSQL, in tests too",
    )


def run_once(attempt: LiveAttempt, work: Callable[[TxHandle], object], tx: Any) -> bool:
    """Run the work and complete the attempt's job in one transaction.

    Args:
        tx: None for a connection of the store's pool, else an ORM's handle.

    Returns:
        False when an earlier delivery of the job did the work.
    """
    return run_effect(attempt, work, tx, key=attempt.lease.job_id)


def run_effect(
    attempt: LiveAttempt,
    work: Callable[[TxHandle], object],
    tx: Any,
    *,
    key: str,
    settle: Settle | None = None,
) -> bool:
    """Run the work in one transaction with what settles it.

    Args:
        tx: None for a connection of the store's pool, else an ORM's handle.
        key: claimed in the transaction, so that the work is committed once for ever.
        settle: the last write; None completes the job.

    Returns:
        False when the key was claimed before; the work is not run.
    """
    transactional = attempt.store.transactional
    if transactional is None:
        raise without_transactions("once", attempt.store)
    if attempt.in_once:
        # It would wait for the outer one's claim of the effect, in the same thread.
        raise InvalidRequest("once must not be called inside of once")
    ending = _ending(transactional, tx)
    attempt.in_once = True
    try:
        with attempt.shielded():
            return _run(attempt, transactional, ending, work, key, settle)
    finally:
        attempt.in_once = False


def _run(
    attempt: LiveAttempt,
    transactional: Transactional,
    ending: _Ending,
    work: Callable[[TxHandle], object],
    key: str,
    settle: Settle | None,
) -> bool:
    handle = ending.begin()
    try:
        if not transactional.claim_effect(handle, key):
            _roll_back(attempt, ending)
            return False
        with attempt.exposed(), ForksEndHere():
            check_ran("once" if settle is None else "step_once", work(handle))
        _settle(attempt, transactional, handle, settle)
    except BaseException:
        _roll_back(attempt, ending)
        raise
    _commit(attempt, ending, completes=settle is None)
    return True


def _settle(
    attempt: LiveAttempt,
    transactional: Transactional,
    handle: TxHandle,
    settle: Settle | None,
) -> None:
    # From here to the end of the commit a renewal finds the row locked or completed,
    # which is no loss of the lease.
    attempt.completing = True
    try:
        if settle is not None:
            settle(transactional, handle)
        else:
            transactional.complete_tx(
                handle, attempt.lease, actual_weight=attempt.actual_weight
            )
    except LeaseRejected as error:
        raise attempt.lose() from error


def _commit(attempt: LiveAttempt, ending: _Ending, *, completes: bool) -> None:
    try:
        ending.commit()
    except Exception as error:
        # A store that knows that nothing was committed says so. Else the answer to the
        # next ack tells: it is rejected when the completion went through. Of a step the
        # next attempt finds out, by the claim of its effect.
        attempt.in_doubt = completes and (
            isinstance(error, StoreUnavailable) or not isinstance(error, StoreError)
        )
        raise
    else:
        if completes:
            attempt.finished = Settlement.COMPLETED
            attempt.renewing = False
    finally:
        attempt.completing = False


def _roll_back(attempt: LiveAttempt, ending: _Ending) -> None:
    attempt.completing = False
    try:
        ending.rollback()
    except Exception:
        # What is under way says more. The server rolls back what its client left.
        logger.warning("job %s: rollback failed", attempt.lease.job_id, exc_info=True)


def _ending(transactional: Transactional, tx: Any) -> _Ending:
    if tx is None:
        return _StoreTransaction(transactional)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(tx).__mro__}
    if _SCOPED in names:
        return _SessionTransaction(transactional, tx())  # this thread's
    if _SESSION in names:
        return _SessionTransaction(transactional, tx)
    if _CONNECTION in names:
        return _ConnectionTransaction(transactional, tx)
    if isinstance(tx, str):
        return _DjangoTransaction(transactional, tx)
    raise InvalidRequest(
        "once can use the transaction of a SQLAlchemy Session, scoped_session or "
        f"Connection, or of a Django alias, not of a {type(tx).__name__}"
    )


def _refuse_open(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"once commits or rolls back what it is given, and {what}; end that first"
    )


class _StoreTransaction:
    """One on a connection of the store's pool."""

    def __init__(self, transactional: Transactional) -> None:
        self._transactional = transactional

    def begin(self) -> TxHandle:
        self._handle = self._transactional.begin_tx()
        return self._handle

    def commit(self) -> None:
        self._transactional.commit_tx(self._handle)

    def rollback(self) -> None:
        self._transactional.rollback_tx(self._handle)


class _SessionTransaction:
    """The next transaction of a SQLAlchemy session, which must not be in one."""

    def __init__(self, transactional: Transactional, session: Any) -> None:
        self._transactional = transactional
        self._session = session

    def begin(self) -> TxHandle:
        session = self._session
        if session.in_transaction():
            raise _refuse_open("the session is in a transaction")
        if session.new or session.dirty or session.deleted:
            raise _refuse_open("the session has pending changes")
        session.begin()
        try:
            return join(self._transactional, session)
        except BaseException:
            session.rollback()
            raise

    def commit(self) -> None:
        self._session.commit()

    def rollback(self) -> None:
        self._session.rollback()


class _ConnectionTransaction:
    """A transaction on a SQLAlchemy connection that is in none."""

    def __init__(self, transactional: Transactional, connection: Any) -> None:
        self._transactional = transactional
        self._connection = connection

    def begin(self) -> TxHandle:
        if self._connection.in_transaction():
            raise _refuse_open("the connection is in a transaction")
        self._connection.begin()
        try:
            return join(self._transactional, self._connection)
        except BaseException:
            self._connection.rollback()
            raise

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class _DjangoTransaction:
    """An atomic block of a Django connection, outside of any other."""

    def __init__(self, transactional: Transactional, alias: str) -> None:
        self._transactional = transactional
        self._alias = alias

    def begin(self) -> TxHandle:
        module = sys.modules.get("django.db.transaction")
        if module is None:
            raise InvalidRequest(
                f"tx is {self._alias!r}: text names a Django connection, "
                "and Django is not in use"
            )
        connection = module.get_connection(self._alias)
        if connection.in_atomic_block or not connection.get_autocommit():
            raise _refuse_open("the connection is in a transaction")
        self._atomic = module.atomic(using=self._alias, durable=True)
        self._atomic.__enter__()
        try:
            return join(self._transactional, self._alias)
        except BaseException:
            self.rollback()
            raise

    def commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        # Any exception makes the block roll back; it is not raised again here.
        error = RuntimeError("rolled back")
        self._atomic.__exit__(type(error), error, None)
