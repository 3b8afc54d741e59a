"""Finds the driver's connection inside what a caller hands over as its transaction.

Handles are recognised by the names of their classes, so that no framework is imported
here: a program that never loaded SQLAlchemy cannot hold one of its sessions.
"""

from __future__ import annotations

import sys
from typing import Any

from headgate_sync.errors import InvalidRequest, Unsupported
from headgate_sync.store import Transactional, TxHandle

SUPPORTED = (
    "psycopg Connection or Cursor; SQLAlchemy Session or Connection over "
    "postgresql+psycopg, also scoped_session and Flask-SQLAlchemy's db.session; "
    "Django connection, or its alias, over psycopg 3"
)
# Recognised, and known not to work: other drivers, and everything asynchronous.
_FOREIGN = (
    "psycopg2", "pg8000", "asyncpg", "aiopg", "psycopg", "sqlite3", "pymysql",
    "MySQLdb", "oracledb", "sqlalchemy", "django", "tortoise", "peewee",
)  # fmt: skip


def join(transactional: Transactional, tx: Any) -> TxHandle:
    """Lend the store the transaction that a caller holds.

    Raises:
        InvalidRequest: no handle of a transaction, or of one that cannot be used.
        Unsupported: a handle of a driver that cannot be joined.
    """
    if type(tx).__module__.startswith("headgate_sync."):
        if transactional.owns(tx):
            handle: TxHandle = tx
            return handle
        # A worker has a store of its own: what its handlers hold is lent like any
        # other connection.
        return transactional.join(driver_connection(getattr(tx, "connection", tx)))
    return transactional.join(driver_connection(tx))


def driver_connection(tx: Any) -> Any:
    """The psycopg connection under a handle.

    Raises:
        InvalidRequest, Unsupported: as `join`.
    """
    if isinstance(tx, str):
        return _django(_django_alias(tx))
    names = _class_names(tx)
    if "django.utils.connection.ConnectionProxy" in names:
        return _django(tx._connections[tx._alias])
    if "django.db.backends.base.base.BaseDatabaseWrapper" in names:
        return _django(tx)
    if "sqlalchemy.orm.scoping.scoped_session" in names:
        tx = tx()
        names = _class_names(tx)
    if "sqlalchemy.orm.session.Session" in names:
        return _sqlalchemy(_session_connection(tx))
    if "sqlalchemy.engine.base.Connection" in names:
        return _sqlalchemy(tx)
    if "psycopg.Cursor" in names:
        return tx.connection
    return _psycopg(tx)


def _class_names(value: object) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}


def _psycopg(connection: Any) -> Any:
    names = _class_names(connection)
    if "psycopg.Connection" in names:
        return connection
    packages = {name.partition(".")[0] for name in names}
    if packages.intersection(_FOREIGN):
        raise Unsupported(
            "transactional",
            f"cannot join a transaction of {type(connection).__module__}."
            f"{type(connection).__qualname__}; supported are {SUPPORTED}",
        )
    raise InvalidRequest(
        f"tx is no transaction, got {type(connection).__name__}; "
        f"supported are {SUPPORTED}"
    )


def _session_connection(session: Any) -> Any:
    """The connection of a session; this does not flush it."""
    if not session.is_active:
        raise InvalidRequest(
            "transaction is aborted: the session waits for rollback() after an error"
        )
    return session.connection()


def _sqlalchemy(connection: Any) -> Any:
    if connection.invalidated or connection.closed:
        raise InvalidRequest("the connection is closed")
    driver = connection.connection.driver_connection
    found = _psycopg(driver)
    if not connection.in_transaction() and not found.autocommit:
        # SQLAlchemy sends no COMMIT for a transaction that it did not see begin.
        raise InvalidRequest(
            "no open transaction: begin one, as `with connection.begin():`, "
            "or execute a statement first"
        )
    return found


def _django_alias(alias: str) -> Any:
    module = sys.modules.get("django.db")
    # Other libraries may load Django without anybody using it.
    if module is None or not sys.modules["django.conf"].settings.configured:
        raise InvalidRequest(
            f"tx is {alias!r}: text names a Django connection, and Django is not in use"
        )
    try:
        return module.connections[alias]
    except module.utils.ConnectionDoesNotExist as error:
        raise InvalidRequest(f"tx is {alias!r}: {error}") from error


def _django(wrapper: Any) -> Any:
    wrapper.ensure_connection()
    connection = _psycopg(wrapper.connection)
    if wrapper.needs_rollback:
        raise InvalidRequest(
            "transaction is aborted: the atomic block rolls back after an error"
        )
    return connection
