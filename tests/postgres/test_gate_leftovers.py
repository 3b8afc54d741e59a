"""What admissions leave behind: a version of a policy row each at most, and no debris.

A session that looks at the database for hours keeps the server from clearing up what
others have finished; an admission may read some of it, but must not drown in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.backends import PostgresBackend
from tests.postgres.visits import admit_rows, undone, visit
from tests.scenarios.gate import ack_all, admit, ceiling, fill, rate_class

POLICY_TABLES = (
    *("queue", "partition", "lane", "lane_group", "rate_class", "budget", "ceiling"),
    *("quarantine", "sleeper"),
)
_WRITTEN = """
SELECT relname, n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables
WHERE schemaname = 'headgate'
"""


@pytest.fixture
def store(postgres: PostgresBackend) -> Any:
    return postgres.make_store()


@pytest.fixture
def other(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of somebody else, in a transaction that ends with the test."""
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


def written(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """Row versions that the transaction has written so far, by table."""
    return dict(connection.execute(_WRITTEN).fetchall())


@pytest.mark.parametrize("capacity", [1, 8, 64])
def test_an_admission_writes_each_policy_row_once(store, postgres, other, capacity):
    """However many jobs it claims, of however many acks it hears.

    A partition may be written twice: for the exits it hears of, and for its decisions.
    """
    rate_class(store, "c", "100/1000", 1_000)
    ceiling(store, 200, "queue")
    ceiling(store, 300, "queue", name="whole", scope="queue")
    for name in "ABC":
        fill(store, name, 80, rate_class="c")
    for _ in range(3):
        ack_all(store, admit(store, 16))
    rows = {
        name: postgres.connection.execute(
            f"SELECT count(*) FROM headgate.headgate_{name}"
        ).fetchone()[0]
        for name in POLICY_TABLES
    }
    with undone(other):
        before = written(other)
        assert len(admit_rows(other, capacity=capacity)) == capacity + 1
        after = written(other)
    for name in POLICY_TABLES:
        table = f"headgate_{name}"
        most = rows[name] * (2 if name == "partition" else 1)
        assert after[table] - before[table] <= most, table
    assert after["headgate_job"] - before["headgate_job"] == capacity


def test_what_an_open_snapshot_costs_ends_with_it(store, other, admin):
    """It keeps a dead entry of each job that was claimed, and each is passed once."""
    fill(store, "A", 60)
    fill(store, "B", 60)
    ack_all(store, admit(store, 16))
    with psycopg.connect(other.info.dsn, autocommit=True) as looker:
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
        under = visit(looker)
        other.rollback()
        for name in ("job", "inbox", *POLICY_TABLES):
            admin.execute(f"VACUUM headgate.headgate_{name}")
        after = visit(looker).blocks
    assert done == 1_000
    assert len(under.claims) == 10
    assert under.blocks <= first + 5 * done
    assert after <= 2.5 * first
