"""Versions of the schema: first starts at the same moment, ledgers, names, rights."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from headgate_sync.errors import ConfigurationError, NotFound, StoreUnavailable
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres import migrate
from headgate_sync.postgres.migrate import (
    Applied,
    check_history,
    migrate_down,
    migrate_up,
    status,
    versions,
)
from headgate_sync.postgres.store import PgStore
from tests.builders import admit, claim_one, enqueue, state_of, steer
from tests.servers import new_database

NEWEST = versions()[-1].number
HOSTILE_NAMES = [
    "Jobs", "JOBS", "jobs", 'quo"te', "quo'te", "dollar$", "dot.dot", "back\\slash",
    "bl ank", "da-sh", "new\nline", "select", "50% off", "{brace}", "é" * 31, "x" * 63,
]  # fmt: skip


@pytest.fixture(scope="module")
def empty_database(server_url):
    """A database for this module; tests use schemas of their own in it."""
    with new_database(server_url) as url:
        yield url


@pytest.fixture
def connection(empty_database):
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


@pytest.fixture
def schema(connection):
    name = f"hg_{uuid.uuid4().hex}"
    yield name
    connection.execute(
        sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name))
    )


def ledger(connection, schema):
    return connection.execute(
        sql.SQL(
            "SELECT line, version, name, checksum FROM {}.headgate_schema_migration"
            " ORDER BY version"
        ).format(sql.Identifier(schema))
    ).fetchall()


def tamper(connection, schema, change):
    connection.execute(
        sql.SQL(change).format(
            ledger=sql.SQL("{}.headgate_schema_migration").format(
                sql.Identifier(schema)
            )
        )
    )


def relations(connection, schema):
    return connection.execute(
        "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace(%s)",
        [f'"{schema}"'],
    ).fetchone()[0]


@contextmanager
def opened(url, schema):
    with ConnectionPool(url, min_size=0, max_size=2, open=True) as pool:
        store = PgStore(pool, schema)
        try:
            yield store
        finally:
            store.close()


def test_up_applies_every_version_once_and_books_it(empty_database, connection, schema):
    assert migrate_up(empty_database, schema) == list(versions())
    assert migrate_up(empty_database, schema) == []
    assert ledger(connection, schema) == [
        ("main", version.number, version.name, version.checksum)
        for version in versions()
    ]


def test_versions_count_from_one_and_each_has_a_way_back():
    assert [version.number for version in versions()] == list(range(1, NEWEST + 1))
    assert all(version.text("up") and version.text("down") for version in versions())


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_migration_has_no_placeholder_but_the_schema(direction):
    for version in versions():
        text = version.text(direction)
        assert "%" not in text
        assert "{" not in text.replace("{schema}", "")


def test_any_number_of_first_starts_at_one_moment_succeed(empty_database, connection):
    for _ in range(3):
        schema = f"hg_{uuid.uuid4().hex}"
        gate = threading.Barrier(12)
        answers = []

        def start(schema=schema, gate=gate, answers=answers):
            gate.wait()
            answers.append(migrate_up(empty_database, schema))

        threads = [threading.Thread(target=start) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 12
        applied = Counter(version.number for done in answers for version in done)
        assert applied == Counter(range(1, NEWEST + 1))
        assert [row[1] for row in ledger(connection, schema)] == sorted(applied)
        connection.execute(
            sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema))
        )


def test_a_version_is_applied_whole_or_not_at_all(connection, schema, monkeypatch):
    broken = migrate.Version(NEWEST + 1, "broken", "0" * 64)
    monkeypatch.setattr(migrate, "versions", lambda: (*versions(), broken))
    monkeypatch.setattr(
        migrate.Version,
        "text",
        lambda version, direction, text=migrate.Version.text: (
            "CREATE TABLE {schema}.half (); SELECT 1 / 0"
            if version is broken
            else text(version, direction)
        ),
    )
    with pytest.raises(Exception, match="division by zero"):
        migrate_up(connection, schema)
    assert len(ledger(connection, schema)) == NEWEST
    [[half]] = connection.execute(
        "SELECT to_regclass(%s)", [f'"{schema}".half']
    ).fetchall()
    assert half is None


def test_a_changed_file_is_refused(empty_database, connection, schema):
    migrate_up(empty_database, schema)
    tamper(connection, schema, "UPDATE {ledger} SET checksum = 'abc' WHERE version = 2")
    for call in (migrate_up, migrate_down, status):
        with pytest.raises(ConfigurationError, match=r"version 2 .*abc"):
            call(empty_database, schema)
    with opened(empty_database, schema) as store, pytest.raises(ConfigurationError):
        enqueue(store, "a")


def test_a_newer_database_is_refused(empty_database, connection, schema):
    migrate_up(empty_database, schema)
    tamper(
        connection,
        schema,
        f"INSERT INTO {{ledger}} VALUES ('main', {NEWEST + 1}, 'later', 'abc', 1)",
    )
    for call in (migrate_up, migrate_down, status):
        with pytest.raises(ConfigurationError, match="newer than this release"):
            call(empty_database, schema)
    with (
        opened(empty_database, schema) as store,
        pytest.raises(ConfigurationError, match="newer than this release"),
    ):
        admit(store)


def test_an_older_database_is_refused_and_the_command_is_named(
    empty_database, connection, schema
):
    migrate_up(empty_database, schema)
    tamper(connection, schema, f"DELETE FROM {{ledger}} WHERE version = {NEWEST}")
    with (
        opened(empty_database, schema) as store,
        pytest.raises(ConfigurationError, match="run `headgate migrate up`"),
    ):
        admit(store)


def test_a_gap_is_refused(empty_database, connection, schema):
    migrate_up(empty_database, schema)
    tamper(connection, schema, "DELETE FROM {ledger} WHERE version = 1")
    with pytest.raises(ConfigurationError, match="gap, version 1 is missing"):
        migrate_up(empty_database, schema)


def test_a_history_may_be_any_beginning_of_the_known_one():
    rows = [Applied(v.number, v.name, v.checksum, 1) for v in versions()]
    for length in range(NEWEST + 1):
        check_history(rows[:length], "s")


def test_tables_without_a_ledger_are_refused(empty_database, connection, schema):
    connection.execute(
        sql.SQL("CREATE SCHEMA {0}; CREATE TABLE {0}.headgate_job ()").format(
            sql.Identifier(schema)
        )
    )
    with pytest.raises(ConfigurationError, match="not made by `headgate migrate up`"):
        migrate_up(empty_database, schema)
    assert relations(connection, schema) == 1


@pytest.mark.parametrize("missing", ["schema", "tables"])
def test_a_store_over_nothing_names_the_command(
    empty_database, connection, schema, missing
):
    if missing == "tables":
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    with (
        opened(empty_database, schema) as store,
        pytest.raises(ConfigurationError, match="run `headgate migrate up`"),
    ):
        enqueue(store, "a")
    migrate_up(empty_database, schema)
    with opened(empty_database, schema) as store:
        enqueue(store, "a")
        assert claim_one(store).envelope.id == "a"


def test_status_tells_what_was_applied_and_when(empty_database, schema):
    assert [line.applied_at_ms for line in status(empty_database, schema)] == (
        [None] * NEWEST
    )
    migrate_up(empty_database, schema)
    lines = status(empty_database, schema)
    assert [line.version for line in lines] == list(versions())
    assert all(line.applied_at_ms > 1_500_000_000_000 for line in lines)
    assert str(lines[0]).startswith("version=1 name=jobs checksum=")


def test_down_removes_everything_of_this_schema_alone(
    empty_database, connection, schema
):
    other = f"{schema}_other"
    migrate_up(empty_database, schema)
    migrate_up(empty_database, other)
    assert migrate_down(empty_database, schema) == list(reversed(versions()))
    assert migrate_down(empty_database, schema) == []
    assert relations(connection, schema) == 0
    [[functions]] = connection.execute(
        "SELECT count(*) FROM pg_proc WHERE pronamespace = %s::regnamespace", [schema]
    ).fetchall()
    assert functions == 0
    with opened(empty_database, other) as store:
        enqueue(store, "a")
        assert claim_one(store).envelope.id == "a"
    assert migrate_up(empty_database, schema) == list(versions())
    migrate_down(empty_database, other)
    connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(other)))


def test_a_lent_connection_goes_back_as_it_came(empty_database, schema):
    with psycopg.connect(empty_database) as connection:
        assert migrate_up(connection, schema) == list(versions())
        assert connection.autocommit is False
        connection.execute("SELECT 1")
        with pytest.raises(ConfigurationError, match="without a transaction"):
            migrate_up(connection, schema)


def test_an_unreachable_server_is_an_outage(schema):
    with pytest.raises(StoreUnavailable):
        migrate_up("host=/nonexistent dbname=none", schema)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_any_name_of_a_schema_works(empty_database, connection, name):
    migrate_up(empty_database, name)
    try:
        with opened(empty_database, name) as store:
            enqueue(store, "a", "b", tags=("t",))
            claim = claim_one(store)
            assert store.renew([claim.lease_ref], lease_ms=1_000) == []
            store.ack(claim.lease_ref, Outcome.SUCCESS)
            assert state_of(store, "a") is State.COMPLETED
            assert steer(store).unfinished("q") == 1
    finally:
        migrate_down(empty_database, name)
        connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(name)))


def test_two_schemas_share_a_pool_and_nothing_else(empty_database, connection, schema):
    left, right = schema, f"{schema}_right"
    migrate_up(empty_database, left)
    migrate_up(empty_database, right)
    with ConnectionPool(empty_database, min_size=0, max_size=2, open=True) as pool:
        stores = [PgStore(pool, left), PgStore(pool, right)]
        claims = []
        for store in stores:
            enqueue(store, "a")
            claims.append(claim_one(store))
            assert store.claim_duty("d", store.__repr__(), 60_000)
        stores[0].ack(claims[0].lease_ref, Outcome.RETRY)
        assert state_of(stores[1], "a") is State.RUNNING
        connection.execute(
            sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(left))
        )
        stores[1].ack(claims[1].lease_ref, Outcome.SUCCESS)
        assert state_of(stores[1], "a") is State.COMPLETED
        for store in stores:
            store.close()
    connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(right)))


@contextmanager
def plain_role(connection):
    """A role that may log in, and no more."""
    role = f"headgate_test_{uuid.uuid4().hex}"
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    try:
        yield role
    finally:
        connection.execute(
            sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(
                sql.Identifier(role)
            )
        )


def test_a_plain_role_that_owns_the_schema_can_install(
    empty_database, connection, schema
):
    with plain_role(connection) as role:
        connection.execute(
            sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}").format(
                sql.Identifier(schema), sql.Identifier(role)
            )
        )
        url = make_conninfo(empty_database, user=role)
        assert migrate_up(url, schema) == list(versions())
        with opened(url, schema) as store:
            enqueue(store, "a")
            assert claim_one(store).envelope.id == "a"


def test_a_role_that_may_not_create_the_schema_is_told_what_to_run(
    empty_database, connection, schema
):
    with (
        plain_role(connection) as role,
        pytest.raises(ConfigurationError, match=f'must run: CREATE SCHEMA "{schema}"'),
    ):
        migrate_up(make_conninfo(empty_database, user=role), schema)


def test_a_run_time_role_needs_no_right_to_create(empty_database, connection, schema):
    migrate_up(empty_database, schema)
    with plain_role(connection) as role:
        for grant in (
            "GRANT USAGE ON SCHEMA {} TO {}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {} TO {}",
            "GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {} TO {}",
        ):
            connection.execute(
                sql.SQL(grant).format(sql.Identifier(schema), sql.Identifier(role))
            )
        url = make_conninfo(empty_database, user=role)
        assert migrate_up(url, schema) == []
        with opened(url, schema) as store:
            enqueue(store, "a")
            store.ack(claim_one(store).lease_ref, Outcome.SUCCESS)
            with pytest.raises(NotFound):
                steer(store).quarantine_release("f")


@pytest.mark.parametrize(("number", "named"), [(120_018, "12"), (90_624, "9")])
def test_an_old_server_is_refused(number, named):
    with pytest.raises(ConfigurationError, match=f"PostgreSQL {named} is too old"):
        migrate.check_server(number, "UTF8")


def test_a_database_that_cannot_hold_every_character_is_refused():
    with pytest.raises(ConfigurationError, match="SQL_ASCII"):
        migrate.check_server(150_000, "SQL_ASCII")
