"""Schemas of a PostgreSQL database that live as long as a test."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping
from importlib import resources
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql

from headgate_sync.errors import ConfigurationError
from headgate_sync.memory.store import no_jitter
from headgate_sync.postgres.database import translate
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.sql import Statements
from headgate_sync.postgres.store import PgStore

TEST_PG = "HEADGATE_TEST_PG"
TEST_PG_REQUIRED = "HEADGATE_TEST_PG_REQUIRED"
DEFAULT_TEST_POOL_SIZE = 8

_numbers = itertools.count(1)


class PgTestStore(PgStore):
    """A `PgStore` in a schema of its own, whose clock a test can set like `MemStore`'s.

    Retries have no jitter, so that tests can name their instants.

    Attributes:
        url: conninfo of the database, for an application of the test.
    """

    url: str
    _database: PostgresTestDatabase

    def freeze_clock_at(self, at_ms: int) -> None:
        """Let store time stand still at an instant."""
        self._database.run("clock_set", frozen_at_ms=at_ms)

    def advance_clock(self, by_ms: int) -> None:
        """Step the frozen store time; a live clock freezes at the present first."""
        self.freeze_clock_at(self.inspect.store_now_ms() + by_ms)

    def unfreeze_clock(self) -> None:
        """Follow the server's clock again."""
        self._database.run("clock_set", frozen_at_ms=None)


class PostgresTestDatabase:
    """A fresh schema, migrated as in production, and dropped at the end of the block.

    Its name is made of the process id, a random part and a number, so that runs that
    share a server never meet. A name that is taken is an error and is not shared.

    Args:
        url: conninfo of a database in which the role may create schemas; None is what
            `HEADGATE_TEST_PG` says.
        pool_size: most connections of its store.

    Attributes:
        url, schema: where it is.

    Raises:
        ConfigurationError: no database is named, or, when entered, it cannot be used.
        StoreUnavailable: when entered: the database did not answer.
    """

    def __init__(
        self, url: str | None = None, *, pool_size: int = DEFAULT_TEST_POOL_SIZE
    ) -> None:
        named = os.environ.get(TEST_PG, "") if url is None else url
        if not named:
            raise ConfigurationError(f"no test database: set {TEST_PG} to its address")
        self.url = named
        self.schema = f"hgt_{os.getpid()}_{secrets.token_hex(4)}_{next(_numbers)}"
        self._pool_size = pool_size
        self._connection: psycopg.Connection[Any] | None = None
        self._stores: list[PgTestStore] = []

    def __enter__(self) -> Self:
        try:
            self._connection = psycopg.connect(self.url, autocommit=True)
        except psycopg.Error as error:
            raise translate(error) from error
        try:
            self._execute(Statements(self.schema)["ledger_schema"])
            try:
                migrate_up(self._connection, self.schema)
                self.run("clock_create")
            except BaseException:
                self.run("schema_drop")
                raise
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._connection is not None
        try:
            while self._stores:
                self._stores.pop().close()
            self.run("schema_drop")
        finally:
            self._connection.close()

    def store(self, **options: Any) -> PgTestStore:
        """Open a store over the schema; it is closed at the end of the block.

        Args:
            **options: those of `PgStore`.
        """
        store = PgTestStore.connect(
            self.url,
            self.schema,
            pool_size=self._pool_size,
            **{"retry_jitter": no_jitter, **options},
        )
        store.url, store._database = self.url, self
        self._stores.append(store)
        return store

    def run(self, name: str, **arguments: object) -> None:
        """Run one of the statements of `headgate_sync.testing.sql`."""
        text = resources.files(f"{__package__}.sql").joinpath(f"{name}.sql").read_text()
        statement = sql.SQL(text).format(schema=sql.Identifier(self.schema))
        self._execute(statement.as_bytes(None), arguments or None)

    def _execute(
        self, statement: bytes, arguments: Mapping[str, object] | None = None
    ) -> None:
        if self._connection is None:
            raise ConfigurationError("the test database was not entered")
        try:
            self._connection.execute(statement, arguments)
        except psycopg.Error as error:
            raise translate(error) from error


def is_required(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a run without a test database has to fail."""
    return environ.get(TEST_PG_REQUIRED, "") == "1"
