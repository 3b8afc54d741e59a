"""Writes down the newest schema and the rights in it.

`python -m tests.manifest_file` does so on a server of its own, or on the one that
`HEADGATE_TEST_DATABASE_URL` names.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from headgate_sync.postgres import ledger, manifest
from headgate_sync.postgres.database import Session
from headgate_sync.postgres.sql import Statements
from tests import rights
from tests.servers import new_database, session_server

PATH = Path(str(manifest.FILE))


@contextmanager
def newest_schema(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """A schema of every version, made without any check of what comes out."""
    schema = f"hg_{uuid.uuid4().hex}"
    name = sql.Identifier(schema)
    session = Session(connection, Statements(schema))
    try:
        for statement in ("ledger_schema", "ledger_create", "grant_create"):
            session.rows(statement)
        for version in ledger.versions():
            text = sql.SQL(version.text("up")).format(schema=name)
            session.command(text.as_bytes(None))
        yield schema
    finally:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(name))


def lines_of(connection: psycopg.Connection[Any], schema: str) -> tuple[str, ...]:
    """The manifest of a schema."""
    with connection.transaction():
        return manifest.read(Session(connection, Statements(schema)), schema)


def render(lines: tuple[str, ...]) -> str:
    """The whole file."""
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write both files."""
    with (
        session_server() as server,
        new_database(server) as url,
        psycopg.connect(url, autocommit=True) as connection,
        newest_schema(connection) as schema,
    ):
        PATH.write_text(render(lines_of(connection, schema)))
        manifest.expected.cache_clear()
        manifest.columns.cache_clear()
        rights.PATH.write_text(rights.render(connection, schema))


if __name__ == "__main__":
    main()
