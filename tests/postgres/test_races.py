"""Calls that meet on the same rows: who wins is open, that exactly one wins is not."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from headgate_sync.errors import (
    BackendError,
    DuplicateJob,
    LeaseRejected,
    StoreConflict,
    StoreError,
)
from headgate_sync.lease import Ack
from headgate_sync.lifecycle import Outcome, State
from tests.backends import SCHEMA
from tests.builders import (
    LEASE_MS,
    admit,
    bring_to,
    claim_one,
    counts,
    crash_until_quarantined,
    enqueue,
    envelopes,
    job,
    run_one,
    state_of,
    steer,
)
from tests.postgres.watching import until, wait_until_blocked


@pytest.fixture
def store(postgres):
    opened = postgres.make_store()
    yield opened
    opened.close()


@pytest.fixture
def clock(postgres):
    return postgres.clock


def together(*calls):
    """Start all calls at one moment; returns what each returned or raised."""
    gate = threading.Barrier(len(calls))
    answers = [None] * len(calls)

    def run(place, call):
        gate.wait()
        try:
            answers[place] = call()
        except StoreError as error:
            answers[place] = error

    threads = [
        threading.Thread(target=run, args=(place, call))
        for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@contextmanager
def other_session(database_url):
    """An open transaction of somebody else; rolled back at the end."""
    with psycopg.connect(database_url) as connection:
        try:
            yield connection
        finally:
            connection.rollback()


def lock_jobs(connection, ids):
    connection.execute(
        sql.SQL("SELECT FROM {}.headgate_job WHERE id = ANY (%s) FOR UPDATE").format(
            sql.Identifier(SCHEMA)
        ),
        [list(ids)],
    )


def ids(prefix, number):
    return [f"{prefix}{place:03}" for place in range(number)]


# One row, two calls


def test_an_ack_and_a_reclaim_settle_each_job_once(store, clock):
    enqueue(store, *ids("a", 60))
    refs = [claim.lease_ref for claim in admit(store, capacity=60).claims]
    clock.advance_ms(LEASE_MS)
    shuffled = random.Random(1).sample(refs, len(refs))
    acks = [Ack(lease=ref, outcome=Outcome.SUCCESS) for ref in shuffled]
    answers = together(
        lambda: store.ack_batch(acks[:30]),
        lambda: store.ack_batch(acks[30:]),
        *[lambda: store.reclaim_expired(25)] * 3,
    )
    acked = dict(zip(shuffled, answers[0] + answers[1], strict=True))
    reclaimed = Counter(record.job_id for taken in answers[2:] for record in taken)
    for ref, error in acked.items():
        found = job(store, ref.job_id)
        if error is None:
            assert (found.state, found.crash_attempt) == (State.COMPLETED, 0)
            assert reclaimed[ref.job_id] == 0
        else:
            assert isinstance(error, LeaseRejected)
            assert (found.state, found.crash_attempt) == (State.RETRYABLE, 1)
            assert reclaimed[ref.job_id] == 1


def test_an_ack_and_a_cancel_at_one_moment_have_one_winner(store):
    for round_number in range(100):
        id = f"a{round_number}"
        ref = run_one(store, id).lease_ref
        acked, cancelled = together(
            lambda ref=ref: store.ack(ref, Outcome.SUCCESS),
            lambda id=id: steer(store).operator_cancel(id),
        )
        won = state_of(store, id)
        assert (acked is None) == (won is State.COMPLETED)
        assert (cancelled is None) == (won is State.CANCELLED)
        assert (acked is None) != (cancelled is None)


def test_an_ack_waits_for_the_row_and_judges_what_it_became(store, database_url):
    """The row that was locked has moved on by the time the lock is free."""
    ref = run_one(store, "a").lease_ref
    with other_session(database_url) as other:
        other.execute(
            sql.SQL("UPDATE {}.headgate_job SET priority = 7 WHERE id = 'a'").format(
                sql.Identifier(SCHEMA)
            )
        )
        waiting = threading.Thread(target=store.ack, args=(ref, Outcome.SUCCESS))
        waiting.start()
        wait_for_a_lock(database_url)
        other.commit()
        waiting.join()
    found = job(store, "a")
    assert (found.state, found.priority) == (State.COMPLETED, 7)


def test_an_ack_that_waited_for_a_cancel_is_rejected(store, database_url):
    ref = run_one(store, "a").lease_ref
    raised = []

    def ack():
        try:
            store.ack(ref, Outcome.SUCCESS)
        except LeaseRejected as error:
            raised.append(error.missing)

    with other_session(database_url) as other:
        other.execute(
            sql.SQL(
                "UPDATE {}.headgate_job SET state = 'cancelled', lease_id = NULL,"
                " lease_expires_at_ms = NULL, claimed_by = NULL, claimed_at_ms = NULL,"
                " finalized_at_ms = 1 WHERE id = 'a'"
            ).format(sql.Identifier(SCHEMA))
        )
        waiting = threading.Thread(target=ack)
        waiting.start()
        wait_for_a_lock(database_url)
        other.execute(
            sql.SQL(
                "INSERT INTO {0}.headgate_inbox (queue, kind) VALUES ('q', 'f');"
                "INSERT INTO {0}.headgate_tally (queue, partition_key, minute_at_ms,"
                " unfinished, arrived, completed) VALUES ('q', '', 0, -1, 0, 0)"
            ).format(sql.Identifier(SCHEMA))
        )
        other.commit()
        waiting.join()
    assert raised == [False]


def wait_for_a_lock(database_url):
    """Return when some session waits for a row lock."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for _ in range(10_000):
            waiting = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname ="
                " current_database() AND wait_event_type = 'Lock'"
            ).fetchone()
            if waiting and waiting[0]:
                return
    raise TimeoutError("nobody waits for a lock")


def test_two_batches_over_the_same_jobs_in_opposite_order_do_not_deadlock(store):
    for _ in range(20):
        enqueue(store, *ids("a", 40), retention_ms=0)
        refs = [claim.lease_ref for claim in admit(store, capacity=40).claims]
        acks = [Ack(lease=ref, outcome=Outcome.SUCCESS) for ref in refs]
        one, other = together(
            lambda acks=acks: store.ack_batch(acks),
            lambda acks=acks: store.ack_batch(acks[::-1]),
        )
        for first, second in zip(one, other[::-1], strict=True):
            assert (first is None) != (second is None)
            assert (first or second).missing
        assert counts(store) == {}


def test_the_acks_of_a_batch_are_judged_in_their_order(store, clock):
    """Also those of a job that one of them removes."""
    old = run_one(store, "a", retention_ms=0).lease_ref
    clock.advance_ms(LEASE_MS)
    store.reclaim_expired(1)
    clock.advance_ms(1_000)
    store.promote_due(1)
    held = claim_one(store).lease_ref
    answers = store.ack_batch(
        [Ack(lease=ref, outcome=Outcome.SUCCESS) for ref in (old, held, held, old)]
    )
    assert [answer and answer.missing for answer in answers] == [
        False, None, True, True
    ]  # fmt: skip


def test_a_second_ack_of_a_lease_is_judged_on_what_the_first_one_left(store):
    ref = run_one(store, "a", max_attempts=9).lease_ref
    acks = [
        Ack(lease=ref, outcome=Outcome.RETRY, delay_ms=5, error="first"),
        Ack(lease=ref, outcome=Outcome.RETRY, delay_ms=9, error="second"),
        Ack(lease=ref, outcome=Outcome.SUCCESS),
    ]
    answers = store.ack_batch(acks)
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], LeaseRejected)
    assert not answers[2].missing
    found = job(store, "a")
    assert (found.attempt, [entry.error for entry in found.errors]) == (1, ["first"])


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("checkpoint", '"no object"'),
        ("headers", '"no object"'),
        ("headers", "[1]"),
        ("headers", '{"h": 5}'),
        ("payload", r"\xff"),
    ],
)
def test_an_admission_survives_a_row_that_was_broken_by_hand(
    store, admin, column, text
):
    enqueue(store, "a", "b", headers={"h": "v"})
    break_by_hand(admin, column, text)
    claims = admit(store).claims
    assert [claim.envelope.id for claim in claims] == ["a", "b"]
    assert claims[1].envelope.headers == {"h": "v"}
    acks = [Ack(lease=claim.lease_ref, outcome=Outcome.UNDECODABLE) for claim in claims]
    assert store.ack_batch(acks) == [None, None]
    assert job(store, "a").state == "undecodable"


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("checkpoint", '{"in_progress": "s", "crashes": {"s": "many"}}'),
        ("checkpoint", '{"in_progress": "s", "crashes": {"s": 1.5}}'),
        ("checkpoint", '{"in_progress": "s", "crashes": {"s": 1e30}}'),
        ("errors", "{}"),
    ],
)
def test_a_row_that_was_broken_by_hand_does_not_keep_others_from_being_taken_back(
    store, admin, clock, column, text
):
    enqueue(store, "a", "b")
    admit(store)
    break_by_hand(admin, column, text)
    clock.advance_ms(LEASE_MS)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a", "b"]
    assert [entry.crash_attempt for entry in job(store, "a").errors] == [1]


def break_by_hand(admin, column, text):
    """Write something into the row of job `a` that no call would."""
    with admin.transaction():
        # Not even the tests' own audit lets the content of a job change.
        admin.execute("SET LOCAL session_replication_role = replica")
        admin.execute(
            sql.SQL("UPDATE {}.headgate_job SET {} = {} WHERE id = 'a'").format(
                sql.Identifier(SCHEMA), sql.Identifier(column), sql.Literal(text)
            )
        )


# Renewals


def test_a_renewal_waits_for_no_lock_and_loses_no_locked_lease(store, database_url):
    enqueue(store, "a", "b")
    refs = [claim.lease_ref for claim in admit(store).claims]
    before = job(store, "a").lease_expires_at_ms
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        assert store.renew(refs, lease_ms=90_000) == []
        assert job(store, "a").lease_expires_at_ms == before
        assert job(store, "b").lease_expires_at_ms > before
    assert store.renew(refs, lease_ms=90_000) == []
    assert job(store, "a").lease_expires_at_ms > before


def test_a_renewal_of_a_locked_row_holds_when_the_lock_is_gone(
    store, clock, database_url
):
    """The reclaimer may come before the next beat; the confirmed lease stands."""
    ref = run_one(store, "a").lease_ref
    clock.advance_ms(LEASE_MS - 1)
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        assert store.renew([ref], lease_ms=LEASE_MS) == []
        clock.advance_ms(LEASE_MS - 1)
        assert store.renew([ref], lease_ms=LEASE_MS) == []  # again beside the row
    clock.advance_ms(LEASE_MS - 1)
    assert store.reclaim_expired(10) == []
    assert store.renew([ref], lease_ms=LEASE_MS) == []
    clock.advance_ms(LEASE_MS)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a"]


def test_a_locked_row_whose_lease_has_run_out_is_not_promised_to_its_holder(
    store, clock, database_url
):
    """The lock may be that of a reclaimer, which takes the job with its commit."""
    ref = run_one(store, "a").lease_ref
    clock.advance_ms(LEASE_MS)
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        assert store.renew([ref], lease_ms=LEASE_MS) == []
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a"]
    assert store.renew([ref], lease_ms=LEASE_MS) == [ref]


def test_what_was_extended_beside_a_row_belongs_to_that_lease_alone(
    store, clock, database_url, admin
):
    ref = run_one(store, "a").lease_ref
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        assert store.renew([ref], lease_ms=90_000) == []
    store.ack(ref, Outcome.RETRY, delay_ms=1)
    clock.advance_ms(1)
    store.promote_due(1)
    claim_one(store, lease_ms=1_000)
    clock.advance_ms(1_000)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a"]
    clock.advance_ms(90_000)
    store.reclaim_expired(10)
    left = admin.execute("SELECT count(*) FROM headgate.headgate_extension")
    assert left.fetchone() == (0,)


def test_a_shorter_renewal_ends_what_was_extended_beside_the_row(
    store, clock, database_url
):
    ref = run_one(store, "a").lease_ref
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        assert store.renew([ref], lease_ms=90_000) == []
    assert store.renew([ref], lease_ms=1_000) == []
    clock.advance_ms(1_000)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a"]


# Acks of locked rows


def test_an_ack_of_a_locked_row_is_told_so_and_its_neighbours_are_settled(
    store, database_url
):
    enqueue(store, "a", "b", "c")
    refs = [claim.lease_ref for claim in admit(store).claims]
    acks = [Ack(lease=ref, outcome=Outcome.SUCCESS) for ref in refs]
    with other_session(database_url) as other:
        lock_jobs(other, ["b"])
        one, two, three = store.ack_batch(acks)
        assert (one, three) == (None, None)
        assert isinstance(two, StoreConflict)
        assert two.retryable
        assert "job b" in str(two)
        assert counts(store) == {"completed": 2, "running": 1}
        with pytest.raises(StoreConflict):
            store.ack(refs[1], Outcome.SUCCESS)
    assert store.ack_batch(acks) == [None, None, None]
    assert counts(store) == {"completed": 3}


def test_an_ack_waits_for_a_lock_that_is_gone_in_a_moment(store, database_url):
    ref = run_one(store, "a").lease_ref
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        threads = threading.Thread(target=release_when_waited_for, args=(other,))
        threads.start()
        store.ack(ref, Outcome.SUCCESS)
        threads.join()
    assert state_of(store, "a") is State.COMPLETED


def release_when_waited_for(other):
    with psycopg.connect(other.info.dsn, autocommit=True) as connection:
        wait_until_blocked(connection, other)
    other.rollback()


def test_a_completion_that_meets_a_lock_leaves_its_transaction_usable(
    store, database_url
):
    ref = run_one(store, "a").lease_ref
    with (
        other_session(database_url) as other,
        other_session(database_url) as caller,
    ):
        lock_jobs(other, ["a"])
        tx = store.transactional.join(caller)
        with pytest.raises(StoreConflict):
            store.transactional.complete_tx(tx, ref)
        other.rollback()
        store.transactional.complete_tx(tx, ref)
        caller.commit()
    assert state_of(store, "a") is State.COMPLETED


def test_a_lease_that_is_being_taken_away_is_lost_with_the_commit(store, database_url):
    ref = run_one(store, "a").lease_ref
    with other_session(database_url) as other:
        tx = store.transactional.join(other)
        store.transactional.complete_tx(tx, ref)
        assert store.renew([ref], lease_ms=1_000) == []
        other.commit()
    assert store.renew([ref], lease_ms=1_000) == [ref]


def test_renewals_of_the_same_leases_in_any_order_do_not_deadlock(store):
    enqueue(store, *ids("a", 50))
    refs = [claim.lease_ref for claim in admit(store, capacity=50).claims]
    for _ in range(20):
        answers = together(
            lambda: store.renew(refs, lease_ms=1_000),
            lambda: store.renew(refs[::-1], lease_ms=1_000),
        )
        assert answers == [[], []]


# Sweeps


def sweepable(store, clock, sweep, names):
    """Bring jobs to where a sweep takes them."""
    if sweep == "reclaim_expired":
        enqueue(store, *names)
        admit(store, capacity=len(names))
        clock.advance_ms(LEASE_MS)
    elif sweep == "promote_due":
        store.enqueue(envelopes(*names, delay_ms=10))
        clock.advance_ms(10)
    elif sweep == "evict_retained":
        enqueue(store, *names, retention_ms=1)
        claims = admit(store, capacity=len(names)).claims
        store.ack_batch(
            [Ack(lease=claim.lease_ref, outcome=Outcome.SUCCESS) for claim in claims]
        )
        clock.advance_ms(1)
    else:
        enqueue(store, *names, fingerprint="f")
        enqueue(store, "poison", queue="other", fingerprint="f")
        crash_until_quarantined(store, clock, claim_one(store, queues=("other",)))


SWEEPS = ["reclaim_expired", "promote_due", "evict_retained", "quarantine_sweep"]


def run_sweep(store, sweep, limit):
    owner = steer(store) if sweep == "quarantine_sweep" else store
    done = getattr(owner, sweep)(limit)
    return done if isinstance(done, int) else len(done)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_locked_rows_at_the_head_do_not_hide_those_behind(
    store, clock, database_url, sweep
):
    names = ids("a", 60)
    sweepable(store, clock, sweep, names)
    with other_session(database_url) as other:
        lock_jobs(other, names[:40])
        assert run_sweep(store, sweep, 10) + run_sweep(store, sweep, 30) == 20
        assert run_sweep(store, sweep, 10) == 0
    assert run_sweep(store, sweep, 100) == 40


@pytest.mark.parametrize("sweep", SWEEPS)
def test_sweeps_at_one_moment_take_each_job_once(store, clock, sweep):
    names = ids("a", 200)
    sweepable(store, clock, sweep, names)

    def sweep_all():
        taken = 0
        while done := run_sweep(store, sweep, 30):
            taken += done
        return taken

    # Whoever finds all rows locked ends early; one more call takes the rest.
    answers = together(*[sweep_all] * 4)
    assert sum(answers) + run_sweep(store, sweep, 1_000) == 200


def test_a_sweep_that_was_held_up_takes_back_no_lease_that_was_given_since(
    store, clock, database_url, admin
):
    """What it has seen of a job before it waited says nothing about the job now."""
    old = run_one(store, "a").lease_ref
    with other_session(database_url) as other:
        lock_jobs(other, ["a"])
        assert store.renew([old], lease_ms=LEASE_MS) == []  # goes beside the row
    clock.advance_ms(LEASE_MS)
    given = []

    def take_over():
        steer(store).operator_cancel("a")
        steer(store).operator_retry("a")
        given.append(claim_one(store).lease_ref)

    with other_session(database_url) as other:
        # Where the sweep comes by between its look and its write.
        other.execute("SELECT FROM headgate.headgate_extension FOR UPDATE")
        sweeping = threading.Thread(target=store.reclaim_expired, args=(1,))
        sweeping.start()
        wait_until_blocked(admin, other)
        taking_over = threading.Thread(target=take_over)
        taking_over.start()
        until(
            lambda: not taking_over.is_alive() or waiting_for_locks(admin) == 2,
            "the job is taken over, or the sweep is waited for",
        )
        other.rollback()
        sweeping.join()
        taking_over.join()
    assert store.renew(given, lease_ms=LEASE_MS) == []
    found = job(store, "a")
    assert (found.state, found.fence) == (State.RUNNING, 2)


def waiting_for_locks(admin):
    [[count]] = admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event_type = 'Lock'"
    ).fetchall()
    return count


def test_a_sweep_does_not_park_what_a_release_sets_free(store, clock, database_url):
    sweepable(store, clock, "quarantine_sweep", ["a", "b"])
    with other_session(database_url) as other:
        other.execute(
            sql.SQL("SELECT {}.headgate_release_quarantine('f')").format(
                sql.Identifier(SCHEMA)
            )
        )
        assert steer(store).quarantine_sweep(10) == 0
        other.commit()
    assert steer(store).quarantine_sweep(10) == 0
    assert state_of(store, "a") is State.AVAILABLE


# Duties


def test_a_duty_that_is_being_claimed_is_not_waited_for(store, database_url):
    assert store.claim_duty("d", "a", 1)
    with other_session(database_url) as other:
        other.execute(
            sql.SQL("SELECT FROM {}.headgate_duty FOR UPDATE").format(
                sql.Identifier(SCHEMA)
            )
        )
        assert store.claim_duty("d", "a", 1_000) is False
        assert store.duty_tick("a", ["d", "e"], 1_000) == {"e": True}
    assert store.claim_duty("d", "a", 1_000) is True


def test_a_duty_has_one_holder(store, clock):
    for _ in range(50):
        claimants = [f"w{place}" for place in range(4)]
        answers = together(
            *[lambda name=name: store.claim_duty("d", name, 10) for name in claimants]
        )
        assert sum(answers) <= 1
        clock.advance_ms(10)
    assert sum(answers) == 1


def test_the_promoter_is_due_now_and_then_without_a_due_job(store, clock):
    def tick():
        return store.duty_tick("w", ["promoter", "reclaimer"], 60_000)

    assert tick() == {"promoter": False, "reclaimer": False}
    clock.advance_ms(29_999)
    assert tick()["promoter"] is False
    clock.advance_ms(1)
    assert tick() == {"promoter": True, "reclaimer": False}
    assert tick()["promoter"] is False


# Keys


def test_a_retry_waits_for_an_open_enqueue_of_its_key(store, clock, database_url):
    bring_to(store, clock, "a", State.ARCHIVED, unique_key=b"k")
    raised = []

    def retry():
        try:
            steer(store).operator_retry("a")
        except DuplicateJob as error:
            raised.append(error.existing_id)

    with other_session(database_url) as other:
        tx = store.transactional.join(other)
        store.transactional.enqueue_tx(tx, envelopes("b", unique_key=b"k"))
        waiting = threading.Thread(target=retry)
        waiting.start()
        wait_for_a_lock(database_url)
        other.commit()
        waiting.join()
    assert raised == ["b"]
    assert state_of(store, "a") is State.ARCHIVED


def test_a_release_waits_for_an_open_enqueue_of_a_key(store, clock, database_url):
    sweepable(store, clock, "quarantine_sweep", [])
    enqueue(store, "a", fingerprint="g", unique_key=b"k")
    crash_until_quarantined(store, clock, claim_one(store))
    answers = []
    with other_session(database_url) as other:
        tx = store.transactional.join(other)
        store.transactional.enqueue_tx(
            tx, envelopes("b", unique_key=b"k", fingerprint="h")
        )
        waiting = threading.Thread(
            target=lambda: answers.append(steer(store).quarantine_release("g"))
        )
        waiting.start()
        wait_for_a_lock(database_url)
        other.commit()
        waiting.join()
    assert answers == [0]
    assert state_of(store, "a") is State.QUARANTINED


# One bad member


def test_a_member_that_the_database_refuses_harms_no_neighbour(store, admin):
    enqueue(store, "a", "b", "c")
    refs = {c.envelope.id: c.lease_ref for c in admit(store).claims}
    with refusing(admin, "error_code = 'POISON'"):
        answers = store.ack_batch(
            [
                Ack(lease=refs["a"], outcome=Outcome.SUCCESS),
                Ack(lease=refs["b"], outcome=Outcome.RETRY, error_code="POISON"),
                Ack(lease=refs["c"], outcome=Outcome.SKIP),
            ]
        )
    assert [type(answer) for answer in answers] == [
        type(None),
        BackendError,
        type(None),
    ]
    assert state_of(store, "a") is State.COMPLETED
    assert state_of(store, "b") is State.RUNNING
    assert state_of(store, "c") is State.ARCHIVED


def test_an_ack_that_the_database_refuses_changes_nothing(store, admin, postgres):
    ref = run_one(store, "a").lease_ref
    before = postgres.image()
    with refusing(admin, "error_code = 'POISON'"), pytest.raises(BackendError):
        store.ack(ref, Outcome.RETRY, error_code="POISON")
    assert postgres.image() == before


@contextmanager
def refusing(admin, condition):
    """Let the job table refuse rows."""
    table = sql.SQL("{}.headgate_job").format(sql.Identifier(SCHEMA))
    admin.execute(
        sql.SQL("ALTER TABLE {} ADD CONSTRAINT poison CHECK (NOT ({}))").format(
            table, sql.SQL(condition)
        )
    )
    try:
        yield
    finally:
        admin.execute(sql.SQL("ALTER TABLE {} DROP CONSTRAINT poison").format(table))
