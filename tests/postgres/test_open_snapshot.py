"""What a session that looks at the database for hours costs the admissions.

It keeps the server from clearing up what others have finished. How far back that
reaches, and what an admission must therefore read again, depends on the transactions
of all databases of a server; these tests have a server of their own.
"""

from __future__ import annotations

from contextlib import ExitStack

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from tests import testschema
from tests.backends import SCHEMA
from tests.builders import envelope
from tests.postgres.visits import visit
from tests.scenarios.gate import ack_all, admit, fill
from tests.servers import SESSION_SETTINGS, new_database, own_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def database_url():
    """The conninfo of a database whose server has no other."""
    with ExitStack() as stack:
        server = stack.enter_context(own_server(**SESSION_SETTINGS))
        url = stack.enter_context(new_database(server.conninfo))
        testschema.install(url, SCHEMA)
        yield url


@pytest.fixture(scope="module")
def pool(database_url):
    with ConnectionPool(database_url, open=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def admin(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def fold(store):
    """Take in all news, as the upkeep would: it is no part of what is counted."""
    while store.maintenance.gate_fold(10_000):
        pass


def test_what_an_open_snapshot_costs_ends_with_it(store, other, admin):
    """It keeps a dead entry of each job that was claimed, and each is passed once."""
    fill(store, "A", 60)
    fill(store, "B", 60)
    ack_all(store, admit(store, 16))
    with psycopg.connect(other.info.dsn, autocommit=True) as looker:
        fold(store)
        first = visit(looker).blocks
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM headgate.headgate_job").fetchone()
        done = 0
        for turn in range(10):
            fill(store, f"A{turn}", 50, partition_key="A")
            fill(store, f"B{turn}", 50, partition_key="B")
            batch = admit(store, 100)
            ack_all(store, batch)
            done += len(batch)
        fold(store)
        under = visit(looker)
        other.rollback()
        admin.execute("VACUUM")
        after = visit(looker).blocks
    assert done == 1_000
    assert len(under.claims) == 10
    assert under.blocks <= first + 5 * done
    assert after <= 2.5 * first


def test_an_open_snapshot_does_not_make_admissions_pass_what_was_served(store, other):
    """Servings, exits and counters leave old versions behind, of which few are met."""
    for turn in range(40):
        for key in range(50):
            store.enqueue([envelope(f"{turn}-{key}", partition_key=f"p{key}")])
    fold(store)
    ack_all(store, admit(store, 10, quantum=0))
    with psycopg.connect(other.info.dsn, autocommit=True) as looker:
        first = visit(looker, capacity=10, quantum=0).blocks
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM headgate.headgate_job").fetchone()
        for _ in range(150):
            ack_all(store, admit(store, 10, quantum=0))
        under = visit(looker, capacity=10, quantum=0)
    assert len(under.claims) == 10
    assert under.blocks <= first + 350
    # 1,510 servings, of which the bound of the lanes has passed all but the latest.
    assert under.rows["headgate_lane_pick"] < 400
    # Each look begins with the newest version.
    assert under.rows["headgate_partition_pkey"] < 200
