"""What an enqueue costs: index look-ups whatever the statistics, few prepared plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import psycopg
import pytest

from headgate_sync.envelope import MAX_INT32, UNIQUE_REPLACE_ALL
from headgate_sync.errors import DuplicateJob, IdConflict
from headgate_sync.lifecycle import UNFINISHED, Event, State, sources_of
from headgate_sync.postgres import migrations
from headgate_sync.postgres.sql import Statements, statement_source
from headgate_sync.postgres.store import PgStore
from tests.builders import enqueue, envelope, envelopes, steer
from tests.concurrency.threads import outcome_of

# What the driver keeps of a statement between two calls (psycopg/_queries.py).
CACHED_BYTES = 4096
CACHED_PARAMETERS = 50


@pytest.fixture
def store(postgres) -> PgStore:
    return postgres.open_store()


@pytest.fixture
def caller(database_url) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


def requests() -> Iterator[list[Any]]:
    """One batch for every way through the functions."""
    yield [envelope("one")]
    yield [envelope("one")]
    yield [envelope("key", unique_key=b"k", tags=("a", "b"))]
    yield [envelope("duplicate", unique_key=b"k")]
    yield [envelope("later", unique_key=b"k", unique_replace=UNIQUE_REPLACE_ALL)]
    yield [envelope("moved", unique_key=b"k", unique_debounce_ms=5, tags=("c",))]
    yield [envelope("window", unique_key=b"k", unique_window_ms=5)]
    yield [envelope("again", unique_key=b"k", unique_window_ms=5)]
    yield [*envelopes("one", "x", "y"), envelope("z", unique_key=b"z", tags=("t",))]
    yield envelopes(*[f"b{n:02}" for n in range(50)])
    yield envelopes(*[f"b{n:02}" for n in range(51)])
    yield [envelope(f"n{n}", unique_key=b"%d" % n) for n in range(50)]
    yield [
        envelope(f"w{n}", unique_key=b"%d" % n, unique_window_ms=9) for n in range(9)
    ]


@pytest.mark.parametrize("is_analysed", [True, False])
def test_no_table_is_scanned_whatever_the_statistics_say(
    store, analyse, caller, is_analysed
):
    """A plan made while a table held three rows is kept when it holds a million."""
    enqueue(store, "a", unique_key=b"a", tags=("t",))
    enqueue(store, "b", unique_key=b"b", unique_window_ms=5)
    steer(store).set_enqueue_limit("q", 10_000)
    if is_analysed:
        analyse()
    for batch in requests():
        tx = store.transactional.join(caller)
        outcome_of(
            lambda tx=tx, batch=batch: store.transactional.enqueue_tx(tx, batch),
            DuplicateJob,
        )
    caller.execute("SET CONSTRAINTS ALL IMMEDIATE")
    scans = {
        table: (whole, by_index)
        for table, whole, by_index in caller.execute(
            "SELECT relname, seq_scan, idx_scan FROM pg_stat_xact_user_tables"
            " WHERE schemaname = 'headgate'"
        )
    }
    scans.pop("headgate_test_clock", None)
    assert [table for table, (whole, _) in scans.items() if whole] == []
    # The calls did look: 237 times on 15, 78 from 17 on, where a list counts once.
    assert scans["headgate_job"][1] > 50
    assert scans["headgate_sleeper"][1] > 0


def test_the_driver_keeps_the_statements():
    for name in ("enqueue", "enqueue_alike", "enqueue_one", "enqueue_plain"):
        assert len(Statements("x" * 63)[name]) <= CACHED_BYTES
        placeholders = set(re.findall(r"%\((\w+)\)", statement_source(name)))
        assert len(placeholders) <= CACHED_PARAMETERS


def test_numbers_of_any_width_share_one_prepared_statement(store, caller):
    """The driver picks the type of an integer by its value."""
    caller.prepare_threshold = 0
    tx = store.transactional.join(caller)
    for n, number in enumerate((0, 1, 40_000, MAX_INT32)):
        for far in (0, 5, 10**12):
            store.transactional.enqueue_tx(
                tx,
                [
                    envelope(
                        f"{n}-{far}",
                        weight=number,
                        priority=-number,
                        scheduled_at_ms=far,
                        deadline_ms=far,
                        timeout_ms=number,
                        schema_version=number,
                    )
                ],
            )
    (found,) = caller.execute(
        "SELECT count(*) FROM pg_prepared_statements"
        " WHERE statement ~ '^-- Take in one'"
    ).fetchone()
    assert found == 1


def test_columns_that_are_equal_and_columns_that_differ_are_stored_alike(store, admin):
    """A column whose values are all equal travels as one value."""
    fields = {
        "kind": ["a", "b", "c"],
        "schema_version": [1, 2, 3],
        "payload": [b"", b"x", b"\0\xff"],
        "queue": ["q", "p", "ü"],
        "partition_key": ["", "x", "y"],
        "rate_class": ["", "x", "y"],
        "weight": [1, 2, 3],
        "priority": [0, -5, 5],
        "max_attempts": [1, 2, 3],
        "scheduled_at_ms": [1, 2, 10**13],
        "timeout_ms": [0, 1, 10**10],
        "deadline_ms": [0, 1, 10**13],
        "retention_ms": [0, 1, 10**10],
        "unique_key": [None, b"", b"x"],
        "unique_states": [0, 1, -1],
        "headers": [{}, {"a": "b"}, {"ü": '"'}],
        "tags": [(), ("a",), ("a", "b")],
        "sticky_worker": ["", "w", "v"],
    }
    columns = ", ".join(name for name in fields if name != "tags")
    for name, values in fields.items():
        batch = [
            envelope(f"{name}-{n}", **{name: value}) for n, value in enumerate(values)
        ]
        store.enqueue(batch)
        for one in batch:
            row = admin.execute(
                f"SELECT {columns}, ARRAY(SELECT tag FROM headgate.headgate_job_tag"
                " WHERE job_seq = seq ORDER BY tag)"
                " FROM headgate.headgate_job WHERE id = %s",
                [one.id],
            ).fetchone()
            stored = dict(zip([*columns.split(", "), "tags"], row, strict=True))
            wanted = {n: getattr(one, n) for n in fields}
            wanted["unique_key"] = one.effective_unique_key
            wanted["headers"] = dict(one.headers)
            wanted["tags"] = list(one.tags)
            assert stored == wanted, name


def test_every_road_stores_a_job_of_defaults_alike(store, admin, caller):
    """The shortest one writes the defaults out instead of taking them as arguments."""
    bare = {"kind": "k", "payload": b"p", "retention_ms": 0, "scheduled_at_ms": 0}
    store.enqueue([envelope("plain", **bare)])
    store.enqueue([envelope("one", **bare, tags=("t",))])
    store.enqueue(envelopes("a", "b", **bare))
    store.enqueue(envelopes("d", "c", **bare))
    own = {"seq", "id", "enqueued_at_ms", "scheduled_at_ms"}
    stored = [
        {name: value for name, value in row.items() if name not in own}
        for (row,) in admin.execute(
            "SELECT to_jsonb(job) FROM headgate.headgate_job AS job"
        )
    ]
    assert len(stored) == 6
    assert all(row == stored[0] for row in stored)
    for table, columns in {
        "inbox": "kind, queue, partition_key, rate_class, sticky_worker, lane_key",
        "tally": "queue, partition_key, minute_at_ms, completed",
    }.items():
        rows = admin.execute(
            f"SELECT DISTINCT {columns} FROM headgate.headgate_{table}"
        ).fetchall()
        assert len(rows) == 1, table
    assert steer(store).unfinished("q") == 6


@pytest.mark.parametrize(
    "shared",
    [
        {"schema_version": 2, "rate_class": "c", "sticky_worker": "w", "weight": 3},
        {"priority": -4, "max_attempts": 7, "timeout_ms": 8, "deadline_ms": 10**13},
        {"delay_ms": 60_000, "deadline_in_ms": 90_000},
        {"scheduled_at_ms": 10**13, "retention_ms": 5, "headers": {"a": "ü"}},
    ],
)
def test_the_quick_road_of_batches_stores_what_the_long_one_stores(
    store, admin, shared
):
    """Ids that descend take the long one."""
    lanes = [("q", "x"), ("p", "x"), ("q", "y"), ("q", "x")]
    batch = [
        envelope(f"{n}", queue=queue, partition_key=key, payload=b"%d" % n, **shared)
        for n, (queue, key) in enumerate(lanes)
    ]
    answers = []
    for jobs in (batch, batch[::-1]):
        store.enqueue(jobs)
        answers.append(
            [
                admin.execute(
                    f"WITH gone AS (DELETE FROM headgate.headgate_{table} RETURNING *)"
                    f" SELECT to_jsonb(gone) - %s::text[] FROM gone ORDER BY {order}",
                    [["seq", "ev", "entry", "xid"]],
                ).fetchall()
                for table, order in {
                    "job": "id",
                    "inbox": "queue, partition_key, kind",
                    "tally": "queue, partition_key",
                }.items()
            ]
        )
    assert answers[0] == answers[1]
    assert [len(rows) for rows in answers[0]][::2] == [4, 3]


@pytest.mark.parametrize("road", ["alone", "in a batch"])
def test_a_taken_id_on_the_shortest_road_is_judged_by_its_content(store, road):
    others = envelopes("x", "y") if road == "in a batch" else []
    store.enqueue([envelope("a", kind="k")])
    store.enqueue([envelope("a", kind="k"), *others])
    with pytest.raises(IdConflict, match="a"):
        store.enqueue([envelope("a", kind="other"), *others])
    assert steer(store).unfinished("q") == 1 + len(others)


def test_states_in_the_functions_are_those_of_the_table():
    source = resources.files(migrations).joinpath("0003_intake.up.sql").read_text()
    lists = {
        frozenset(re.findall(r"'(\w+)'", inside))
        for inside in re.findall(r"state (?:NOT )?IN \(([^)]*)\)", source)
    }
    changeable = sources_of(Event.DEBOUNCED)
    assert lists == {
        frozenset(UNFINISHED),
        frozenset(changeable),
        frozenset(UNFINISHED) - frozenset(changeable),
    }
    named = set(re.findall(r"'(\w+)'", source)) & {state.value for state in State}
    assert named == {state.value for state in UNFINISHED}
