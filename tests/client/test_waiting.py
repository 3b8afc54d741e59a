"""Enqueue and wait: the end of a job is never missed, and the store is spared."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.app import Headgate
from headgate_sync.client import Client, JobClient
from headgate_sync.client.waiting import Completion, Watch
from headgate_sync.context import JobContext
from headgate_sync.errors import (
    DuplicateJob,
    EnqueueForbidden,
    InvalidRequest,
    JobFailed,
    LeaseLost,
    MalformedPayload,
    StoreClosed,
    StoreUnavailable,
    Unsupported,
    WaitTimeout,
)
from headgate_sync.events import EventBus
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.memory.store import MemStore
from headgate_sync.options import TaskOptions, Unique
from headgate_sync.registry import Registry
from tests.builders import (
    DAY_MS,
    START_MS,
    admit,
    claim_one,
    counts,
    envelope,
    job,
)
from tests.client.pacing import Ticks, World, told, work
from tests.worker.rig import Gate, Tap, over, wait_for, working

registry = Registry()


@registry.task("double", queue="q", retention="1d")
def double(n: int) -> int:
    return n * 2


@registry.task("quick", queue="q")
def quick(n: int) -> None: ...


@pytest.fixture
def world():
    return World()


@pytest.fixture
def client(store, world):
    return Client(store, pace=world, registry=registry)


# What the waiter gets


def test_the_waiter_gets_what_the_handler_returned(store):
    hg = Headgate(store)
    hg.include(registry)
    with working(store, hg.registry):
        done = hg.enqueue_and_wait(double, 21, timeout="20s")
        assert (done.state, done.value, done.succeeded) == (State.COMPLETED, 42, True)
        assert done.unwrap() == 42
        assert done.result.data == b"42"
        again = Client(store).enqueue_and_wait(double.job(4), timeout="20s")
    assert again.value == 8


def test_every_road_to_the_wait_is_the_same(store, world):
    other = Registry()

    @other.task("half", queue="q", retention="1d")
    def half(n: int) -> int:
        return n // 2

    hg = Headgate(store)
    hg.include(other)
    with working(store, hg.registry):
        for done in (
            half.enqueue_and_wait(8, timeout="20s"),
            half.using(priority=3).enqueue_and_wait(n=8, timeout="20s"),
            hg.enqueue_and_wait(half, n=8, timeout="20s"),
            hg.enqueue_and_wait(half.using(priority=1), 8, timeout="20s"),
            hg.enqueue_and_wait(half.job(8), priority=2, timeout="20s"),
        ):
            assert done.value == 4
            assert hg.result(done.job_id) == 4


def test_a_job_without_retention_is_deleted_and_counts_as_done(client, store, world):
    world.turn = lambda: work(store)
    done = client.enqueue_and_wait(quick.job(1), timeout="10s")
    assert (done.state, done.result, done.value) == (State.DELETED, None, None)
    assert done.unwrap() is None


@pytest.mark.parametrize(
    ("outcome", "state", "ack"),
    [
        (Outcome.SKIP, State.ARCHIVED, {"error": "no"}),
        (Outcome.UNDECODABLE, State.UNDECODABLE, {"error": "no"}),
        (Outcome.RETRY, State.ARCHIVED, {"error": "no"}),
    ],
)
def test_a_failure_is_told_with_its_error(client, store, world, outcome, state, ack):
    world.turn = lambda: work(store, outcome=outcome, **ack)
    done = client.enqueue_and_wait(double.job(1), max_attempts=1, timeout="10s")
    assert (done.state, done.error, done.succeeded) == (state, "no", False)
    with pytest.raises(JobFailed, match=f"ended {state}: no") as caught:
        done.unwrap()
    assert caught.value.completion is done
    assert pickle.loads(pickle.dumps(caught.value)).completion == done


def test_a_retry_is_no_end(client, store, world, clock):
    turns = iter(
        [
            lambda: work(store, outcome=Outcome.RETRY, error="once"),
            lambda: None,
            lambda: (clock.advance_ms(10_000), store.promote_due(10)),
            lambda: work(store, result=b"2"),
        ]
    )
    world.turn = lambda: next(turns)()
    done = client.enqueue_and_wait(double.job(1), timeout="10s")
    assert (done.state, done.value, done.error) == (State.COMPLETED, 2, None)


def test_cancelled_and_quarantined_are_ends(store, world, make_store, clock):
    store = make_store(crash_limit=1)
    client = Client(store, pace=world)
    handles = []

    def cancel():
        (handle,) = [j.id for j in waiting(store)]
        handles.append(handle)
        store.inspect.operator_cancel(handle)

    world.turn = cancel
    assert client.enqueue_and_wait(double.job(1), timeout="9s").state == "cancelled"

    def crash():
        claim_one(store, lease_ms=1)
        clock.advance_ms(2)
        store.reclaim_expired(10)

    world.turn = crash
    done = client.enqueue_and_wait(double.job(2), timeout="9s")
    assert done.state == "quarantined"
    assert not done.succeeded


def waiting(store):
    """Jobs of queue `q` that can run, without claiming them for good."""
    claims = admit(store).claims
    for claim in claims:
        store.ack(claim.lease_ref, Outcome.RATE_LIMITED)
    return [claim.envelope for claim in claims]


def test_a_job_that_is_over_already_answers_at_once(client, store, world):
    world.turn = lambda: work(store, result=b"2")
    first = client.enqueue_and_wait(double.job(1), id="a", timeout="10s")
    waits = len(world.waits)
    again = client.enqueue_and_wait(double.job(1), id="a", timeout="10s")
    assert (again, again.value) == (first, 2)
    assert len(world.waits) == waits


def test_a_replaced_job_is_waited_for(client, store, world):
    rule = Unique("{n}", replace="payload")
    first = client.enqueue(double.job(1), unique=rule)
    world.turn = lambda: work(store, result=b"2")
    done = client.enqueue_and_wait(double.job(1), unique=rule, timeout="10s")
    assert (done.job_id, done.value) == (first.id, 2)


def test_bytes_stay_bytes_where_nobody_knows_the_kind(store, world):
    world.turn = lambda: work(store, result=b"raw")
    done = Client(store, pace=world).enqueue_and_wait(envelope("a"), timeout="10s")
    assert done.value == b"raw"


def test_a_result_that_is_none_of_the_handlers_is_told(client, store, world):
    world.turn = lambda: work(store, result=b'"x"')
    done = client.enqueue_and_wait(double.job(1), timeout="10s")
    assert done.result.data == b'"x"'
    with pytest.raises(MalformedPayload):
        _ = done.value


def test_a_class_task_is_read_by_the_handler_of_the_registry(store, world):
    classes = Registry()

    @classes.task("shape", queue="q", retention="1d")
    @attrs.frozen
    class Shape:
        sides: int

    @classes.handler(Shape)
    def area(shape: Shape) -> list[int]:
        return [shape.sides]

    world.turn = lambda: work(store, result=b"[4]")
    client = Client(store, pace=world, registry=classes)
    assert client.enqueue_and_wait(Shape(4), timeout="1s").value == [4]
    bare = Client(store, pace=world)
    assert bare.enqueue_and_wait(Shape(5), timeout="1s").value == b"[4]"


# Time


def test_after_the_timeout_the_job_goes_on(store):
    gate, slow = Gate(), Registry()

    @slow.task("slow", queue="q", retention="1d")
    def handler() -> None:
        gate.hold()

    hg = Headgate(store)
    hg.include(slow)
    with working(store, hg.registry):
        with pytest.raises(WaitTimeout) as caught:
            handler.enqueue_and_wait(timeout="50ms")
        gate.wait()
        gate.open()
        late = caught.value.job_id
        wait_for(lambda: job(store, late).state == "completed", "the end of the job")


def test_the_store_is_read_every_tenth_of_a_second(store, world):
    tapped = Tap(store)
    inspect = Tap(store.inspect)
    reads = []
    inspect.around["get_jobs"] = lambda real, ids: (
        reads.append(world.at_s),
        real(ids),
    )[1]
    watch = Watch(inspect, pace=world)
    store.enqueue([envelope("a")])
    with pytest.raises(TimeoutError):
        watch.wait("a", world.at_s + 1.0)
    gaps = {round(b - a, 3) for a, b in pairwise(reads)}
    assert gaps == {0.1}
    assert 10 <= len(reads) <= 11
    assert tapped.calls == []


def test_a_timeout_may_be_longer_than_a_system_can_wait(store):
    """Also for those who leave the reading to another waiter."""
    inspect = Tap(store.inspect)
    watch = Watch(inspect)
    store.enqueue([envelope("a")])
    found = []

    def wait():
        try:
            found.append(watch.wait("a", time.monotonic() + 365_000 * 86_400).state)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: inspect.count("get_jobs") >= 5, "all wait and one reads")
    work(store)
    for thread in threads:
        thread.join(20)
    assert found == ["completed"] * 3


def test_many_waiters_are_one_reader(store):
    """Eight threads that wait cost as many reads per round as one."""
    ticks, inspect = Ticks(), Tap(store.inspect)
    watch = Watch(inspect, pace=ticks)
    ids = [str(n) for n in range(8)]
    store.enqueue([envelope(id) for id in ids])
    found = {}

    def wait(job_id):
        found[job_id] = watch.wait(job_id, ticks.at_s + 100)

    threads = [threading.Thread(target=wait, args=(id,)) for id in ids]
    for thread in threads:
        thread.start()
    wait_for(lambda: ticks.parked == 8, "all wait")
    before = inspect.count("get_jobs")
    for round_ in range(1, 6):
        ticks.step(0.2)
        wait_for(
            lambda n=round_: inspect.count("get_jobs") == before + n, "one more read"
        )
        wait_for(lambda: ticks.parked == 8, "all wait again")
    assert inspect.count("get_jobs") == before + 5
    work(store, result=b"1")
    ticks.step(0.2)
    for thread in threads:
        thread.join(20)
    assert {job.state for job in found.values()} == {"completed"}
    assert sorted(found) == ids


@given(
    at=st.integers(0, 6),
    before=st.booleans(),
    retention=st.sampled_from([0, 1_000_000]),
    outcome=st.sampled_from([Outcome.SUCCESS, Outcome.SKIP, Outcome.REVOKE]),
)
def test_no_end_is_missed_wherever_it_falls(at, before, retention, outcome):
    """An end just before or after any store call is seen by the next read."""
    store, world = MemStore(), World()
    store.freeze_clock_at(START_MS)
    calls = [0]

    def around(real, *args):
        number, calls[0] = calls[0], calls[0] + 1
        if number == at and before:
            work(store, outcome=outcome)
        answer = real(*args)
        if number == at and not before:
            work(store, outcome=outcome)
        return answer

    inspect = Tap(store.inspect)
    inspect.around["get_jobs"] = around

    class Tapped:
        results = store.results

        def __init__(self):
            self.inspect = inspect

        def enqueue(self, batch):
            return around(store.enqueue, batch)

    client = Client(Tapped(), pace=world)
    if at == 0 and before:
        return  # there is no job yet
    done = client.enqueue_and_wait(envelope("a", retention_ms=retention), timeout="10s")
    kept = {Outcome.SUCCESS: "completed" if retention else "deleted"}
    kept |= {Outcome.SKIP: "archived", Outcome.REVOKE: "deleted"}
    assert done.state == kept[outcome]
    assert calls[0] <= at + 2


# Workers of this process


def test_a_job_that_ends_in_this_process_is_read_at_once(store):
    """Time stands still, so that no read is ever due by itself."""
    bus = EventBus()
    client = Client(store, pace=Ticks(), registry=registry, event_bus=bus)
    ended = []

    def wait():
        ended.append(client.enqueue_and_wait(double.job(21), timeout="20s").value)

    with working(store, registry, event_bus=bus):
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        waiter.join(20)
    assert ended == [42]
    assert not bus.has_subscribers


def test_only_the_job_that_was_told_of_is_read_and_only_at_its_end(store):
    ticks, bus, inspect = Ticks(), EventBus(), Tap(store.inspect)
    watch = Watch(inspect, pace=ticks, bus=lambda: bus)
    store.enqueue([envelope("a", retention_ms=DAY_MS), envelope("b", retention_ms=0)])
    found = {}

    def wait(job_id):
        found[job_id] = watch.wait(job_id, ticks.at_s + 100)

    threads = {id: threading.Thread(target=wait, args=(id,)) for id in "ab"}
    for thread in threads.values():
        thread.start()
    wait_for(lambda: ticks.parked == 2, "both wait")
    work(store, count=1)
    bus.publish(told("b", "retryable"))
    bus.publish(told("c"))
    assert sorted(inspect.given("get_jobs")) == [["a"], ["b"]]
    bus.publish(told("a"))
    threads["a"].join(20)
    assert found["a"].state == "completed"
    assert inspect.given("get_jobs")[2:] == [["a"]]
    work(store, count=1)
    bus.publish(told("b", "deleted"))
    threads["b"].join(20)
    assert found["b"] is None
    assert not bus.has_subscribers


def test_what_is_told_all_the_time_keeps_no_other_read_from_being_made(store, world):
    bus, inspect = EventBus(), Tap(store.inspect)
    watch = Watch(inspect, pace=world, bus=lambda: bus)
    store.enqueue([envelope("a")])
    world.turn = lambda: bus.publish(told("a"))
    with pytest.raises(TimeoutError):
        watch.wait("a", world.at_s + 1.0)
    assert inspect.count("get_jobs") <= 12


def test_the_clients_of_an_application_hear_its_workers(store):
    hg = Headgate(store)
    hg.include(registry)
    own = EventBus()
    for bus in (hg.client.event_bus, own):
        if bus is own:
            hg.configure_worker(event_bus=own)
        assert hg.client.event_bus is bus
        with bus.subscribe() as heard, hg.worker(queues=["q"]):
            handle = hg.enqueue(double, 1)
            assert heard.get(20).job_id == handle.id


# Inside of a handler


def test_a_handler_waits_for_a_child_that_inherits_its_trace(store):
    hg = Headgate(store)
    hg.include(registry)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    @hg.task("parent", queue="q", retention="1d", headers={"traceparent": trace})
    def parent(ctx: JobContext) -> list[object]:
        done = ctx.client.enqueue_and_wait(double.job(4), timeout="20s")
        child = job(store, done.job_id)
        return [done.value, child.headers["traceparent"]]

    with hg.worker(threads=2):
        assert hg.enqueue_and_wait(parent, timeout="20s").value == [8, trace]


def test_a_handler_that_should_stop_waits_no_longer(client, store, world):
    def check():
        if world.at_s > 1_000.25:
            raise LeaseLost

    mine = JobClient(client, check=check, headers={})
    with pytest.raises(LeaseLost):
        mine.enqueue_and_wait(double.job(1), timeout="20s")
    assert world.at_s < 1_000.5
    assert counts(store) == {"available": 1}
    mine.close()
    with pytest.raises(RuntimeError):
        mine.enqueue_and_wait(double.job(1), timeout="20s")


# Outages and refusals


def test_an_outage_while_waiting_is_waited_out(store, world):
    tapped, inspect = Tap(store), Tap(store.inspect)
    inspect.fail("get_jobs", *[StoreUnavailable("away")] * 5)
    world.turn = lambda: work(store, result=b"1")
    watch = Watch(inspect, pace=world)
    tapped.enqueue([envelope("a")])
    assert watch.wait("a", world.at_s + 10).state == "completed"


def test_a_timeout_in_an_outage_names_it(store, world):
    inspect = Tap(store.inspect)
    away = StoreUnavailable("away")
    inspect.fail("get_jobs", *[away] * 500)
    store.enqueue([envelope("a")])
    with pytest.raises(TimeoutError) as caught:
        Watch(inspect, pace=world).wait("a", world.at_s + 1)
    assert caught.value.__cause__ is away


def test_an_outage_while_the_result_is_read_is_waited_out(store, world):
    results = Tap(store.results)
    results.fail("read_result", *[StoreUnavailable("away")] * 5)
    client = Client(over(store, results=results), pace=world, registry=registry)
    world.turn = lambda: work(store, result=b"8")
    assert client.enqueue_and_wait(double.job(4), timeout="10s").value == 8
    results.fail("read_result", *[StoreUnavailable("away")] * 500)
    start = world.at_s
    with pytest.raises(StoreUnavailable):
        client.enqueue_and_wait(double.job(5), timeout="10s")
    assert world.at_s - start == pytest.approx(10)


def test_nobody_waits_for_a_store_that_was_closed(store, world):
    inspect = Tap(store.inspect)
    inspect.fail("get_jobs", StoreClosed("closed"))
    client = Client(over(store, inspect=inspect), pace=world, registry=registry)
    with pytest.raises(StoreClosed):
        client.enqueue_and_wait(double.job(4), timeout="10s")
    assert world.waits == []


def test_a_refused_job_is_not_waited_for(client, store, world):
    client.enqueue(quick.job(1), unique="x")
    with pytest.raises(DuplicateJob):
        client.enqueue_and_wait(quick.job(1), unique="x", timeout="1s")
    dropping = Client(store, middleware=[lambda request, proceed: None])
    with pytest.raises(EnqueueForbidden):
        dropping.enqueue_and_wait(quick.job(2), timeout="1s")
    assert world.waits == []


@pytest.mark.parametrize("timeout", [None, 5, 0.5, "0s", "soon", True])
def test_the_timeout_is_a_duration_and_comes_before_the_job(client, store, timeout):
    with pytest.raises(InvalidRequest, match="timeout"):
        client.enqueue_and_wait(quick.job(1), timeout=timeout)
    assert counts(store) == {}


def test_a_transaction_is_refused_for_nobody_could_run_the_job(client, store):
    hg = Headgate(store)
    other = Registry()

    @other.task("late", queue="q")
    def late(timeout: str = "x") -> None: ...

    hg.include(other)
    for call in (
        lambda: client.enqueue_and_wait(quick.job(1), timeout="1s", tx=object()),
        lambda: late.enqueue_and_wait(timeout="1s", tx=object()),
        lambda: late.using(priority=1).enqueue_and_wait(timeout="1s", tx=object()),
        lambda: hg.enqueue_and_wait(late, timeout="1s", tx=object()),
    ):
        with pytest.raises(InvalidRequest, match="takes no tx"):
            call()
    assert counts(store) == {}


def test_a_store_that_cannot_be_inspected_is_refused_before_the_job():
    class Blind:
        inspect = None

        def enqueue(self, batch):
            raise AssertionError("enqueued")

    with pytest.raises(Unsupported):
        Client(Blind()).enqueue_and_wait(quick.job(1), timeout="1s")


def test_waiting_inside_a_handler_warns(store, caplog):
    hg = Headgate(store, defaults=TaskOptions(retention="1d"))
    nested = Registry()

    @nested.task("outer", queue="q")
    def outer() -> int:
        return hg.enqueue_and_wait(double, 1, timeout="20s").value

    hg.include(nested)
    hg.include(registry)
    with caplog.at_level(logging.WARNING), working(store, hg.registry):
        assert hg.enqueue_and_wait(outer, timeout="20s").value == 2
    (record,) = [r for r in caplog.records if "inside its handler" in r.message]
    assert record.name == "headgate_sync.client.client"


def test_completions_compare_by_how_the_job_ended():
    one = Completion(job_id="a", state=State.DELETED)
    assert one == Completion(job_id="a", state=State.DELETED)
    assert one != Completion(job_id="a", state=State.CANCELLED)


def test_the_result_of_a_job_is_read_by_its_id(store):
    hg = Headgate(store)
    hg.include(registry)
    store.enqueue(
        [envelope("a", kind="double", payload=b'{"n":1}'), envelope("b", kind="other")]
    )
    assert hg.result("a") is None
    work(store, result=b"3")
    assert hg.result("a") == 3
    assert hg.result("b") == b"3"
    assert hg.result("nothing") is None
