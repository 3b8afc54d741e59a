"""Appended counts and the counters they are folded into."""

from __future__ import annotations

import threading

import pytest
from psycopg import sql

from headgate_sync.postgres.maintenance import (
    COUNTER_RETENTION_MS,
    PARTITION_RETENTION_MS,
)
from tests.backends import SCHEMA
from tests.builders import enqueue, steer


@pytest.fixture
def store(postgres):
    opened = postgres.make_store()
    yield opened
    opened.close()


def rows_of(admin, name):
    [[number]] = admin.execute(
        sql.SQL("SELECT count(*) FROM {}.{}").format(
            sql.Identifier(SCHEMA), sql.Identifier(name)
        )
    ).fetchall()
    return number


def test_a_fold_takes_so_many_rows_of_each_queue(store, admin):
    for number in range(5):
        enqueue(store, f"a{number}", queue="a")
        enqueue(store, f"b{number}", queue="b")
    assert rows_of(admin, "headgate_tally") == 10
    store.maintenance.gate_fold(2)
    assert rows_of(admin, "headgate_tally") == 6
    store.maintenance.gate_fold(100)
    assert rows_of(admin, "headgate_tally") == 0
    assert steer(store).unfinished("a") == steer(store).unfinished("b") == 5


def test_folds_at_one_moment_count_nothing_twice(store, admin):
    for number in range(60):
        enqueue(store, f"a{number}")
    folding = [
        threading.Thread(target=store.maintenance.gate_fold, args=(7,))
        for _ in range(12)
    ]
    for thread in folding:
        thread.start()
    for thread in folding:
        thread.join()
    store.maintenance.gate_fold(100)
    assert rows_of(admin, "headgate_tally") == 0
    assert steer(store).unfinished("q") == 60


def test_counters_of_minutes_are_dropped_when_they_are_old(postgres, store):
    enqueue(store, "a")
    store.maintenance.gate_fold(100)
    [first] = steer(store).history("q", 0)
    postgres.clock.freeze_at(first.at_ms + COUNTER_RETENTION_MS)
    enqueue(store, "b")
    store.maintenance.gate_fold(100)
    assert len(steer(store).history("q", 0)) == 2
    postgres.clock.advance_ms(60_000)
    enqueue(store, "c")
    store.maintenance.gate_fold(100)
    assert min(b.at_ms for b in steer(store).history("q", 0)) > first.at_ms


def test_counters_of_partitions_are_kept_while_they_tell_what_is_noisy(postgres, store):
    enqueue(store, "a")
    store.maintenance.gate_fold(100)
    minute = min(at for _, _, at in postgres.snapshot().minutes)
    postgres.clock.freeze_at(minute + PARTITION_RETENTION_MS)
    enqueue(store, "b")
    store.maintenance.gate_fold(100)
    assert len(postgres.snapshot().minutes) == 2
    postgres.clock.advance_ms(60_000)
    enqueue(store, "c")
    store.maintenance.gate_fold(100)
    assert min(at for _, _, at in postgres.snapshot().minutes) > minute
