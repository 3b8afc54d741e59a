"""Runs tests with each call made by the least role that may make it.

`pytest -p tests.as_roles tests/contract` shows that the rights suffice for everything
that the contract asks of a store. Only what is granted helps: nobody owns anything, and
the right of everybody to run functions is taken away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from headgate_sync.postgres.migrate import grant
from headgate_sync.postgres.roles import ROLES
from headgate_sync.postgres.store import PgStore
from tests.backends import PostgresBackend

# Methods of a store that others than a worker call, by who does.
CALLERS = {
    "enqueue": "producer",
    "inspect": "operator",
    "health_check": "reader",
}
READER_CALLS = {
    "concurrency_limits", "counts", "distinct_kinds", "get_jobs", "get_operation",
    "history", "list_jobs", "partitions", "quarantine_list", "queue_stats",
    "rate_classes", "store_now_ms", "unfinished", "index_health", "list_workers",
    "cluster", "list_schedule_events", "explain_admission",
}  # fmt: skip
WORKER_CALLS = {
    "quarantine_sweep", "run_pending_operations", "sample_queue_memory",
    "heartbeat_worker", "forget_worker", "due_schedules", "fire_ticks",
    "record_schedule_event",
}  # fmt: skip
OWNER_CALLS = {"reindex_concurrently", "vacuum", "prune_archive_month"}
OPERATOR_CALLS = {"set_archive_policy", "clear_archive_policy", "archive_policies"}
_KEPT: dict[str, dict[str, ConnectionPool[Any]]] = {}


class Inspector:
    """`inspect` or `maintenance` of whoever may make a call."""

    def __init__(self, name: str, stores: dict[str, PgStore], otherwise: str) -> None:
        self._name = name
        self._stores = stores
        self._otherwise = otherwise

    def __getattr__(self, call: str) -> Any:
        return getattr(getattr(self._stores[self._role(call)], self._name), call)

    def get_job(self, job_id: str, *, include_payload: bool = False) -> Any:
        role = "operator" if include_payload is True else "reader"
        inspect = self._stores[role].inspect
        return inspect.get_job(job_id, include_payload=include_payload)

    def list_schedules(self, *given: Any, include_payload: bool = True) -> Any:
        role = "reader" if include_payload is False else "operator"
        inspect = self._stores[role].inspect
        return inspect.list_schedules(*given, include_payload=include_payload)

    def _role(self, call: str) -> str:
        if call in OWNER_CALLS:
            return "owner"
        if call in OPERATOR_CALLS:
            return "operator"
        if call in READER_CALLS:
            return "reader"
        return "worker" if call in WORKER_CALLS else self._otherwise


class Routed:
    """A store each of whose calls is made by the least role that may."""

    def __init__(self, stores: dict[str, PgStore]) -> None:
        self.stores = stores
        self.inspect = Inspector("inspect", stores, "operator")
        self.maintenance = Inspector("maintenance", stores, "worker")
        self.idempotency = stores["operator"].idempotency

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stores[CALLERS.get(name, "worker")], name)

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


def make_roles(connection: psycopg.Connection[Any], schema: str) -> dict[str, str]:
    """Make a role of the server for each of ours, which may do what it must."""
    space = sql.Identifier(schema)
    connection.execute(
        sql.SQL("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {} FROM PUBLIC").format(
            space
        )
    )
    [[prefix]] = connection.execute("SELECT current_database()").fetchall()
    names = {role: f"{prefix}_{role}"[-63:] for role in ROLES}
    for role, name in names.items():
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        grant(connection, schema, role=name, as_role=role)
    return names


def drop_roles(connection: psycopg.Connection[Any], names: dict[str, str]) -> None:
    """Take the roles of a database away again."""
    for name in names.values():
        connection.execute(
            sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name))
        )


@contextmanager
def pools_of(
    url: str, names: dict[str, str]
) -> Iterator[dict[str, ConnectionPool[Any]]]:
    """A pool for each role."""
    pools = {
        role: ConnectionPool(
            make_conninfo(url, user=name), min_size=0, max_size=4, open=True
        )
        for role, name in names.items()
    }
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def pytest_configure(config: Any) -> None:
    """Put the roles between the tests and the database."""
    plain = PostgresBackend.open_store

    def open_store(self: PostgresBackend, **options: Any) -> Any:
        connection = self.connection
        url = connection.info.dsn
        if url not in _KEPT:
            names = make_roles(connection, self.schema)
            connection.execute(
                sql.SQL("GRANT SELECT ON {}.headgate_test_clock TO PUBLIC").format(
                    sql.Identifier(self.schema)
                )
            )
            manager = pools_of(url, names)
            _KEPT[url] = manager.__enter__()
            config.add_cleanup(lambda: manager.__exit__(None, None, None))
        owner = plain(self, **options)
        stores = {"owner": owner}
        options = {"retry_jitter": lambda base_ms: 0, **options}
        for role, pool in _KEPT[url].items():
            stores[role] = PgStore(pool, self.schema, **options)
        routed = Routed(stores)
        self._stores.append(routed)
        return routed

    PostgresBackend.open_store = open_store
