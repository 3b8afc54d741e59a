"""Claims that wait for a thread: which begin, which go back, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from headgate_sync.attempt import LiveAttempt
from headgate_sync.binding import BatchJob
from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import MAX_CAPACITY
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.telemetry import JobSpan
from headgate_sync.worker import WorkerConfig
from headgate_sync.worker.batching import Chunk
from headgate_sync.worker.handlers import HandlerThreads
from headgate_sync.worker.prefetch import PATIENCE_S, WaitingRoom
from headgate_sync.worker.reporting import Emitter, Report
from tests.builders import START_MS, enqueue, envelope, job, set_rate_limit, state_of
from tests.scenarios.gate import tokens
from tests.worker.rig import PATIENCE_S as LONG_S
from tests.worker.rig import (
    Bench,
    Gate,
    Steps,
    Tap,
    Together,
    add_batch_handler,
    take_ahead,
    wait_for,
    working,
)


class Crew:
    """Handler threads with a waiting room around a bench."""

    def __init__(self, store: Any, registry: Registry, **config: Any) -> None:
        settings = {"capacity": 1, "prefetch": 4, **config}
        self.steps = Steps()
        self.bench = Bench(Tap(store), registry, now_s=self.steps, **settings)
        self.late: list[LiveAttempt] = []
        self.threads = HandlerThreads(
            self.bench.runner,
            self.bench.acks,
            self.bench.room,
            begun_late=self.late.append,
        )

    def feed(self) -> list[LiveAttempt]:
        attempts = self.bench.admit()
        self.threads.feed(attempts)
        return attempts

    def flush(self, after_s: float) -> list[Chunk]:
        self.steps.advance(after_s)
        chunks, _ = self.bench.runner.batches.due()
        self.threads.feed_chunks(chunks)
        return chunks

    def drain(self) -> None:
        wait_for(lambda: len(self.bench.inflight) == 0, "all slots are free")


@contextmanager
def crew(store: Any, registry: Registry, **config: Any) -> Iterator[Crew]:
    made = Crew(store, registry, **config)
    made.threads.start()
    yield made
    made.threads.end()
    assert made.threads.join(LONG_S) == []


def put(store: Any, count: int, **fields: Any) -> list[str]:
    ids = [f"j{number}" for number in range(count)]
    enqueue(store, *ids, **{"kind": "k", "payload": b"{}", **fields})
    return ids


def holding(registry: Registry, gate: Gate) -> list[str]:
    """Jobs of kind `k` that stay at the gate; returns the ids of those that began."""
    began: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        began.append(ctx.job_id)
        gate.hold()

    return began


def test_no_more_handlers_run_together_than_there_are_threads(store: Any) -> None:
    registry = Registry()
    together = Together(registry, 3)
    ids = put(store, 20)
    with crew(store, registry, capacity=3, prefetch=17) as made:
        assert len(made.feed()) == 20
        made.drain()
    assert together.most == 3
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}
    assert len(made.late) >= 14


def test_a_batch_or_a_callback_has_its_thread_for_itself(store: Any) -> None:
    gate, calls, registry = Gate(), Gate(), Registry()
    ran: list[str] = []
    add_batch_handler(registry, lambda jobs: [gate.hold() for _ in jobs], kind="b")

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)

    enqueue(store, "b0", kind="b", payload=b"{}")
    with crew(store, registry, capacity=2) as made:
        made.feed()
        wait_for(lambda: bool(made.flush(1.0)), "the batch is handed out")
        gate.wait()
        made.threads.call(calls.hold)
        calls.wait()
        put(store, 1, timeout_ms=1_000)
        (waits,) = made.feed()
        assert waits.timeout_due_s == float("inf")
        assert made.threads._queue.empty()
        gate.open()
        wait_for(lambda: ran == ["j0"], "it has the thread of the batch")
        calls.open()
        made.drain()


def test_a_batch_whose_time_is_up_waits_for_a_thread(store: Any) -> None:
    """Its jobs have slots, but with prefetch not every slot has a thread."""
    gate, busy, registry = Gate(), Gate(), Registry()
    ran: list[str] = []
    add_batch_handler(registry, lambda jobs: [ran.append("b") for _ in jobs], kind="b")
    registry.task("busy")(lambda: busy.hold())

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        gate.hold()
        ran.append(ctx.job_id)

    enqueue(store, "b0", kind="b", payload=b"{}")
    with crew(store, registry, capacity=2) as made:
        made.feed()
        wait_for(lambda: made.bench.room._busy == 0, "it waits for another one")
        enqueue(store, "busy", kind="busy", payload=b"{}")
        made.feed()
        busy.wait()  # so that one thread is left, and the order is that of the room
        put(store, 2)
        made.feed()
        gate.wait()
        assert len(made.flush(1.0)) == 1
        assert made.threads._queue.empty()
        gate.open()
        wait_for(lambda: len(ran) == 3, "all that have the other thread have run")
        busy.open()
        made.drain()
    assert ran == ["j0", "b", "j1"]  # the batch before the claim that came earlier
    assert state_of(store, "b0") is State.COMPLETED


def test_a_batch_that_finds_no_thread_is_handed_back(store: Any) -> None:
    gate, registry = Gate(), Registry()
    ran: list[str] = []
    add_batch_handler(registry, lambda jobs: [ran.append("b") for _ in jobs], kind="b")
    registry.task("k")(lambda: gate.hold())
    set_rate_limit(store, "mail", 10, 3_600_000, burst=10)
    enqueue(store, "b0", kind="b", payload=b"{}", rate_class="mail")
    with crew(store, registry, capacity=2) as made:
        made.feed()
        wait_for(lambda: made.bench.room._busy == 0, "it waits for another one")
        put(store, 2)
        made.feed()
        gate.wait(2)
        made.flush(1.0)
        made.steps.advance(PATIENCE_S)
        made.threads.look()
        wait_for(lambda: state_of(store, "b0") is State.AVAILABLE, "it is back")
        assert tokens(store, "mail") == 10
        assert job(store, "b0").attempt == job(store, "b0").crash_attempt == 0
        gate.open()
        made.drain()
    assert ran == []


def test_an_ack_does_not_wait_behind_callbacks(store: Any) -> None:
    """They are run although every thread may be busy."""
    gate, calls, registry = Gate(), Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    ended: list[None] = []

    def callback() -> None:
        try:
            calls.hold()
        finally:
            ended.append(None)

    put(store, 1)
    with crew(store, registry) as made:
        made.feed()
        gate.wait()
        for _ in range(2):
            made.threads.call(callback)
        calls.wait()
        gate.open()
        wait_for(lambda: state_of(store, "j0") is State.COMPLETED, "it is acked")
        assert ended == []
        calls.open()
        made.drain()


def test_an_ack_does_not_wait_behind_what_waits_for_a_thread(store: Any) -> None:
    gate, registry = Gate(), Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        if ctx.job_id != "j0":
            gate.hold()

    put(store, 4)
    with crew(store, registry) as made:
        made.feed()
        wait_for(lambda: state_of(store, "j0") is State.COMPLETED, "it is acked")
        assert state_of(store, "j3") is State.RUNNING
        gate.open()
        made.drain()


def test_what_waited_too_long_is_handed_back_as_if_never_claimed(store: Any) -> None:
    gate, registry = Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    set_rate_limit(store, "mail", 10, 3_600_000, burst=10)
    put(store, 3, rate_class="mail")
    with crew(store, registry) as made:
        made.feed()
        gate.wait()
        assert tokens(store, "mail") == 7
        made.steps.advance(PATIENCE_S)
        made.threads.look()
        wait_for(lambda: state_of(store, "j2") is State.AVAILABLE, "it is back")
        assert [ack.latency_ms for ack in made.bench.accepted] == [0, 0]
        wait_for(lambda: len(made.bench.inflight) == 1, "their slots are free")
        assert state_of(store, "j1") is State.AVAILABLE
        assert state_of(store, "j0") is State.RUNNING
        assert tokens(store, "mail") == 9
        assert job(store, "j1").attempt == job(store, "j1").crash_attempt == 0
        gate.open()
        made.drain()
        made.feed()
        made.drain()
    assert {state_of(store, f"j{n}") for n in range(3)} == {State.COMPLETED}


def test_a_lease_that_was_lost_in_the_meantime_is_not_begun(store: Any) -> None:
    gate, registry = Gate(), Registry()
    ran = holding(registry, gate)
    put(store, 2)
    with crew(store, registry) as made:
        _, waits = made.feed()
        gate.wait()
        made.bench.inflight.lose([waits])
        gate.open()
        made.drain()
    assert ran == ["j0"]
    assert state_of(store, "j1") is State.RUNNING  # whoever has the lease decides


def test_what_is_told_to_stop_before_it_begins_has_cost_nothing(store: Any) -> None:
    gate, registry = Gate(), Registry()
    ran = holding(registry, gate)
    set_rate_limit(store, "mail", 10, 3_600_000, burst=10)
    put(store, 2, rate_class="mail")
    with crew(store, registry) as made:
        _, waits = made.feed()
        gate.wait()
        waits.cancel(CancelReason.SHUTDOWN)
        gate.open()
        made.drain()
    assert ran == ["j0"]
    assert state_of(store, "j1") is State.AVAILABLE
    assert tokens(store, "mail") == 9


def test_a_time_out_that_is_over_before_the_handler_begins_is_the_handlers(
    store: Any,
) -> None:
    """It may still do what it must, and is told at its first look."""
    told: list[str | None] = []
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        told.append(ctx.cancel_reason)

    put(store, 1, timeout_ms=1)
    bench = Bench(store, registry)
    (attempt,) = bench.admit()
    attempt.cancel(CancelReason.TIMEOUT)
    bench.run(attempt)
    assert told == ["timeout"]
    assert state_of(store, "j0") is State.COMPLETED


def test_a_deadline_that_passes_in_the_meantime_is_kept(store: Any) -> None:
    gate, registry = Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    put(store, 2, deadline_ms=START_MS + 500)
    with crew(store, registry) as made:
        made.feed()
        gate.wait()
        made.steps.advance(0.5)
        gate.open()
        made.drain()
    assert state_of(store, "j1") is State.ARCHIVED
    assert job(store, "j1").error_code == "DEADLINE_EXCEEDED"


def test_time_counts_from_the_beginning_and_not_from_the_claim(store: Any) -> None:
    gates = {"j0": Gate(), "j1": Gate()}
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        gates[ctx.job_id].hold()

    spans: list[Any] = []

    class Sink:
        def on_event(self, event: Any) -> None:
            if isinstance(event, JobSpan):
                spans.append(event)

    put(store, 2, timeout_ms=300)
    with crew(store, registry) as made:
        steps, bench = made.steps, made.bench
        report = Report(
            "w",
            emit=Emitter(Sink(), now_s=steps),
            bus=None,
            death_handlers=(),
            call=lambda work: None,
            keep=bench.inflight.touch_down,
            conclude=bench.inflight.conclude,
        )
        bench.acks._accepted = report.accepted
        _, waits = made.feed()
        gates["j0"].wait()
        steps.advance(0.25)
        assert waits.timeout_due_s == float("inf")
        gates["j0"].open()
        gates["j1"].wait()
        assert made.late == [waits]
        assert waits.timeout_due_s == pytest.approx(steps() + 0.3)
        steps.advance(0.1)
        gates["j1"].open()
        made.drain()
    assert [
        (span.job_id, span.started_at_ms - START_MS, span.ms) for span in spans
    ] == [
        ("j0", 0, 250),
        ("j1", 250, 100),
    ]


# A whole worker


def test_a_worker_takes_ahead_and_loses_nothing(store: Any) -> None:
    registry, tap = Registry(), Tap(store)
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)
        ctx.wait(0.001)  # so that there is time to take the pace, on any machine

    ids = put(store, 300)
    with working(tap, registry, capacity=2, prefetch=14) as worker:
        wait_for(lambda: len(ran) == 300, "all ran")
        assert worker.health().capacity == 16
    assert sorted(ran) == sorted(ids)
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}
    asked = [request.capacity for request in tap.given("admit")]
    assert asked[0] == 2
    assert 2 < max(asked) <= 16


def test_a_worker_that_waits_with_a_full_room_hears_of_every_free_thread(
    store: Any, monkeypatch: Any
) -> None:
    """Else it would sleep although it had asked for more, and threads were free."""
    take_ahead(monkeypatch)
    registry, tap = Registry(), Tap(store)

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ctx.wait(0.002)

    ids = put(store, 120)
    with working(tap, registry, capacity=2, prefetch=6):
        wait_for(
            lambda: all(state_of(store, id) is State.COMPLETED for id in ids), "all ran"
        )
    assert max(request.capacity for request in tap.given("admit")) == 8


def test_a_worker_hears_that_the_room_is_empty_where_no_ack_departs(
    store: Any, monkeypatch: Any
) -> None:
    """Jobs that wait for others of their kind leave their threads without one."""
    take_ahead(monkeypatch)
    invite, refusals = WaitingRoom.invite, [0]

    def counted(room: WaitingRoom, slots: int) -> int:
        count = invite(room, slots)
        refusals[0] += count <= 0
        return count

    monkeypatch.setattr(WaitingRoom, "invite", counted)
    registry, first, others, decoding = Registry(), Gate(), Gate(), Gate()
    ran: list[str] = []

    @registry.task("b")
    @attrs.frozen
    class Booking:
        def __attrs_post_init__(self) -> None:
            decoding.hold()

    @registry.batch_handler(Booking, max_size=4, max_delay="1h")
    def together(jobs: list[BatchJob[Booking]]) -> list[None]:
        return [None for _ in jobs]

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        if ctx.job_id == "late":
            ran.append(ctx.job_id)
        elif ctx.job_id == "j0":
            first.hold()
        else:
            others.hold()

    put(store, 4, priority=1)
    enqueue(store, "b0", "b1", "b2", kind="b", payload=b"{}")
    with working(store, registry, capacity=4, prefetch=3):
        first.wait()
        others.wait(3)
        wait_for(lambda: state_of(store, "b2") is State.RUNNING, "they are taken ahead")
        before = refusals[0]
        first.open()
        decoding.wait()
        wait_for(lambda: state_of(store, "j0") is State.COMPLETED, "its ack departs")
        wait_for(lambda: refusals[0] > before, "too many wait for more to be asked for")
        decoding.open()
        enqueue(store, "late", kind="k", payload=b"{}")
        wait_for(lambda: ran == ["late"], "the free thread has work")
        assert state_of(store, "j1") is State.RUNNING  # no other one became free
        others.open()


def test_a_time_out_of_what_waited_wakes_the_watchdog(
    store: Any, monkeypatch: Any
) -> None:
    take_ahead(monkeypatch)
    monkeypatch.setattr("headgate_sync.worker.watchdog.LOOK_AT_LOOPS_S", 1_000.0)
    monkeypatch.setattr("headgate_sync.worker.prefetch.PATIENCE_S", 1_000.0)
    registry, gate = Registry(), Gate()
    told: list[str | None] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        if ctx.job_id == "first":
            gate.hold()
        else:
            ctx.wait(LONG_S)
            told.append(ctx.cancel_reason)

    store.enqueue(
        [
            envelope("first", kind="k", payload=b"{}", priority=1),
            envelope("second", kind="k", payload=b"{}", timeout_ms=20),
        ]
    )
    with working(store, registry, capacity=1, prefetch=1, stuck_threshold="1h"):
        gate.wait()
        gate.open()
        wait_for(lambda: bool(told), "the handler ends")
    assert told == ["timeout"]


def test_a_stop_hands_back_at_once_what_waits(store: Any, monkeypatch: Any) -> None:
    take_ahead(monkeypatch)
    monkeypatch.setattr("headgate_sync.worker.prefetch.PATIENCE_S", 1_000.0)
    registry, gate = Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, 5)
    with working(store, registry, capacity=2, prefetch=8) as worker:
        gate.wait(2)
        wait_for(lambda: state_of(store, "j4") is State.RUNNING, "it is taken ahead")
        worker.stop()
        for id in ("j2", "j3", "j4"):
            wait_for(lambda id=id: state_of(store, id) is State.AVAILABLE, "it is back")
        assert state_of(store, "j0") is state_of(store, "j1") is State.RUNNING
        gate.open()
    status = worker.exit_status
    assert status is not None
    assert (status.code, status.released) == (0, 0)
    assert state_of(store, "j0") is state_of(store, "j1") is State.COMPLETED
    assert job(store, "j2").attempt == 0


def test_slow_handlers_send_back_what_was_taken_ahead(
    store: Any, monkeypatch: Any
) -> None:
    take_ahead(monkeypatch)
    monkeypatch.setattr("headgate_sync.worker.prefetch.PATIENCE_S", 0.05)
    monkeypatch.setattr("headgate_sync.worker.watchdog.LOOK_AT_LOOPS_S", 1_000.0)
    registry, gate = Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, 2)
    with working(
        store, registry, capacity=1, prefetch=1, stuck_threshold="1h"
    ) as worker:
        gate.wait()
        worker._admission.quiet = True  # else it is claimed again and again
        wait_for(lambda: state_of(store, "j1") is State.AVAILABLE, "it is handed back")
        gate.open()


@pytest.mark.parametrize("prefetch", [-1, MAX_CAPACITY, "8", True])
def test_a_bad_prefetch_is_refused(prefetch: Any) -> None:
    with pytest.raises(InvalidRequest, match="prefetch"):
        WorkerConfig(prefetch=prefetch)
