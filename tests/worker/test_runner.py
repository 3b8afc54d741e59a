"""One claim from the hand-over to its row, on this thread."""

from __future__ import annotations

import concurrent.futures
import contextvars
import decimal
import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import psycopg_pool
import pytest

from headgate_sync.cancel import CancelReason
from headgate_sync.client import JobClient
from headgate_sync.context import JobContext, current_job, current_jobs
from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    AttemptTimeout,
    InvalidRequest,
    LeaseLost,
    LeaseRejected,
    ShutdownRequested,
    StoreUnavailable,
)
from headgate_sync.injection import Attempt, TaskId, WorkerInfo
from headgate_sync.lease import MAX_RESULT_BYTES, Checkpoint
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Skip, Snooze
from headgate_sync.worker import HandBack
from tests.builders import (
    START_MS,
    WORKER,
    claim_one,
    envelope,
    job,
    state_of,
    steer,
)
from tests.worker.rig import Bench, Steps, Tap

BARE = b"{}"


def put(store: Any, id: str, kind: str = "k", **fields: Any) -> None:
    store.enqueue([envelope(id, **{"kind": kind, "payload": BARE, **fields})])


def running(
    store: Any, handler: Callable[..., Any], *, config: Any = None, **options: Any
) -> Bench:
    """A bench with one task of kind `k`."""
    registry = Registry()
    registry.task("k", **options)(handler)
    return Bench(store, registry, **(config or {}))


def first_line(store: Any, id: str) -> str:
    return (job(store, id).errors[-1].error or "").partition("\n")[0]


# Outcomes on the row


def test_a_failing_job_is_retried_until_its_attempts_are_used_up(
    store: Any, clock: Any
) -> None:
    def fail() -> None:
        raise ValueError("x")

    put(store, "a", max_attempts=3)
    bench = running(store, fail)
    waits_ms = []
    states = []
    for _ in range(3):
        bench.run_next()
        row = job(store, "a")
        states.append(row.state)
        waits_ms.append(row.scheduled_at_ms - clock.now_ms())
        clock.advance_ms(3_600_000)
        store.promote_due(10)
    assert states == ["retryable", "retryable", "archived"]
    assert waits_ms[:2] == [1_000, 2_000]
    row = job(store, "a")
    assert (row.attempt, row.reason_code) == (3, "attempts_exhausted")
    assert [first_line(store, "a")] * 3 == [
        (entry.error or "").partition("\n")[0] for entry in row.errors
    ]


def test_fifty_snoozes_cost_no_attempt_and_leave_no_history(
    store: Any, clock: Any
) -> None:
    put(store, "a")
    bench = running(store, lambda: Snooze("5m"))
    for _ in range(50):
        bench.run_next()
        assert job(store, "a").scheduled_at_ms == clock.now_ms() + 300_000
        clock.advance_ms(300_000)
        store.promote_due(10)
    assert (job(store, "a").attempt, job(store, "a").errors) == (0, ())


def test_a_skip_archives_on_the_first_run(store: Any) -> None:
    def skip() -> None:
        raise Skip("no such user")

    put(store, "a")
    running(store, skip).run_next()
    row = job(store, "a")
    assert (row.state, row.attempt) == ("archived", 0)
    assert row.reason_code == "skipped"
    assert first_line(store, "a") == "no such user"


def test_an_exception_that_is_no_failure_makes_the_job_available_again(
    store: Any,
) -> None:
    def busy() -> None:
        raise ConnectionRefusedError("429")

    put(store, "a")
    bench = running(
        store, busy, is_failure=lambda e: not isinstance(e, ConnectionRefusedError)
    )
    bench.run_next()
    row = job(store, "a")
    assert (row.state, row.attempt, row.errors) == ("available", 0, ())


def test_sys_exit_in_a_handler_is_a_failed_attempt(store: Any) -> None:
    def leave() -> None:
        raise SystemExit(1)

    put(store, "a")
    running(store, leave).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert first_line(store, "a") == "panic: SystemExit: 1"


class DirectlyBase(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        concurrent.futures.TimeoutError(),
        concurrent.futures.CancelledError(),
        queue.Empty(),
        StopIteration(),
        GeneratorExit(),
        KeyboardInterrupt(),
        SystemExit(0),
        DirectlyBase(),
        MemoryError(),
        RecursionError(),
        psycopg.errors.QueryCanceled(),
        psycopg_pool.PoolTimeout(),
        StoreUnavailable("the handler's own call"),
        LeaseRejected("another"),
        AttemptTimeout("the handler's own"),
        LeaseLost("the handler's own"),
        ExceptionGroup("many", [Skip("not counted"), ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_handler_raises_is_one_failed_attempt(
    store: Any, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    put(store, "a")
    bench = running(store, fail)
    bench.run_next()
    row = job(store, "a")
    assert (row.state, row.attempt, len(row.errors)) == ("retryable", 1, 1)
    assert len(bench.inflight) == 0


def test_a_nul_in_an_error_message_does_not_keep_the_job(store: Any) -> None:
    def fail() -> None:
        raise ValueError("a\0b \ud800")

    put(store, "a")
    running(store, fail).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert first_line(store, "a") == "ValueError: a\ufffdb \ufffd"


def test_a_handler_may_end_its_thread_where_the_worker_is_told_not_to_catch(
    store: Any, clock: Any
) -> None:
    def leave() -> None:
        raise SystemExit(1)

    put(store, "a")
    bench = running(store, leave, config={"catch_base_exceptions": False})
    (attempt,) = bench.admit()
    with pytest.raises(SystemExit):
        bench.run(attempt)
    assert state_of(store, "a") is State.RUNNING
    bench.inflight.finish(attempt, acks=False)
    assert not attempt.renewing
    clock.advance_ms(30_000)
    (reclaimed,) = store.reclaim_expired(10)
    assert reclaimed.crash_attempt == 1


def test_a_failure_is_logged_with_what_is_left(
    store: Any, clock: Any, caplog: Any
) -> None:
    def fail() -> None:
        raise ValueError("no stock")

    put(store, "a", max_attempts=2)
    bench = running(store, fail, retry=lambda info: timedelta(seconds=1))
    for number in (1, 2):
        bench.run_next()
        told = f"job a (queue q, kind k): attempt {number} of 2 failed: ValueError: no"
        assert told in caplog.text
        clock.advance_ms(1_000)
        store.promote_due(10)
    assert state_of(store, "a") is State.ARCHIVED


def test_the_policy_of_the_handler_sets_the_delay(store: Any, clock: Any) -> None:
    def fail() -> None:
        raise ValueError("x")

    put(store, "a")
    running(store, fail, retry=lambda info: timedelta(minutes=7)).run_next()
    assert job(store, "a").scheduled_at_ms == clock.now_ms() + 420_000


def test_rate_limited_without_a_class_waits_alone(store: Any, clock: Any) -> None:
    put(store, "a")
    running(store, lambda: RateLimited("9s")).run_next()
    row = job(store, "a")
    assert (row.state, row.attempt) == ("scheduled", 0)
    assert row.scheduled_at_ms == clock.now_ms() + 9_000


# Dispatch


def test_a_job_of_unknown_kind_is_handed_back_for_a_worker_that_knows_it(
    store: Any, clock: Any, caplog: Any
) -> None:
    put(store, "a", kind="new:thing")
    Bench(store).run_next()
    row = job(store, "a")
    assert (row.state, row.attempt, row.errors) == ("scheduled", 0, ())
    assert row.scheduled_at_ms == clock.now_ms() + 30_000
    assert "job a (queue q): no handler for kind new:thing" in caplog.text
    clock.advance_ms(30_000)
    store.promote_due(10)
    registry = Registry()
    registry.task("new:thing")(lambda: None)
    Bench(store, registry).run_next()
    assert state_of(store, "a") is State.COMPLETED


def test_a_job_of_unknown_kind_is_archived_after_so_many_claims(
    store: Any, clock: Any
) -> None:
    put(store, "a", kind="new:thing")
    bench = Bench(store, unknown_kind=HandBack(delay="5s", max_claims=2))
    bench.run_next()
    clock.advance_ms(5_000)
    store.promote_due(10)
    bench.run_next()
    row = job(store, "a")
    assert (row.state, row.reason_code) == ("archived", "skipped")
    assert first_line(store, "a") == "no handler registered after 2 claims"


def test_a_payload_that_cannot_be_read_never_reaches_the_handler(store: Any) -> None:
    called = []

    def take(n: int) -> None:
        called.append(n)

    put(store, "a", payload=b'{"n": "text"}')
    running(store, take).run_next()
    row = job(store, "a")
    assert (row.state, row.attempt, called) == ("undecodable", 0, [])


def test_one_bad_job_of_an_admission_does_not_stop_the_others(store: Any) -> None:
    for number in range(10):
        fields = {3: {"kind": "unknown"}, 6: {"payload": b"no json"}}
        put(store, f"j{number}", **fields.get(number, {}))
    bench = running(store, lambda: None, config={"capacity": 10})
    for attempt in bench.admit():
        bench.run(attempt)
    states = [state_of(store, f"j{number}").value for number in range(10)]
    assert states[3] == "scheduled"
    assert states[6] == "undecodable"
    assert set(states[:3] + states[4:6] + states[7:]) == {"completed"}


def test_a_job_past_its_deadline_is_given_up_unrun(store: Any, clock: Any) -> None:
    called = []
    put(store, "a", deadline_ms=START_MS + 10)
    clock.advance_ms(11)
    running(store, lambda: called.append(1)).run_next()
    row = job(store, "a")
    assert (row.state, row.attempt, called) == ("archived", 0, [])
    assert row.reason_code == "deadline_exceeded"
    assert first_line(store, "a") == "deadline exceeded"


def test_the_deadline_is_judged_on_store_time_that_goes_on_after_the_claim(
    store: Any,
) -> None:
    steps = Steps()
    called = []
    put(store, "a", deadline_ms=START_MS + 10_000)
    bench = running(store, lambda: called.append(1), config={"now_s": steps})
    (attempt,) = bench.admit()
    assert (attempt.timeout_ms, attempt.deadline_cut) == (10_000, True)
    steps.advance(10.0)
    bench.run(attempt)
    assert (state_of(store, "a"), called) == (State.ARCHIVED, [])


@pytest.mark.parametrize(
    ("timeout_ms", "deadline_in_ms", "limit"),
    [(0, 0, (0, False)), (100, 0, (100, False)), (100, 50, (50, True)),
     (50, 100, (50, False)), (0, 70, (70, True))],
)  # fmt: skip
def test_the_earlier_of_timeout_and_deadline_limits_an_attempt(
    store: Any, timeout_ms: int, deadline_in_ms: int, limit: tuple[int, bool]
) -> None:
    deadline_ms = START_MS + deadline_in_ms if deadline_in_ms else 0
    put(store, "a", timeout_ms=timeout_ms, deadline_ms=deadline_ms)
    (attempt,) = Bench(store).admit()
    assert (attempt.timeout_ms, attempt.deadline_cut) == limit


def test_a_handler_gets_what_its_annotations_ask_for(store: Any) -> None:
    got: dict[str, Any] = {}

    def take(
        ctx: JobContext,
        envelope: Envelope,
        client: JobClient,
        id: TaskId,
        count: Attempt,
        worker: WorkerInfo,
        n: int,
    ) -> None:
        got.update(locals())
        assert current_job() is ctx
        assert current_jobs() == (ctx,)

    put(store, "a", payload=b'{"n":7}', weight=3)
    bench = running(store, take)
    attempt = bench.run_next()
    ctx = got["ctx"]
    assert (ctx.job_id, ctx.kind, ctx.queue, ctx.weight) == ("a", "k", "q", 3)
    assert (ctx.attempt, ctx.crash_attempt, ctx.max_attempts) == (0, 0, 25)
    assert ctx.lease == attempt.lease
    assert (ctx.deadline, ctx.periodic, ctx.trace) == (None, None, None)
    assert (got["id"], got["n"]) == ("a", 7)
    assert got["envelope"] == attempt.claim.envelope
    assert got["worker"].worker_id == WORKER
    assert got["count"] == Attempt(0, 0, 25)
    with pytest.raises(LookupError):
        current_job()
    assert current_jobs() == ()


def test_nothing_an_attempt_sets_in_its_context_is_seen_by_the_next(
    store: Any,
) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("of the starter")
    seen: list[Any] = []

    def look(n: int) -> None:
        seen.append((tenant.get(), decimal.getcontext().prec))
        tenant.set(f"tenant {n}")
        decimal.getcontext().prec = n

    put(store, "a", payload=b'{"n":3}')
    put(store, "b", payload=b'{"n":4}')
    bench = running(store, look)
    bench.run_next()
    bench.run_next()
    assert seen == [("of the starter", 28)] * 2
    assert tenant.get() == "of the starter"


# Cancellation


def cancelling(
    store: Any, reason: CancelReason, handler: Callable[[JobContext], Any]
) -> Bench:
    """Run `a` with a handler whose attempt is cancelled while it runs."""
    bench: Bench

    def act(ctx: JobContext) -> Any:
        (attempt,) = bench.inflight.attempts()
        if reason is CancelReason.LEASE_LOST:
            bench.inflight.lose([attempt])
        else:
            attempt.cancel(reason)
        return handler(ctx)

    put(store, "a", timeout_ms=100)
    bench = running(Tap(store), act)
    bench.run_next()
    return bench


@pytest.mark.parametrize("reason", [CancelReason.TIMEOUT, CancelReason.SHUTDOWN])
def test_a_success_after_the_timeout_is_logged(
    store: Any, reason: CancelReason, caplog: Any
) -> None:
    cancelling(store, reason, lambda ctx: None)
    told = "returned after its timeout of 100 ms"
    assert (told in caplog.text) == (reason is CancelReason.TIMEOUT)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (CancelReason.LEASE_LOST, LeaseLost),
        (CancelReason.LEASE_EXPIRED, LeaseLost),
        (CancelReason.TIMEOUT, AttemptTimeout),
        (CancelReason.SHUTDOWN, ShutdownRequested),
    ],
)
def test_a_cancelled_attempt_learns_it_from_every_look(
    store: Any, reason: CancelReason, error: type[BaseException]
) -> None:
    seen: list[Any] = []

    def look(ctx: JobContext) -> None:
        assert (ctx.cancelled, ctx.cancel_reason) == (True, reason.value)
        assert ctx.wait(1_000)
        calls: list[Callable[[], object]] = [
            ctx.check,
            lambda: ctx.sleep(1_000),
            lambda: ctx.report_progress(1, 2),
            lambda: ctx.persist_output(b"x"),
            lambda: ctx.checkpoint(Checkpoint()),
            lambda: ctx.client.enqueue(envelope("child")),
        ]
        for call in calls:
            with pytest.raises(error):
                call()
            seen.append(call)

    bench = cancelling(store, reason, look)
    assert len(seen) == 6
    assert bench.store.count("checkpoint") == bench.store.count("enqueue") == 0


def test_a_handler_that_returns_after_its_time_out_has_done_its_work(
    store: Any,
) -> None:
    cancelling(store, CancelReason.TIMEOUT, lambda ctx: None)
    assert state_of(store, "a") is State.COMPLETED


def test_a_handler_that_stops_at_its_time_out_failed(store: Any) -> None:
    cancelling(store, CancelReason.TIMEOUT, lambda ctx: ctx.sleep(0.3))
    row = job(store, "a")
    assert (row.state, row.attempt, row.crash_attempt) == ("retryable", 1, 0)
    assert first_line(store, "a") == "attempt timed out after 100ms"


@pytest.mark.parametrize("swallow", [True, False])
def test_a_lost_lease_is_never_acked_whatever_the_handler_makes_of_it(
    store: Any, swallow: bool
) -> None:
    def handler(ctx: JobContext) -> None:
        try:
            ctx.check()
        except BaseException:
            if not swallow:
                raise ValueError("made of it") from None

    bench = cancelling(store, CancelReason.LEASE_LOST, handler)
    assert bench.store.count("ack_batch") == bench.store.count("ack") == 0
    assert len(bench.inflight) == 0


def test_except_exception_does_not_swallow_a_cancellation(store: Any) -> None:
    reached = []

    def handler(ctx: JobContext) -> None:
        try:
            ctx.check()
        except Exception:
            reached.append("swallowed")

    cancelling(store, CancelReason.SHUTDOWN, handler)
    assert reached == []
    row = job(store, "a")
    assert (row.state, row.attempt, row.crash_attempt) == ("available", 0, 0)


def test_a_zombie_can_write_nothing_once_another_worker_has_the_job(
    backend: Any, store: Any, clock: Any
) -> None:
    tried: list[str] = []
    images: list[object] = []

    def zombie(ctx: JobContext) -> None:
        clock.advance_ms(30_000)
        assert len(store.reclaim_expired(10)) == 1
        clock.advance_ms(3_600_000)
        store.promote_due(10)
        second = claim_one(store)
        store.ack(second.lease_ref, Outcome.SUCCESS)
        images.append(backend.image())
        with pytest.raises(LeaseLost):
            ctx.checkpoint(Checkpoint(completed_steps=("late",)))
        tried.append("checkpoint")
        for write in (
            lambda: store.checkpoint(ctx.lease, Checkpoint()),
            lambda: store.ack(ctx.lease, Outcome.SUCCESS),
        ):
            with pytest.raises(LeaseRejected):
                write()
            tried.append("write")
        with pytest.raises(LeaseLost):
            ctx.report_progress(1, 1)
        tried.append("progress")

    put(store, "a")
    bench = running(store, zombie)
    bench.run_next()
    assert len(tried) == 4
    assert images == [backend.image()]
    assert state_of(store, "a") is State.COMPLETED
    assert len(bench.inflight) == 0


def test_the_first_refused_write_stops_the_attempt(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        steer(store).operator_cancel("a")
        with pytest.raises(LeaseLost):
            ctx.report_progress(1, 1)
        assert ctx.cancel_reason == "lease_lost"
        assert ctx.wait(1_000)

    put(store, "a")
    bench = running(Tap(store), handler)
    bench.run_next()
    assert bench.store.count("ack_batch") == 0
    assert state_of(store, "a") is State.CANCELLED


# The lease


def test_extending_a_lease_keeps_the_job_beyond_the_usual_length(
    store: Any, clock: Any
) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.extend_lease("60s")
        clock.advance_ms(59_999)
        assert store.reclaim_expired(10) == []

    put(store, "a")
    running(store, handler).run_next()
    assert state_of(store, "a") is State.COMPLETED


def test_extending_a_lost_lease_stops_the_attempt(store: Any, clock: Any) -> None:
    def handler(ctx: JobContext) -> None:
        clock.advance_ms(30_000)
        store.reclaim_expired(10)
        with pytest.raises(LeaseLost):
            ctx.extend_lease(timedelta(seconds=60))
        assert ctx.cancel_reason == "lease_lost"

    put(store, "a")
    bench = running(Tap(store), handler)
    bench.run_next()
    assert bench.store.count("ack_batch") == 0
    assert job(store, "a").crash_attempt == 1


def test_a_released_job_is_available_again_and_gets_no_second_ack(store: Any) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.release()
        assert state_of(store, "a") is State.AVAILABLE
        (attempt,) = bench.inflight.attempts()
        assert not attempt.renewing

    put(store, "a")
    bench = running(Tap(store), handler)
    bench.run_next()
    assert bench.store.count("ack_batch") == 0
    row = job(store, "a")
    assert (row.state, row.attempt, row.errors) == ("available", 0, ())


@pytest.mark.parametrize("raises", [True, False])
def test_reported_weight_goes_with_every_outcome(store: Any, raises: bool) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.report_actual_weight(5)
        ctx.report_actual_weight(2)
        if raises:
            raise ValueError("x")

    put(store, "a")
    bench = running(Tap(store), handler)
    bench.run_next()
    ((ack,),) = bench.store.given("ack_batch")
    assert ack.actual_weight == 2


@pytest.mark.parametrize("weight", [-1, 2**31, True, 1.5])
def test_a_weight_that_is_none_is_refused(store: Any, weight: Any) -> None:
    def handler(ctx: JobContext) -> None:
        with pytest.raises(InvalidRequest, match="weight"):
            ctx.report_actual_weight(weight)

    put(store, "a")
    running(store, handler).run_next()
    assert state_of(store, "a") is State.COMPLETED


# Results, output, checkpoints


def test_a_return_value_is_stored_with_the_success(store: Any) -> None:
    def handler(n: int) -> dict[str, int]:
        return {"twice": 2 * n}

    put(store, "a", payload=b'{"n":21}')
    running(store, handler).run_next()
    assert store.results.read_result("a").data == b'{"twice":42}'


def test_a_recorded_result_counts_only_with_the_success(store: Any, clock: Any) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.record_result(b"%d" % ctx.attempt, version=3)
        if not ctx.attempt:
            raise ValueError("x")

    put(store, "a")
    bench = running(store, handler)
    bench.run_next()
    assert store.results.read_result("a") is None
    clock.advance_ms(60_000)
    store.promote_due(10)
    bench.run_next()
    result = store.results.read_result("a")
    assert (result.schema_version, result.data) == (3, b"1")


def test_a_value_that_is_none_of_the_annotation_fails_the_attempt(store: Any) -> None:
    def handler() -> int:
        return "text"  # type: ignore[return-value]

    put(store, "a")
    running(store, handler).run_next()
    assert state_of(store, "a") is State.RETRYABLE
    assert "result" in first_line(store, "a")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("text",), "output must be bytes, got str"),
        ((b"x", 0), "output schema_version is 0, allowed is 1 to 2147483647"),
        (
            (bytes(MAX_RESULT_BYTES + 1),),
            "output has 33554433 bytes, the limit is 33554432",
        ),
    ],
    ids=["type", "version", "size"],
)
def test_an_output_that_cannot_be_is_called_an_output(
    store: Any, given: Any, text: str
) -> None:
    refused = []

    def handler(ctx: JobContext) -> None:
        with pytest.raises(InvalidRequest) as error:
            ctx.persist_output(*given)
        refused.append(error.value.message)

    put(store, "a")
    running(store, handler).run_next()
    assert refused == [text]
    assert store.outputs.read_output("a") is None


def test_output_is_there_while_the_handler_runs_and_names_its_author(
    store: Any, clock: Any
) -> None:
    seen = []

    def handler(ctx: JobContext) -> None:
        seen.append(store.outputs.read_output("a"))
        ctx.persist_output(b"part %d" % ctx.attempt)
        seen.append(store.outputs.read_output("a"))
        if not ctx.attempt:
            raise ValueError("x")

    put(store, "a")
    bench = running(store, handler)
    bench.run_next()
    clock.advance_ms(60_000)
    store.promote_due(10)
    bench.run_next()
    assert [(o.data, o.fence) if o else None for o in seen] == [
        None, (b"part 0", 1), (b"part 0", 1), (b"part 1", 2),
    ]  # fmt: skip


def test_the_next_attempt_starts_with_the_checkpoint_of_the_last(
    store: Any, clock: Any
) -> None:
    seen = []

    def handler(ctx: JobContext) -> None:
        seen.append(ctx.last_checkpoint.completed_steps)
        ctx.checkpoint(Checkpoint(completed_steps=("a",)))
        seen.append(ctx.last_checkpoint.completed_steps)
        raise ValueError("x")

    put(store, "a")
    bench = running(store, handler)
    bench.run_next()
    clock.advance_ms(60_000)
    store.promote_due(10)
    bench.run_next()
    assert seen == [(), ("a",), ("a",), ("a",)]


def test_a_follow_up_job_ends_with_the_attempt(store: Any) -> None:
    kept: list[JobClient] = []

    def handler(ctx: JobContext) -> None:
        kept.append(ctx.client)
        ctx.client.enqueue(envelope("child"))

    put(store, "a", headers={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
    bench = running(store, handler)
    bench.run_next()
    child = job(store, "child")
    assert child.headers is not None
    assert child.headers["traceparent"].startswith("00-aaaa")
    with pytest.raises(RuntimeError):
        kept[0].enqueue(envelope("late"))


def test_a_client_that_is_asked_for_after_the_attempt_is_over_too(store: Any) -> None:
    kept: list[JobContext] = []

    def handler(ctx: JobContext) -> None:
        kept.append(ctx)

    put(store, "a")
    running(store, handler).run_next()
    with pytest.raises(RuntimeError, match="ends with the attempt"):
        kept[0].client.enqueue(envelope("child"))
    assert steer(store).get_job("child") is None
