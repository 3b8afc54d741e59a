"""The demo's application: one job per file, one row per job, written exactly once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attrs import astuple
from psycopg import sql

from headgate_sync.app import Headgate
from headgate_sync.context import JobContext
from headgate_sync.demo.facts import FileFacts, read_facts

QUEUE = "demo"
RUN_VARIABLE = "HEADGATE_DEMO_RUN"

hg = Headgate.from_env()


def application_table(name: str) -> sql.Identifier:
    """A table of this run's application schema."""
    return sql.Identifier(f"{os.environ[RUN_VARIABLE]}_app", name)


@hg.task("demo:index", queue=QUEUE, max_attempts=5, timeout="2m", retention="1h")
def index_file(ctx: JobContext, path: str) -> None:
    """Read one file and store what it holds, in the commit that completes the job."""
    facts = read_facts(Path(path))
    ctx.once(lambda tx: insert_facts(tx.connection, path, facts))


def insert_facts(connection: Any, path: str, facts: FileFacts) -> None:
    """Write the row. No key guards it: a second effect would be a second row."""
    connection.execute(
        sql.SQL(
            "INSERT INTO {} (path, sha256, size_bytes, lines, parsed, functions,"
            " classes, imports) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
        ).format(application_table("file_index")),
        (path, *astuple(facts)),
    )
