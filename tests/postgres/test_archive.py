"""The cold archive: copies of deleted jobs by month, alone and in races."""

from __future__ import annotations

import random
import threading
import time
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from headgate_sync.envelope import MAX_RELATIVE_MS
from headgate_sync.errors import InvalidRequest, StoreConflict
from headgate_sync.lifecycle import EVICTABLE, Outcome, State
from headgate_sync.operations import BulkRequest
from headgate_sync.postgres import maintenance as settings
from headgate_sync.store import ArchivePolicy
from tests.backends import SCHEMA
from tests.builders import (
    DAY_MS,
    bring_to,
    claim_one,
    counts,
    enqueue,
    job,
    run_one,
    state_of,
)

COPIED = (
    "evicted_at_ms", "finalized_at_ms", "archive_retention_ms", "attempt",
    "crash_attempt", "id", "kind", "queue", "state", "fingerprint", "payload", "errors",
)  # fmt: skip
WAIT_S = 20


def month_ms(year, month):
    """The first millisecond of a month."""
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp() * 1000)


@pytest.fixture
def clock(postgres):
    return postgres.clock


@pytest.fixture
def archive(store):
    return store.maintenance


@pytest.fixture
def connect(database_url):
    """Open further connections, closed at the end."""
    opened = []

    def one(**options):
        opened.append(psycopg.connect(make_conninfo(database_url, **options)))
        return opened[-1]

    yield one
    for connection in opened:
        connection.close()


def finish(store, *ids, queue="q", retention_ms=1, **fields):
    """Let jobs succeed."""
    enqueue(store, *ids, queue=queue, retention_ms=retention_ms, **fields)
    for _ in ids:
        claim = claim_one(store, queues=(queue,))
        store.ack(claim.lease_ref, Outcome.SUCCESS)


def copies(admin):
    """All rows of the archive, the oldest first."""
    with admin.cursor(row_factory=dict_row) as cursor:
        cursor.execute(
            "SELECT *, tableoid::regclass::text AS place FROM"
            " headgate.headgate_job_archive ORDER BY evicted_at_ms, id"
        )
        return cursor.fetchall()


def ids(admin):
    return [copy["id"] for copy in copies(admin)]


# Policies


def test_a_queue_has_one_policy_the_newest(archive):
    assert archive.archive_policies() == []
    archive.set_archive_policy("z", 5)
    archive.set_archive_policy("a", 1)
    archive.set_archive_policy("z", MAX_RELATIVE_MS)
    assert archive.archive_policies() == [
        ArchivePolicy(queue="a", retention_ms=1),
        ArchivePolicy(queue="z", retention_ms=MAX_RELATIVE_MS),
    ]
    archive.clear_archive_policy("z")
    archive.clear_archive_policy("never set")
    assert [policy.queue for policy in archive.archive_policies()] == ["a"]


@pytest.mark.parametrize(
    ("queue", "retention_ms"),
    [("", 1), ("q", 0), ("q", -1), ("q", MAX_RELATIVE_MS + 1), ("x" * 256, 1)],
)
def test_an_impossible_policy_is_refused(archive, queue, retention_ms):
    with pytest.raises(InvalidRequest, match=r"queue|retention_ms"):
        archive.set_archive_policy(queue, retention_ms)
    assert archive.archive_policies() == []


def test_the_policy_of_a_queue_goes_with_it(store, archive):
    archive.set_archive_policy("q", 1)
    archive.set_archive_policy("other", 1)
    enqueue(store, "a")
    operation = store.inspect.delete_queue("q", force=True)
    while store.inspect.get_operation(operation).status != "completed":
        store.inspect.run_pending_operations(10)
    assert [policy.queue for policy in archive.archive_policies()] == ["other"]


# Copies


def test_an_evicted_job_is_copied_and_its_id_is_free(store, archive, clock, admin):
    archive.set_archive_policy("q", DAY_MS)
    fields = {"payload": b"body", "tags": ("t",), "headers": {"h": "x"}}
    claim = run_one(store, "a", retention_ms=1, kind="k", fingerprint="f", **fields)
    store.ack(claim.lease_ref, Outcome.SUCCESS, logs=("said",))
    finalized_at_ms = clock.now_ms()
    clock.advance_ms(20)
    assert store.evict_retained(10) == 1
    [copy] = copies(admin)
    assert copy.pop("place").endswith("headgate_job_archive_before_2025")
    assert tuple(copy) == COPIED
    [attempt] = copy.pop("errors")
    assert attempt["logs"] == ["said"]
    assert copy == {
        "evicted_at_ms": finalized_at_ms + 20,
        "finalized_at_ms": finalized_at_ms,
        "archive_retention_ms": DAY_MS,
        "attempt": 0,
        "crash_attempt": 0,
        "id": "a",
        "kind": "k",
        "queue": "q",
        "state": "completed",
        "fingerprint": "f",
        "payload": b"body",
    }
    assert state_of(store, "a") is State.DELETED
    assert counts(store) == {}
    enqueue(store, "a", payload=b"other")
    assert job(store, "a").state == "available"


@pytest.mark.parametrize("state", sorted(EVICTABLE))
def test_every_state_that_is_evicted_is_copied(store, archive, clock, admin, state):
    archive.set_archive_policy("q", 1)
    bring_to(store, clock, "a", state, retention_ms=1)
    clock.advance_ms(1)
    assert store.evict_retained(10) == 1
    assert [(copy["id"], copy["state"]) for copy in copies(admin)] == [("a", state)]


def test_one_sweep_copies_the_queues_with_a_policy_alone(store, archive, clock, admin):
    for queue in ("b", "c", "a"):
        finish(store, queue, f"{queue}2", queue=queue)
    archive.set_archive_policy("a", 5)
    archive.set_archive_policy("c", 7)
    archive.set_archive_policy("without jobs", 7)
    clock.advance_ms(1)
    assert store.evict_retained(10) == 6
    kept = {copy["id"]: copy["archive_retention_ms"] for copy in copies(admin)}
    assert kept == {"a": 5, "a2": 5, "c": 7, "c2": 7}


def test_a_later_policy_changes_no_copy(store, archive, clock, admin):
    archive.set_archive_policy("q", 5)
    finish(store, "a")
    clock.advance_ms(1)
    store.evict_retained(10)
    archive.set_archive_policy("q", 9)
    finish(store, "b")
    clock.advance_ms(1)
    store.evict_retained(10)
    archive.clear_archive_policy("q")
    finish(store, "c")
    clock.advance_ms(1)
    assert store.evict_retained(10) == 1
    kept = {copy["id"]: copy["archive_retention_ms"] for copy in copies(admin)}
    assert kept == {"a": 5, "b": 9}


def test_the_limit_of_a_sweep_bounds_its_copies(store, archive, clock, admin):
    archive.set_archive_policy("q", 5)
    finish(store, *"abc")
    clock.advance_ms(1)
    assert store.evict_retained(2) == 2
    assert ids(admin) == ["a", "b"]
    assert state_of(store, "c") is State.COMPLETED


def test_what_succeeded_before_an_instant_is_archived(store, archive, clock, admin):
    archive.set_archive_policy("q", 5)
    finish(store, "a", "b", retention_ms=DAY_MS, tags=("t",))
    finish(store, "x", queue="other", retention_ms=DAY_MS)
    clock.advance_ms(1)
    sweep = store.inspect.archive_completed_older_than
    assert sweep(clock.now_ms(), 1) == 1
    assert ids(admin) == ["a"]
    assert sweep(clock.now_ms(), 10) == 2
    assert sweep(clock.now_ms(), 10) == 0
    assert ids(admin) == ["a", "b"]
    [[tags]] = admin.execute("SELECT count(*) FROM headgate.headgate_job_tag")
    assert tags == 0


def test_what_an_operator_or_a_handler_deletes_is_not_copied(
    store, archive, clock, admin
):
    archive.set_archive_policy("q", DAY_MS)
    finish(store, *"abc", retention_ms=DAY_MS)
    clock.advance_ms(1)
    store.inspect.delete_job("a")
    assert store.inspect.delete_terminal(["completed"], clock.now_ms(), 1) == 1
    store.inspect.create_operation(
        BulkRequest(id="o", action="delete", queue="q", state="completed")
    )
    while store.inspect.get_operation("o").status != "completed":
        store.inspect.run_pending_operations(10)
    finish(store, "without retention", retention_ms=0)
    store.ack(run_one(store, "revoked").lease_ref, Outcome.REVOKE)
    assert counts(store) == {}
    assert copies(admin) == []


def test_an_id_archived_twice_in_one_millisecond_waits_for_the_next(
    store, archive, clock, admin
):
    archive.set_archive_policy("q", 5)
    sweep = store.inspect.archive_completed_older_than
    finish(store, "a", retention_ms=DAY_MS)
    assert sweep(clock.now_ms() + 1, 10) == 1
    finish(store, "a", retention_ms=DAY_MS)
    with pytest.raises(StoreConflict, match="archived in this millisecond"):
        sweep(clock.now_ms() + 1, 10)
    assert state_of(store, "a") is State.COMPLETED
    clock.advance_ms(1)
    assert sweep(clock.now_ms(), 10) == 1
    assert ids(admin) == ["a", "a"]


# Months


def test_there_is_a_partition_for_every_month_and_one_on_either_side(admin):
    rows = admin.execute(
        "SELECT child.relname, pg_get_expr(child.relpartbound, child.oid)"
        " FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid"
        " WHERE inhparent = 'headgate.headgate_job_archive'::regclass"
    ).fetchall()
    bounds = {
        f"{year}{month:02}": (
            f"'{month_ms(year, month)}'",
            f"'{month_ms(year + month // 12, month % 12 + 1)}'",
        )
        for year in range(2025, 2032)
        for month in range(1, 13)
    }
    assert len(bounds) == 84
    bounds["before_2025"] = ("MINVALUE", "'1735689600000'")
    bounds["after_2031"] = ("'1956528000000'", "MAXVALUE")
    assert dict(rows) == {
        f"headgate_job_archive_{name}": f"FOR VALUES FROM ({low}) TO ({high})"
        for name, (low, high) in bounds.items()
    }


def evict_at(store, clock, at_ms, *names):
    """Finish jobs and let them be evicted at an instant."""
    clock.freeze_at(at_ms - 1)
    finish(store, *names)
    clock.freeze_at(at_ms)
    assert store.evict_retained(100) == len(names)


@pytest.mark.parametrize(
    ("at_ms", "place"),
    [
        (month_ms(2025, 1) - 1, "before_2025"),
        (month_ms(2025, 1), "202501"),
        (month_ms(2028, 3) - 1, "202802"),
        (month_ms(2028, 3), "202803"),
        (month_ms(2032, 1) - 1, "203112"),
        (month_ms(2032, 1), "after_2031"),
        (month_ms(2060, 1), "after_2031"),
    ],
)
def test_a_copy_goes_to_the_month_of_its_eviction(
    store, archive, clock, admin, at_ms, place
):
    archive.set_archive_policy("q", 5)
    evict_at(store, clock, at_ms, "a")
    assert [copy["place"].rpartition("archive_")[2] for copy in copies(admin)] == [
        place
    ]


HOSTILE_MONTHS = [
    "2031;DROP", "202500", "202513", "202412", "203201", "20261", "2026011", "",
    " 202601", "202601\n", "2026-1", "٢٠٢٦٠١", "２０２６０１", "before_2025",
    "after_2031", "202601'; DROP TABLE x; --", "-20260", "+20260", "2_0260",
]  # fmt: skip


@pytest.mark.parametrize("month", HOSTILE_MONTHS)
def test_only_a_month_of_the_layout_is_pruned(store, archive, clock, admin, month):
    archive.set_archive_policy("q", 1)
    evict_at(store, clock, month_ms(2024, 12), "early")
    evict_at(store, clock, month_ms(2032, 1), "late")
    clock.freeze_at(month_ms(2040, 1))
    with pytest.raises(InvalidRequest, match="is not YYYYMM from 202501 to 203112"):
        archive.prune_archive_month(month)
    assert ids(admin) == ["early", "late"]


def test_a_month_is_pruned_when_it_is_over(store, archive, clock, admin):
    archive.set_archive_policy("q", 1)
    evict_at(store, clock, month_ms(2025, 1) - 1, "before")
    evict_at(store, clock, month_ms(2025, 1), "first")
    evict_at(store, clock, month_ms(2025, 2) - 2, "last", "last too")
    evict_at(store, clock, month_ms(2025, 2), "after")
    clock.freeze_at(month_ms(2025, 2) - 1)
    for month in ("202501", "202502", "203112"):
        with pytest.raises(InvalidRequest, match="archive partition is open"):
            archive.prune_archive_month(month)
    assert len(copies(admin)) == 5
    clock.freeze_at(month_ms(2025, 2))
    assert archive.prune_archive_month("202501") == 3
    assert archive.prune_archive_month("202501") == 0
    assert ids(admin) == ["before", "after"]


def test_one_copy_that_is_to_be_kept_holds_its_month(store, archive, clock, admin):
    archive.set_archive_policy("q", 1)
    evicted_at_ms = month_ms(2025, 1)
    evict_at(store, clock, evicted_at_ms, *(f"n{n}" for n in range(9)))
    archive.set_archive_policy("q", 40 * DAY_MS)
    evict_at(store, clock, evicted_at_ms + 1, "long")
    kept_until_ms = evicted_at_ms + 1 + 40 * DAY_MS
    clock.freeze_at(kept_until_ms - 1)
    with pytest.raises(InvalidRequest, match=f"rows; nothing .* {kept_until_ms}$"):
        archive.prune_archive_month("202501")
    assert len(copies(admin)) == 10
    clock.freeze_at(kept_until_ms)
    assert archive.prune_archive_month("202501") == 10
    assert copies(admin) == []


def test_months_are_those_of_utc_whatever_the_zone_of_the_session(clock, connect):
    for zone in ("Pacific/Kiritimati", "Etc/GMT+12"):
        other = connect(options=f"-c timezone={zone}")
        for at_ms, pruned in ((month_ms(2025, 3) - 1, None), (month_ms(2025, 3), 0)):
            clock.freeze_at(at_ms)
            [[found]] = other.execute(
                "SELECT pruned FROM headgate.headgate_prune_archive('202502', 1000)"
            )
            assert found == pruned
        other.rollback()


# Races, in order by locks and not by chance


def started(call):
    """Run a call on a thread; what it answers or raises is put into a list."""
    answers = []

    def run():
        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def wait_until_blocked(admin, relation):
    """Wait until somebody waits for a lock of a table."""
    deadline = time.monotonic() + WAIT_S
    while admin.execute(
        "SELECT FROM pg_locks WHERE NOT granted AND relation = %s::regclass",
        [f"{SCHEMA}.{relation}"],
    ).rowcount == 0:  # fmt: skip
        assert time.monotonic() < deadline, "nobody waits"


def end(admin, connection):
    """End a connection as a kill of its client does, and wait for that."""
    pid = [connection.info.backend_pid]
    connection.close()
    deadline = time.monotonic() + WAIT_S
    while admin.execute(
        "SELECT FROM pg_stat_activity WHERE pid = %s", pid
    ).rowcount > 0:  # fmt: skip
        assert time.monotonic() < deadline, "the backend lives on"


def joined(thread, answers):
    thread.join(WAIT_S)
    assert not thread.is_alive()
    [answer] = answers
    return answer


@pytest.fixture
def patient(monkeypatch):
    """Let no call give up while a test holds a lock."""
    monkeypatch.setattr(settings, "ARCHIVE_LOCK_WAIT_MS", WAIT_S * 1000)


def test_a_sweep_that_comes_while_a_policy_is_set_obeys_it(
    store, clock, connect, admin
):
    finish(store, "a")
    clock.advance_ms(1)
    setting = connect()
    setting.execute("SELECT headgate.headgate_set_archive_policy('q', 5, 1000)")
    sweep = started(lambda: store.evict_retained(10))
    wait_until_blocked(admin, "headgate_archive_policy")
    setting.commit()
    assert joined(*sweep) == 1
    assert ids(admin) == ["a"]


def test_a_policy_waits_for_the_sweeps_that_did_not_see_it(
    patient, store, archive, clock, connect, admin
):
    """Once it is set nothing is deleted without a copy, and once cleared with one."""
    finish(store, "a")
    clock.advance_ms(1)
    sweeping = connect()
    assert sweeping.execute("SELECT headgate.headgate_evict(10)").fetchone() == (1,)
    setting = started(lambda: archive.set_archive_policy("q", 5))
    wait_until_blocked(admin, "headgate_archive_policy")
    sweeping.commit()
    assert joined(*setting) is None
    assert copies(admin) == []
    finish(store, "b")
    clock.advance_ms(1)
    sweeping.execute("SELECT headgate.headgate_evict(10)")
    clearing = started(lambda: archive.clear_archive_policy("q"))
    wait_until_blocked(admin, "headgate_archive_policy")
    sweeping.commit()
    assert joined(*clearing) is None
    assert ids(admin) == ["b"]


def test_a_policy_that_cannot_be_set_in_time_is_a_conflict(
    monkeypatch, store, archive, clock, connect
):
    monkeypatch.setattr(settings, "ARCHIVE_LOCK_WAIT_MS", 20)
    finish(store, "a")
    clock.advance_ms(1)
    sweeping = connect()
    sweeping.execute("SELECT headgate.headgate_evict(10)")
    for call in (
        lambda: archive.set_archive_policy("q", 5),
        lambda: archive.clear_archive_policy("q"),
    ):
        with pytest.raises(StoreConflict, match="lock timeout"):
            call()
    assert archive.archive_policies() == []
    sweeping.rollback()
    archive.set_archive_policy("q", 5)


def test_a_sweep_that_dies_has_neither_copied_nor_deleted(
    store, archive, clock, connect, admin
):
    archive.set_archive_policy("q", 5)
    finish(store, "a", tags=("t",))
    clock.advance_ms(1)
    dying = connect()
    assert dying.execute("SELECT headgate.headgate_evict(10)").fetchone() == (1,)
    end(admin, dying)
    assert job(store, "a").tags == ("t",)
    assert copies(admin) == []
    assert store.evict_retained(10) == 1
    assert ids(admin) == ["a"]


def test_pruning_waits_for_a_copy_on_its_way_and_keeps_it(
    patient, store, archive, clock, connect, admin
):
    archive.set_archive_policy("q", 5)
    clock.freeze_at(month_ms(2026, 5) - 2)
    finish(store, "a")
    clock.freeze_at(month_ms(2026, 5) - 1)
    sweeping = connect()
    sweeping.execute("SELECT headgate.headgate_evict(10)")
    clock.freeze_at(month_ms(2026, 5))
    pruning = started(lambda: archive.prune_archive_month("202604"))
    wait_until_blocked(admin, "headgate_job_archive_202604")
    sweeping.commit()
    assert "still contains retained rows" in str(joined(*pruning))
    assert ids(admin) == ["a"]


def test_pruning_goes_past_sweeps_and_readers_of_other_months(
    store, archive, clock, connect, admin
):
    archive.set_archive_policy("q", 1)
    evict_at(store, clock, month_ms(2026, 4), "old")
    clock.freeze_at(month_ms(2026, 6))
    finish(store, "a")
    clock.advance_ms(1)
    connect().execute("SELECT headgate.headgate_evict(10)")
    connect().execute("SELECT FROM headgate.headgate_job_archive_202605")
    assert archive.prune_archive_month("202604") == 1


def test_a_month_that_is_being_read_is_not_pruned_and_not_lost(
    monkeypatch, store, archive, clock, connect, admin
):
    monkeypatch.setattr(settings, "ARCHIVE_LOCK_WAIT_MS", 20)
    archive.set_archive_policy("q", 1)
    evict_at(store, clock, month_ms(2026, 4), "a")
    clock.freeze_at(month_ms(2026, 5))
    reading = connect()
    reading.execute("SELECT FROM headgate.headgate_job_archive_202604")
    with pytest.raises(StoreConflict, match="lock timeout"):
        archive.prune_archive_month("202604")
    assert ids(admin) == ["a"]
    reading.rollback()
    assert archive.prune_archive_month("202604") == 1


def test_whatever_races_a_job_is_deleted_once_and_copied_at_most_once(
    patient, postgres, store, archive, clock, admin
):
    names = [f"n{n}" for n in range(120)]
    clock.freeze_at(month_ms(2026, 5) - 2)
    finish(store, *names)
    clock.freeze_at(month_ms(2026, 5) - 1)
    deleted, failed = [], []
    gate = threading.Barrier(5)

    def repeat(call):
        other = postgres.open_store()
        gate.wait()
        try:
            for _ in range(12):
                call(other)
        except Exception as error:
            failed.append(error)

    def sweep(other):
        deleted.append(other.evict_retained(random.randint(1, 6)))

    def sweep_by_age(other):
        cutoff_ms = month_ms(2026, 5)
        deleted.append(other.inspect.archive_completed_older_than(cutoff_ms, 3))

    def change(other):
        other.maintenance.set_archive_policy("q", DAY_MS)
        other.maintenance.clear_archive_policy("q")

    def prune(other):
        clock_ends_the_month()
        try:
            other.maintenance.prune_archive_month("202604")
        except InvalidRequest:  # copies of this hour
            return

    def clock_ends_the_month():
        with clock_lock:
            clock.freeze_at(month_ms(2026, 5))

    clock_lock = threading.Lock()
    threads = [
        threading.Thread(target=repeat, args=[call])
        for call in (sweep, sweep, sweep_by_age, change, prune)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S * 2)
        assert not thread.is_alive()
    assert failed == []
    there = {found.id for found in store.inspect.get_jobs(names) if found is not None}
    assert len(there) == 120 - sum(deleted)
    found = ids(admin)
    assert len(found) == len(set(found))
    assert not there & set(found)


# What it costs


_TOUCHED = """
SELECT relname, seq_scan, coalesce(idx_tup_fetch, 0) + seq_tup_read
FROM pg_stat_xact_user_tables
WHERE schemaname = %s AND relname = ANY (%s)
"""


@pytest.mark.parametrize("are_analysed", [False, True])
@pytest.mark.parametrize("is_archived", [False, True])
def test_a_sweep_reads_its_jobs_and_the_policies_of_their_queues(
    store, archive, clock, connect, admin, are_analysed, is_archived
):
    """Among many policies and jobs, whatever the statistics are of."""
    finish(store, *(f"n{n}" for n in range(50)))
    clock.advance_ms(1)
    other = connect()
    other.execute(
        "INSERT INTO headgate.headgate_archive_policy"
        " SELECT 'queue ' || n, 1 FROM generate_series(1, 2000) AS n"
    )
    if is_archived:
        other.execute("INSERT INTO headgate.headgate_archive_policy VALUES ('q', 1)")
    if are_analysed:
        other.execute("ANALYZE headgate.headgate_archive_policy")
    tables = ["headgate_archive_policy", "headgate_job"]
    before = {row[0]: row[1:] for row in other.execute(_TOUCHED, [SCHEMA, tables])}
    assert other.execute("SELECT headgate.headgate_evict(20)").fetchone() == (20,)
    after = {row[0]: row[1:] for row in other.execute(_TOUCHED, [SCHEMA, tables])}
    scans, rows = (
        {name: after[name][n] - before.get(name, (0, 0))[n] for name in tables}
        for n in (0, 1)
    )
    assert scans == {"headgate_archive_policy": 0, "headgate_job": 0}
    assert rows["headgate_job"] <= 60
    # One for the lock and one for each copy, of two thousand.
    assert rows["headgate_archive_policy"] <= (60 if is_archived else 0)
    other.rollback()


def test_a_copy_opens_no_other_month(store, archive, clock, connect):
    archive.set_archive_policy("q", 1)
    clock.freeze_at(month_ms(2026, 4))
    finish(store, "a")
    clock.advance_ms(1)
    other = connect()
    other.execute("SELECT headgate.headgate_evict(10)")
    rows = other.execute(
        "SELECT relation::regclass::text FROM pg_locks"
        " WHERE pid = pg_backend_pid() AND mode = 'RowExclusiveLock'"
        " AND relation::regclass::text LIKE '%archive_2%'"
    ).fetchall()
    assert {name.rpartition(".")[2].removesuffix("_pkey") for (name,) in rows} == {
        "headgate_job_archive_202604"
    }
    other.rollback()


def test_vacuum_tells_of_the_archive_as_one_table(archive):
    told = [table.table for table in archive.vacuum() if "archive" in table.table]
    assert told == ["headgate_archive_policy", "headgate_job_archive"]
