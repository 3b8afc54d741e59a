"""A deep queue and much that is blocked cost an admission nothing.

All plans are made while the tables are empty, and nobody analyses them afterwards.
What is compared are counts of the server, not times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from attrs import frozen
from psycopg import sql
from psycopg_pool import ConnectionPool

from headgate_sync.policy import HOLD_MAX
from headgate_sync.postgres.database import Database
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.backends import SCHEMA
from tests.builders import DAY_MS, enqueue, envelope, steer
from tests.postgres.visits import (
    Visit,
    quiet_visit,
    read,
    undone,
    wait_until_alone,
)
from tests.scenarios.gate import admit, ceiling, ids, rate_class
from tests.servers import new_database

CAPACITY = 10
MOST_VISITED = 40 * CAPACITY + 512
MOST_BLOCKS = 2_000
FEW = 100
JOBS, READY = "headgate_job", "headgate_job_ready"
# What is true of the jobs that are blocked, and of the ceiling above them.
FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "class": lambda name: {"rate_class": name},
    "paused class": lambda name: {"rate_class": name},
    "oversize": lambda name: {"rate_class": name, "weight": 2},
    "ceiling": lambda name: {"partition_key": "A"},
    "queue ceiling": lambda name: {},
    "class ceiling": lambda name: {"rate_class": name},
    "quarantine": lambda name: {"fingerprint": name},
    "sticky": lambda name: {"sticky_worker": "elsewhere"},
    "paused queue": lambda name: {},
    "future": lambda name: {"delay_ms": 7 * DAY_MS},
}
CEILINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "ceiling": lambda name: {"queue": name},
    "queue ceiling": lambda name: {"queue": name, "scope": "queue"},
    "class ceiling": lambda name: {"queue": "", "rate_class": name, "scope": "class"},
}
QUARANTINE = "INSERT INTO headgate.headgate_quarantine VALUES (%s, 'k', 3, 1, '', '')"


@frozen
class Size:
    """How many rows there are of a kind."""

    finished: int
    future: int
    blocked: int


SIZES = [
    pytest.param(Size(9_000, 5_000, 2_000), id="thousands"),
    pytest.param(
        Size(900_000, 500_000, 100_000),
        id="a million",
        marks=[pytest.mark.crash, pytest.mark.xdist_group("a million deep")],
    ),
]
_COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = 'headgate.headgate_job'::regclass AND attnum > 0 AND NOT attisdropped
  AND attname <> ALL (%s)
"""
_COPY = """
INSERT INTO {table} (id, {changed}, {columns})
SELECT id || '-' || n, {values}, {columns}
FROM {table}, generate_series(1, %(count)s) AS n WHERE id = %(id)s
"""


class Deep:
    """A store with few plans, and a way to make many rows out of one."""

    def __init__(self, url: str, store: PgStore, db: Database) -> None:
        self.url = url
        self.store = store
        self.db = db

    def copy(self, id: str, count: int, **changes: Any) -> None:
        """Copy the row of a job; the gate knows its lane from the job itself."""
        names = [*changes] or ["attempt"]
        values = changes or {"attempt": 0}
        with psycopg.connect(self.url) as connection:
            connection.execute("SET session_replication_role = replica")
            rest = connection.execute(_COLUMNS, [["id", "seq", *names]]).fetchall()
            connection.execute(
                sql.SQL(_COPY).format(
                    table=sql.Identifier(SCHEMA, "headgate_job"),
                    changed=sql.SQL(", ").join(map(sql.Identifier, names)),
                    values=sql.SQL(", ").join(map(sql.Placeholder, names)),
                    columns=sql.SQL(", ").join(
                        sql.Identifier(name) for (name,) in rest
                    ),
                ),
                {**values, "count": count, "id": id},
            )

    def block(self, kind: str, count: int) -> str:
        """A queue with so many jobs that cannot run before ten that can; its name."""
        queue, store = f"{kind}-{count}", self.store
        fields = {"queue": queue, "priority": 9, **FIELDS[kind](queue)}
        if kind == "paused class":
            rate_class(store, queue, "9/1000", 9, paused=True)
        elif "rate_class" in fields and kind != "class ceiling":
            rate_class(store, queue, "0/1000", 1)
        elif kind == "paused queue":
            steer(store).set_queue_paused(queue, True)
        elif kind.endswith("ceiling"):
            ceiling(store, 1, "queue", name=queue, **CEILINGS[kind](queue))
        if kind == "class" or kind.endswith("ceiling"):
            enqueue(store, f"runs-{queue}", **fields)
            assert len(admit(store, queues=(queue,))) == 1
        enqueue(store, f"blocked-{queue}", **fields)
        if kind == "quarantine":
            with psycopg.connect(self.url) as connection:
                connection.execute(QUARANTINE, [queue])
        assert ids(admit(store, queues=(queue,))) == []
        self.copy(f"blocked-{queue}", count)
        free = "free-" + queue if kind in ("paused queue", "queue ceiling") else queue
        store.enqueue(
            [
                envelope(f"{queue}-{n}", queue=free, partition_key=str(n))
                for n in range(CAPACITY)
            ]
        )
        return queue

    def visit(self, *queues: str, **asked: Any) -> Visit:
        """What an admission from these queues reads.

        Not what earlier calls deleted, which it would have to pass over as well.
        """
        with psycopg.connect(self.url, autocommit=True) as admin:
            wait_until_alone(admin)
            admin.execute("VACUUM headgate.headgate_inbox, headgate.headgate_lane")
        with self.db.checkout() as session:
            asked = {"capacity": CAPACITY, "queues": sorted(queues), **asked}
            return quiet_visit(session.connection, **asked)


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    """How deep it is."""
    found: Size = request.param
    return found


@pytest.fixture(scope="module")
def deep(server_url: str, size: Size) -> Iterator[Deep]:
    """A queue `q` with finished jobs and jobs of next week, and nothing else."""
    with (
        new_database(server_url) as url,
        ConnectionPool(url, min_size=1, max_size=1, open=True) as pool,
    ):
        migrate_up(url, SCHEMA)
        store = PgStore(pool, heartbeat_connection=False)
        made = Deep(url, store, Database(pool, SCHEMA))
        for _ in range(6):
            admit(store)
            store.promote_due(10)
        enqueue(store, "ends", "later")
        with psycopg.connect(url) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute("DELETE FROM headgate.headgate_inbox")
        made.copy("ends", size.finished, state="completed", finalized_at_ms=1)
        week = store.inspect.store_now_ms() + 7 * DAY_MS
        made.copy("later", size.future, state="scheduled", scheduled_at_ms=week)
        yield made
        store.close()


def test_one_due_job_of_the_lowest_priority_is_found(deep: Deep) -> None:
    """Behind all that has ended and all that is due some day."""
    enqueue(deep.store, "due", priority=-(2**31))
    found = deep.visit("due", "q")
    assert "due" in found.claims
    assert found.scans[JOBS] == 0
    assert found.rows.total() <= MOST_VISITED
    assert found.blocks <= MOST_BLOCKS


def test_a_promotion_reads_what_is_due_and_no_more(deep: Deep) -> None:
    enqueue(deep.store, "soon", delay_ms=DAY_MS)
    deep.copy("soon", 20, scheduled_at_ms=1)
    with deep.db.checkout() as session, undone(session.connection):
        session.rows("promote_due", max_jobs=1_000)
    with deep.db.checkout() as session, undone(session.connection):
        rows, scans = read(session.connection)
        assert session.rows("promote_due", max_jobs=1_000) == [(20,)]
        rows_then, scans_then = read(session.connection)
    assert scans_then[JOBS] == scans[JOBS]
    assert (rows_then - rows).total() <= 20 * 20


@pytest.mark.parametrize("kind", FIELDS)
def test_what_is_blocked_costs_nothing(deep: Deep, size: Size, kind: str) -> None:
    """For each policy: no scan, the index of ready jobs, a bound that never moves."""
    few, many = deep.block(kind, FEW), deep.block(kind, size.blocked)
    found = [deep.visit(queue, f"free-{queue}") for queue in (few, many)]
    for queue, seen in zip((few, many), found, strict=True):
        assert sorted(seen.claims) == sorted(f"{queue}-{n}" for n in range(CAPACITY))
        assert seen.scans[JOBS] == 0
        assert seen.scans[READY] > 0
        assert seen.rows.total() <= MOST_VISITED + 2 * HOLD_MAX
        assert seen.blocks <= MOST_BLOCKS
    assert found[1].rows.total() <= 3 * found[0].rows.total()
    assert found[1].blocks <= 3 * found[0].blocks
    alone = deep.visit(many, f"free-{many}", capacity=1)
    assert len(alone.claims) == 1
    assert alone.rows.total() <= 500


@pytest.mark.parametrize("kind", ["class", "ceiling"])
def test_any_number_of_blocked_partitions_hides_none(
    deep: Deep, size: Size, kind: str
) -> None:
    """More lanes than a window, each of them closed by its class or its ceiling."""
    queue, store, partitions = f"wide-{kind}", deep.store, size.blocked // 20 + 300
    fields = {"queue": queue, **({"rate_class": queue} if kind == "class" else {})}

    def fill_each(name: str) -> None:
        jobs = [
            envelope(f"{queue}-{name}-{n}", partition_key=f"p{n}", **fields)
            for n in range(partitions)
        ]
        for start in range(0, partitions, 1_000):
            store.enqueue(jobs[start : start + 1_000])

    fill_each("first")
    if kind == "class":
        rate_class(store, queue, "0/1000", 1)
        assert len(admit(store, queues=(queue,))) == 1
    else:
        while admit(store, 1_000, queues=(queue,), quantum=1):
            pass
        ceiling(store, 1, "queue", name=queue, queue=queue)
    fill_each("second")
    enqueue(store, f"{queue}-free", queue=queue, partition_key="zz", scheduled_at_ms=9)
    while store.maintenance.gate_fold(10_000):
        pass
    found = deep.visit(queue)
    assert found.claims == [f"{queue}-free"]
    assert found.scans[JOBS] == 0
    assert found.rows.total() <= MOST_VISITED
