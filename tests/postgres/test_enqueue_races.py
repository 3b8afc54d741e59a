"""Producers that meet at the same moment: late collisions, and no deadlock."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    IdConflict,
    StoreConflict,
)
from headgate_sync.postgres.store import PgStore
from tests.backends import PostgresBackend, unchanged_by
from tests.builders import counts, enqueue, envelope, envelopes, state_of, steer
from tests.concurrency.threads import outcome_of, together
from tests.postgres.watching import deadlocks, wait_until_blocked

SOON_S = 20
DAY_MS = 86_400_000


@pytest.fixture
def crowd(database_url, admin) -> Iterator[PostgresBackend]:
    """A schema whose producers have many connections; no deadlock may happen in it."""
    before = deadlocks(admin)
    with ConnectionPool(
        database_url, min_size=2, max_size=16, timeout=60, open=True
    ) as pool:
        backend = PostgresBackend(pool, admin)
        backend.reset()
        yield backend
    backend.audit()
    assert deadlocks(admin) == before


@pytest.fixture
def store(crowd) -> PgStore:
    return crowd.open_store()


@pytest.fixture
def caller(database_url) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


def take_in_open(store, caller, *batch):
    """Enqueue a batch on the caller's connection without committing."""
    tx = store.transactional.join(caller)
    store.transactional.enqueue_tx(tx, list(batch))


def test_one_new_id_taken_in_twice_at_once_is_stored_once(store):
    for round in range(100):
        together([lambda id=f"z{round}": enqueue(store, id)] * 2)
    assert counts(store) == {"available": 100}
    assert steer(store).unfinished("q") == 100


def test_batches_with_the_same_ids_in_opposite_order_both_succeed(store):
    for round in range(40):
        batch = envelopes(*[f"r{round}-{n}" for n in range(50)])
        together(
            [
                lambda batch=batch: store.enqueue(batch),
                lambda batch=batch: store.enqueue(batch[::-1]),
                lambda batch=batch: store.enqueue(batch[20:40]),
            ]
        )
    assert counts(store) == {"available": 2000}
    assert steer(store).unfinished("q") == 2000


@pytest.mark.parametrize("window_ms", [0, DAY_MS])
def test_batches_with_the_same_keys_in_opposite_order_have_one_winner(store, window_ms):
    """Ids and keys are ordered differently, and locks can follow one order only."""
    for round in range(40):

        def take(side, numbers, round=round):
            batch = [
                envelope(
                    f"{side}{99 - n}-{round}",
                    unique_key=f"{round}/{n}".encode(),
                    unique_window_ms=window_ms,
                )
                for n in numbers
            ]
            return outcome_of(lambda: store.enqueue(batch), DuplicateJob)

        answers = together(
            [
                lambda: take("a", range(50)),
                lambda: take("b", range(49, -1, -1)),
            ]
        )
        assert answers.count(None) == 1
    assert counts(store) == {"available": 2000}


@pytest.mark.parametrize("window_ms", [0, DAY_MS])
def test_callers_with_the_same_keys_in_opposite_order_do_not_deadlock(store, window_ms):
    """Their locks last to their commits, so that every wait is a long one."""

    def take(side, numbers, round):
        batch = [
            envelope(
                f"{side}{99 - n}-{round}",
                unique_key=f"{round}/{n}".encode(),
                unique_window_ms=window_ms,
            )
            for n in numbers
        ]
        with store.transactional.transaction() as tx:
            tx.connection.execute("SELECT pg_sleep(0.001)")
            return outcome_of(
                lambda: store.transactional.enqueue_tx(tx, batch), DuplicateJob
            )

    for round in range(30):
        answers = together(
            [
                lambda round=round: take("a", range(30), round),
                lambda round=round: take("b", range(29, -1, -1), round),
                lambda round=round: take("c", range(10, 20), round),
            ]
        )
        assert answers.count(None) == 1
    assert steer(store).unfinished("q") == counts(store)["available"]


def test_keys_taken_from_several_processes_have_one_winner_each(store, database_url):
    program = textwrap.dedent(
        """
        import sys
        from headgate_sync.errors import DuplicateJob
        from headgate_sync.postgres.store import PgStore
        from tests.builders import enqueue

        store = PgStore.connect(sys.argv[1])
        for n in range(200):
            try:
                enqueue(store, f"{sys.argv[2]}-{n}", unique_key=b"%d" % n)
            except DuplicateJob as duplicate:
                print(n, duplicate.existing_id)
            else:
                print(n, f"{sys.argv[2]}-{n}")
        store.close()
        """
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, database_url, name],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    told = [process.communicate(timeout=60)[0].split("\n") for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert told[0] == told[1] == told[2]
    assert counts(store) == {"available": 200}


def test_a_limit_holds_among_batches_and_single_jobs_of_many_producers(store):
    steer(store).set_enqueue_limit("q", 25)

    def produce(name, size):
        taken = 0
        for round in range(10):
            ids = [f"{name}-{round}-{n}" for n in range(size)]
            if outcome_of(lambda ids=ids: enqueue(store, *ids), Backpressure) is None:
                taken += size
        return taken

    taken = together([lambda n=n: produce(f"p{n}", 1 + n % 3) for n in range(16)])
    assert sum(taken) == steer(store).unfinished("q") == 25


def test_a_producer_that_waited_for_the_limit_counts_what_it_waited_for(
    store, admin, caller
):
    """The counters are read after the lock, by a statement that begins after it."""
    steer(store).set_enqueue_limit("q", 1)
    caller.execute("SELECT FROM headgate.headgate_enqueue_policy FOR UPDATE")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            outcome_of, lambda: enqueue(store, "late"), Backpressure
        )
        wait_until_blocked(admin, caller)
        take_in_open(store, caller, envelope("early"))
        caller.commit()
        refusal = waiting.result(SOON_S)
    assert (refusal.limit, refusal.current, refusal.incoming) == (1, 1, 1)
    assert counts(store) == {"available": 1}


def test_transactions_open_at_once_exceed_a_limit_by_what_they_hold_only(
    store, database_url
):
    steer(store).set_enqueue_limit("q", 2)
    with psycopg.connect(database_url) as one, psycopg.connect(database_url) as other:
        take_in_open(store, one, envelope("a"), envelope("b"))
        take_in_open(store, other, envelope("c"))
        with pytest.raises(Backpressure) as refused:
            take_in_open(store, other, envelope("d"), envelope("e"))
        assert (refused.value.current, refused.value.incoming) == (1, 2)
    assert steer(store).unfinished("q") == 3


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ({"id": "b", "payload": b"other"}, IdConflict),
        ({"id": "x", "unique_key": b"k"}, DuplicateJob),
        ({"id": "x", "unique_key": b"w", "unique_window_ms": DAY_MS}, DuplicateJob),
    ],
    ids=["id", "key", "window"],
)
def test_a_batch_that_collides_late_leaves_nothing_of_itself(
    store, crowd, admin, caller, database_url, late, expected
):
    """The collision is found in the middle of the inserts, after a wait."""
    taken = [
        envelope("b", unique_key=b"k"),
        envelope("c", unique_key=b"w", unique_window_ms=DAY_MS),
    ]
    take_in_open(store, caller, *taken)
    batch = [
        *envelopes("a", "z", tags=("t",), partition_key="p"),
        envelope("y", unique_key=b"a", unique_window_ms=DAY_MS),
        envelope(**late),
    ]
    with (
        psycopg.connect(database_url) as second,
        ThreadPoolExecutor(1) as threads,
    ):
        second.execute("CREATE TEMPORARY TABLE mine (n integer) ON COMMIT DROP")

        def take():
            tx = store.transactional.join(second)
            return outcome_of(
                lambda: store.transactional.enqueue_tx(tx, batch), expected
            )

        waiting = threads.submit(take)
        wait_until_blocked(admin, caller)
        caller.commit()
        before = crowd.image()
        assert isinstance(waiting.result(SOON_S), expected)
        second.execute("INSERT INTO mine VALUES (1)")
        second.commit()
    assert crowd.image() == before
    assert state_of(store, "a") == "deleted"


def test_a_batch_that_meets_its_own_replay_late_is_completed(store, admin, caller):
    take_in_open(store, caller, *envelopes("b", "d"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(enqueue, store, "e", "d", "c", "b", "a")
        wait_until_blocked(admin, caller)
        caller.commit()
        waiting.result(SOON_S)
    assert steer(store).unfinished("q") == 5


def test_a_job_of_a_batch_that_waited_keeps_its_place_in_the_batch(
    store, admin, caller
):
    take_in_open(store, caller, envelope("m"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            store.enqueue,
            [
                envelope("z", unique_key=b"9"),
                envelope("m"),
                envelope("a", unique_key=b"1"),
                envelope("k"),
            ],
        )
        wait_until_blocked(admin, caller)
        caller.commit()
        waiting.result(SOON_S)
    stored = admin.execute("SELECT id FROM headgate.headgate_job ORDER BY seq")
    assert [id for (id,) in stored] == ["m", "z", "a", "k"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize(
    "fields",
    [
        {"id": "a"},
        {"id": "x", "unique_key": b"k"},
        {"id": "x", "unique_key": b"w", "unique_window_ms": DAY_MS},
    ],
    ids=["id", "key", "window"],
)
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "in a batch"])
def test_an_old_snapshot_that_cannot_see_the_holder_is_a_conflict_at_once(
    store, crowd, caller, isolation, fields, others
):
    caller.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
    caller.execute("SELECT FROM headgate.headgate_job")
    enqueue(store, "a", unique_key=b"k")
    enqueue(store, "b", unique_key=b"w", unique_window_ms=DAY_MS)
    batch = [envelope(**fields), *envelopes("c", "d")[:others]]
    error = unchanged_by(crowd, lambda: take_in_open(store, caller, *batch))
    assert isinstance(error, StoreConflict)
    assert error.sqlstate == "40001"


def test_the_same_ids_with_other_keys_in_another_order_are_told_as_a_conflict(
    postgres, admin, database_url
):
    """They lock by key first, so they may meet crosswise; the server ends one."""
    store = postgres.open_store()
    with (
        psycopg.connect(database_url) as one,
        psycopg.connect(database_url) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        take_in_open(store, one, envelope("a", unique_key=b"1"))
        take_in_open(store, other, envelope("b", unique_key=b"2"))
        waiting = threads.submit(
            outcome_of,
            lambda: take_in_open(store, one, envelope("b", unique_key=b"3")),
            StoreConflict,
        )
        wait_until_blocked(admin, other)
        crossing = outcome_of(
            lambda: take_in_open(store, other, envelope("a", unique_key=b"4")),
            StoreConflict,
        )
        (one if isinstance(crossing, StoreConflict) else other).rollback()
        waited = waiting.result(SOON_S)
        victims = [e for e in (crossing, waited) if isinstance(e, StoreConflict)]
        assert [(e.sqlstate, e.retryable) for e in victims] == [("40P01", True)]
        one.rollback()
        other.rollback()
    assert counts(store) == {}


@pytest.fixture
def unlucky(admin) -> Iterator[int]:
    """A weight that any insert collides with, though no holder is ever found."""
    weight = 77
    admin.execute(
        "CREATE UNIQUE INDEX unlucky ON headgate.headgate_job ((weight = 77))"
        " WHERE weight = 77"
    )
    admin.execute(
        "INSERT INTO headgate.headgate_job (id, kind, schema_version, payload, queue,"
        " partition_key, rate_class, sticky_worker, lane_key, weight, fingerprint,"
        " priority, state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms,"
        " deadline_ms, retention_ms, unique_states, periodic_schedule_id,"
        " periodic_tick_ms, headers) VALUES ('u', 'k', 1, '', 'u', '', '', '', 0, 77,"
        " '', 0, 'pending', 1, 0, 0, 0, 0, 0, 0, '', 0, '{}')"
    )
    yield weight
    admin.execute("DROP INDEX headgate.unlucky")
    admin.execute("DELETE FROM headgate.headgate_job WHERE id = 'u'")


@contextmanager
def after_insert(admin, id: str, body: str) -> Iterator[None]:
    """Let the server do this after each insert of a job of that id."""
    admin.execute(
        "CREATE FUNCTION headgate.haunt() RETURNS trigger LANGUAGE plpgsql"
        f" AS $$ BEGIN {body} END $$;"
        "CREATE TRIGGER haunt AFTER INSERT ON headgate.headgate_job FOR EACH ROW"
        f" WHEN (NEW.id = '{id}') EXECUTE FUNCTION headgate.haunt()"
    )
    yield
    admin.execute("DROP TRIGGER haunt ON headgate.headgate_job")
    admin.execute("DROP FUNCTION headgate.haunt()")


_ID_IS_TAKEN = (
    "RAISE unique_violation USING CONSTRAINT = 'headgate_job_id',"
    " DETAIL = format('Key (id)=(%s) already exists.', NEW.id);"
)


@pytest.fixture
def haunted(admin) -> Iterator[str]:
    """An id that is taken for whoever inserts it, and free for whoever looks."""
    id = "b (or) not"
    with after_insert(admin, id, _ID_IS_TAKEN):
        yield id


@pytest.fixture
def chased(admin) -> Iterator[str]:
    """An id whose insert collides with a key, then with the id, and then no more."""
    id = "late"
    admin.execute("CREATE SEQUENCE headgate.chase")
    body = (
        "CASE nextval('headgate.chase')"
        " WHEN 1 THEN RAISE unique_violation USING CONSTRAINT = 'headgate_job_unique';"
        f" WHEN 2 THEN {_ID_IS_TAKEN} ELSE RETURN NULL; END CASE;"
    )
    with after_insert(admin, id, body):
        yield id
    admin.execute("DROP SEQUENCE headgate.chase")


def test_an_id_that_collides_once_is_looked_for_whatever_collided_before(store, chased):
    store.enqueue([envelope(chased, unique_key=b"k", pending=True)])
    assert state_of(store, chased) == "pending"


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "in a batch"])
def test_an_id_that_collides_again_and_is_never_found_is_a_conflict(
    store, crowd, haunted, others
):
    batch = [*envelopes("a", "c")[:others], envelope(haunted, pending=True)]
    error = unchanged_by(crowd, lambda: store.enqueue(batch))
    assert isinstance(error, IdConflict)
    assert error.job_id == haunted


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "in a batch"])
def test_a_key_whose_holder_is_never_found_is_a_conflict_that_may_be_tried_again(
    store, crowd, unlucky, others
):
    batch = [
        *envelopes("a", "c")[:others],
        envelope("b", unique_key=b"k", weight=unlucky),
    ]
    error = unchanged_by(crowd, lambda: store.enqueue(batch))
    assert isinstance(error, StoreConflict)
    assert error.retryable
