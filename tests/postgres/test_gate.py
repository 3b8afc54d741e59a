"""The gate in the database: its locks, its upkeep and what it leaves alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from headgate_sync.lease import SentAway
from headgate_sync.policy import FOLD_MAX, GATE_CONSTANTS, LOCK_WAIT_MS
from tests.backends import PostgresBackend
from tests.builders import DAY_MS, START_MS, counts, enqueue, envelope, steer
from tests.postgres.visits import admit_rows, quiet_visit
from tests.scenarios.gate import (
    ack_all,
    admit,
    ceiling,
    fill,
    ids,
    inflight,
    rate_class,
    served,
    tokens,
)

POLICY_TABLES = (
    "queue",
    "partition",
    "lane",
    "lane_group",
    "rate_class",
    "budget",
    "ceiling",
    "quarantine",
    "inbox",
    "sleeper",
)


def versions(postgres: PostgresBackend) -> dict[str, list[Any]]:
    """Every row version of the gate's tables."""
    return {
        name: postgres.connection.execute(
            f"SELECT ctid, xmin, t.* FROM headgate.headgate_{name} AS t ORDER BY 1"
        ).fetchall()
        for name in POLICY_TABLES
    }


# What an admission leaves alone


def test_the_second_of_two_empty_polls_writes_nothing(store, postgres):
    rate_class(store, "c", "0/1000", 1)
    ceiling(store, 1, "queue")
    fill(store, "dry", 3, rate_class="c")
    fill(store, "full", 3)
    fill(store, "gone", 1)
    admit(store)
    steer(store).operator_cancel("gone-1")
    admit(store)
    before = versions(postgres)
    assert ids(admit(store)) == []
    assert versions(postgres) == before


def test_a_poll_of_an_unknown_queue_makes_no_queue(store, postgres):
    admit(store, queues=("nowhere",))
    assert postgres.snapshot().queues == {}


def test_refused_rows_are_not_locked_while_the_admission_is_open(
    store, postgres, other
):
    fill(store, "bomb", 3, partition_key="p", fingerprint="fp")
    fill(store, "good", 3, partition_key="p")
    postgres.connection.execute(
        "INSERT INTO headgate.headgate_quarantine VALUES ('fp', 'k', 3, 1, '', 'test')"
    )
    claimed = admit_rows(other)[:-1]
    assert len(claimed) == 3
    free = postgres.connection.execute(
        "SELECT id FROM headgate.headgate_job ORDER BY seq FOR UPDATE SKIP LOCKED"
    ).fetchall()
    assert [id for (id,) in free] == ["bomb-1", "bomb-2", "bomb-3"]


def test_a_release_between_an_admission_and_its_marks_wins(store, postgres, other):
    fill(store, "bomb", 2, fingerprint="fp")
    postgres.connection.execute(
        "INSERT INTO headgate.headgate_quarantine VALUES ('fp', 'k', 3, 1, '', 'test')"
    )
    facts = admit_rows(other)[-1]
    other.commit()
    passed_over = facts["passed_over"]
    assert len(passed_over) == 2
    assert steer(store).quarantine_release("fp") == 0
    mark = "SELECT headgate.headgate_mark_holds(%s, %s)"
    assert other.execute(mark, [passed_over, LOCK_WAIT_MS]).fetchone() == (0,)
    other.commit()
    assert ids(admit(store)) == ["bomb-1", "bomb-2"]


def test_work_announced_behind_many_other_rows_is_found_in_the_same_call(
    store, postgres
):
    postgres.connection.execute(
        "INSERT INTO headgate.headgate_inbox (queue, kind, rate_class)"
        " SELECT 'q', 'o', 'unknown' FROM generate_series(1, %s)",
        [3 * GATE_CONSTANTS["fold_max"]],
    )
    fill(store, "job", 1)
    assert ids(admit(store)) == ["job-1"]


def test_a_candidate_that_changed_after_it_was_read_is_left_to_a_later_call(
    store, postgres, other
):
    fill(store, "job", 3, partition_key="p")
    other.execute(
        "SELECT FROM headgate.headgate_job WHERE id = 'job-2' FOR UPDATE"
    ).fetchall()
    assert ids(admit(store, 10)) == ["job-1", "job-3"]
    assert inflight(postgres, "p") == 2
    assert postgres.snapshot().queues["q"][2] == 2
    other.rollback()
    assert ids(admit(store, 10)) == ["job-2"]


def test_nobody_is_displaced_for_a_candidate_that_somebody_holds(store, other):
    ceiling(store, 1, "cancel_running")
    fill(store, "A", 1)
    admit(store)
    fill(store, "new", 1, partition_key="A")
    other.execute(
        "SELECT FROM headgate.headgate_job WHERE id = 'new-1' FOR UPDATE"
    ).fetchall()
    assert ids(admit(store)) == []
    assert counts(store) == {"running": 1, "available": 1}
    other.rollback()
    assert ids(admit(store)) == ["new-1"]
    assert counts(store) == {"cancelled": 1, "running": 1}


def test_a_running_job_that_somebody_holds_is_not_displaced(store, postgres, other):
    """It may be ending. The next oldest makes room, or nobody does."""
    ceiling(store, 2, "cancel_running")
    for name in ("A-1", "A-2"):
        store.enqueue([envelope(name, partition_key="A")])
        assert ids(admit(store)) == [name]
        postgres.clock.advance_ms(1)
    fill(store, "new", 2, partition_key="A")
    hold = "SELECT FROM headgate.headgate_job WHERE id = %s FOR UPDATE"
    with psycopg.connect(other.info.dsn, autocommit=True) as admitter:
        admitter.execute("SET lock_timeout = '2s'")
        other.execute(hold, ["A-1"]).fetchall()
        claimed = admit_rows(admitter, capacity=1)[:-1]
        assert [row["id"] for row in claimed] == ["new-1"]
        other.execute(hold, ["new-1"]).fetchall()
        assert admit_rows(admitter, capacity=1)[:-1] == []
    assert counts(store) == {"running": 2, "cancelled": 1, "available": 1}
    other.rollback()
    assert ids(admit(store, 1)) == ["new-2"]


def test_only_what_was_really_sent_away_is_told(store, other):
    ceiling(store, 1, "discard")
    fill(store, "job", 4, partition_key="p")
    other.execute(
        "SELECT FROM headgate.headgate_job WHERE id = 'job-3' FOR UPDATE"
    ).fetchall()
    first = admit(store, 10)
    assert (ids(first), first.sent_away) == (["job-1"], (SentAway("q", "discard", 2),))
    other.rollback()
    second = admit(store, 10)
    assert (ids(second), second.sent_away) == ([], (SentAway("q", "discard", 1),))


def test_a_locked_candidate_costs_its_class_nothing(store, postgres, other):
    rate_class(store, "c", "0/1000", 5)
    fill(store, "job", 3, rate_class="c", partition_key="p")
    other.execute(
        "SELECT FROM headgate.headgate_job WHERE id = 'job-2' FOR UPDATE"
    ).fetchall()
    assert len(admit(store)) == 2
    assert tokens(store, "c") == 3
    assert inflight(postgres, "p") == 2
    assert postgres.snapshot().queues["q"][2] == 2
    other.rollback()
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 0


@pytest.mark.parametrize("policy", ["none", "a ceiling", "a class"])
@pytest.mark.parametrize("apart", [True, False])
def test_locked_heads_hold_up_nothing_behind_them(
    store, postgres, other, policy, apart
):
    """Whoever replaces a job in a long transaction holds up no small admission."""
    if policy == "a ceiling":
        ceiling(store, 1, "discard", scope="queue")
    if policy == "a class":
        rate_class(store, "c", "0/1000", 2)
    fields = {"rate_class": "c"} if policy == "a class" else {}
    for n in range(1, 6):
        fill(store, f"job{n}", 1, partition_key=f"p{n * apart}", **fields)
    other.execute(
        "SELECT FROM headgate.headgate_job WHERE id < 'job4' FOR UPDATE"
    ).fetchall()
    batch = admit(store, 1, quantum=0)
    assert ids(batch) == ["job4-1"]
    assert postgres.snapshot().queues["q"][2] == 1
    other.rollback()
    ack_all(store, batch)
    assert ids(admit(store, 1, quantum=0)) == ["job1-1"]
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 0


def test_a_queue_of_which_all_is_locked_loses_nothing(store, postgres, other):
    fill(store, "job", 40)
    other.execute("SELECT FROM headgate.headgate_job FOR UPDATE").fetchall()
    assert ids(admit(store, 1, quantum=0)) == []
    assert inflight(postgres, "job") == 0
    other.rollback()
    assert len(admit(store, 100)) == 40
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 0


def test_lanes_that_share_a_key_by_accident_do_not_mix(store, postgres):
    """The key is a hash; the four names decide."""
    fill(store, "A", 2)
    fill(store, "B", 2)
    with postgres.connection.transaction():
        # Not even the tests' own audit lets a key change.
        postgres.connection.execute("SET LOCAL session_replication_role = replica")
        postgres.connection.execute("UPDATE headgate.headgate_job SET lane_key = 7")
        postgres.connection.execute("UPDATE headgate.headgate_inbox SET lane_key = 7")
    assert served(admit(store, 10, quantum=1)) == {"A": 1, "B": 1}
    assert served(admit(store, 10, quantum=1)) == {"A": 1, "B": 1}


# Cost


@pytest.fixture
def analyse_at(
    store: Any, postgres: PostgresBackend, analyse: Callable[[], object]
) -> Callable[[str], None]:
    """Let the statistics tell of another time than now: that of another load."""

    def at(when: str) -> None:
        load_as(store, when)
        analyse()
        postgres.reset()

    return at


def load_as(store: Any, when: str) -> None:
    """Fill the store as at that time."""
    lanes, jobs, is_done = {
        "empty": (0, 0, False),
        "one job waited": (1, 1, False),
        "one lane waited": (1, 3_000, False),
        "many lanes waited": (500, 3_000, False),
        "many lanes were done": (300, 3_000, True),
    }[when]
    for lane in range(lanes):
        fill(store, f"then-{lane}", jobs // lanes, partition_key=f"then-{lane}")
    while is_done and (claimed := admit(store, 100)):
        ack_all(store, claimed)


@pytest.mark.parametrize(
    "analysed_when",
    [
        *("never", "empty", "one job waited", "one lane waited"),
        *("many lanes waited", "many lanes were done"),
    ],
)
@pytest.mark.parametrize("partitions", [1, 30])
def test_the_rows_read_do_not_grow_with_the_backlog(
    store, other, partitions, analyse_at, analysed_when
):
    """Plans are made and kept while the statistics say whatever they say."""
    if analysed_when != "never":
        analyse_at(analysed_when)
    for queue in ("q", "nowhere"):
        admit_rows(other, queues=[queue])
    other.rollback()
    counted = []
    for size in (300, 3000):
        for name in range(partitions):
            fill(store, f"p{name}-{size}", size // partitions, partition_key=f"p{name}")
        ack_all(store, admit(store, 1))
        found = quiet_visit(other)
        assert len(found.claims) == 10
        counted.append(found.rows)
    assert max(map(Counter.total, counted)) <= 40 * 10 + 512, counted
    # Thirty times the backlog: a deeper index costs a few more visits, no multiple, and
    # the entries of what was folded before may be passed over.
    assert counted[1].total() <= 1.5 * counted[0].total() + FOLD_MAX, counted


@pytest.mark.parametrize(
    "analysed_when", ["never", "one job waited", "many lanes were done"]
)
def test_the_rows_read_do_not_grow_with_what_is_blocked(
    store, other, analyse_at, analysed_when
):
    if analysed_when != "never":
        analyse_at(analysed_when)
    rate_class(store, "dry", "0/1000", 1)
    ceiling(store, 1, "queue")
    fill(store, "spends", 1, rate_class="dry")
    for name in range(40):
        fill(store, f"full-{name}", 2)
    while admit(store, 50):
        pass
    counted = []
    for size in (2, 60):
        for name in range(40):
            fill(store, f"dry-{name}-{size}", size, rate_class="dry", partition_key="d")
            fill(store, f"more-{name}-{size}", size, partition_key=f"full-{name}")
        for name in range(20):
            fill(store, f"free-{name}-{size}", 1)
        assert len(admit(store, 10)) == 10
        found = quiet_visit(other)
        assert len(found.claims) == 10
        counted.append(found.rows)
    assert max(map(Counter.total, counted)) <= 40 * 10 + 512, counted
    # Thirty times the backlog: a deeper index costs a few more visits, no multiple, and
    # the entries of what was folded before may be passed over.
    assert counted[1].total() <= 1.5 * counted[0].total() + FOLD_MAX, counted


# Locks


def test_a_busy_queue_is_answered_in_time_and_says_when_to_come_back(store, other):
    fill(store, "job", 1)
    other.execute("SELECT headgate.headgate_lock_queues(ARRAY['q'])")
    started = time.monotonic()
    batch = admit(store)
    assert time.monotonic() - started < 5
    assert ids(batch) == []
    assert 1 <= batch.retry_after_ms <= GATE_CONSTANTS["busy_ms"]
    other.rollback()
    assert ids(admit(store)) == ["job-1"]


def test_a_class_that_somebody_holds_does_not_stop_the_others(store, other):
    rate_class(store, "held", "100/1000", 100)
    rate_class(store, "free", "100/1000", 100)
    fill(store, "h", 2, rate_class="held")
    fill(store, "f", 2, rate_class="free")
    fill(store, "plain", 2)
    first = admit(store, 1)
    assert ids(first) == ["h-1"]
    ack_all(store, first)
    other.execute(
        "SELECT FROM headgate.headgate_rate_class WHERE name = 'held' FOR UPDATE"
    ).fetchall()
    batch = admit(store)
    assert served(batch) == {"f": 2, "plain": 2}
    assert batch.retry_after_ms is not None
    assert 1 <= batch.retry_after_ms <= GATE_CONSTANTS["busy_ms"]
    other.rollback()
    assert ids(admit(store)) == ["h-2"]
    running = other.execute(
        "SELECT inflight FROM headgate.headgate_rate_class WHERE name = 'held'"
    ).fetchone()
    assert running == (1,)


def test_an_open_enqueue_delays_nobody(store):
    with store.transactional.transaction() as tx:
        store.transactional.enqueue_tx(tx, [envelope("open")])
        fill(store, "job", 3)
        assert ids(admit(store)) == ["job-1", "job-2", "job-3"]
    assert ids(admit(store)) == ["open"]


def test_queues_in_any_order_do_not_deadlock(store):
    names = ("qa", "qb", "qc", "qd")
    for name in names:
        fill(store, name, 60, queue=name)

    def run(turn: int) -> int:
        order = names[turn % 4 :] + names[: turn % 4]
        batch = admit(store, 3, queues=order[: 2 + turn % 3], worker=f"w{turn}")
        ack_all(store, batch)
        return len(batch)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(run, range(40))) > 0
    while rest := admit(store, 50, queues=names):
        ack_all(store, rest)
    assert counts(store) == {"completed": 240}


# Upkeep


def test_rows_of_a_paused_queue_are_folded(store, postgres):
    fill(store, "job", 4)
    batch = admit(store)
    steer(store).set_queue_paused("q", True)
    ack_all(store, batch)
    assert store.maintenance.gate_fold(100) > 0
    stored = postgres.connection.execute(
        "SELECT queue.inflight, part.inflight, (SELECT count(*) FROM"
        " headgate.headgate_inbox) FROM headgate.headgate_queue AS queue,"
        " headgate.headgate_partition AS part"
    ).fetchone()
    assert stored == (0, 0, 0)


def test_a_full_partition_opens_again_when_the_upkeep_hears_of_an_exit(store):
    ceiling(store, 1, "queue")
    fill(store, "A", 2)
    first = admit(store)
    assert ids(admit(store)) == []
    ack_all(store, first)
    assert store.maintenance.gate_fold(100) > 0
    assert ids(admit(store)) == ["A-2"]


def test_an_exit_that_the_upkeep_hears_of_frees_a_class_that_somebody_holds(
    store, other
):
    ceiling(store, 1, "queue", queue="", scope="class", rate_class="c")
    fill(store, "A", 2, rate_class="c")
    first = admit(store)
    assert ids(first) == ["A-1"]
    ack_all(store, first)
    other.execute("SELECT FROM headgate.headgate_rate_class FOR UPDATE").fetchall()
    assert store.maintenance.gate_fold(100) > 0
    other.rollback()
    assert ids(admit(store)) == ["A-2"]
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 0


@pytest.mark.parametrize("forced", [999, 0])
def test_a_wrong_counter_is_put_right(store, postgres, forced):
    ceiling(store, 3, "queue")
    fill(store, "A", 9)
    ack_all(store, admit(store), only=["A-1"])
    postgres.connection.execute(
        "UPDATE headgate.headgate_partition SET inflight = %s", [forced]
    )
    postgres.connection.execute(
        "UPDATE headgate.headgate_queue SET inflight = %s", [forced]
    )
    if forced:
        assert ids(admit(store)) == []
    corrected = sum(store.maintenance.gate_reconcile(100) for _ in range(2))
    assert corrected >= 2
    assert inflight(postgres, "A") == 2
    assert ids(admit(store)) == ["A-4"]
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(4)) == 0


def test_a_wrong_counter_of_a_class_is_put_right(store, postgres):
    rate_class(store, "c", "100/1000", 100)
    fill(store, "A", 3, rate_class="c")
    admit(store)
    postgres.connection.execute("UPDATE headgate.headgate_rate_class SET inflight = 9")
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 1
    stored = postgres.connection.execute(
        "SELECT inflight FROM headgate.headgate_rate_class"
    ).fetchone()
    assert stored == (3,)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE headgate.headgate_lane SET active = false",
        "UPDATE headgate.headgate_lane SET parked = true",
        (
            "UPDATE headgate.headgate_lane SET parked = true;"
            " UPDATE headgate.headgate_lane_group"
            " SET head_round = NULL, head_partition = NULL"
        ),
        "DELETE FROM headgate.headgate_lane",
        "DELETE FROM headgate.headgate_lane_group",
        (
            "UPDATE headgate.headgate_lane_group"
            " SET head_round = NULL, head_partition = NULL"
        ),
        "UPDATE headgate.headgate_lane_group SET head_round = 99",
    ],
)
def test_work_that_the_gate_lost_sight_of_is_found_again(store, postgres, damage):
    fill(store, "A", 2)
    assert ids(admit(store, 1)) == ["A-1"]
    postgres.connection.execute(damage)
    assert ids(admit(store)) == []
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(4)) == 1
    assert ids(admit(store)) == ["A-2"]


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_every_queue_is_reconciled_however_many_partitions_it_has(
    store, postgres, partitions
):
    """Also where the last slice is a full one."""
    for name in range(partitions):
        fill(store, f"p{name}", 2)
    admit(store, partitions, quantum=1)
    postgres.connection.execute("UPDATE headgate.headgate_queue SET inflight = 9")
    assert sum(store.maintenance.gate_reconcile(2) for _ in range(4)) == 1
    assert postgres.connection.execute(
        "SELECT inflight FROM headgate.headgate_queue"
    ).fetchone() == (partitions,)


def test_a_mark_without_its_reason_is_cleared(store, postgres):
    fill(store, "A", 2)
    postgres.connection.execute(
        "UPDATE headgate.headgate_job SET gate_hold = 'quarantine' WHERE id = 'A-1'"
    )
    assert ids(admit(store)) == ["A-2"]
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 1
    assert ids(admit(store)) == ["A-1"]


def test_partitions_without_work_are_dropped_after_a_day(store, postgres):
    for name in range(5):
        fill(store, f"user-{name}", 1)
    fill(store, "kept", 2)
    ack_all(store, admit(store, 6))

    def look() -> list[str]:
        for _ in range(3):
            store.maintenance.gate_fold(100)
            assert store.maintenance.gate_reconcile(100) == 0
        rows = postgres.connection.execute(
            "SELECT partition_key FROM headgate.headgate_partition ORDER BY 1"
        )
        return [name for (name,) in rows]

    assert len(look()) == 6
    postgres.clock.freeze_at(START_MS + DAY_MS - 1)
    assert len(look()) == 6
    postgres.clock.freeze_at(START_MS + DAY_MS)
    assert look() == ["kept"]
    fill(store, "again", 1, partition_key="user-0")
    assert sorted(ids(admit(store))) == ["again-1", "kept-2"]


def test_partitions_that_wait_or_have_something_of_their_own_are_not_dropped(
    store, postgres
):
    fill(store, "waits", 1, sticky_worker="elsewhere")
    fill(store, "runs", 1)
    assert ids(admit(store)) == ["runs-1"]
    fill(store, "first", 1)
    fill(store, "saved", 1, scheduled_at_ms=2)
    ack_all(store, admit(store, 1, quantum=1))
    steer(store).operator_cancel("saved-1")
    steer(store).set_partition_quantum("q", "agreed", 5)
    for _ in range(2):
        while store.maintenance.gate_fold(100):
            pass
        assert sum(store.maintenance.gate_reconcile(100) for _ in range(3)) == 0
        postgres.clock.advance_ms(DAY_MS)
    rows = postgres.connection.execute(
        "SELECT partition_key FROM headgate.headgate_partition"
    )
    assert {name for (name,) in rows} == {"waits", "runs", "saved", "agreed"}
    assert ids(admit(store, worker="elsewhere")) == ["waits-1"]


def test_lanes_and_groups_of_dropped_partitions_go_with_them(store, postgres):
    for number in range(3):
        fill(store, f"user-{number}", 1, rate_class=f"class-{number}")
    ack_all(store, admit(store))

    def look() -> list[Any]:
        for _ in range(3):
            store.maintenance.gate_fold(100)
            assert store.maintenance.gate_reconcile(100) == 0
        return [
            postgres.connection.execute(
                f"SELECT count(*) FROM headgate.headgate_{table}"
            ).fetchone()[0]
            for table in ("partition", "lane", "lane_group")
        ]

    assert look()[:2] == [3, 3]
    postgres.clock.freeze_at(START_MS + DAY_MS)
    assert look() == [0, 0, 0]


def test_a_partition_that_worked_meanwhile_is_not_dropped(store, postgres):
    fill(store, "A", 1)
    ack_all(store, admit(store))
    store.maintenance.gate_reconcile(100)
    postgres.clock.freeze_at(START_MS + DAY_MS - 1)
    fill(store, "again", 1, partition_key="A")
    ack_all(store, admit(store))
    postgres.clock.freeze_at(START_MS + DAY_MS)
    for _ in range(4):
        store.maintenance.gate_reconcile(100)
    assert ("q", "A") in postgres.snapshot().partitions


# Sleepers


def test_a_worker_sleeps_while_it_has_slots_that_it_could_not_fill(store, postgres):
    def asleep() -> list[Any]:
        return postgres.connection.execute(
            "SELECT queue, worker FROM headgate.headgate_sleeper ORDER BY 1, 2"
        ).fetchall()

    admit(store, queues=("q", "r"), worker="w1")
    admit(store, worker="w2")
    assert asleep() == [("q", "w1"), ("q", "w2"), ("r", "w1")]
    enqueue(store, "a", "b")
    assert len(admit(store, worker="w1", queues=("q", "r"), capacity=1).claims) == 1
    assert asleep() == [("q", "w2")]
    assert len(admit(store, worker="w1", queues=("r", "q"), capacity=2).claims) == 1
    assert asleep() == [("q", "w1"), ("q", "w2"), ("r", "w1")]
    admit(store, worker="w1", capacity=0)
    assert asleep() == [("q", "w1"), ("q", "w2"), ("r", "w1")]


def test_sleepers_of_long_ago_are_forgotten(store, postgres):
    def asleep() -> list[Any]:
        return postgres.connection.execute(
            "SELECT worker FROM headgate.headgate_sleeper ORDER BY 1"
        ).fetchall()

    admit(store, worker="gone")
    postgres.clock.advance_ms(599_999)
    admit(store, worker="lives")
    store.maintenance.gate_reconcile(100)
    assert asleep() == [("gone",), ("lives",)]
    postgres.clock.advance_ms(1)
    store.maintenance.gate_reconcile(100)
    assert asleep() == [("lives",)]
