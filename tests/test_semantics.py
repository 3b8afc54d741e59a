"""The table of what is promised: it is well formed, and its tests are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headgate_sync.memory.store import MemStore
from headgate_sync.postgres.store import PgStore
from headgate_sync.semantics import SEMANTICS
from tests.semantics_page import PAGE, render

ROOT = Path(__file__).parents[1]
GUARANTEED = [row for row in SEMANTICS if row.level == "guaranteed"]
# Tests whose path alone says which store they run on.
BY_FOLDER = {
    "memory": ("tests/memory/",),
    "postgres": ("tests/postgres/", "tests/crash/"),
}
# What a store says of itself, by the row that says the same.
CAPABILITY = {
    "transactional-enqueue": "transactional",
    "effect-once": "transactional",
    "wake-up-notices": "notifying",
}


@pytest.fixture(scope="module")
def collected():
    """Every test that the named files hold, with the parameters of each."""
    files = sorted({node.split("::")[0] for row in GUARANTEED for node in row.tests})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def runs_on(node, store):
    name, _, parameters = node.partition("[")
    if name.startswith(BY_FOLDER[store]):
        return True
    return store in parameters.removesuffix("]").split("-")


def test_ids_are_unique():
    ids = [row.id for row in SEMANTICS]
    assert len(ids) == len(set(ids))


def test_what_is_guaranteed_has_tests_and_nothing_else_has():
    assert all(bool(row.tests) == (row.level == "guaranteed") for row in SEMANTICS)


def test_what_is_guaranteed_holds_on_every_store_and_what_is_not_promised_on_none():
    assert all(row.memory and row.postgres for row in GUARANTEED)
    assert not any(
        row.memory or row.postgres for row in SEMANTICS if row.level == "not_promised"
    )


@pytest.mark.parametrize("row", GUARANTEED, ids=lambda row: row.id)
def test_each_test_of_a_guarantee_exists_and_every_store_runs_one(row, collected):
    for named in row.tests:
        assert any(node.partition("[")[0] == named for node in collected), named
    nodes = [node for node in collected if node.partition("[")[0] in row.tests]
    for store in ("memory", "postgres"):
        assert any(runs_on(node, store) for node in nodes), store


def test_rows_by_store_agree_with_the_capabilities(pool, database_url):
    stores = {
        "memory": MemStore(),
        "postgres": PgStore(pool, listen=database_url),
    }
    rows = {row.id: row for row in SEMANTICS if row.level == "backend"}
    for name, store in stores.items():
        for id, capability in CAPABILITY.items():
            claimed = bool(getattr(rows[id], name))
            assert claimed == (getattr(store, capability) is not None), (id, name)
    stores["postgres"].close()


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text() == render()
