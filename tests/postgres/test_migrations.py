"""Versions of the schema: first starts at the same moment, ledgers, names, rights."""

from __future__ import annotations

import re
import threading
import uuid
from collections import Counter
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from headgate_sync.errors import (
    ConfigurationError,
    NotFound,
    StoreConflict,
    StoreUnavailable,
)
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres import ledger, manifest, migrate
from headgate_sync.postgres.database import Session
from headgate_sync.postgres.ledger import Applied, Version, check_history, versions
from headgate_sync.postgres.migrate import (
    adopt,
    migrate_down,
    migrate_up,
    status,
    validate,
)
from headgate_sync.postgres.sql import Statements
from headgate_sync.postgres.store import PgStore
from tests.builders import admit, claim_one, enqueue, state_of, steer
from tests.manifest_file import lines_of, newest_schema, render
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


@pytest.fixture(scope="module")
def made(empty_database):
    """A schema of the newest version, for tests that leave it as it was."""
    migrate_up(empty_database, "made")
    return "made"


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


def booked(connection, schema):
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


def add_version(monkeypatch, up, down="SELECT"):
    """Let this release have one more version; its manifest stays that of the others."""
    added = Version(NEWEST + 1, "added", "0" * 64)
    texts = {"up": up, "down": down}
    for module in (migrate, ledger):
        monkeypatch.setattr(module, "versions", lambda: (*versions(), added))
    monkeypatch.setattr(
        Version,
        "text",
        lambda version, direction, text=Version.text: (
            texts[direction] if version is added else text(version, direction)
        ),
    )
    return added


@contextmanager
def opened(url, schema):
    with ConnectionPool(url, min_size=0, max_size=2, open=True) as pool:
        store = PgStore(pool, schema)
        try:
            yield store
        finally:
            store.close()


def test_a_schema_is_recognised_where_all_names_are_quoted(server_url):
    with new_database(server_url) as url:
        with psycopg.connect(url, autocommit=True) as admin:
            quoted = sql.SQL("ALTER DATABASE {} SET quote_all_identifiers = on")
            admin.execute(quoted.format(sql.Identifier(admin.info.dbname)))
        assert migrate_up(url) == list(versions())
        validate(url)


@pytest.mark.parametrize("limit", ["statement_timeout", "transaction_timeout"])
def test_no_time_limit_of_a_role_ends_a_migration(server_url, limit):
    with new_database(server_url) as url:
        with psycopg.connect(url, autocommit=True) as admin:
            if limit == "transaction_timeout" and admin.info.server_version < 170_000:
                pytest.skip("PostgreSQL 17 brought this limit")
            limited = sql.SQL("ALTER DATABASE {} SET {} = 30").format(
                sql.Identifier(admin.info.dbname), sql.Identifier(limit)
            )
            admin.execute(limited)
        assert migrate_up(url) == list(versions())


def test_up_applies_every_version_once_and_books_it(empty_database, connection, schema):
    assert migrate_up(empty_database, schema) == list(versions())
    assert migrate_up(empty_database, schema) == []
    assert booked(connection, schema) == [
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
        assert [row[1] for row in booked(connection, schema)] == sorted(applied)
        connection.execute(
            sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema))
        )


def test_a_version_is_applied_whole_or_not_at_all(connection, schema, monkeypatch):
    add_version(monkeypatch, "CREATE TABLE {schema}.half (); SELECT 1 / 0")
    with pytest.raises(Exception, match="division by zero"):
        migrate_up(connection, schema)
    assert len(booked(connection, schema)) == NEWEST
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
            assert store.maintenance.prune_archive_month("202501") == 0
    finally:
        migrate_down(empty_database, name)
        connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(name)))


def test_names_that_differ_in_case_only_are_different_schemas(
    empty_database, connection
):
    names = ["Jobs", "jobs", "JOBS"]
    for name in names:
        migrate_up(empty_database, name)
    try:
        for name in names:
            with opened(empty_database, name) as store:
                enqueue(store, name)
                assert [claim.envelope.id for claim in admit(store).claims] == [name]
    finally:
        for name in names:
            connection.execute(
                sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name))
            )


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
        ledger.check_server(number, "UTF8")


def test_a_database_that_cannot_hold_every_character_is_refused():
    with pytest.raises(ConfigurationError, match="SQL_ASCII"):
        ledger.check_server(150_000, "SQL_ASCII")


# Targets, steps and dry runs


def numbers(steps):
    return [step.number for step in steps]


def test_up_and_down_stop_where_they_are_told(empty_database, connection, schema):
    assert numbers(migrate_up(empty_database, schema, target=2)) == [1, 2]
    assert numbers(migrate_up(empty_database, schema, max_steps=1)) == [3]
    assert numbers(migrate_up(empty_database, schema, target=5, max_steps=9)) == [4, 5]
    assert numbers(migrate_down(empty_database, schema, target=3)) == [5, 4]
    assert numbers(migrate_down(empty_database, schema, max_steps=1)) == [3]
    assert [row[1] for row in booked(connection, schema)] == [1, 2]
    assert numbers(migrate_up(empty_database, schema))[0] == 3
    assert validate(empty_database, schema).current == NEWEST


def test_a_dry_run_tells_the_steps_and_takes_none(empty_database, connection, schema):
    assert migrate_up(empty_database, schema, dry_run=True) == list(versions())
    assert relations(connection, schema) == 0
    migrate_up(empty_database, schema, target=3)
    assert numbers(migrate_up(empty_database, schema, target=5, dry_run=True)) == [4, 5]
    assert numbers(migrate_down(empty_database, schema, dry_run=True)) == [3, 2, 1]
    assert len(booked(connection, schema)) == 3
    tamper(connection, schema, "UPDATE {ledger} SET name = 'x' WHERE version = 2")
    for call in (migrate_up, migrate_down):
        with pytest.raises(ConfigurationError, match="version 2 was applied as x"):
            call(empty_database, schema, dry_run=True)


def test_a_target_on_the_wrong_side_is_refused(empty_database, connection, schema):
    migrate_up(empty_database, schema, target=3)
    for call, target, says in (
        (migrate_up, 2, "migrate down"),
        (migrate_up, NEWEST + 1, f"versions 1 to {NEWEST}"),
        (migrate_up, -1, f"versions 1 to {NEWEST}"),
        (migrate_down, 4, "cannot lead to 4"),
        (migrate_down, -1, "cannot lead to -1"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            call(empty_database, schema, target=target)
    for call in (migrate_up, migrate_down):
        for steps in (0, -1, True, "2", 1.5):
            with pytest.raises(ConfigurationError, match=f"max_steps {steps!r}"):
                call(empty_database, schema, max_steps=steps)
        for target in (True, "2", 1.5):
            with pytest.raises(ConfigurationError, match=f"version {target!r}"):
                call(empty_database, schema, target=target)
    with pytest.raises(ConfigurationError, match="lock_timeout_ms 0"):
        migrate_up(empty_database, schema, lock_timeout_ms=0)
    assert len(booked(connection, schema)) == 3


def test_each_way_back_leads_to_where_it_came_from(connection, schema):
    seen = []
    for version in versions():
        migrate_up(connection, schema, target=version.number)
        seen.append(lines_of(connection, schema))
    for number in range(NEWEST - 1, 0, -1):
        migrate_down(connection, schema, target=number)
        assert lines_of(connection, schema) == seen[number - 1], number


def test_a_pool_serves_as_well_as_a_connection(empty_database, schema):
    with ConnectionPool(empty_database, min_size=0, max_size=1, open=True) as pool:
        assert migrate_up(pool, schema) == list(versions())
        assert validate(pool, schema).current == NEWEST


# Locks


def definitions(version):
    """The statements of a version without comments and bodies of functions."""
    text = re.sub(r"\$\$.*?\$\$", "", version.text("up"), flags=re.DOTALL)
    text = re.sub(r"--[^\n]*", "", text)
    return [statement.strip() for statement in text.split(";") if statement.strip()]


@pytest.mark.parametrize("version", versions(), ids=lambda version: version.name)
def test_an_online_safe_step_only_adds_what_nobody_uses_yet(version):
    own = set(re.findall(r"CREATE TABLE \{schema\}\.(\w+)", version.text("up")))
    adds = all(
        re.match(r"CREATE (TABLE|TYPE|(OR REPLACE )?FUNCTION) ", statement)
        or (
            (index := re.match(r"CREATE (UNIQUE )?INDEX \w+ ON \S+?\.(\w+)", statement))
            and index[2] in own
        )
        for statement in definitions(version)
    )
    assert version.online_safe <= adds


def test_an_online_safe_step_tries_five_times_and_never_waits_for_long(
    empty_database, connection, schema, monkeypatch
):
    migrate_up(connection, schema)
    add_version(
        monkeypatch,
        "-- Online-safe: adds a column.\n"
        "ALTER TABLE {schema}.headgate_job ADD COLUMN later text",
    )
    with psycopg.connect(empty_database) as reader:
        reader.execute(
            sql.SQL("SELECT FROM {}.headgate_job").format(sql.Identifier(schema))
        )
        tries = []
        monkeypatch.setattr(
            migrate,
            "history_of",
            lambda session, read=migrate.history_of: tries.append(1) or read(session),
        )
        with pytest.raises(StoreConflict):
            migrate_up(connection, schema, lock_timeout_ms=20)
    assert len(tries) == 5
    assert len(booked(connection, schema)) == NEWEST


def test_a_step_that_is_not_online_safe_waits_for_its_lock(
    empty_database, connection, schema, monkeypatch
):
    migrate_up(connection, schema)
    add_version(monkeypatch, "LOCK TABLE {schema}.headgate_duty")
    monkeypatch.setattr(manifest, "difference", lambda lines: "")
    with psycopg.connect(empty_database) as reader:
        reader.execute(
            sql.SQL("SELECT FROM {}.headgate_duty").format(sql.Identifier(schema))
        )
        thread = threading.Thread(
            target=migrate_up,
            args=(empty_database, schema),
            kwargs={"lock_timeout_ms": 1},
        )
        thread.start()
        waiting = False
        while thread.is_alive() and not waiting:
            [[waiting]] = connection.execute(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted"
                " AND relation = to_regclass(%s))",
                [f"{schema}.headgate_duty"],
            ).fetchall()
        assert waiting
        reader.rollback()
        thread.join()
    assert len(booked(connection, schema)) == NEWEST + 1


# The manifest


def test_the_manifest_is_the_text_of_the_newest_schema(connection):
    with newest_schema(connection) as schema:
        assert render(lines_of(connection, schema)) == manifest.FILE.read_text()


CHANGES = {
    "ALTER TABLE {0}.headgate_duty ADD COLUMN more text": "+ column headgate_duty.more",
    "ALTER TABLE {0}.headgate_duty DROP COLUMN holder": "- column headgate_duty.holder",
    "ALTER TABLE {0}.headgate_duty ALTER holder DROP NOT NULL": "headgate_duty.holder",
    "ALTER TABLE {0}.headgate_duty ALTER holder SET DEFAULT ''": "DEFAULT",
    "ALTER TABLE {0}.headgate_duty ALTER expires_at_ms TYPE numeric": "numeric",
    'ALTER TABLE {0}.headgate_duty ALTER holder TYPE text COLLATE "POSIX"': "POSIX",
    "DROP TABLE {0}.headgate_sleeper": "- table headgate_sleeper",
    "CREATE TABLE {0}.headgate_more ()": "+ table headgate_more",
    "DROP INDEX {0}.headgate_job_hold": "- CREATE INDEX headgate_job_hold",
    "CREATE INDEX headgate_job_more ON {0}.headgate_job (kind)": "headgate_job_more",
    "DROP TRIGGER headgate_job_removed ON {0}.headgate_job": "headgate_job_removed",
    "ALTER TABLE {0}.headgate_job DISABLE TRIGGER headgate_job_removed": "+ CREATE TR",
    "ALTER TABLE {0}.headgate_job DROP CONSTRAINT headgate_job_sound": "- constraint",
    "CREATE OR REPLACE FUNCTION {0}.headgate_wake() RETURNS trigger LANGUAGE plpgsql"
    " AS 'BEGIN RETURN NULL; END'": "function headgate_wake",
    "ALTER FUNCTION {0}.headgate_wake() SECURITY DEFINER": "SECURITY DEFINER",
    "ALTER FUNCTION {0}.headgate_wake() SET search_path = public": "search_path=public",
    "DROP TABLE {0}.headgate_job_archive_202607": "- partition headgate_job_archive_2",
    "ALTER TYPE {0}.headgate_admission ADD ATTRIBUTE more text": "more text",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_manifest_tells_what_is_not_as_it_should_be(connection, made, change):
    with connection.transaction(force_rollback=True):
        connection.execute(sql.SQL(change).format(sql.Identifier(made)))
        found = manifest.read(Session(connection, Statements(made)), made)
    assert CHANGES[change] in manifest.difference(found)


def test_validate_names_what_is_not_as_it_should_be(connection, schema):
    migrate_up(connection, schema)
    assert validate(connection, schema) == migrate.Validity(
        current=NEWEST, latest=NEWEST
    )
    change, told = next(iter(CHANGES.items()))
    connection.execute(sql.SQL(change).format(sql.Identifier(schema)))
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        validate(connection, schema)


def test_what_an_administrator_may_do_is_no_difference(connection, schema):
    migrate_up(connection, schema)
    for change in (
        "CREATE INDEX mine ON {0}.headgate_job (kind, fence)",
        "ALTER TABLE {0}.headgate_job SET (fillfactor = 70)",
        "CREATE TABLE {0}.others ()",
        "ALTER TABLE {0}.headgate_duty ADD CONSTRAINT mine CHECK (name <> 'x')",
        "GRANT SELECT ON {0}.headgate_duty TO PUBLIC",
        "ANALYZE {0}.headgate_duty",
    ):
        connection.execute(sql.SQL(change).format(sql.Identifier(schema)))
    assert validate(connection, schema).current == NEWEST


def test_an_older_schema_is_checked_by_its_ledger_alone(connection, schema):
    assert validate(connection, schema).current == 0
    migrate_up(connection, schema, target=3)
    assert validate(connection, schema) == migrate.Validity(current=3, latest=NEWEST)


def test_the_newest_version_is_not_committed_over_a_schema_that_drifted(
    connection, schema
):
    migrate_up(connection, schema, target=NEWEST - 1)
    drop = sql.SQL("DROP INDEX {}.headgate_job_hold").format(sql.Identifier(schema))
    connection.execute(drop)
    with pytest.raises(ConfigurationError, match="- CREATE INDEX headgate_job_hold"):
        migrate_up(connection, schema)
    assert len(booked(connection, schema)) == NEWEST - 1


# Taking over


@pytest.mark.parametrize("grants", ["recorded", "not recorded"])
@pytest.mark.parametrize("left", ["no ledger", "an empty ledger"])
def test_tables_from_a_dump_without_ledger_are_adopted(
    connection, schema, left, grants
):
    migrate_up(connection, schema)
    gone = "DROP TABLE" if left == "no ledger" else "DELETE FROM"
    tamper(connection, schema, gone + " {ledger}")
    if grants == "not recorded":
        connection.execute(
            sql.SQL("DROP TABLE {}.headgate_grant").format(sql.Identifier(schema))
        )
    for call in (migrate_up, migrate_down, validate):
        with pytest.raises(ConfigurationError, match=f"{left}.*migrate adopt"):
            call(connection, schema)
    adopt(connection, schema, version=NEWEST)
    assert [row[1] for row in booked(connection, schema)] == list(range(1, NEWEST + 1))
    assert validate(connection, schema).current == NEWEST
    with pytest.raises(ConfigurationError, match="has a ledger already"):
        adopt(connection, schema, version=NEWEST)


def test_nothing_is_adopted_that_is_not_exactly_this_release(connection, schema):
    with pytest.raises(ConfigurationError, match="no tables to adopt"):
        adopt(connection, schema, version=NEWEST)
    migrate_up(connection, schema, target=NEWEST - 1)
    tamper(connection, schema, "DELETE FROM {ledger}")
    with pytest.raises(ConfigurationError, match=f"version {NEWEST} only"):
        adopt(connection, schema, version=NEWEST - 1)
    with pytest.raises(ConfigurationError, match=f"is not what version {NEWEST}"):
        adopt(connection, schema, version=NEWEST)
    assert booked(connection, schema) == []
