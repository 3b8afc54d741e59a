"""What admissions leave behind: one version of a policy row at most, and no debris."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from headgate_sync.policy import FOLD_MAX
from tests.builders import envelope, steer
from tests.postgres.visits import admit_rows, undone
from tests.scenarios.gate import ack_all, admit, ceiling, fill, ids, rate_class
from tests.worker.rig import wait_for

POLICY_TABLES = (
    *("queue", "partition", "lane", "lane_group", "rate_class", "budget", "ceiling"),
    *("quarantine", "sleeper"),
)
FAR = 9_000_000_000  # a transaction that this server will not reach
_WRITTEN = """
SELECT relname, n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables
WHERE schemaname = 'headgate'
"""


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


def test_what_a_long_transaction_announces_is_heard_when_it_commits(store, other):
    """Though others have been heard since, and their inbox is not read again."""
    tx = store.transactional.join(other)
    store.transactional.enqueue_tx(tx, [envelope("late-1", partition_key="late")])
    heard = []
    for turn in range(3):
        fill(store, f"soon{turn}", 5, partition_key="soon")
        batch = admit(store, 5)
        heard += ids(batch)
        ack_all(store, batch)
    assert len(heard) == 15
    other.commit()
    assert ids(admit(store, 5)) == ["late-1"]


def test_what_the_oldest_open_transaction_announces_is_heard_alone(store, other):
    """The bound stands at that transaction, and nothing else has happened since."""
    tx = store.transactional.join(other)
    store.transactional.enqueue_tx(tx, [envelope("late-1")])
    fill(store, "soon", 1)
    ack_all(store, admit(store))
    assert ids(admit(store)) == []
    other.commit()
    assert ids(admit(store)) == ["late-1"]


def bound_of(connection: psycopg.Connection[Any]) -> int:
    """Before which transaction nothing is left in the inbox of queue `q`."""
    found = connection.execute("SELECT inbox_from::text FROM headgate.headgate_queue")
    [(bound,)] = found.fetchall()
    return int(bound)


def restore_elsewhere(store: Any, connection: psycopg.Connection[Any]) -> None:
    """Where less has happened so far; one job is announced before and one after."""
    fill(store, "A", 5)
    ack_all(store, admit(store, 1))
    connection.execute(
        "UPDATE headgate.headgate_queue SET inbox_from = %s::text::xid8", [FAR]
    )
    connection.commit()
    fill(store, "B", 1)


def test_a_restored_database_counts_its_transactions_anew(store, other):
    """A bound that lies in the future of this server is none."""
    restore_elsewhere(store, other)
    assert sorted(ids(admit(store, 9))) == ["A-2", "A-3", "A-4", "A-5", "B-1"]
    assert bound_of(other) < FAR


def test_a_bound_of_another_server_does_not_come_true_later(store, other):
    """Where nobody is admitted meanwhile, the upkeep takes it away."""
    restore_elsewhere(store, other)
    store.maintenance.gate_fold(100)
    assert bound_of(other) == 0


def test_what_a_wrong_bound_hides_is_found_by_the_upkeep(store, postgres):
    fill(store, "A", 1)
    admit(store)
    fill(store, "hidden", 1)
    # An older transaction anywhere on the server, as of a vacuum, would hold the bound
    # back behind what it is to hide.
    wait_for(
        lambda: postgres.connection.execute(
            "SELECT bool_and(xid < pg_snapshot_xmin(pg_current_snapshot()))"
            " FROM headgate.headgate_inbox"
        ).fetchone()[0],
        "older transactions have ended",
    )
    postgres.connection.execute(
        "UPDATE headgate.headgate_queue"
        " SET inbox_from = pg_snapshot_xmin(pg_current_snapshot())"
    )
    assert ids(admit(store)) == []
    assert store.maintenance.gate_fold(100) > 0
    assert ids(admit(store)) == ["hidden-1"]


def test_each_queue_of_a_call_is_heard_on_whatever_the_others_had(store):
    """Also one that was paused while the bounds of the others moved on."""
    fill(store, "a", 2, queue="a")
    fill(store, "b", 2, queue="b")
    steer(store).set_queue_paused("b", True)
    both = {"queues": ("a", "b")}
    heard = []
    for turn in range(3):
        fill(store, f"b{turn}", 1, queue="b")
        batch = admit(store, 1, **both)
        heard += ids(batch)
        ack_all(store, batch)
    assert heard == ["a-1", "a-2"]
    steer(store).set_queue_paused("b", False)
    assert sorted(ids(admit(store, 9, **both))) == [
        "b-1",
        "b-2",
        "b0-1",
        "b1-1",
        "b2-1",
    ]


def test_what_a_savepoint_keeps_is_heard_once_its_transaction_commits(store, other):
    fill(store, "first", 3)
    ack_all(store, admit(store, 1))
    with other.transaction(), other.transaction():
        tx = store.transactional.join(other)
        store.transactional.enqueue_tx(tx, [envelope("saved", partition_key="late")])
        ack_all(store, admit(store, 1))
    assert "saved" in ids(admit(store, 9))


def test_what_one_call_cannot_take_in_is_left_to_the_next(store):
    """A look that ends at its limit has not heard all of the transactions so far."""
    partitions = FOLD_MAX + 50
    jobs = [envelope(f"j{n:03}", partition_key=f"p{n:03}") for n in range(partitions)]
    fill(store, "first", 1)
    heard = ids(admit(store, 1))
    store.enqueue(jobs)
    while found := ids(admit(store, 16)):
        heard += found
    assert sorted(heard) == ["first-1", *[job.id for job in jobs]]
