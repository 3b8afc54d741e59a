"""The statement files: each is used, has its header, and prepares on the server."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import psycopg
import pytest
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

import headgate_sync.postgres
from headgate_sync.errors import ConfigurationError
from headgate_sync.lifecycle import ACKABLE, UNFINISHED, Event, State, target_sql
from headgate_sync.policy import MIN_UNITS
from headgate_sync.postgres.ledger import versions
from headgate_sync.postgres.sql import (
    PREPARED,
    Statements,
    statement_names,
    statement_source,
)
from tests.backends import SCHEMA
from tests.builders import enqueue

PACKAGE = Path(headgate_sync.postgres.__file__).parent
HEADER = ("Arguments:", "Rows:", "Locks:")
# What a server cannot prepare; every migration runs them.
COMMANDS = {
    "grant_create",
    "grant_drop",
    "ledger_create",
    "ledger_drop",
    "ledger_lock",
    "ledger_schema",
}
# The driver converts longer texts anew at each call.
MAX_CACHED_BYTES = 4096


SQL = re.compile(
    r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|TRUNCATE|CREATE|ALTER|DROP|GRANT|SET|"
    r"LISTEN|NOTIFY)\b"
)
# A channel is a constant with a hash behind it.
HARMLESS = {"channel", "self._channel.encode()"}


def names_in_code() -> set[str]:
    """Every text of the package's modules that could be the name of a statement."""
    found = set()
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def names_of_calls() -> set[str]:
    """The first argument of every call of a method `rows`."""
    found = set()
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "rows"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(node.args[0].value)
    return found


def literal(node: ast.AST) -> str:
    """What is known of a text before the program runs; a gap is one character."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "\0" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
        return node.value.decode()
    return ""


def filled_in(node: ast.AST) -> tuple[str, str]:
    """A text into which a program puts something, and what it puts there."""
    match node:
        case ast.JoinedStr():
            gaps = [
                part for part in node.values if isinstance(part, ast.FormattedValue)
            ]
            return literal(node), ", ".join(map(ast.unparse, gaps))
        case ast.BinOp(op=ast.Mod() | ast.Add()):
            return literal(node.left) + literal(node.right), ast.unparse(node.right)
        case ast.Call(func=ast.Attribute(attr="format" | "join" | "replace") as called):
            return literal(called.value), ", ".join(map(ast.unparse, node.args))
    return "", ""


def test_no_statement_is_built_from_text():
    """Values are arguments, and names go through the quoting of the driver."""
    for file in PACKAGE.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text, put = filled_in(node)
            if put and SQL.search(text) and "%d" not in text:
                assert put in HARMLESS, f"{file.name}: {ast.unparse(node)}"


def test_every_statement_file_is_used():
    assert set(statement_names()) <= names_in_code()


def test_every_statement_that_the_code_runs_has_a_file():
    assert names_of_calls() <= set(statement_names())


def test_every_prepared_statement_has_a_file():
    assert set(statement_names()) >= PREPARED


@pytest.mark.parametrize("name", statement_names())
def test_a_statement_file_opens_with_its_header(name):
    lines = statement_source(name).splitlines()
    comment = "\n".join(line for line in lines if line.startswith("--"))
    assert lines[0].startswith("-- ")
    assert all(part in comment for part in HEADER)


@pytest.mark.parametrize("name", statement_names())
def test_a_statement_names_its_schema_everywhere(name):
    body = re.sub(r"--.*", "", statement_source(name))
    unqualified = re.findall(r"(?<!\.)\bheadgate_\w+", body)
    assert [found for found in unqualified if f"'{found}'" not in body] == []


@pytest.mark.parametrize("name", sorted(PREPARED))
def test_a_prepared_statement_is_short_enough_for_the_driver_to_keep(name):
    assert len(Statements("s" * 63)[name]) <= MAX_CACHED_BYTES


@pytest.mark.parametrize("name", sorted(set(statement_names()) - COMMANDS))
def test_a_statement_prepares(admin, name):
    query = PostgresQuery(Transformer(admin))
    parameters = re.findall(rb"%\((\w+)\)", Statements(SCHEMA)[name])
    query.convert(
        Statements(SCHEMA)[name], {found.decode(): None for found in parameters}
    )
    admin.execute(b"PREPARE headgate_test_statement AS " + query.query)
    admin.execute("DEALLOCATE headgate_test_statement")


def test_a_percent_sign_in_the_schema_is_no_placeholder(admin: psycopg.Connection):
    admin.execute('CREATE SCHEMA "50% off"')
    admin.execute('CREATE FUNCTION "50% off".headgate_now_ms() RETURNS bigint'
                  " LANGUAGE sql AS 'SELECT 1'")  # fmt: skip
    statement = Statements("50% off")["store_now"]
    assert admin.execute(statement, {}).fetchall() == [(1,)]
    admin.execute('DROP SCHEMA "50% off" CASCADE')


@pytest.mark.parametrize("schema", ["", "a\0b", "a$$b", "x" * 64, "é" * 32, None])
def test_a_schema_name_that_the_server_would_change_is_refused(schema):
    with pytest.raises(ConfigurationError, match="schema name"):
        Statements(schema)


def source_of(version):
    """The migration of this name."""
    [found] = [known for known in versions() if known.name == version]
    return found.text("up")


@pytest.mark.parametrize("outcome", sorted(ACKABLE))
def test_the_ack_takes_the_edge_of_the_table(outcome):
    edge = f"WHEN '{outcome.value}' THEN {target_sql(outcome.event)}"
    assert edge in source_of("settle")


def test_the_reclaim_takes_the_edge_of_the_table():
    edge = target_sql(Event.LEASE_LOST).replace("crash_limit", "p_crash_limit")
    assert f"SET state = {edge}," in source_of("sweeps")


def test_the_schema_knows_the_states_of_the_table():
    source = source_of("jobs")
    body = source[source.index("CASE\n      WHEN job.finalized_at_ms IS NULL") :]
    unfinished, finished = re.findall(r"ANY \(ARRAY\[([^]]*)\]\)", body)[:2]
    assert set(re.findall(r"'(\w+)'", unfinished)) == {s.value for s in UNFINISHED}
    stored = {state.value for state in State if state is not State.DELETED}
    assert set(re.findall(r"'(\w+)'", finished)) == stored - set(UNFINISHED)


@pytest.mark.parametrize("name", ["settle", "policies"])
def test_the_least_balance_of_a_budget_is_that_of_the_policy(name):
    assert re.findall(r"greatest\((-?\d+)::numeric", source_of(name)) == [
        str(MIN_UNITS)
    ]


def test_a_search_path_cannot_bend_the_rules_of_a_row(postgres, admin):
    enqueue(postgres.make_store(), "a")
    admin.execute("CREATE SCHEMA bent")
    try:
        admin.execute(
            "CREATE FUNCTION bent.agree(integer, integer) RETURNS boolean LANGUAGE sql"
            " AS 'SELECT true'"
        )
        for operator in ("=", ">", ">=", "<", "<="):
            admin.execute(
                f"CREATE OPERATOR bent.{operator} (LEFTARG = integer,"
                " RIGHTARG = integer, PROCEDURE = bent.agree)"
            )
        admin.execute("SET search_path = bent, pg_catalog")
        judged = admin.execute(
            "SELECT headgate.headgate_job_is_sound(job),"
            " headgate.headgate_job_is_sound("
            "  jsonb_populate_record(job, jsonb_build_object('weight', 0)))"
            " FROM headgate.headgate_job AS job"
        )
        assert judged.fetchone() == (True, False)
    finally:
        admin.execute("RESET search_path")
        admin.execute("DROP SCHEMA bent CASCADE")


def test_no_row_can_break_a_rule_of_every_job(postgres, admin):
    enqueue(postgres.make_store(), "a")
    for broken in (
        "state = 'running'",
        "state = 'completed'",
        "state = 'unknown', finalized_at_ms = 1",
        "weight = 0",
        "rate_charge = -1",
        "queue = ''",
        "gate_hold = 'other'",
        "result = 'x'",
        "output = 'x'",
        "progress_current = 5",
        "periodic_tick_ms = 5",
        "charge_weight = -1",
    ):
        with admin.transaction(force_rollback=True):
            admin.execute(f"ALTER TABLE {SCHEMA}.headgate_job DISABLE TRIGGER USER")
            with pytest.raises(psycopg.errors.CheckViolation):
                admin.execute(f"UPDATE {SCHEMA}.headgate_job SET {broken}")
