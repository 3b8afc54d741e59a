"""The command line outside of the worker: one clear line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from headgate_sync.postgres.ledger import versions
from tests.servers import new_database, reachable_directory

VARIABLES = (
    "HEADGATE_DATABASE_URL",
    "DATABASE_URL",
    "HEADGATE_SCHEMA",
    "HEADGATE_EMBEDDED",
)


def headgate(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "headgate_sync", *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["migrate", "up"], 2, "HEADGATE_DATABASE_URL"),
        (["migrate", "up", "--url", "postgresql://127.0.0.1:1/none"], 1, "127.0.0.1"),
        (["demo", "--files", "/no/such/folder"], 2, "/no/such/folder"),
    ],
)
def test_a_fault_is_one_line_and_an_exit_code(arguments, code, says):
    done = headgate(*arguments)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_the_demo_says_that_its_database_is_away():
    done = headgate("demo", HEADGATE_DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert done.returncode == 1
    assert "cannot use the database of HEADGATE_DATABASE_URL" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_python_files_is_named(tmp_path, server_url):
    done = headgate("demo", "--files", str(tmp_path), HEADGATE_DATABASE_URL=server_url)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


def test_migrations_go_up_and_down_on_request(server_url):
    with new_database(server_url) as url:
        arguments = ("--url", url, "--schema", "queue")
        assert "is current" in headgate("migrate", "up", *arguments).stdout
        assert headgate("migrate", "up", *arguments).stdout.count("applied") == 0
        told = headgate("migrate", "status", *arguments)
        assert told.stdout.startswith("version=1 name=jobs checksum=")
        assert " online_safe=no applied=" in told.stdout
        assert re.search(r" applied=20\d\d-\d\d-\d\dT[\d:.]+Z\n", told.stdout)
        told = headgate("migrate", "list", "--output", "json", *arguments)
        rows = json.loads(told.stdout)
        assert [row["version"] for row in rows] == [v.number for v in versions()]
        assert all(row["applied_at_ms"] > 1_700_000_000_000 for row in rows)
        refused = headgate("migrate", "down", *arguments)
        assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
        assert headgate("migrate", "down", "--yes", *arguments).returncode == 0
        with psycopg.connect(url) as connection:
            left = connection.execute(
                "SELECT relname FROM pg_class"
                " WHERE relnamespace = 'queue'::regnamespace"
            ).fetchall()
        assert left == []


def test_the_commands_of_migrate_print_one_line_per_fact(server_url):
    newest = len(versions())
    with new_database(server_url) as url:

        def migrate(*arguments: str) -> list[str]:
            done = headgate("migrate", *arguments, "--url", url)
            assert (done.returncode, done.stderr) == (0, ""), arguments
            return done.stdout.splitlines()

        first = f"version=1 name={versions()[0].name} online_safe=no"
        assert migrate("version") == [f"current=0 latest={newest}"]
        ok, behind = migrate("validate")
        assert ok == f"ok backend=postgres current=0 latest={newest}"
        assert "until `headgate migrate up`" in behind
        assert migrate("up", "--target-version", "1", "--dry-run") == [
            f"up {first} dry_run=true"
        ]
        assert migrate("up", "--max-steps", "1") == [f"up {first}"]
        assert len(migrate("up")) == newest
        assert migrate("up")[0] == "no-op: already at target version"
        assert migrate("validate") == [
            f"ok backend=postgres current={newest} latest={newest}"
        ]
        assert migrate("list")[0].startswith("version=1 name=jobs checksum=")
        assert migrate("get", "--version", "1", "--down")[0].startswith(
            "-- Destructive"
        )
        grants = migrate("grants", "--role", "postgres", "--as", "reader", "--apply")
        assert grants[0] == 'GRANT USAGE ON SCHEMA "headgate" TO "postgres";'
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP TABLE headgate.headgate_schema_migration")
            connection.execute("DROP TABLE headgate.headgate_grant")
        assert migrate("adopt", "--version", str(newest), "--confirm") == [
            f"adopted version={newest}"
        ]
        assert len(migrate("down", "--dry-run")) == newest
        assert migrate("down", "--target-version", "1", "--confirm")[-1].startswith(
            "down version=2"
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["get"], "--version"),
        (["get", "--version", "0"], "versions 1 to"),
        (["adopt", "--version", "1", "--url", "x"], "--yes"),
        (["grants", "--role", "r"], "--as"),
        (["grants", "--role", "r", "--as", "owner"], "none of producer"),
    ],
)
def test_a_mistake_in_migrate_needs_no_database_to_be_told(arguments, says):
    done = headgate("migrate", *arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_the_development_database_is_migrated_where_the_environment_asks_for_it():
    with reachable_directory() as folder:
        chosen = {
            "HEADGATE_EMBEDDED": "1",
            "HEADGATE_EMBEDDED_DIR": str(folder / "data"),
        }
        done = headgate("migrate", "up", **chosen)
        assert (done.returncode, done.stderr) == (0, "")
        assert "schema headgate is current" in done.stdout
        assert "applied=no" not in headgate("migrate", "status", **chosen).stdout
        listed = headgate("embedded", "status", **chosen).stdout
        assert listed.startswith(str(folder / "data"))
        asked = headgate("embedded", "status", "-o", "json", **chosen).stdout
        [server] = json.loads(asked)
        assert server["directory"].startswith(str(folder / "data"))
        assert headgate("embedded", "rm", "--yes", **chosen).returncode == 0


def test_removing_an_embedded_database_that_is_not_there_is_no_error():
    with reachable_directory() as folder:
        done = headgate(
            "embedded", "rm", "--yes", HEADGATE_EMBEDDED_DIR=str(folder / "x")
        )
    assert (done.returncode, done.stdout) == (0, "there is no embedded database\n")


@pytest.mark.crash
def test_the_main_job_survives_its_killed_worker(tmp_path: Path, server_url):
    for number in range(600):
        functions = "\n".join(f"def f{n}(): return {n}" for n in range(number % 40))
        (tmp_path / f"m{number}.py").write_text(functions + "\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    with new_database(server_url) as url:
        done = headgate("demo", "--files", str(tmp_path), HEADGATE_DATABASE_URL=url)
        with psycopg.connect(url) as connection:
            left = connection.execute(
                "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'headgate%'"
            ).fetchall()
    assert done.returncode == 0, done.stderr
    facts = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines()[:8])
    assert facts["files"] == facts["jobs"] == "601"
    assert int(facts["crashes recovered"]) >= 1
    assert int(facts["runs"]) >= 602
    assert facts["duplicates"] == facts["lost"] == facts["differing rows"] == "0"
    assert left == []
