"""The pytest plugin in runs of its own, and the schemas that it makes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import psycopg
import pytest

from headgate_sync import ConfigurationError, StoreError, StoreUnavailable
from headgate_sync.testing import PostgresTestDatabase
from tests.builders import enqueue

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PLUGIN = "headgate_sync.testing.plugin"

ISOLATED = """
import pytest
from headgate_sync import Headgate
from headgate_sync.testing import assert_enqueued, drain, find_enqueued

@pytest.mark.parametrize("n", range(3))
def test_of_jobs(headgate_store, n):
    hg = Headgate(headgate_store)

    @hg.task("count", retention="1h")
    def count(n: int) -> None: ...

    assert find_enqueued(hg, "count") == []
    count.enqueue(n)
    assert [job.outcome for job in drain(hg)] == ["success"]
    assert_enqueued(hg, count, count=1, args={"n": n})
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the tests of a file in a process that loads the plugin and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("HEADGATE_TEST_PG", raising=False)
    monkeypatch.delenv("HEADGATE_TEST_PG_REQUIRED", raising=False)

    def run(text: str):
        pytester.makepyfile(text)
        return pytester.runpytest_subprocess("-p", PLUGIN, "-W", "error", "-rs")

    return run


def schemas(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT nspname FROM pg_catalog.pg_namespace WHERE nspname LIKE 'hgt%'"
        )
        return [name for (name,) in rows]


def test_each_test_of_a_user_has_a_store_of_its_own(run, monkeypatch, database_url):
    monkeypatch.setenv("HEADGATE_TEST_PG", database_url)
    run(ISOLATED).assert_outcomes(passed=6)
    assert schemas(database_url) == []


def test_without_a_database_its_tests_are_skipped(run):
    told = run(ISOLATED)
    told.assert_outcomes(passed=3, skipped=3)
    told.stdout.fnmatch_lines(["*HEADGATE_TEST_PG names no database*"])


def test_a_run_that_needs_the_database_fails_without_it(run, monkeypatch):
    monkeypatch.setenv("HEADGATE_TEST_PG_REQUIRED", "1")
    told = run(ISOLATED)
    told.assert_outcomes(passed=3, errors=3)
    told.stdout.fnmatch_lines(
        ["*HEADGATE_TEST_PG_REQUIRED=1, and HEADGATE_TEST_PG names no database*"]
    )


def test_a_failed_test_leaves_no_schema(run, monkeypatch, database_url):
    monkeypatch.setenv("HEADGATE_TEST_PG", database_url)
    run(
        """
from headgate_sync.testing import assert_enqueued

def test_it(headgate_pg):
    assert_enqueued(headgate_pg, "mail")
"""
    ).assert_outcomes(failed=1)
    assert schemas(database_url) == []


def test_a_failure_shows_the_line_of_the_user(run):
    told = run(
        """
from headgate_sync.testing import assert_enqueued

def test_it(headgate_mem):
    assert_enqueued(headgate_mem, "mail")
"""
    )
    told.stdout.fnmatch_lines(
        [
            '>*assert_enqueued(headgate_mem, "mail")',
            "E*expected a job of kind mail, found none; the store is empty",
        ]
    )
    assert "expectations.py" not in told.stdout.str()


def test_the_plugin_is_installed_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"headgate": PLUGIN}


@pytest.mark.parametrize(
    ("imported", "loaded"),
    [
        ("headgate_sync, headgate_sync.app, headgate_sync.worker", set()),
        (PLUGIN, {"headgate_sync.testing", PLUGIN}),
    ],
)
def test_the_helpers_are_loaded_by_those_who_use_them(imported, loaded):
    program = (
        f"import sys, {imported}\n"
        "print(*(m for m in sys.modules if m.startswith(('headgate_sync.testing',"
        " 'headgate_sync.memory', 'psycopg')) and 'testing' in sys.argv[1]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, "testing"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(told.stdout.split()) == loaded


# The database.


def test_two_databases_never_see_each_other(database_url):
    with (
        PostgresTestDatabase(database_url) as one,
        PostgresTestDatabase(database_url) as other,
    ):
        assert one.schema != other.schema
        enqueue(one.store(), "a")
        enqueue(one.store(), "b")
        assert len(one.store().inspect.list_jobs().jobs) == 2
        assert other.store().inspect.list_jobs().jobs == ()
    assert schemas(database_url) == []


def test_a_name_that_is_taken_is_not_shared(database_url):
    with PostgresTestDatabase(database_url) as one:
        enqueue(one.store(), "a")
        late = PostgresTestDatabase(database_url)
        late.schema = one.schema
        with pytest.raises(StoreError, match="already exists"):
            late.__enter__()
        assert len(one.store().inspect.list_jobs().jobs) == 1


def test_a_store_says_where_it_is(database_url):
    with PostgresTestDatabase(database_url) as database:
        store = database.store(crash_limit=1)
        assert (store.url, store.schema) == (database_url, database.schema)


def test_a_database_that_is_not_there_is_told(monkeypatch):
    monkeypatch.delenv("HEADGATE_TEST_PG", raising=False)
    with pytest.raises(ConfigurationError, match="set HEADGATE_TEST_PG"):
        PostgresTestDatabase()
    nobody = PostgresTestDatabase("host=127.0.0.1 port=1 connect_timeout=2")
    with pytest.raises(StoreUnavailable):
        nobody.__enter__()
    with pytest.raises(ConfigurationError, match="not entered"):
        nobody.run("clock_set", frozen_at_ms=None)
