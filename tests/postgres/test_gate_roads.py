"""Which admissions take the short road: those in which no policy can bind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from headgate_sync.policy import LEDGER_LAG
from tests.backends import PostgresBackend
from tests.builders import state_of, steer
from tests.postgres.visits import admit_rows, undone
from tests.postgres.watching import wait_until_blocked
from tests.scenarios.gate import ack_all, admit, ceiling, fill, ids, rate_class, tokens

STRATEGIES = ("queue", "discard", "cancel_incoming", "cancel_running")
_WHOLE = "SELECT pg_stat_get_xact_function_calls(%s::regproc)"


@pytest.fixture
def other(other: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """It counts the calls of functions."""
    other.execute("SET track_functions = 'pl'")
    other.commit()
    return other


def whole_decisions(connection: psycopg.Connection[Any], **asked: Any) -> int:
    """How often an admission went through the whole decision; it is undone."""
    with undone(connection):
        before = _calls(connection)
        admit_rows(connection, **asked)
        return _calls(connection) - before


def _calls(connection: psycopg.Connection[Any]) -> int:
    name = "headgate.headgate_admit_under_policies"
    row = connection.execute(_WHOLE, [name]).fetchone()
    return int((row and row[0]) or 0)


def rows(postgres: PostgresBackend, query: str) -> list[Any]:
    found: list[Any] = postgres.connection.execute(f"{query} ORDER BY 1").fetchall()
    return found


def roomy_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 12, rate_class="c")


def class_that_is_not_configured(store: Any) -> None:
    fill(store, "job", 3, rate_class="c")


def classes_of_their_own(store: Any) -> None:
    for name in "abc":
        rate_class(store, name, "10/1000", 10)
        fill(store, name, 2, rate_class=name)
    fill(store, "none", 2)


def classes_in_one_partition(store: Any) -> None:
    fill(store, "x", 1, partition_key="p", rate_class="x")
    fill(store, "y", 1, partition_key="p")


def exits_of_a_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 3, rate_class="c")
    ack_all(store, admit(store, 2))


def only_exits_of_a_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 2, rate_class="c")
    ack_all(store, admit(store, 2))


def class_that_was_used_once(store: Any) -> None:
    fill(store, "then", 1, rate_class="c")
    ack_all(store, admit(store))
    fill(store, "now", 3)


def worker_that_had_work_of_its_own(store: Any) -> None:
    fill(store, "own", 1, sticky_worker="w")
    ack_all(store, admit(store, worker="w"))
    fill(store, "job", 3)


def class_that_is_closed(store: Any) -> None:
    rate_class(store, "c", "1/1000", 1)
    fill(store, "dry", 3, rate_class="c")
    admit(store)
    fill(store, "job", 2)


def ceilings_with_room(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    ceiling(store, 30, "queue", name="all", scope="queue")
    ceiling(store, 10, "discard", name="class", scope="class", queue="", rate_class="c")
    for strategy in STRATEGIES:
        ceiling(store, 2, strategy, name=strategy, scope="partition")
    fill(store, "job", 2, rate_class="c")


SHORT: list[Callable[[Any], None]] = [
    roomy_class,
    class_that_is_not_configured,
    classes_of_their_own,
    classes_in_one_partition,
    exits_of_a_class,
    only_exits_of_a_class,
    class_that_was_used_once,
    class_that_is_closed,
    worker_that_had_work_of_its_own,
    ceilings_with_room,
]


@pytest.mark.parametrize("prepare", SHORT)
def test_where_no_policy_binds_the_road_is_short(store, other, prepare):
    prepare(store)
    assert whole_decisions(other) == 0


def dry_class(store: Any) -> None:
    rate_class(store, "c", "9/1000", 9)
    fill(store, "job", 10, rate_class="c")


def weight_above_the_burst(store: Any) -> None:
    rate_class(store, "c", "9/1000", 9)
    fill(store, "job", 1, rate_class="c", weight=10)


def full_queue(store: Any) -> None:
    ceiling(store, 9, "queue", scope="queue")
    fill(store, "job", 1)


def full_class(store: Any) -> None:
    rate_class(store, "c", "10/1000", 10)
    ceiling(store, 1, "queue", scope="class", queue="", rate_class="c")
    fill(store, "job", 2, rate_class="c")


def full_partition(store: Any) -> None:
    ceiling(store, 1, "cancel_running", scope="partition")
    fill(store, "job", 2)


def own_work(store: Any) -> None:
    fill(store, "job", 1, sticky_worker="w")


WHOLE: list[Callable[[Any], None]] = [
    dry_class,
    weight_above_the_burst,
    full_queue,
    full_class,
    full_partition,
    own_work,
]


@pytest.mark.parametrize("prepare", WHOLE)
def test_where_a_policy_may_bind_the_whole_decision_is_taken(store, other, prepare):
    prepare(store)
    assert whole_decisions(other) == 1


def test_a_paused_class_is_met_once(store, other):
    fill(store, "job", 2, rate_class="c")
    admit(store, 1)
    rate_class(store, "c", "10/1000", 10)
    steer(store).pause_rate_class("c", 1000)
    fill(store, "free", 2)
    assert whole_decisions(other) == 1
    assert len(admit(store, 1)) == 1
    assert whole_decisions(other) == 0


def test_the_short_road_leaves_a_class_that_is_held_to_the_patient_one(
    store, postgres, other
):
    rate_class(store, "c", "10/1000", 10)
    fill(store, "job", 2, rate_class="c")
    with psycopg.connect(other.info.dsn) as holder:
        holder.execute("SELECT FROM headgate.headgate_rate_class FOR NO KEY UPDATE")
        assert whole_decisions(other, lock_wait_ms=1) == 1
    assert whole_decisions(other) == 0
    assert tokens(store, "c") == 10


@pytest.mark.parametrize("has_exit", [True, False])
def test_a_class_that_is_held_for_a_moment_is_waited_for(store, other, has_exit):
    """Or those that share it with a busier queue would starve beside their own."""
    for name in "ab":
        rate_class(store, name, "1000/1", 1000)
    if has_exit:
        fill(store, "gone", 1, rate_class="b")
        ack_all(store, admit(store))
    else:
        fill(store, "b", 2, rate_class="b")
    fill(store, "a", 2, rate_class="a")
    other.execute("SET lock_timeout = '20s'")
    with (
        psycopg.connect(other.info.dsn) as holder,
        psycopg.connect(other.info.dsn, autocommit=True) as admin,
        ThreadPoolExecutor(1) as pool,
    ):
        holder.execute(
            "SELECT FROM headgate.headgate_rate_class WHERE name = 'a'"
            " FOR NO KEY UPDATE"
        )
        admitted = pool.submit(admit_rows, other, lock_wait_ms=20_000)
        wait_until_blocked(admin, holder)
        # Whoever waits holds no other: two could wait for each other.
        admin.execute(
            "SELECT FROM headgate.headgate_rate_class WHERE name = 'b'"
            " FOR NO KEY UPDATE NOWAIT"
        )
        holder.rollback()
        *claims, _ = admitted.result()
    assert {"a-1", "a-2"} <= {row["id"] for row in claims}


@pytest.mark.parametrize("others", [0, 1])
def test_a_lane_parked_for_a_claim_that_was_lost_is_found_again(store, other, others):
    capacity = 2 + others
    ceiling(store, 2, "queue", scope="partition")
    rate_class(store, "d", "0/1000", 5)
    fill(store, "spent", 1, partition_key="o", rate_class="d", weight=4)
    fill(store, "first", 1, partition_key="p", rate_class="c")
    running = admit(store, 2)
    assert len(running.claims) == 2
    fill(store, "free", others)
    for n in range(1, 18 - others):  # a window of this request holds 18 lanes
        fill(store, f"a{n:02}", 1, rate_class="d", weight=2)
    fill(store, "p", 1, priority=9)
    fill(store, "last", 1, partition_key="p", rate_class="c")
    other.execute("SELECT FROM headgate.headgate_job WHERE id = 'p-1' FOR UPDATE")
    first = admit(store, capacity)
    assert ids(first) == (["free-1"] if others else ["last-1"])
    other.rollback()
    ack_all(store, running)
    steer(store).operator_cancel("p-1")
    assert ids(admit(store, capacity)) == (["last-1"] if others else [])


@pytest.mark.parametrize("capacity", [2, 3])
def test_a_class_closed_for_a_claim_that_was_lost_is_open(store, other, capacity):
    """What the lost claim had taken is there for the next job, and nothing refills."""
    rate_class(store, "c", "0/1000", 1)
    fill(store, "job", 2, rate_class="c")
    if capacity == 3:
        fill(store, "free", 1)
    other.execute("SELECT FROM headgate.headgate_job WHERE id = 'job-1' FOR UPDATE")
    admit(store, capacity)
    other.rollback()
    steer(store).operator_cancel("job-1")
    admit(store, capacity)
    assert tokens(store, "c") == 0
    assert str(state_of(store, "job-2")) == "running"


def test_an_admission_ends_where_the_lanes_of_many_groups_are_full(store, other):
    ceiling(store, 1, "queue", scope="partition")
    fill(store, "first", 1, partition_key="p")
    assert ids(admit(store, 1)) == ["first-1"]
    for n in range(18):  # as many groups as a window holds
        fill(store, f"c{n:02}", 1, partition_key="p", rate_class=f"c{n:02}")
    other.execute("SET statement_timeout = '10s'")
    *claims, _ = admit_rows(other, capacity=1)
    assert claims == []


def test_idle_groups_do_not_make_the_road_long(store, other):
    """More than a window's spare of them are forgotten, few are looked at."""
    for n in range(18):
        fill(store, f"c{n:02}", 3 if n < 10 else 1, rate_class=f"c{n:02}")
    ack_all(store, admit(store, 18, quantum=1))
    assert whole_decisions(other, quantum=1) == 1
    ack_all(store, admit(store, 10, quantum=1))
    assert whole_decisions(other, quantum=1) == 0


def test_exits_of_a_class_that_is_held_are_not_lost(store, postgres, other):
    for name in "ab":
        rate_class(store, name, "10/1000", 10)
    fill(store, "b", 1, rate_class="b")
    ack_all(store, admit(store))
    fill(store, "a", 1, rate_class="a")
    with psycopg.connect(other.info.dsn) as holder:
        holder.execute(
            "SELECT FROM headgate.headgate_rate_class WHERE name = 'b' FOR UPDATE"
        )
        *claims, _ = admit_rows(other, lock_wait_ms=1)
        other.commit()
    assert [row["id"] for row in claims] == ["a-1"]
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(6)) == 0
    admit(store)
    assert rows(
        postgres, "SELECT name, inflight FROM headgate.headgate_rate_class"
    ) == [
        ("a", 1),
        ("b", 0),
    ]


def test_what_never_passes_is_held_behind_a_share_as_well(store, other):
    rate_class(store, "c", "9/1000", 9)
    fill(store, "light", 1, partition_key="p", rate_class="c")
    fill(store, "heavy", 1, partition_key="p", rate_class="c", weight=10)
    assert whole_decisions(other, quantum=1) == 1
    batch = admit(store, quantum=1)
    assert ids(batch) == ["light-1"]
    assert batch.refused == {"rate_class": 1}


def test_a_partition_of_two_classes_is_noisy_once(store, other):
    fill(store, "x", 6, partition_key="n", rate_class="x")
    fill(store, "y", 6, partition_key="n")
    assert len(admit(store, 4).claims) == 4
    for name in "ab":
        fill(store, name, 2)
    assert ids(admit(store, 2, quantum=1)) == ["a-1", "b-1"]
    assert whole_decisions(other, capacity=1, quantum=0) == 0
    # Least recently served, but with 4 of 6 running jobs.
    assert ids(admit(store, 1, quantum=0)) == ["a-2"]


def test_a_queue_that_was_idle_is_at_most_the_lag_behind(store, postgres, other):
    """Also where it alone has work."""
    fill(store, "then", 1)
    ack_all(store, admit(store))
    fill(store, "busy", 100, queue="busy")
    ack_all(store, admit(store, 100, queues=("busy",)))
    fill(store, "job", 1)
    asked = ["busy", "q"]
    assert whole_decisions(other, queues=asked) == 0
    assert ids(admit(store, queues=asked)) == ["job-1"]
    counters = "SELECT queue, dispatch_count, inflight FROM headgate.headgate_queue"
    assert rows(postgres, counters) == [
        ("busy", 100, 0),
        ("q", 100 - LEDGER_LAG + 1, 1),
    ]


def test_of_several_queues_one_with_lanes_takes_the_short_road(store, other):
    asked = {"queues": ["p", "q", "r"]}
    assert whole_decisions(other, **asked) == 0
    fill(store, "job", 3)
    fill(store, "later", 1, queue="r")
    assert whole_decisions(other, **asked) == 1
    ack_all(store, admit(store, queues=("r",)))
    assert whole_decisions(other, **asked) == 0
    ceiling(store, 9, "queue", scope="queue")
    assert whole_decisions(other, **asked) == 1


def test_both_roads_write_the_same(store, postgres, other):
    """A worker with work of its own takes the whole decision; somebody holds it."""
    fill(store, "own", 1, sticky_worker="w")
    postgres.connection.execute("BEGIN")
    postgres.connection.execute("SELECT FROM headgate.headgate_job FOR UPDATE")
    classes_of_their_own(store)
    classes_in_one_partition(store)
    ceilings_with_room(store)
    read = (
        "SELECT to_jsonb(t) - '{{claimed_by,inbox_from}}'::text[]"
        " FROM headgate.headgate_{} AS t"
        " WHERE to_jsonb(t) ->> 'partition_key' IS DISTINCT FROM 'own'"
        " ORDER BY to_jsonb(t)::text"
    )
    written = []
    for worker, calls in (("v", 0), ("w", 1)):
        assert whole_decisions(other, worker=worker, capacity=20) == calls
        with undone(other):
            rows = admit_rows(other, worker=worker, capacity=20)
            claims = [row["id"] for row in rows[:-1]]
            written.append(
                [claims]
                + [
                    other.execute(read.format(name)).fetchall()
                    for name in (
                        *("job", "queue", "partition", "lane", "rate_class"),
                        *("budget", "inbox"),
                    )
                ]
            )
    postgres.connection.execute("ROLLBACK")
    assert len(written[0][0]) == 12
    assert written[0] == written[1]
