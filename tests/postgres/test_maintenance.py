"""Indexes, vacuum and health, as an operator meets them."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from headgate_sync.errors import (
    ConfigurationError,
    InvalidRequest,
    StoreUnavailable,
)
from headgate_sync.postgres.maintenance import INDEXES
from headgate_sync.postgres.store import PgStore
from headgate_sync.store import CrowdedPartition
from tests.backends import SCHEMA
from tests.builders import enqueue
from tests.scenarios.gate import ack_all, admit, fill


@pytest.fixture
def maintenance(postgres):
    return postgres.make_store().maintenance


def test_the_list_names_every_secondary_index_of_jobs_and_lanes(admin):
    rows = admin.execute(
        "SELECT indexname FROM pg_indexes WHERE schemaname = %s"
        " AND (tablename LIKE 'headgate_job%%' OR tablename LIKE 'headgate_lane%%')"
        " AND indexname NOT LIKE '%%_pkey' AND indexname <> 'headgate_job_id'"
        ' ORDER BY indexname COLLATE "C"',
        [SCHEMA],
    ).fetchall()
    assert tuple(name for (name,) in rows) == INDEXES


def test_health_of_indexes_is_told_by_name(maintenance):
    found = maintenance.index_health()
    assert tuple(index.name for index in found) == INDEXES
    assert all(index.bytes > 0 for index in found)


def test_an_index_is_rebuilt_beside_writers(postgres, maintenance, admin):
    def node():
        return admin.execute(
            "SELECT relfilenode FROM pg_class WHERE relname = 'headgate_job_oldest'"
        ).fetchone()

    before = node()
    maintenance.reindex_concurrently("headgate_job_oldest")
    assert node() != before
    enqueue(postgres.open_store(), "a")


@pytest.mark.parametrize(
    "name", ["headgate_job_pkey", "pg_class", 'x"; DROP TABLE y; --', "", None]
)
def test_no_other_index_is_rebuilt(maintenance, name):
    with pytest.raises(InvalidRequest, match="is not one of"):
        maintenance.reindex_concurrently(name)


def test_vacuum_tells_of_each_table_and_skips_a_busy_one(maintenance, pool):
    assert all(table.ok for table in maintenance.vacuum())
    with pool.connection() as busy:
        busy.execute(
            sql.SQL("LOCK TABLE {}.headgate_duty IN SHARE MODE").format(
                sql.Identifier(SCHEMA)
            )
        )
        told = {table.table: table for table in maintenance.vacuum()}
        busy.rollback()
    assert not told["headgate_duty"].ok
    assert "headgate_duty" in told["headgate_duty"].error
    assert told["headgate_job"].ok


def test_an_unhealthy_store_says_why(postgres, pool, admin):
    elsewhere = PgStore(pool, "nowhere")
    with pytest.raises(ConfigurationError, match="migrate up"):
        elsewhere.health_check()
    store = postgres.make_store()
    store.health_check()
    with admin.transaction(force_rollback=True):
        pass
    gone = PgStore.connect("postgresql://nobody@127.0.0.1:1/none", pool_timeout_ms=200)
    try:
        with pytest.raises(StoreUnavailable):
            gone.health_check()
    finally:
        gone.close()


def test_sweeps_from_many_places_delete_each_job_once(postgres, admin):
    """A job that another transaction holds is left, and hides nothing behind it."""
    store = postgres.make_store()
    enqueue(store, *"abc")
    for job_id in "abc":
        store.inspect.operator_cancel(job_id)
    with psycopg.connect(postgres.pool.conninfo) as other:
        other.execute(
            sql.SQL("SELECT FROM {}.headgate_job WHERE id = 'a' FOR UPDATE").format(
                sql.Identifier(SCHEMA)
            )
        )
        assert store.inspect.delete_terminal(["cancelled"], 2**62, 2) == 2
        other.rollback()
    assert store.inspect.delete_terminal(["cancelled"], 2**62, 2) == 1


def test_partitions_of_many_rate_classes_are_found(postgres):
    """The most crowded first, for as long as the jobs wait."""
    store = postgres.make_store()
    for partition, classes in (("A", 65), ("B", 66), ("C", 64)):
        for n in range(classes):
            fill(
                store, f"{partition}{n}", 1, partition_key=partition, rate_class=f"c{n}"
            )
    while store.maintenance.gate_fold(1_000):
        pass
    widest = CrowdedPartition(queue="q", partition_key="B", classes=66)
    other = CrowdedPartition(queue="q", partition_key="A", classes=65)
    assert store.maintenance.crowded_partitions(10) == [widest, other]
    assert store.maintenance.crowded_partitions(1) == [widest]
    while batch := admit(store, 300):
        ack_all(store, batch)
    assert store.maintenance.crowded_partitions(10) == []


@pytest.mark.parametrize("limit", [0, "10", None])
def test_a_limit_of_partitions_is_checked(maintenance, limit):
    with pytest.raises(InvalidRequest, match="limit"):
        maintenance.crowded_partitions(limit)
