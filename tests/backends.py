"""The two stores behind one face, so that one test body drives either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import psycopg
from psycopg import sql
from psycopg_pool import ConnectionPool

from headgate_sync.memory.store import MemStore
from headgate_sync.postgres.store import PgStore
from headgate_sync.store import Store
from tests import observe
from tests.builders import START_MS

SCHEMA = "headgate"


class Clock(Protocol):
    """Store time in the hands of a test; it stands still unless stepped."""

    def now_ms(self) -> int: ...

    def freeze_at(self, ms: int) -> None: ...

    def advance_ms(self, by_ms: int) -> None: ...


class Backend(Protocol):
    """A kind of store."""

    @property
    def name(self) -> str:
        """Either "memory" or "postgres"."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of every store made here."""
        ...

    @property
    def lacks(self) -> frozenset[str]:
        """Names of the capabilities that this kind does not have."""
        ...

    def make_store(self, **options: Any) -> Store:
        """Empty the backend and make a store; both constructors know the options."""
        ...

    def snapshot(self) -> observe.Snapshot:
        """What the newest store holds."""
        ...

    def image(self) -> object:
        """What the newest store holds, down to what no call shows; only to compare."""
        ...

    def audit(self) -> None:
        """Check what must hold of the stored rows at any moment."""
        ...


class _MemoryClock:
    def __init__(self) -> None:
        self._now_ms = START_MS
        self.store: MemStore | None = None

    def now_ms(self) -> int:
        return self._now_ms

    def freeze_at(self, ms: int) -> None:
        self._now_ms = ms
        if self.store is not None:
            self.store.freeze_clock_at(ms)

    def advance_ms(self, by_ms: int) -> None:
        self.freeze_at(self._now_ms + by_ms)


class MemoryBackend:
    """MemStores, one at a time."""

    name = "memory"
    lacks = frozenset({"transactional", "notifying", "maintenance"})

    def __init__(self) -> None:
        self.clock = _MemoryClock()

    def make_store(self, **options: Any) -> MemStore:
        self.clock.store = MemStore(**options)
        self.clock.freeze_at(START_MS)
        return self.clock.store

    def snapshot(self) -> observe.Snapshot:
        assert self.clock.store is not None, "no store was made"
        return observe.of_memory(self.clock.store)

    def image(self) -> object:
        assert self.clock.store is not None, "no store was made"
        return self.clock.store.snapshot()

    def audit(self) -> None:
        if self.clock.store is not None:
            observe.check(self.snapshot())


class _PostgresClock:
    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._set = sql.SQL(
            "UPDATE {}.headgate_test_clock SET frozen_at_ms = %s"
        ).format(sql.Identifier(schema))
        self._now_ms = START_MS

    def now_ms(self) -> int:
        return self._now_ms

    def freeze_at(self, ms: int) -> None:
        self._connection.execute(self._set, [ms])
        self._now_ms = ms

    def advance_ms(self, by_ms: int) -> None:
        self.freeze_at(self._now_ms + by_ms)


class PostgresBackend:
    """PgStores over one schema of a test database.

    Args:
        pool: for the stores.
        connection: autocommit; for the clock, the reset and the snapshots.
    """

    name = "postgres"
    lacks = frozenset({"notifying"})

    def __init__(
        self,
        pool: ConnectionPool[Any],
        connection: psycopg.Connection[Any],
        schema: str = SCHEMA,
    ) -> None:
        self.pool = pool
        self.connection = connection
        self.schema = schema
        self.clock = _PostgresClock(connection, schema)
        self._stores: list[PgStore] = []

    def reset(self) -> None:
        """Empty the schema and set the clock back."""
        self.connection.execute(
            sql.SQL("SELECT {}.headgate_test_reset()").format(
                sql.Identifier(self.schema)
            )
        )
        self.clock.freeze_at(START_MS)

    def make_store(self, **options: Any) -> PgStore:
        self.close()
        self.reset()
        return self.open_store(**options)

    def open_store(self, **options: Any) -> PgStore:
        """Make one more store over what is there."""
        store = PgStore(
            self.pool, self.schema, **{"retry_jitter": _no_jitter, **options}
        )
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close the stores made so far; the pool stays."""
        while self._stores:
            self._stores.pop().close()

    def snapshot(self) -> observe.Snapshot:
        return observe.of_postgres(self.connection, self.schema)

    def image(self) -> object:
        return observe.dump(self.connection, self.schema)

    def audit(self) -> None:
        observe.check(self.snapshot())


def _no_jitter(base_ms: int) -> int:
    return 0


def unchanged_by(backend: Backend, call: Callable[[], object]) -> BaseException | None:
    """Make a call that must leave nothing behind; returns what it raised."""
    before = backend.image()
    raised = None
    try:
        call()
    except Exception as error:
        raised = error
    assert backend.image() == before, f"{raised!r} left a change behind"
    return raised
