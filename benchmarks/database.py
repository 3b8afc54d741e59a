"""Where benchmarks run: the given database, else an own server with defaults."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headgate_sync.embedded import EmbeddedServer
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore

SCHEMA = "headgate_bench"


@contextmanager
def benchmark_database(url: str | None) -> Iterator[str]:
    """The URL of a database; never one with durability turned off by us."""
    url = url or os.environ.get("HEADGATE_DATABASE_URL")
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        Path(folder).chmod(0o755)
        settings = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
        server = EmbeddedServer.start(Path(folder) / "server", settings=settings)
        try:
            yield server.url
        finally:
            server.remove()  # stopped before its files go


def drop_schema(url: str, schema: str = SCHEMA) -> None:
    """Remove the queue's schema."""
    with psycopg.connect(url, autocommit=True) as connection:
        statement = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE")
        connection.execute(statement.format(sql.Identifier(schema)))


@contextmanager
def fresh_store(url: str, **options: Any) -> Iterator[PgStore]:
    """A store over a newly migrated schema."""
    drop_schema(url)
    migrate_up(url, schema=SCHEMA)
    store = PgStore.connect(url, schema=SCHEMA, **options)
    try:
        yield store
    finally:
        store.close()
