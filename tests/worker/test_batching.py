"""Batch handlers: jobs share a call, and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from headgate_sync.binding import BatchJob
from headgate_sync.cancel import CancelReason
from headgate_sync.context import JobContext, current_job, current_jobs
from headgate_sync.errors import ConfigurationError, InvalidRequest
from headgate_sync.lifecycle import State
from headgate_sync.loglines import read_line
from headgate_sync.registry import Registry
from headgate_sync.signals import Revoke, Skip, Snooze
from headgate_sync.worker import WorkerConfig
from headgate_sync.worker.worker import Worker
from tests.builders import crash, envelope, job, state_of, steer
from tests.worker.rig import Bench, Gate, Tap, wait_for, working


def batching(
    handler: Callable[[list[Any]], Any],
    *,
    max_size: int = 3,
    max_delay: str = "50ms",
    **options: Any,
) -> Registry:
    """A registry with a batch handler of kind `mail`, alias `letter`."""
    registry = Registry()

    @registry.task("mail", aliases=["letter"])
    @attrs.frozen
    class Mail:
        to: str

    registry.batch_handler(Mail, max_size=max_size, max_delay=max_delay, **options)(
        handler
    )
    return registry


def put(store: Any, *ids: str, payload: bytes | None = None, **fields: Any) -> None:
    store.enqueue(
        [
            envelope(
                id,
                **{
                    "kind": "mail",
                    "payload": payload or json.dumps({"to": id}).encode(),
                    **fields,
                },
            )
            for id in ids
        ]
    )


def bench_of(store: Any, handler: Any, **options: Any) -> Bench:
    return Bench(store, batching(handler, **options))


def begin(bench: Bench) -> list[Any]:
    """Admit what is there, and let it wait or run."""
    attempts = bench.admit()
    for attempt in attempts:
        bench.run(attempt)
    return attempts


def flush(bench: Bench) -> float:
    """What the watchdog does with what must not wait longer."""
    chunks, due_s = bench.runner.batches.due()
    for chunk in chunks:
        if bench.runner.batches.run(chunk):
            bench.acks.fly()
    return due_s


def names(jobs: list[BatchJob[Any]]) -> list[str]:
    return [each.args.to for each in jobs]


def test_jobs_are_put_together_up_to_the_size_and_the_delay(store: Any) -> None:
    calls: list[list[str]] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(names(jobs))
        return [None] * len(jobs)

    put(store, *"abcde")
    bench = bench_of(store, handler)
    begin(bench)
    assert calls == [["a", "b", "c"]]
    assert len(bench.inflight) == 2  # waiting jobs have slots
    assert flush(bench) == pytest.approx(bench.now_s() + 0.05)
    bench.now_s.advance(0.05)  # type: ignore[attr-defined]
    assert flush(bench) == float("inf")
    assert calls == [["a", "b", "c"], ["d", "e"]]
    assert {state_of(store, id) for id in "abcde"} == {State.COMPLETED}
    assert len(bench.inflight) == 0


def test_a_steady_stream_does_not_postpone_the_first_of_a_chunk(store: Any) -> None:
    calls: list[list[str]] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(names(jobs))
        return [None] * len(jobs)

    bench = bench_of(store, handler, max_size=10)
    for id in "abcd":
        put(store, id)
        begin(bench)
        flush(bench)
        bench.now_s.advance(0.03)  # type: ignore[attr-defined]
    assert calls == [["a", "b", "c"]]


def test_every_job_has_the_outcome_of_its_entry(store: Any) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[Any]:
        return [None, ValueError("no"), Skip("x"), Snooze("5m"), Revoke(), {"n": 1}]

    put(store, *"abcdef")
    bench = bench_of(store, handler, max_size=6)
    begin(bench)
    assert [state_of(store, id) for id in "abcdef"] == [
        State.COMPLETED,
        State.RETRYABLE,
        State.ARCHIVED,
        State.SCHEDULED,
        State.DELETED,
        State.COMPLETED,
    ]
    assert (job(store, "b").errors[-1].error or "").startswith("ValueError: no")
    assert store.results.read_result("f").data == b'{"n":1}'


def test_the_acks_of_a_chunk_share_a_call(store: Any) -> None:
    put(store, *"abc")
    tap = Tap(store)
    begin(bench_of(tap, lambda jobs: [None] * 3))
    assert tap.count("ack_batch") <= 3
    assert {state_of(store, id) for id in "abc"} == {State.COMPLETED}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([None, None], "batch handler returned 2 results for 3 jobs"),
        ([], "batch handler returned 0 results for 3 jobs"),
        (None, "batch handler returned NoneType for 3 jobs"),
        ("abc", "batch handler returned str for 3 jobs"),
    ],
)
def test_an_answer_of_another_length_fails_them_all(
    store: Any, answer: Any, text: str
) -> None:
    put(store, *"abc")
    begin(bench_of(store, lambda jobs: answer))
    for id in "abc":
        assert job(store, id).attempt == 1
        assert (job(store, id).errors[-1].error or "").partition("\n")[0] == text


def test_what_a_batch_handler_raises_fails_them_all(store: Any) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        raise KeyError("gone")

    put(store, *"abc")
    begin(bench_of(store, handler))
    assert {state_of(store, id) for id in "abc"} == {State.RETRYABLE}
    assert {job(store, id).attempt for id in "abc"} == {1}


def test_one_bad_result_fails_one_job(store: Any) -> None:
    put(store, *"abc")
    begin(bench_of(store, lambda jobs: [1, object(), 3]))
    states = [state_of(store, id) for id in "abc"]
    assert states == [State.COMPLETED, State.RETRYABLE, State.COMPLETED]


def test_an_undecodable_job_harms_no_other(store: Any) -> None:
    calls: list[list[str]] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(names(jobs))
        return [None] * len(jobs)

    put(store, "a")
    put(store, "bad", payload=b"\xff")
    put(store, "b", "c")
    begin(bench_of(store, handler))
    assert calls == [["a", "b", "c"]]
    assert state_of(store, "bad") is State.UNDECODABLE


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (CancelReason.LEASE_LOST, State.RUNNING),
        (CancelReason.TIMEOUT, State.RETRYABLE),
        (CancelReason.SHUTDOWN, State.AVAILABLE),
        (CancelReason.LEASE_EXPIRED, State.AVAILABLE),
    ],
)
def test_a_job_that_is_cancelled_while_it_waits_leaves_the_others(
    store: Any, reason: CancelReason, state: State
) -> None:
    calls: list[list[str]] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(names(jobs))
        return [None] * len(jobs)

    put(store, *"abc", timeout_ms=1_000)
    bench = bench_of(store, handler, max_size=4, max_delay="1m")
    begin(bench)[1].cancel(reason)
    flush(bench)
    assert calls == []
    assert state_of(store, "b") is state
    assert len(bench.inflight) == 2
    bench.now_s.advance(60)  # type: ignore[attr-defined]
    flush(bench)
    assert calls == [["a", "c"]]


def test_after_the_call_has_begun_the_fence_decides(store: Any, clock: Any) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        steer(store).operator_cancel("b")
        jobs[1].ctx._attempt.cancel(CancelReason.LEASE_LOST)
        return [None] * len(jobs)

    put(store, *"abc")
    tap = Tap(store)
    begin(bench_of(tap, handler))
    acked = [ack.lease.job_id for acks in tap.given("ack_batch") for ack in acks]
    assert sorted(acked) == ["a", "c"]
    assert state_of(store, "b") is State.CANCELLED


def test_every_job_of_a_call_has_its_own_context_and_log(store: Any) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        for each in jobs:
            assert each.ctx.job_id == each.envelope.id == each.args.to
            each.ctx.log.info("for %s", each.args.to)
            each.ctx.report_progress(1, 1)
        with pytest.raises(LookupError, match="current_jobs"):
            current_job()
        assert current_jobs() == tuple(each.ctx for each in jobs)
        return [None] * len(jobs)

    put(store, *"ab")
    bench = bench_of(store, handler, max_size=2)
    logging.getLogger("headgate.job").setLevel(logging.INFO)
    bench.runner.capture.install()
    try:
        begin(bench)
    finally:
        bench.runner.capture.uninstall()
        logging.getLogger("headgate.job").setLevel(logging.NOTSET)
    for id in "ab":
        (line,) = job(store, id).errors[-1].logs
        assert read_line(line).message == f"for {id}"


def test_an_alias_waits_with_its_task(store: Any) -> None:
    calls: list[list[str]] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(names(jobs))
        return [None] * len(jobs)

    put(store, "a")
    put(store, "b", kind="letter")
    begin(bench_of(store, handler, max_size=2))
    assert calls == [["a", "b"]]


def test_a_batch_never_needs_more_jobs_than_there_are_threads(
    store: Any, caplog: Any
) -> None:
    calls: list[int] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(len(jobs))
        return [None] * len(jobs)

    put(store, *"abcd")
    registry = batching(handler, max_size=100, max_delay="1h")
    with working(store, registry, capacity=2):
        wait_for(lambda: sum(calls) == 4, "all have run")
    assert calls == [2, 2]
    assert "batches of 100 do not fit into 2 threads" in caplog.text


def test_a_lone_job_waits_as_long_as_it_may_and_no_longer(store: Any) -> None:
    calls: list[int] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(len(jobs))
        return [None] * len(jobs)

    put(store, "a")
    with working(store, batching(handler, max_size=3, max_delay="20ms")):
        wait_for(lambda: state_of(store, "a") is State.COMPLETED, "it has run")
    assert calls == [1]


def test_a_drain_runs_at_once_what_waits(store: Any) -> None:
    calls: list[int] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        calls.append(len(jobs))
        return [None] * len(jobs)

    put(store, *"ab")
    registry = batching(handler, max_size=4, max_delay="1h")
    with working(store, registry) as worker:
        wait_for(lambda: worker.health().in_flight == 2, "both are here")
    assert sum(calls) == 2  # in one call, unless the stop came before the second
    assert worker.exit_status is not None
    assert worker.exit_status.code == 0
    assert {state_of(store, id) for id in "ab"} == {State.COMPLETED}


def test_a_batch_handler_may_end_its_thread_and_no_job_is_acked(
    store: Any, clock: Any
) -> None:
    gate = Gate()

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        if jobs[0].ctx.crash_attempt == 0:
            gate.open()
            raise SystemExit
        return [None] * len(jobs)

    put(store, *"abc")
    registry = batching(handler, max_delay="20ms")
    with working(store, registry, catch_base_exceptions=False, capacity=3) as worker:
        gate.hold()
        wait_for(lambda: worker.health().in_flight == 0, "the slots are free")
        assert {state_of(store, id) for id in "abc"} == {State.RUNNING}
        clock.advance_ms(31_000)
        wait_for(
            lambda: (
                clock.advance_ms(1_000)
                or all(state_of(store, id) is State.COMPLETED for id in "abc")
            ),
            "they ran again",
        )


def test_the_ack_of_a_cancelled_job_flies_although_the_others_end_the_thread(
    store: Any,
) -> None:
    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        raise SystemExit

    put(store, *"abc", timeout_ms=1_000)
    bench = Bench(store, batching(handler), catch_base_exceptions=False)
    first, second, third = bench.admit()
    bench.run(first)
    bench.run(second)
    first.cancel(CancelReason.TIMEOUT)
    with pytest.raises(SystemExit):
        bench.run(third)
    assert state_of(store, "a") is State.RETRYABLE
    assert {state_of(store, id) for id in "bc"} == {State.RUNNING}
    assert len(bench.inflight) == 0
    put(store, "d", "e", "f")
    begin(bench_of(store, lambda jobs: [None] * len(jobs)))
    assert {state_of(store, id) for id in "def"} == {State.COMPLETED}


def test_threads_of_a_batch_that_ends_its_thread_are_told_to_stop(store: Any) -> None:
    stopped: list[bool] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        jobs[0].ctx.spawn(lambda: stopped.append(jobs[0].ctx.wait(20)))
        raise SystemExit

    put(store, *"ab")
    bench = Bench(store, batching(handler, max_size=2), catch_base_exceptions=False)
    first, second = bench.admit()
    bench.run(first)
    with pytest.raises(SystemExit):
        bench.run(second)
    assert stopped == [True]
    assert {state_of(store, id) for id in "ab"} == {State.RUNNING}


def test_threads_of_a_failed_batch_end_before_its_acks(store: Any) -> None:
    stopped: list[bool] = []

    def handler(jobs: list[BatchJob[Any]]) -> list[None]:
        jobs[0].ctx.spawn(lambda: stopped.append(jobs[0].ctx.wait(20)))
        raise ValueError

    put(store, *"abc")
    begin(bench_of(store, handler))
    assert stopped == [True]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_size": 0}, "max_size"),
        ({"max_size": 1.5}, "max_size"),
        ({"max_size": 10_001}, "max_size"),
        ({"max_delay": "0ms"}, "max_delay"),
        ({"max_delay": 5}, "max_delay"),
    ],
)
def test_a_bad_batch_is_refused_at_its_declaration(options: Any, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        batching(lambda jobs: [], **options)


def test_a_batch_handler_takes_the_list_and_nothing_else() -> None:
    def greedy(jobs: list[Any], ctx: JobContext) -> list[Any]:
        return []

    with pytest.raises(InvalidRequest, match="the list of jobs and nothing else"):
        batching(greedy)
    with pytest.raises(InvalidRequest, match="no payload class"):
        Registry().batch_handler(int, max_size=1, max_delay="1s")


def test_a_batch_handler_needs_no_store_of_results(store: Any) -> None:
    """Its annotation speaks of outcomes, not of one result."""

    def handler(jobs: list[BatchJob[Any]]) -> list[Skip | None]:
        return [None] * len(jobs)

    class Bare(Tap):
        results = None

    worker = Worker(Bare(store), batching(handler), WorkerConfig())
    worker.stop()
    try:
        assert worker.run(install_signal_handlers=False).code == 0
    except ConfigurationError:
        pytest.fail("refused")


def test_crashes_of_a_chunk_count_for_each_of_its_jobs(store: Any, clock: Any) -> None:
    put(store, *"ab")
    bench = bench_of(store, lambda jobs: [None] * len(jobs), max_size=9)
    crash(store, clock, begin(bench)[0].claim)
    assert {job(store, id).crash_attempt for id in "ab"} == {1}
