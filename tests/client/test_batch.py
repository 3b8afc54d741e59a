"""Batches: sent in chunks, never twice, followed to the end of each job, once."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.app import Headgate
from headgate_sync.client import Client
from headgate_sync.client.batch import Batch
from headgate_sync.client.batch_following import ROUND_JOBS, Following
from headgate_sync.client.batch_values import BatchSummary
from headgate_sync.client.circuit import CircuitBreaker
from headgate_sync.errors import (
    BatchTimeout,
    EnqueueForbidden,
    FingerprintQuarantined,
    IdConflict,
    InvalidRequest,
    JobFailed,
    StoreClosed,
    StoreUnavailable,
    Unsupported,
)
from headgate_sync.events import EventBus
from headgate_sync.identity import Identity
from headgate_sync.lease import JobResult
from headgate_sync.lifecycle import Outcome
from headgate_sync.memory.store import MemStore
from headgate_sync.options import TaskOptions, Unique
from headgate_sync.registry import Registry
from tests.builders import DAY_MS, START_MS, admit, claim_one, counts, envelope, job
from tests.client.pacing import World, told, work
from tests.worker.rig import Tap, over, wait_for, working

registry = Registry()


@registry.task("double", queue="q")
def double(n: int) -> int:
    if n < 0:
        raise ValueError("negative")
    return n * 2


@registry.task("bill", queue="q", unique="{order_id}")
def bill(order_id: int) -> None: ...


@registry.task("mail", queue="mail")
@attrs.frozen
class Mail:
    to: str


@pytest.fixture
def world():
    return World()


@pytest.fixture
def tapped(store):
    return Tap(store)


@pytest.fixture
def make(tapped, world):
    """Make a batch in stepped time over the tapped store."""

    def made(id="b", **options):
        parts = options.pop("parts", {})
        client = Client(tapped, registry=registry, **parts)
        return Batch(client, id, pace=world, **options)

    return made


def fill(batch, count, start=0):
    for n in range(start, start + count):
        batch.enqueue(double, n)


def until_timeout(batch, timeout):
    """Indexes that an iteration yields before its timeout, and the error."""
    found = []

    def iterate():
        for item in batch.as_completed(timeout):
            found.append(item.index)  # noqa: PERF401 - it ends with an error

    with pytest.raises(BatchTimeout) as caught:
        iterate()
    return found, caught.value


def sizes(tapped):
    return [len(batch) for batch in tapped.given("enqueue")]


# Sending


def test_jobs_are_sent_in_chunks_and_the_rest_at_the_end(make, tapped):
    with make(chunk_size=4) as batch:
        fill(batch, 10)
        assert (sizes(tapped), batch.sent) == ([4, 4], 8)
    assert (sizes(tapped), batch.sent) == ([4, 4, 2], 10)


def test_a_job_has_its_place_its_tag_and_is_kept(make, store):
    with make("reindex-2024", options={"priority": 7, "queue": "slow"}) as batch:
        batch.enqueue(double, n=1)
        batch.add(double.using(retention="2d", tags=["x"], queue="q").job(2), key="two")
        batch.enqueue(Mail("ada"), retention="1s", priority=1)
        batch.add(envelope("own-id", retention_ms=0))
    found = [job(store, f"reindex-2024:{key}") for key in (0, "two", 2, 3)]
    assert [(j.queue, j.priority, j.retention_ms) for j in found] == [
        ("slow", 7, 3_600_000),
        ("q", 7, 2 * DAY_MS),
        ("slow", 1, 3_600_000),
        ("q", 0, 3_600_000),
    ]
    assert found[1].tags == ("batch:reindex-2024", "x")


def test_retention_is_left_alone_when_asked(make, store):
    with make(keep="0ms") as batch:
        fill(batch, 1)
    assert job(store, "b:0").retention_ms == 0
    work(store)
    assert [item.completion.state for item in batch.as_completed()] == ["deleted"]


def test_a_batch_without_a_name_is_one_of_its_own(make):
    assert len({make(None).id for _ in range(3)}) == 3


@pytest.mark.parametrize("id", ["", "a" * 59, "a/b", "a b", "é", 3, "a\n"])
def test_the_name_of_a_batch_is_checked(make, id):
    if id == "":
        with pytest.raises(InvalidRequest, match="batch id"):
            make(id)
        return
    with pytest.raises(InvalidRequest, match="batch id is"):
        make(id)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": 1001}, "chunk_size"),
        ({"window": 0}, "window"),
        ({"keep": 60}, "keep"),
        ({"patience": "0s"}, "patience"),
        ({"progress": "bar"}, "progress"),
        ({"options": {"nope": 1}}, "batch: unknown option nope"),
        ({"options": {"tx": 1}}, "batch: unknown option tx"),
        ({"options": {"id": "x"}}, "give them a key"),
    ],
)
def test_what_a_batch_cannot_take_is_refused_when_it_is_made(make, arguments, fault):
    with pytest.raises(InvalidRequest, match=fault):
        make(**arguments)


def test_a_store_that_cannot_be_inspected_has_no_batches():
    class Blind:
        inspect = None

    with pytest.raises(Unsupported):
        Batch(Client(Blind()))


def test_an_error_in_the_block_drops_what_was_not_sent_and_passes_on(make, store):
    batch = make(chunk_size=4)

    def block():
        with batch:
            fill(batch, 6)
            raise LookupError

    with pytest.raises(LookupError) as caught:
        block()
    assert batch.sent == 4
    assert counts(store) == {"available": 4}
    assert caught.value.__notes__ == [
        "batch b: 4 jobs were sent and go on; 2 buffered jobs were dropped"
    ]


def test_large_jobs_are_cut_by_bytes(make, tapped):
    @Registry().task("blob", queue="q")
    def blob(data: str) -> None: ...

    with make() as batch:
        for _ in range(40):
            batch.add(blob.job("x" * 900_000))
    assert sum(sizes(tapped)) == 40
    assert max(sizes(tapped)) < 20


def refusals():
    return [
        (lambda b: b.enqueue(double, "x"), InvalidRequest, "n: expected int, got str"),
        (lambda b: b.enqueue(double), InvalidRequest, "missing"),
        (lambda b: b.add(double.job(1), key=""), InvalidRequest, "key must not be"),
        (lambda b: b.add(double.job(1), key="x" * 300), InvalidRequest, "id has 302"),
        (lambda b: b.add(double.job(1), key="1"), InvalidRequest, "stands twice"),
        (lambda b: b.add(3), InvalidRequest, "int is no job"),
        (lambda b: b.enqueue(Mail("a"), id="x"), InvalidRequest, "give them a key"),
        (
            lambda b: b.add(double.using(identity=Identity("x")).job(1)),
            InvalidRequest,
            "the identity of a batch",
        ),
        (
            lambda b: b.add(double.using(tags=[str(n) for n in range(32)]).job(1)),
            InvalidRequest,
            "tags has 33",
        ),
    ]


@pytest.mark.parametrize("number", range(len(refusals())))
def test_a_bad_job_is_told_with_its_place_after_the_good_ones_were_sent(
    make, store, number
):
    add, error, text = refusals()[number]
    batch = make()
    fill(batch, 3)
    with pytest.raises(error, match=text) as caught:
        add(batch)
    assert caught.value.item_index == 3
    assert "item 3 of the batch" in caught.value.__notes__
    assert counts(store) == {"available": 3}
    fill(batch, 1)
    batch.flush()
    assert job(store, "b:4").state == "available"


@pytest.mark.parametrize("add", [0, 1])
def test_a_transaction_is_refused(make, add):
    batch = make()
    with pytest.raises(InvalidRequest, match="tx"):
        (lambda: batch.enqueue(double, 1, tx=object()),
         lambda: batch.enqueue(Mail("x"), tx=object()))[add]()  # fmt: skip


def test_a_key_that_was_refused_may_be_given_again(make, store):
    batch = make()
    with pytest.raises(InvalidRequest, match="tags has 33"):
        batch.add(envelope("e", tags=[f"t{n}" for n in range(32)]), key="a")
    batch.add(double.job(1), key="a")
    batch.flush()
    assert job(store, "b:a").state == "available"


def test_a_conflict_names_its_item_and_those_around_it_go_in(make, store):
    store.enqueue([envelope("b:5", kind="other")])
    batch = make()
    with pytest.raises(IdConflict, match="b:5") as caught, batch:
        fill(batch, 10)
    assert caught.value.item_index == 5
    assert batch.sent == 5
    batch.flush()
    assert batch.sent == 9


def test_quarantine_and_denial_name_their_item(make, make_store, clock, world):
    store = make_store(crash_limit=1)
    store.enqueue([Client(store).envelope(double.job(6))])
    claim_one(store, lease_ms=1)
    clock.advance_ms(2)
    store.reclaim_expired(10)
    batch = Batch(Client(store), "b", pace=world)
    fill(batch, 10)
    with pytest.raises(FingerprintQuarantined) as caught:
        batch.flush()
    assert (caught.value.item_index, batch.sent) == (6, 6)
    no_mail = Client(store, authorizer=lambda asked, job: job.kind != "mail")
    batch = Batch(no_mail, "c", pace=world)
    batch.enqueue(double, 1)
    batch.enqueue(Mail("x"))
    with pytest.raises(EnqueueForbidden) as denied:
        batch.flush()
    assert (denied.value.item_index, batch.sent) == (1, 1)
    dropping = Client(store, middleware=[lambda request, proceed: None])
    batch = Batch(dropping, "d", pace=world)
    fill(batch, 1)
    with pytest.raises(EnqueueForbidden) as dropped:
        batch.flush()
    assert dropped.value.item_index == 0


def test_a_held_key_joins_the_winner_and_follows_it(make, store, tapped):
    first = Client(store).enqueue(bill.using(retention="1d").job(3))
    with make() as batch:
        for n in range(8):
            batch.enqueue(bill, n)
        batch.enqueue(bill, 5)  # the key of an earlier item of the same batch
    assert counts(store) == {"available": 8}
    work(store, result=b"1")
    items = {item.index: item for item in batch.as_completed()}
    assert sorted(items) == list(range(9))
    assert items[3].job_id == first.id
    assert items[8].job_id == "b:5"
    assert {item.completion.state for item in items.values()} == {"completed"}
    assert len(sizes(tapped)) < 30


def test_replacing_jobs_are_sent_alone(make, store, tapped):
    rule = Unique("{n}", replace="payload")
    with make() as batch:
        fill(batch, 3)
        for n in (7, 7, 8):
            batch.add(double.using(unique=rule).job(n))
        fill(batch, 2)
    assert sizes(tapped) == [3, 1, 1, 1, 2]
    work(store, result=b"1")
    assert [i.job_id for i in sorted(batch.as_completed(), key=lambda i: i.index)][
        3:6
    ] == ["b:3", "b:3", "b:5"]


# Room


def test_a_full_queue_is_never_overfilled_and_the_batch_completes(make, store, world):
    store.inspect.set_enqueue_limit("q", 10)
    most = []

    def turn():
        most.append(store.inspect.unfinished("q"))
        work(store, count=4, result=b"1")

    world.turn = turn
    told = []
    with make(chunk_size=8, progress=told.append) as batch:
        for n in range(57):
            batch.enqueue(double, n)
            if n % 9 == 0:
                batch.enqueue(Mail(str(n)))
        most.append(store.inspect.unfinished("q"))
    assert max(most) <= 10
    assert "room in q" in {at.waiting_for for at in told}
    world.turn = lambda: work(store, count=100, queues=("q", "mail"))
    assert batch.wait().total == 64
    assert told[-1].done == 64


def test_waiting_for_room_slows_down_and_starts_again(make, store, world):
    store.inspect.set_enqueue_limit("q", 1)
    batch = make()
    fill(batch, 2)
    rests = []

    def turn():
        rests.append(world.at_s)
        if len(rests) == 60:
            work(store, result=b"1")

    world.turn = turn
    start = world.at_s
    batch.flush()
    assert batch.sent == 2
    assert world.at_s - start < 200


def test_a_window_bounds_the_unfinished_jobs_of_a_batch(make, store, world):
    most = []

    def turn():
        most.append(store.inspect.unfinished("q"))
        work(store, count=3, result=b"1")

    world.turn = turn
    with make(chunk_size=5, window=7) as batch:
        fill(batch, 40)
    assert max(most) <= 7
    assert batch.wait().by_state == {"completed": 40}
    assert [item.index for item in batch.as_completed()] == list(range(40))


# Outages


def test_an_outage_is_waited_out_with_the_same_ids(make, store, tapped, world):
    tapped.fail("enqueue", *[StoreUnavailable("away")] * 6)
    with make() as batch:
        fill(batch, 3)
    assert batch.sent == 3
    given_ = [[e.id for e in b] for b in tapped.given("enqueue")]
    assert given_ == [["b:0", "b:1", "b:2"]] * 7
    assert counts(store) == {"available": 3}


def test_a_long_outage_is_raised_and_nothing_is_lost(make, store, tapped, world):
    tapped.fail("enqueue", *[StoreUnavailable("away")] * 500)
    start = world.at_s
    batch = make(patience="10s")
    with pytest.raises(StoreUnavailable), batch:
        fill(batch, 3)
    assert 10 <= world.at_s - start <= 11
    del tapped.around["enqueue"]
    batch.flush()
    assert counts(store) == {"available": 3}
    assert batch.sent == 3


def test_a_store_that_was_closed_is_not_waited_for(make, store, tapped, world):
    start = world.at_s
    tapped.fail("enqueue", StoreClosed("for good"))
    with pytest.raises(StoreClosed), make() as batch:
        fill(batch, 3)
    inspect = Tap(store.inspect)
    follower = Batch(Client(over(store, inspect=inspect)), "f", pace=world)
    fill(follower, 3)
    follower.flush()
    inspect.fail("get_jobs", StoreClosed("for good"))
    with pytest.raises(StoreClosed):
        list(follower.as_completed())
    assert world.at_s == start


def test_an_open_circuit_counts_as_an_outage(make, store, tapped, world):
    breaker = CircuitBreaker(
        failure_threshold=1, recovery_timeout="2s", clock=world.now_s
    )
    tapped.fail("enqueue", *[StoreUnavailable("away")] * 3)
    with make(parts={"circuit_breaker": breaker}) as batch:
        fill(batch, 3)
    assert batch.sent == 3
    assert tapped.count("enqueue") == 4


def test_an_outage_while_following_is_waited_out(store, world):
    inspect = Tap(store.inspect)
    batch = Batch(Client(over(store, inspect=inspect)), "b", pace=world, patience="5s")
    fill(batch, 3)
    batch.flush()
    work(store, result=b"1")
    inspect.fail("get_jobs", *[StoreUnavailable("away")] * 3)
    assert len(list(batch.as_completed())) == 3


def test_a_long_outage_while_following_is_raised_and_can_be_resumed(store, world):
    inspect = Tap(store.inspect)
    batch = Batch(Client(over(store, inspect=inspect)), "b", pace=world, patience="5s")
    fill(batch, 3)
    batch.flush()
    work(store, result=b"1")
    inspect.fail("get_jobs", *[StoreUnavailable("away")] * 500)
    start = world.at_s
    with pytest.raises(StoreUnavailable):
        list(batch.as_completed())
    assert 5 <= world.at_s - start < 10
    del inspect.around["get_jobs"]
    assert len(list(batch.as_completed())) == 3


def test_an_outage_while_results_are_read_is_waited_out(store, world):
    results = Tap(store.results)
    client = Client(over(store, results=results))
    batch = Batch(client, "b", pace=world, patience="5s")
    fill(batch, 2)
    batch.flush()
    work(store, result=b"1")
    results.fail("read_result", *[StoreUnavailable("away")] * 3)
    assert len(batch.results()) == 2
    results.fail("read_result", *[StoreUnavailable("away")] * 500)
    start = world.at_s
    with pytest.raises(StoreUnavailable):
        batch.results()
    assert world.at_s - start == pytest.approx(5)
    del results.around["read_result"]
    assert len(batch.results()) == 2


# Following


def test_each_item_is_yielded_once_with_its_value(make, store, world):
    with make() as batch:
        fill(batch, 25)

    def turn():
        for claim in admit(store, capacity=4).claims:
            n = int(claim.envelope.id.partition(":")[2])
            store.results.ack_success_with_result(
                claim.lease_ref, JobResult(1, b"%d" % (2 * n))
            )

    world.turn = turn
    items = list(batch.as_completed(timeout="10m"))
    assert sorted(item.index for item in items) == list(range(25))
    assert all(item.completion.value == 2 * item.index for item in items)
    assert all(item.job_id == f"b:{item.key}" for item in items)
    assert list(batch.as_completed()) == []
    assert batch.results() == [2 * n for n in range(25)]
    assert batch.failed == []


def test_results_are_read_only_when_asked_for(store):
    reads = []
    results = Tap(store.results)
    results.around["read_result"] = lambda real, id: (reads.append(id), real(id))[1]
    batch = Batch(Client(over(store, results=results), registry=registry), "b")
    fill(batch, 5)
    batch.flush()
    work(store, result=b"1")
    items = list(batch.as_completed())
    assert batch.wait().by_state == {"completed": 5}
    assert reads == []
    assert items[3].completion.value == 1
    assert reads == [items[3].job_id]


def test_failures_are_listed_and_raised_by_results(make, store, world):
    with make() as batch:
        fill(batch, 10)
    for claim in admit(store).claims:
        bad = claim.envelope.id in ("b:2", "b:5", "b:7")
        store.ack(
            claim.lease_ref,
            Outcome.SKIP if bad else Outcome.SUCCESS,
            error="no" if bad else None,
        )
    assert batch.wait() == BatchSummary(
        total=10, by_state={"completed": 7, "archived": 3}, seconds=0.0, rate=0.0
    )
    assert [(i.index, i.completion.error) for i in batch.failed] == [
        (2, "no"), (5, "no"), (7, "no"),
    ]  # fmt: skip
    with pytest.raises(JobFailed, match="job b:2 ended archived: no"):
        batch.results()
    told = batch.results(return_exceptions=True)
    assert [type(value) for value in told].count(JobFailed) == 3
    assert len(told) == 10


def test_jobs_that_are_held_up_hide_nobody(make, store, world):
    """More than a round of blocked jobs in front, and others behind that finish."""
    store.inspect.set_queue_paused("slow", True)
    blocked = ROUND_JOBS + 1_000
    batch = make(chunk_size=1000)
    for n in range(blocked):
        batch.add(double.using(queue="slow").job(n))
    fill(batch, 20)
    batch.flush()
    work(store, count=20, result=b"1")
    found, late = until_timeout(batch, "30s")
    assert set(found) == set(range(blocked, blocked + 20))
    assert late.outstanding == blocked


def test_rounds_are_quick_while_something_ends_and_slow_when_not(store, world):
    inspect, at = Tap(store.inspect), []
    inspect.around["get_jobs"] = lambda real, ids: (at.append(world.at_s), real(ids))[1]
    batch = Batch(Client(over(store, inspect=inspect)), "b", pace=world)
    fill(batch, 3)
    with pytest.raises(BatchTimeout):
        batch.wait("20s")
    gaps = [round(b - a, 3) for a, b in pairwise(at)]
    assert gaps[:4] == [0.4, 0.8, 1.6, 2.0]
    assert set(gaps[3:]) == {2.0}
    work(store, count=1)
    at.clear()
    iterator = batch.as_completed("20s")
    next(iterator)
    work(store, count=1)
    next(iterator)
    assert round(at[-1] - at[0], 3) == 0.2


def test_a_job_that_ends_in_this_process_is_read_by_itself_and_soon(store, world):
    bus, inspect = EventBus(), Tap(store.inspect)
    following = Following(inspect, pace=world, patience_ms=1_000, bus=bus)
    ids = ["a", "b", "c"]
    store.enqueue([envelope(id, retention_ms=DAY_MS) for id in ids])
    for index, job_id in enumerate(ids):
        following.follow(index, job_id)
    with following.listening():
        following.turn(world.at_s + 60, lambda: False)
        work(store, count=2)
        for job_id in ("a", "b", "x"):
            bus.publish(told(job_id))
        for _ in range(2):
            following.turn(world.at_s + 60, lambda: False)
    assert [sorted(ids) for ids in inspect.given("get_jobs")] == [ids, ids[:2]]
    assert [round(wait, 3) for wait in world.waits] == [0.02]
    assert {following.next_ended().index for _ in range(2)} == {0, 1}
    assert not bus.has_subscribers
    following.turn(world.at_s + 60, lambda: False)
    assert round(sum(world.waits), 3) == 0.4


def test_a_batch_hears_the_workers_of_its_application(store):
    hg = Headgate(store)
    hg.include(registry)
    batch = hg.batch()
    fill(batch, 3)
    assert not hg.client.event_bus.has_subscribers
    with hg.worker(queues=["q"]):
        for _ in batch.as_completed("20s"):
            assert hg.client.event_bus.has_subscribers
    assert not hg.client.event_bus.has_subscribers


def test_after_a_timeout_another_iteration_yields_the_rest(make, store, world):
    with make() as batch:
        fill(batch, 10)
    work(store, count=4, result=b"1")
    first, late = until_timeout(batch, "50ms")
    assert (len(first), late.outstanding) == (4, 6)
    assert late.job_id.startswith("b:")
    work(store, result=b"1")
    second = [item.index for item in batch.as_completed()]
    assert sorted(first + second) == list(range(10))


def test_leaving_an_iteration_keeps_the_others_for_the_next(make, store):
    with make() as batch:
        fill(batch, 10)
    work(store, result=b"1")
    seen = []
    for item in batch.as_completed():
        seen.append(item.index)
        if len(seen) == 3:
            break
    seen += [item.index for item in batch.as_completed()]
    assert sorted(seen) == list(range(10))


def test_inside_its_own_block_an_iteration_ends_with_what_was_sent(make, store, world):
    world.turn = lambda: work(store, result=b"1")
    with make() as batch:
        fill(batch, 5)
        assert len(list(batch.as_completed())) == 5
        fill(batch, 2, start=5)
    assert [item.index for item in batch.as_completed()] == [5, 6]


def test_jobs_added_while_iterating_are_sent_and_yielded(make, store, world):
    world.turn = lambda: work(store, result=b"1")
    batch = make()
    fill(batch, 3)
    seen = []
    for item in batch.as_completed():
        seen.append(item.index)
        if item.index < 3:
            batch.enqueue(double, 100 + item.index)
    assert sorted(seen) == list(range(6))


def test_another_thread_iterates_while_the_block_is_open(store):
    hg = Headgate(store)
    hg.include(registry)
    seen, opened = [], threading.Event()
    batch = hg.batch("b", chunk_size=7)

    def follow():
        opened.wait(20)
        seen.extend(item.index for item in batch.as_completed("60s"))

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    with working(store, hg.registry, capacity=8):
        with batch:
            opened.set()
            fill(batch, 100)
            wait_for(lambda: len(seen) > 20, "items before the end of the block")
            fill(batch, 100, start=100)
        for thread in threads:
            thread.join(60)
    assert sorted(seen) == list(range(200))


def test_a_whole_batch_runs_on_a_worker(store):
    hg = Headgate(store, defaults=TaskOptions(max_attempts=1))
    hg.include(registry)
    with working(store, hg.registry, capacity=8):
        with hg.batch() as batch:
            for n in range(-3, 300):
                batch.enqueue(double, n=n)
        summary = batch.wait("60s")
    assert summary.total == 303
    assert summary.by_state == {"completed": 300, "archived": 3}
    assert [item.index for item in batch.failed] == [0, 1, 2]
    assert batch.results(return_exceptions=True)[3:] == [2 * n for n in range(300)]


# Started again


def test_a_script_started_again_sends_nothing_twice_and_sees_the_old_ends(make, store):
    with suppress(LookupError), make("again", chunk_size=4) as first:
        fill(first, 9)
        raise LookupError
    work(store, count=3, result=b"1")
    with make("again", chunk_size=5) as second:
        fill(second, 12)
    assert second.sent == 12
    work(store, count=20, result=b"1")
    assert sorted(item.index for item in second.as_completed()) == list(range(12))
    assert counts(store) == {"completed": 12}


def test_without_keys_another_order_is_a_conflict_and_with_keys_it_is_not(make, store):
    with make() as first:
        for n in (1, 2, 3):
            first.add(double.job(n), key=f"n{n}")
    with make() as second:
        for n in (3, 1, 2):
            second.add(double.job(n), key=f"n{n}")
    assert counts(store) == {"available": 3}
    with make("c") as batch:
        fill(batch, 2)
    with pytest.raises(IdConflict) as caught, make("c") as batch:
        fill(batch, 2, start=1)
    assert caught.value.item_index == 0


def test_a_script_started_again_needs_no_room_for_what_is_there(make, store, world):
    """Its jobs fill the queue, and are replays."""
    with make() as first:
        fill(first, 5)
    store.inspect.set_enqueue_limit("q", 5)
    with make() as second:
        fill(second, 5)
    assert second.sent == 5
    assert world.waits == []


class Killed(BaseException):
    """Ends the script where it stands."""


@given(
    count=st.integers(1, 12),
    chunk_size=st.integers(1, 5),
    kills=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=3),
    working_=st.lists(st.integers(0, 4), max_size=8),
    window=st.sampled_from([None, 3]),
    retries=st.booleans(),
)
def test_however_often_it_is_killed_each_job_exists_once_and_is_yielded_once(
    count, chunk_size, kills, working_, window, retries
):
    """Kills before and after any store call, with workers going on in between."""
    store, world, steps = MemStore(), World(), iter(working_)
    store.freeze_clock_at(START_MS)
    runs: dict[str, int] = {}

    def turn(least=0):
        for claim in admit(store, capacity=max(next(steps, 5), least, 1)).claims:
            runs[claim.envelope.id] = runs.get(claim.envelope.id, 0) + 1
            store.ack(claim.lease_ref, Outcome.SUCCESS)

    world.turn = turn
    script = [*kills, None]
    for kill in script:
        tapped = Tap(store)
        calls = [0]

        def around(real, batch, kill=kill, calls=calls):
            number, calls[0] = calls[0], calls[0] + 1
            if kill == (number, False):
                raise Killed
            if retries and number == 1:
                real(batch)
                raise StoreUnavailable("the reply was lost")
            real(batch)
            if kill == (number, True):
                raise Killed

        tapped.around["enqueue"] = around
        batch = Batch(
            Client(tapped), "b", pace=world, chunk_size=chunk_size, window=window
        )
        with suppress(Killed):
            seen = []
            with batch:
                fill(batch, count)
            seen += [item.index for item in batch.as_completed()]
    assert sorted(seen) == list(range(count))
    assert runs == {f"b:{n}": 1 for n in range(count)}


# Cancelling


def test_cancel_ends_what_is_not_over_and_takes_no_more(make, store, world):
    Client(store).enqueue(bill.job(1))
    with make(chunk_size=5) as batch:
        batch.enqueue(bill, 1)
        fill(batch, 9)
        batch.flush()
        work(store, count=3, result=b"1")
        fill(batch, 2)
        assert batch.cancel() == 7
    with pytest.raises(InvalidRequest, match="batch b is cancelled"):
        fill(batch, 1)
    assert batch.cancel() == 0
    assert counts(store) == {"cancelled": 7, "completed": 2}
    assert batch.wait().by_state == {"cancelled": 7, "completed": 2, "deleted": 1}


def test_a_batch_is_cancelled_a_thousand_jobs_at_a_time(store, world):
    inspect = Tap(store.inspect)
    batch = Batch(Client(over(store, inspect=inspect)), "b", pace=world)
    with batch:
        fill(batch, 1_001)
    assert batch.cancel() == 1_001
    assert [len(ids) for ids in inspect.given("cancel_jobs")] == [1_000, 1]
    assert counts(store) == {"cancelled": 1_001}


def test_cancel_from_another_thread_frees_one_that_waits_for_room(store):
    store.inspect.set_enqueue_limit("q", 3)
    batch = Batch(Client(store), "b")
    ended = []

    def send():
        try:
            with batch:
                fill(batch, 10)
        finally:
            ended.append(True)

    thread = threading.Thread(target=send)
    thread.start()
    wait_for(lambda: batch.sent == 3, "the queue is full")
    assert batch.cancel() == 3
    thread.join(20)
    assert ended == [True]
    assert batch.wait("20s").by_state == {"cancelled": 3}


# Telling


def test_progress_counts_what_was_sent_done_and_failed(make, store, world):
    told = []
    with make(progress=told.append, chunk_size=5) as batch:
        fill(batch, 10)
    assert (told[-1].sent, told[-1].done, told[-1].resting) == (10, 0, True)
    steps = iter([Outcome.SKIP, *[Outcome.SUCCESS] * 9])
    world.turn = lambda: work(store, count=1, outcome=next(steps))
    list(batch.as_completed())
    assert (told[-1].done, told[-1].failed, told[-1].resting) == (10, 1, True)
    assert told[-1].left_seconds == 0
    done = [at.done for at in told]
    assert done == sorted(done)
    assert {at.batch_id for at in told} == {"b"}
    rate = told[-1].rate
    assert rate == pytest.approx(10 / (world.at_s - 1_000), rel=0.01)


def test_an_interrupt_names_the_batch(make, store, world):
    batch = make("nightly")
    fill(batch, 3)

    def interrupt():
        raise KeyboardInterrupt

    world.turn = interrupt
    for call in (lambda: list(batch.as_completed()), batch.wait):
        with pytest.raises(KeyboardInterrupt) as caught:
            call()
        assert caught.value.__notes__ == ["batch nightly: 3 jobs were sent and go on"]
    assert counts(store) == {"available": 3}


def test_everything_can_be_left_to_the_facade():
    store = MemStore()
    hg = Headgate(store)
    hg.include(registry)
    told = []
    with hg.batch(
        "x", chunk_size=2, keep="2d", window=9, progress=told.append, priority=4
    ) as batch:
        batch.enqueue(double, 1)
    assert job(store, "x:0").priority == 4
    assert job(store, "x:0").retention_ms == 2 * DAY_MS
    assert told
    with pytest.raises(InvalidRequest, match="unknown option prio"):
        hg.batch(prio=3)


def test_a_lone_progress_line_goes_to_stderr(capsys):
    store = MemStore()
    hg = Headgate(store)
    hg.include(registry)
    with hg.batch("x", progress=True) as batch:
        batch.enqueue(double, 1)
    work(store)
    batch.wait()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("batch x: 1 sent, 1 done, 0 failed, ")
