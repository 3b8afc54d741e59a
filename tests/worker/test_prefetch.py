"""Claims that wait for a thread: which begin, which go back, and when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from headgate_sync.attempt import LiveAttempt
from headgate_sync.binding import BatchJob
from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import MAX_CAPACITY, Claim
from headgate_sync.lifecycle import State
from headgate_sync.memory.store import MemStore
from headgate_sync.registry import Registry
from headgate_sync.telemetry import JobSpan
from headgate_sync.worker import WorkerConfig
from headgate_sync.worker.batching import Chunk, Member
from headgate_sync.worker.handlers import HandlerThreads
from headgate_sync.worker.prefetch import AHEAD_S, PATIENCE_S, WaitingRoom
from headgate_sync.worker.reporting import Emitter, Report
from tests.builders import START_MS, enqueue, envelope, job, set_rate_limit, state_of
from tests.scenarios.gate import tokens
from tests.worker.rig import PATIENCE_S as LONG_S
from tests.worker.rig import Bench, Gate, Steps, Tap, wait_for, working


class Room(WaitingRoom):
    """A waiting room on stepped time, with claims of its own."""

    def __init__(self, threads: int, prefetch: int) -> None:
        self.steps = Steps()
        self.told = 0
        super().__init__(
            threads, prefetch, now_s=self.steps, half_empty=self._count_told
        )
        self.store = MemStore()

    def _count_told(self) -> None:
        self.told += 1

    def claims(self, count: int) -> list[LiveAttempt]:
        return [
            LiveAttempt(
                Claim(
                    envelope=envelope(f"j{number}"),
                    fence=1,
                    lease_id="l",
                    claimed_at_ms=START_MS,
                    expires_at_ms=START_MS + 30_000,
                ),
                self.store,
                lease_due_s=self.steps() + 30,
                returned_s=self.steps(),
                now_s=self.steps,
            )
            for number in range(count)
        ]

    def keep_pace(self, per_s: float) -> None:
        """Let one thread begin so many claims per second for a while."""
        self.invite(0)
        self.steps.advance(0.125)
        for claim in self.claims(round(per_s * 0.125)):
            self.enter([claim])
            self.leave()
        self.invite(0)


def chunk_of(members: list[Member]) -> Chunk:
    binding: Any = None  # the room does not look at it
    return Chunk(binding, members)


def test_no_more_claims_begin_than_there_are_threads() -> None:
    """Whatever comes and goes: in order, none lost, none twice."""
    for seed in range(50):
        draw = random.Random(seed)
        threads = draw.randint(1, 4)
        room = Room(threads, 8)
        came: list[LiveAttempt] = []
        began: list[LiveAttempt] = []
        chunks: list[Chunk] = []
        ran: list[Chunk] = []
        busy: list[str] = []
        while busy or len(came) < 100:
            step = draw.random()
            if step < 0.3 and len(came) < 100:
                fresh = room.claims(draw.randint(0, 5))
                came += fresh
                at_once = room.enter(fresh)
                began += at_once
                busy += ["claim"] * len(at_once)
            elif step < 0.4 and busy.count("call") < 2 and len(came) < 100:
                room.occupy()
                busy.append("call")
            elif step < 0.5 and len(came) < 100:
                chunks.append(chunk_of([]))
                if room.enter_chunk(chunks[-1]):
                    ran.append(chunks[-1])
                    busy.append("chunk")
            elif busy:
                busy.pop(draw.randrange(len(busy)))
                following = room.leave()
                if isinstance(following, Chunk):
                    ran.append(following)
                    busy.append("chunk")
                elif following is not None:
                    began.append(following)
                    busy.append("claim")
            assert busy.count("claim") + busy.count("chunk") <= threads
            assert room.crowded == (len(busy) > threads)
        assert began == came
        assert ran == chunks


def test_as_much_is_taken_ahead_as_the_threads_begin_in_a_moment() -> None:
    room = Room(4, 20)
    slots = 24  # nothing is held
    assert room.invite(slots) == 4  # nothing is known of the pace
    room.keep_pace(48)
    assert room.invite(slots) == 4 + 4  # of the 4.8 that begin in a tenth of a second
    room.keep_pace(5_000)
    assert room.invite(slots) == 24
    room.steps.advance(10 * AHEAD_S)  # nothing has begun for a while
    assert room.invite(slots) == 4


def test_what_waited_before_it_began_is_part_of_the_pace() -> None:
    room = Room(1, 20)
    room.enter(room.claims(13))
    room.steps.advance(0.125)
    for _ in range(12):
        room.leave()
    assert room.invite(21) == 1 + 10  # 13 in an eighth of a second


def test_without_prefetch_the_pace_does_not_matter() -> None:
    room = Room(4, 0)
    room.keep_pace(5_000)
    assert room.invite(4) == 4


def test_more_is_asked_for_when_the_room_is_half_empty() -> None:
    room = Room(2, 8)
    room.keep_pace(1_000)
    room.enter(room.claims(10))
    assert room.invite(0) == 0
    for waiting in (7, 6, 5):
        assert room.leave() is not None
        assert room.invite(8 - waiting) == 0
    assert room.told == 0
    assert room.leave() is not None
    assert room.told == 1  # whoever was sent away comes again
    assert room.invite(4) == 4
    assert room.leave() is not None
    assert room.told == 1


def test_what_was_handed_back_is_not_asked_for_again_by_the_pace_of_before() -> None:
    room = Room(1, 20)
    room.keep_pace(5_000)
    room.enter(room.claims(1))
    for claim in room.claims(500):
        room.leave()
        room.enter([claim])
    room.enter(room.claims(20))
    room.steps.advance(PATIENCE_S)
    claims, _, _ = room.overdue()
    assert len(claims) == 20
    assert room.invite(20) == 0
    assert room.leave() is None
    assert room.invite(21) == 1


def test_what_waits_for_a_second_or_was_cancelled_goes() -> None:
    room = Room(1, 8)
    early = room.claims(3)
    room.enter(early)
    room.steps.advance(PATIENCE_S / 2)
    late = room.claims(2)
    room.enter(late)
    assert room.due_s() == early[0].returned_s + PATIENCE_S
    assert room.overdue() == ([], [], early[0].returned_s + PATIENCE_S)
    late[1].token.set(CancelReason.LEASE_LOST)
    room.steps.advance(PATIENCE_S / 2)
    claims, chunks, due_s = room.overdue()
    assert (claims, chunks) == ([*early[1:], late[1]], [])
    assert due_s == pytest.approx(late[0].returned_s + PATIENCE_S)
    assert room.leave() is late[0]
    assert room.due_s() == float("inf")
    chunk = chunk_of([])
    assert not room.enter_chunk(chunk)
    assert room.due_s() == room.steps() + PATIENCE_S
    room.steps.advance(PATIENCE_S)
    assert room.overdue() == ([], [chunk], float("inf"))
    assert room.leave() is None


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


def test_no_more_handlers_run_together_than_there_are_threads(store: Any) -> None:
    running, most = [0], [0]
    lock, registry = threading.Lock(), Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        ctx.wait(0.001)
        with lock:
            running[0] -= 1

    ids = put(store, 20)
    with crew(store, registry, capacity=3, prefetch=17) as made:
        assert len(made.feed()) == 20
        made.drain()
    assert most[0] == 3
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}
    assert len(made.late) >= 14


def test_a_batch_or_a_callback_has_its_thread_for_itself(store: Any) -> None:
    gate, calls, registry = Gate(), Gate(), Registry()
    ran: list[str] = []

    @registry.task("b")
    @attrs.frozen
    class Booking:
        pass

    @registry.batch_handler(Booking, max_size=2, max_delay="1s")
    def together(jobs: list[BatchJob[Booking]]) -> list[None]:
        gate.hold()
        return [None for _ in jobs]

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


def register_batch(registry: Registry, run: Callable[[], None], **terms: Any) -> None:
    """Bookings of kind `b` that are run together."""

    @registry.task("b")
    @attrs.frozen
    class Booking:
        pass

    @registry.batch_handler(Booking, **terms)
    def together(jobs: list[BatchJob[Booking]]) -> list[None]:
        run()
        return [None for _ in jobs]


def test_a_batch_whose_time_is_up_waits_for_a_thread(store: Any) -> None:
    """Its jobs have slots, but with prefetch not every slot has a thread."""
    gate, busy, registry = Gate(), Gate(), Registry()
    ran: list[str] = []
    register_batch(registry, lambda: ran.append("b"), max_size=2, max_delay="1s")
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
    register_batch(registry, lambda: ran.append("b"), max_size=2, max_delay="1s")
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
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)
        gate.hold()

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
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)
        gate.hold()

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


def hurry(monkeypatch: Any) -> None:
    """Let workers take ahead what they may, whatever the pace."""
    monkeypatch.setattr(WaitingRoom, "_allowed", lambda room: room._prefetch)


def test_a_worker_takes_ahead_and_loses_nothing(store: Any) -> None:
    registry, tap = Registry(), Tap(store)
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)

    ids = put(store, 600)
    with working(tap, registry, capacity=2, prefetch=14) as worker:
        wait_for(lambda: len(ran) == 600, "all ran")
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
    hurry(monkeypatch)
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
    hurry(monkeypatch)
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
    hurry(monkeypatch)
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
    hurry(monkeypatch)
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
    hurry(monkeypatch)
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
