"""Draws up the least rights of each role, for `tests.manifest_file`.

What a statement needs is read off its text and those of the functions it calls, through
the triggers that its writes fire. That the rights suffice, and that they are no more
than they should be, is tested with real roles on a server.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from attrs import define, field

from headgate_sync.postgres import manifest, roles
from headgate_sync.postgres.roles import Right
from headgate_sync.postgres.sql import _MATCHES, statement_source

PATH = Path(str(roles.FILE))
_NAME = re.compile(r"\{schema\}\.(headgate_\w+)(\s*\()?")
_UPDATE = re.compile(
    r"UPDATE\s+\{schema\}\.(headgate_\w+)(?:\s+AS\s+\w+)?\s+SET\s+(.*?)"
    r"(?=\n\s*(?:FROM|WHERE|RETURNING)\b|\sWHERE\b|;|\n\s*\)|$)",
    re.DOTALL,
)
_UPSERT = re.compile(
    r"INSERT INTO\s+\{schema\}\.(headgate_\w+)(?:(?!INSERT INTO).)*?"
    r"ON CONFLICT(?:(?!INSERT INTO).)*?DO UPDATE\s+SET\s+(.*?)"
    r"(?=\n\s*(?:WHERE|RETURNING)\b|\sWHERE\b|;|\n\s*\)|$)",
    re.DOTALL,
)
_LOCK = re.compile(r"FOR (?:NO KEY )?(?:UPDATE|SHARE|KEY SHARE)\b")
_SEQUENCE = re.compile(r"_seq$")
_EVENTS = {4: "INSERT", 8: "DELETE", 16: "UPDATE"}
# What a role updates where it only locks, instead of the first column.
LOCK_COLUMN = "lock_right"


@define
class Needs:
    """What a text needs of one table."""

    privileges: set[str] = field(factory=set)
    updated: set[str] = field(factory=set)
    locked: bool = False


@define
class Text:
    """Tables and functions that a text names."""

    tables: dict[str, Needs] = field(factory=lambda: defaultdict(Needs))
    calls: set[str] = field(factory=set)

    def add(self, other: Text) -> None:
        for name, needs in other.tables.items():
            mine = self.tables[name]
            mine.privileges |= needs.privileges
            mine.updated |= needs.updated
            mine.locked |= needs.locked
        self.calls |= other.calls


def assigned(text: str) -> set[str]:
    """The columns that the text of a SET clause assigns."""
    depth, parts = 0, [""]
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    found = (re.match(r"\s*(\w+)\s*=", part) for part in parts)
    return {match[1] for match in found if match}


def query_before(text: str) -> str:
    """The SELECT that a text ends in, without its subqueries."""
    depth, kept = 0, []
    for sign in reversed(text):
        depth += (sign == ")") - (sign == "(")
        if depth < 0 or (depth == 0 and sign == ";"):
            break
        if depth == 0 and sign != ")":
            kept.append(sign)
    return "".join(reversed(kept)).rpartition("SELECT")[2]


def read(text: str, functions: Iterable[str]) -> Text:
    """What a text needs by itself."""
    text = re.sub(r"--[^\n]*", "", text)
    found, functions = Text(), set(functions)
    for match in _NAME.finditer(text):
        before = re.split(r"[\s(]+", text[: match.start()].rstrip())[-2:]
        if match[1] in functions and match[2] and before != ["INSERT", "INTO"]:
            found.calls.add(match[1])
            continue
        privileges = found.tables[match[1]].privileges
        if before == ["INSERT", "INTO"]:
            privileges.add("INSERT")
            if re.match(r"[^;]*?ON CONFLICT", text[match.end() :]):
                privileges.add("SELECT")
        elif before == ["DELETE", "FROM"]:
            privileges |= {"DELETE", "SELECT"}
        else:
            privileges.add("SELECT")
    for pattern in (_UPDATE, _UPSERT):
        for match in pattern.finditer(text):
            found.tables[match[1]].updated |= assigned(match[2])
    for lock in _LOCK.finditer(text):
        for match in _NAME.finditer(query_before(text[: lock.start()])):
            if not match[2]:
                found.tables[match[1]].locked = True
    return found


class Schema:
    """The functions and triggers of a migrated schema."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        bodies = connection.execute(
            "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = %s::regnamespace",
            [schema],
        ).fetchall()
        bodies = [(n, body.replace(f'"{schema}".', "{schema}.")) for n, body in bodies]
        names = {name for name, _ in bodies}
        self.functions: dict[str, Text] = defaultdict(Text)
        for name, body in bodies:
            self.functions[name].add(read(body, names))
        self.fired: dict[tuple[str, str], set[str]] = defaultdict(set)
        for table, code, kinds in connection.execute(
            "SELECT class.relname, code.proname, tgtype FROM pg_trigger"
            " JOIN pg_proc AS code ON code.oid = tgfoid"
            " JOIN pg_class AS class ON class.oid = tgrelid"
            " WHERE NOT tgisinternal AND code.pronamespace = %s::regnamespace",
            [schema],
        ):
            for bit, event in _EVENTS.items():
                if kinds & bit:
                    self.fired[table, event].add(code)

    def whole(self, name: str) -> Text:
        """What a statement file needs, with all that it calls and fires."""
        source = statement_source(name).replace("{matches}", _MATCHES)
        found, done = read(source, self.functions), set[str]()
        while True:
            for table, needs in list(found.tables.items()):
                events = needs.privileges | ({"UPDATE"} if needs.updated else set())
                for event in events:
                    found.calls |= self.fired[table, event]
                if "INSERT" in needs.privileges | events:
                    # Its checks call functions too.
                    found.calls |= {f"{table}_is_sound"} & set(self.functions)
            todo = found.calls - done
            if not todo:
                return found
            done |= todo
            for code in todo:
                found.add(self.functions[code])


def drawn(role: str, schema: Schema) -> Iterator[Right]:
    """The least rights of a role."""
    needed = Text()
    for name in roles.STATEMENTS[role]:
        needed.add(schema.whole(name))
    columns = manifest.columns()
    for table, needs in sorted(needed.tables.items()):
        if _SEQUENCE.search(table):
            yield Right(role, "SEQUENCE", table, "SELECT")
            yield Right(role, "SEQUENCE", table, "USAGE")
        if table not in columns:
            continue
        if "SELECT" in needs.privileges:
            yield Right(role, "TABLE", table, "SELECT", roles.readable(role, table))
        if "INSERT" in needs.privileges:
            yield Right(role, "TABLE", table, "INSERT")
        updated = needs.updated & set(columns[table])
        if needs.locked and not updated:
            spare = LOCK_COLUMN in columns[table]
            updated = {LOCK_COLUMN if spare else columns[table][0]}
        if updated:
            yield Right(role, "TABLE", table, "UPDATE", tuple(sorted(updated)))
        if "DELETE" in needs.privileges:
            yield Right(role, "TABLE", table, "DELETE")
    for code in sorted(needed.calls & set(schema.functions)):
        yield Right(role, "FUNCTION", code, "EXECUTE")


def render(connection: psycopg.Connection[Any], name: str) -> str:
    """The whole file, from a schema of the newest version."""
    schema = Schema(connection, name)
    lines = (str(right) for role in roles.ROLES for right in drawn(role, schema))
    return "".join(f"{line}\n" for line in lines)
