"""What the newest version of the schema looks like, for comparison with a database.

The lines are the same text on every server from PostgreSQL 13 on and in every schema.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from psycopg import sql

from headgate_sync.postgres.database import Session

FILE = resources.files("headgate_sync.postgres").joinpath("manifest.txt")
_SHOWN = 10


@cache
def expected() -> tuple[str, ...]:
    """The lines of the newest version, in order."""
    return tuple(FILE.read_text("utf-8").splitlines())


def read(session: Session, schema: str) -> tuple[str, ...]:
    """The lines of a schema, in order; inside a transaction, whose path it sets."""
    quoted = sql.Identifier(schema).as_string(None)
    session.rows("manifest_path", quoted_name=quoted)
    rows = session.rows("manifest", schema_name=schema, quoted_name=quoted)
    return tuple(text for (text,) in rows)


def difference(found: tuple[str, ...]) -> str:
    """What a schema lacks (-) and what it has instead (+); empty when nothing."""
    there, wanted = set(found), set(expected())
    lines = [f"- {line}" for line in expected() if line not in there]
    lines += [f"+ {line}" for line in found if line not in wanted]
    lines.sort(key=lambda line: (line[2:], line))
    more = len(lines) - _SHOWN
    return "; ".join(lines[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


@cache
def columns() -> dict[str, tuple[str, ...]]:
    """The columns of each table of the newest version, by table."""
    found: dict[str, tuple[str, ...]] = {}
    for line in expected():
        if line.startswith("column "):
            table, column = line.split()[1].split(".")
            found[table] = (*found.get(table, ()), column)
    return found


@cache
def functions() -> frozenset[str]:
    """The names of the functions of the newest version."""
    lines = (line for line in expected() if line.startswith("function "))
    return frozenset(line.split()[1].split("(")[0] for line in lines)
