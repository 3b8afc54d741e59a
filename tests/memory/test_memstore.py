"""What MemStore offers to tests beside the port, and its one lock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from sys import getswitchinterval, setswitchinterval

import pytest

from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    IdConflict,
    InvalidRequest,
    LeaseRejected,
)
from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import Ack, Checkpoint, Claim, LeaseRef
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.memory.store import MemStore
from tests import observe
from tests.builders import (
    DAY_MS,
    LEASE_MS,
    START_MS,
    admit,
    bring_to,
    claim_one,
    crash,
    enqueue,
    envelope,
    run_one,
)


@pytest.fixture
def store() -> MemStore:
    """An empty store whose clock stands at 1,000,000."""
    made = MemStore()
    made.freeze_clock_at(START_MS)
    return made


class Stepped:
    """The clock of a store, as the builders step it."""

    def __init__(self, store: MemStore) -> None:
        self._store = store

    def now_ms(self) -> int:
        return self._store.inspect.store_now_ms()

    def advance_ms(self, by_ms: int) -> None:
        self._store.advance_clock(by_ms)


# The clock


def test_a_frozen_clock_moves_only_when_it_is_stepped(store):
    assert store.inspect.store_now_ms() == START_MS
    store.advance_clock(5)
    store.advance_clock(7)
    assert store.inspect.store_now_ms() == START_MS + 12
    store.freeze_clock_at(3)
    assert store.inspect.store_now_ms() == 3


def test_stepping_a_live_clock_freezes_it_at_the_present():
    store = MemStore()
    before = store.inspect.store_now_ms()
    store.advance_clock(DAY_MS)
    stepped = store.inspect.store_now_ms()
    assert before + DAY_MS <= stepped < before + DAY_MS + 60_000
    store.advance_clock(0)
    assert store.inspect.store_now_ms() == stepped


def test_an_unfrozen_clock_follows_the_system_again(store):
    store.unfreeze_clock()
    assert store.inspect.store_now_ms() > START_MS + 50 * 365 * DAY_MS


def test_everything_that_waits_follows_the_stepped_clock(store):
    enqueue(store, "due", delay_ms=10)
    claim = run_one(store, "leased", queue="other")
    store.advance_clock(LEASE_MS)
    assert store.promote_due(10) == 1
    assert [record.job_id for record in store.reclaim_expired(10)] == ["leased"]
    assert claim.expires_at_ms == START_MS + LEASE_MS


# Looking


def test_a_job_is_shown_with_its_present_counters_and_schedule(store):
    claim = run_one(store, "a", priority=3)
    store.ack(claim.lease_ref, Outcome.RETRY, delay_ms=500)
    shown, state = store.job_state("a")
    assert state is State.RETRYABLE
    assert (shown.attempt, shown.scheduled_at_ms) == (1, START_MS + 500)
    assert (shown.priority, claim.envelope.attempt) == (3, 0)


def test_an_unknown_or_removed_job_has_no_state(store):
    assert store.job_state("a") is None
    store.ack(run_one(store, "a", retention_ms=0).lease_ref, Outcome.SUCCESS)
    assert store.job_state("a") is None
    assert store.attempts("a") == []
    assert store.errors("a") == []


@pytest.mark.parametrize(
    ("outcome", "told", "lines"),
    [
        (
            Outcome.SUCCESS,
            {"logs": ["opened", "done"]},
            ["success logs: opened | done"],
        ),
        (Outcome.SUCCESS, {}, []),
        (Outcome.RETRY, {"error": "boom"}, ["retry (attempt 1): boom"]),
        (Outcome.RETRY, {}, ["retry (attempt 1): "]),
        (
            Outcome.RETRY,
            {"error": "boom", "logs": ["a", "b"]},
            ["retry (attempt 1): boom", "logs: a | b"],
        ),
        (Outcome.SKIP, {"error": "gone"}, ["archived: gone"]),
        (Outcome.SKIP, {"logs": ["a"]}, ["logs: a"]),
        (Outcome.SKIP, {}, []),
        (
            Outcome.UNDECODABLE,
            {"error": "old", "logs": ["a"]},
            ["undecodable: old", "logs: a"],
        ),
        (Outcome.RATE_LIMITED, {"error": "later", "logs": ["a"]}, []),
    ],
)
def test_the_history_reads_as_lines_of_text(store, outcome, told, lines):
    store.ack(run_one(store, "a").lease_ref, outcome, **told)
    assert store.errors("a") == lines


def test_a_lost_lease_reads_as_a_line_of_text(store):
    crash(store, Stepped(store), run_one(store, "a"))
    assert store.errors("a") == ["lease_lost (crash 1)"]


def test_attempts_are_the_entries_themselves(store):
    store.ack(run_one(store, "a").lease_ref, Outcome.RETRY, error="boom")
    entry = AttemptEntry(
        at_ms=START_MS, outcome="retry", attempt=1, error="boom", worker="w", fence=1
    )
    history = store.attempts("a")
    assert history == [entry]
    history.clear()
    assert store.attempts("a") == [entry]


def test_counts_leave_out_states_without_a_job(store):
    enqueue(store, "a", "b")
    enqueue(store, "c", queue="other", pending=True)
    admit(store, capacity=1)
    assert store.counts() == {"running": 1, "available": 1, "pending": 1}
    assert store.counts("other") == {"pending": 1}
    assert store.counts("nowhere") == {}


def test_all_jobs_are_listed_by_id_also_the_finished_ones(store):
    store.ack(run_one(store, "z").lease_ref, Outcome.SUCCESS)
    store.ack(run_one(store, "gone").lease_ref, Outcome.REVOKE)
    enqueue(store, "b", "a", tags=("t",), headers={"h": "1"})
    assert [found.id for found in store.all_enqueued()] == ["a", "b", "z"]
    assert store.all_enqueued()[0] == store.job_state("a")[0]
    assert store.all_enqueued()[0].headers == {"h": "1"}


def test_what_was_handed_out_does_not_follow_the_store(store):
    enqueue(store, "a", unique_key=b"k", payload=b"old")
    before = store.snapshot()
    (listed,) = store.all_enqueued()
    with pytest.raises(DuplicateJob):
        enqueue(store, "b", unique_key=b"k", payload=b"new", unique_replace=15)
    assert listed.payload == b"old"
    assert before["jobs"][0]["payload"] == b"old"
    assert store.snapshot()["jobs"][0]["payload"] == b"new"


def test_a_snapshot_is_a_copy(store):
    enqueue(store, "a", headers={"h": "1"}, partition_key="p")
    taken = store.snapshot()
    assert taken == store.snapshot()
    taken["jobs"][0]["headers"]["h"] = "2"
    taken["jobs"].clear()
    taken["unfinished"].clear()
    assert store.snapshot()["unfinished"] == {"q": 1}
    assert store.all_enqueued()[0].headers == {"h": "1"}


# Setting up


def test_the_limit_of_crashes_may_be_set_later(store):
    store.crash_limit = 1
    crash(store, Stepped(store), run_one(store, "a"))
    assert store.job_state("a")[1] is State.QUARANTINED


def test_backoff_may_be_set_at_any_time(store):
    store.retry_base_ms = 10
    store.retry_cap_ms = 15
    store.retry_jitter = lambda base_ms: base_ms + 2
    for attempt, delay_ms in ((1, 22), (2, 27)):
        claim = claim_one(store) if attempt > 1 else run_one(store, "a")
        store.ack(claim.lease_ref, Outcome.RETRY)
        found = store.job_state("a")[0]
        now_ms = store.inspect.store_now_ms()
        assert (found.attempt, found.scheduled_at_ms) == (attempt, now_ms + delay_ms)
        store.advance_clock(delay_ms)
        store.promote_due(1)
    assert (store.retry_base_ms, store.retry_cap_ms) == (10, 15)
    assert store.retry_jitter(1) == 3


@pytest.mark.parametrize("name", ["crash_limit", "retry_base_ms", "retry_cap_ms"])
def test_an_impossible_option_is_refused_at_once_and_later(store, name):
    with pytest.raises(InvalidRequest, match=f"{name} is 0, allowed is 1 to "):
        MemStore(**{name: 0})
    before = getattr(store, name)
    with pytest.raises(InvalidRequest, match=f"{name} is 0, allowed is 1 to "):
        setattr(store, name, 0)
    assert getattr(store, name) == before


def test_a_queue_may_be_paused_and_limited(store):
    enqueue(store, "a")
    store.set_queue_paused("q", True)
    assert not admit(store)
    store.set_queue_paused("q", False)
    store.set_enqueue_limit("q", 1)
    with pytest.raises(Backpressure, match="queue q is full: limit 1"):
        enqueue(store, "b")
    assert [claim.envelope.id for claim in admit(store).claims] == ["a"]


def test_a_rate_limit_starts_full_and_replaces_the_old_one(store):
    store.set_rate_limit("c", limit=0, window_ms=1000, burst=2)
    enqueue(store, "a", "b", "c", "d", rate_class="c")
    assert len(admit(store)) == 2
    store.advance_clock(DAY_MS)
    assert len(admit(store)) == 0
    store.set_rate_limit("c", limit=1, window_ms=1000, burst=1)
    assert len(admit(store)) == 1
    store.advance_clock(999)
    assert len(admit(store)) == 0
    store.advance_clock(1)
    assert len(admit(store)) == 1


@pytest.mark.parametrize(
    "arguments", [("", 1, 1, 1), ("c", -1, 1, 1), ("c", 1, 0, 1), ("c", 1, 1, 0)]
)
def test_an_impossible_rate_limit_changes_nothing(store, arguments):
    store.set_rate_limit("c", limit=1, window_ms=1, burst=1)
    before = store.snapshot()
    with pytest.raises(InvalidRequest):
        store.set_rate_limit(*arguments)
    assert store.snapshot() == before


def test_a_class_that_asks_for_a_long_pause_gets_it(store):
    claim = run_one(store, "a", rate_class="c")
    store.ack(claim.lease_ref, Outcome.RATE_LIMITED, delay_ms=2 * DAY_MS)
    assert store.job_state("a")[1] is State.AVAILABLE
    store.advance_clock(2 * DAY_MS - 1)
    assert not admit(store)
    store.advance_clock(1)
    assert len(admit(store)) == 1


def test_uniqueness_can_be_left_out_of_one_call(store):
    enqueue(store, "a", unique_key=b"k")
    held = [
        envelope("b", unique_key=b"k"),
        envelope("c", unique_key=b"k", unique_window_ms=DAY_MS),
    ]
    store.enqueue_without_uniqueness(held)
    debounced = envelope("d", unique_key=b"k", unique_debounce_ms=5, scheduled_at_ms=0)
    store.enqueue_without_uniqueness([debounced])
    assert store.counts() == {"available": 4}
    assert store.job_state("b")[0].unique_key is None
    with pytest.raises(DuplicateJob) as raised:
        enqueue(store, "e", unique_key=b"k")
    assert raised.value.existing_id == "a"
    store.enqueue([envelope("f", unique_key=b"k", unique_window_ms=DAY_MS)])


def test_ids_stay_strict_without_uniqueness(store):
    enqueue(store, "a", unique_key=b"k")
    store.enqueue_without_uniqueness([envelope("a", unique_key=b"k")])
    with pytest.raises(IdConflict):
        store.enqueue_without_uniqueness([envelope("a", payload=b"other")])
    assert store.counts() == {"available": 1}


def test_what_memory_cannot_do_is_absent(store):
    assert store.transactional is None
    assert store.notifying is None
    assert store.maintenance is None


@pytest.mark.parametrize("state", sorted(set(State) - {State.DELETED, State.RUNNING}))
def test_no_lease_fits_a_job_that_does_not_run(store, state):
    """A ref made up from the empty columns of a row proves nothing."""
    bring_to(store, Stepped(store), "a", state)
    made_up = LeaseRef("a", "", store.snapshot()["jobs"][0]["fence"])
    before = store.snapshot()
    for call in (
        lambda: store.ack(made_up, Outcome.SUCCESS),
        lambda: store.checkpoint(made_up, Checkpoint()),
    ):
        with pytest.raises(LeaseRejected):
            call()
    assert store.renew([made_up], lease_ms=5) == [made_up]
    assert store.snapshot() == before


# Threads


@contextmanager
def restless() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    usual = getswitchinterval()
    setswitchinterval(1e-6)
    try:
        yield
    finally:
        setswitchinterval(usual)


def run_threads(*bodies: Callable[[], None]) -> None:
    """Start all bodies together; the first failure of any is raised here."""
    barrier = threading.Barrier(len(bodies))
    failures: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        barrier.wait()
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    with restless():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


OUTCOMES = (
    Outcome.SUCCESS,
    Outcome.RETRY,
    Outcome.SNOOZE,
    Outcome.RATE_LIMITED,
    Outcome.SKIP,
    Outcome.REVOKE,
)


class Life:
    """One thread that does a bit of everything, and writes down what it was given."""

    def __init__(self, store: MemStore, name: str) -> None:
        self.store = store
        self.name = name
        self.claims: list[Claim] = []
        self.removed = 0
        self.settled = 0

    def __call__(self) -> None:
        for turn in range(40):
            enqueue(
                self.store,
                *(f"{self.name}-{turn}-{n}" for n in range(3)),
                partition_key=str(turn % 4),
                rate_class="c" if turn % 3 else "",
                retention_ms=DAY_MS if turn % 2 else 0,
            )
            batch = admit(self.store, f"{self.name}-{turn}", capacity=4).claims
            self.claims += batch
            refs = [claim.lease_ref for claim in batch]
            lost = self.store.renew(refs, lease_ms=LEASE_MS)
            self._settle(
                [claim for claim in batch if claim.lease_ref not in lost], turn
            )
            self.store.advance_clock(1 if turn % 8 else LEASE_MS)
            self.store.promote_due(2)
            self.store.reclaim_expired(2)

    def _settle(self, batch: list[Claim], turn: int) -> None:
        acks = []
        for n, claim in enumerate(batch[:-1] if turn % 5 == 0 else batch):
            outcome = OUTCOMES[(turn + n) % len(OUTCOMES)]
            delay_ms = 3 if outcome in (Outcome.RETRY, Outcome.SNOOZE) else None
            acks.append(Ack(lease=claim.lease_ref, outcome=outcome, delay_ms=delay_ms))
        for ack, claim, answer in zip(
            acks, batch, self.store.ack_batch(acks), strict=False
        ):
            if answer is None:
                self.settled += 1
                kept = claim.envelope.retention_ms > 0
                self.removed += ack.outcome is Outcome.REVOKE or (
                    ack.outcome is Outcome.SUCCESS and not kept
                )


def test_eight_threads_neither_lose_nor_share_a_job(store):
    store.crash_limit = 1000
    lives = [Life(store, f"t{n}") for n in range(8)]
    run_threads(*lives)

    claims = [claim for life in lives for claim in life.claims]
    fences = Counter((claim.envelope.id, claim.fence) for claim in claims)
    assert max(fences.values()) == 1, "one claim was given out twice"
    highest = Counter(claim.envelope.id for claim in claims)
    rows = {row["id"]: row for row in store.snapshot()["jobs"]}
    for id, row in rows.items():
        assert row["fence"] == highest[id], f"{id} was claimed and nobody was told"
    assert len(rows) == 8 * 40 * 3 - sum(life.removed for life in lives)
    assert sum(store.counts().values()) == len(rows)
    assert sum(life.settled for life in lives) > 500
    observe.check(observe.of_memory(store))


def test_after_the_threads_every_job_can_still_be_finished(store):
    store.crash_limit = 1000
    run_threads(*(Life(store, f"t{n}") for n in range(4)))
    for _ in range(1000):
        store.advance_clock(DAY_MS // 2)
        store.promote_due(1000)
        store.reclaim_expired(1000)
        for claim in admit(store, capacity=1000).claims:
            store.ack(claim.lease_ref, Outcome.SUCCESS)
        if store.inspect.unfinished("q") == 0:
            break
    unfinished = {"pending", "scheduled", "available", "running", "retryable"}
    assert unfinished.isdisjoint(store.counts())
    observe.check(observe.of_memory(store))


def test_a_limit_of_intake_is_exact_under_sixty_four_producers(store):
    store.set_enqueue_limit("q", 25)
    refused = []

    def produce(n: int) -> Callable[[], None]:
        def one() -> None:
            try:
                enqueue(store, f"n{n}")
            except Backpressure as error:
                refused.append(error)

        return one

    run_threads(*(produce(n) for n in range(64)))
    assert store.counts() == {"available": 25}
    assert {(error.limit, error.incoming) for error in refused} == {(25, 1)}
    assert len(refused) == 39


def test_of_many_threads_one_wins_a_unique_key(store):
    holders = set()

    def produce(n: int) -> Callable[[], None]:
        def one() -> None:
            try:
                enqueue(store, f"n{n}", unique_key=b"k")
            except DuplicateJob as error:
                holders.add(error.existing_id)

        return one

    run_threads(*(produce(n) for n in range(16)))
    (winner,) = store.all_enqueued()
    assert holders == {winner.id}


def test_a_store_that_renews_for_ever_does_not_grow(store):
    claim = run_one(store, "a")
    for _ in range(5_000):
        store.advance_clock(10)
        assert store.renew([claim.lease_ref], lease_ms=LEASE_MS) == []
    assert store.reclaim_expired(10) == []
    store.advance_clock(LEASE_MS)
    assert [record.job_id for record in store.reclaim_expired(10)] == ["a"]
