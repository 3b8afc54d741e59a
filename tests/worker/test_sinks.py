"""Several sinks, the beginning of attempts, and events that are rare."""

from __future__ import annotations

import contextvars
import logging
from collections import Counter
from typing import Any

import pytest
from attrs import frozen

from headgate_sync.binding import BatchJob
from headgate_sync.errors import InvalidRequest, LeaseRejected, StoreConflict
from headgate_sync.loglines import MAX_LOG_LINES
from headgate_sync.registry import Registry
from headgate_sync.task import task
from headgate_sync.telemetry import (
    AttemptBegun,
    GateCorrected,
    JobSpan,
    LogDropped,
    Unhandled,
)
from headgate_sync.worker import WorkerConfig
from headgate_sync.worker.duties import Duties
from headgate_sync.worker.reporting import Emitter
from tests.builders import START_MS, WORKER, claim_one, envelope
from tests.worker.rig import PATIENCE_S, Steps, Tap, wait_for, working
from tests.worker.test_reporting import Sink

CURRENT: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="")


class Follower(Sink):
    """A sink that hears of beginnings, and gives each attempt a name."""

    def __init__(self, name: str, *, fails: BaseException | None = None) -> None:
        super().__init__(fails=fails)
        self.name = name
        self.begun: list[AttemptBegun] = []

    def begin_attempt(self, begun: AttemptBegun) -> object:
        self.begun.append(begun)
        if self.fails is not None:
            raise self.fails
        CURRENT.set(f"{self.name}-{begun.job_id}")
        return f"{self.name}-{begun.job_id}"


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def test_every_sink_hears_everything_although_one_raises(store: Any) -> None:
    broken, sound, registry = Sink(fails=SystemExit(1)), Sink(), Registry()
    registry.task("k")(lambda: None)
    put(store, "a")
    with working(store, registry, telemetry=[broken, sound], run_duties=False):
        wait_for(lambda: bool(sound.about("a")), "the span")
    # Two threads may tell of two things in any order.
    assert Counter(map(type, sound.events)) == Counter(map(type, broken.events))


@pytest.mark.parametrize("given", [7, [7], [None], "text", iter([Sink()])])
def test_what_is_no_sink_is_refused_when_the_configuration_is_made(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"telemetry: .* has no method on_event"):
        WorkerConfig(telemetry=given)


def test_each_sink_gets_back_what_it_made_of_the_beginning(store: Any) -> None:
    first, plain, second = Follower("x"), Sink(), Follower("y")
    broken = Follower("z", fails=RuntimeError("begin is broken"))
    registry, seen = Registry(), []
    registry.task("k")(lambda: seen.append(CURRENT.get()))
    put(store, "a", "b")
    sinks = [broken, first, plain, second]
    with working(store, registry, telemetry=sinks, capacity=1, run_duties=False):
        wait_for(lambda: len(plain.of(JobSpan)) == 2, "both spans")
    for sink, lives in (
        (first, ["x-a", "x-b"]),
        (second, ["y-a", "y-b"]),
        (plain, [None, None]),
        (broken, [None, None]),
    ):
        assert [span.live for span in sink.of(JobSpan)] == lives
    # What one attempt was given is not seen by the next one on its thread.
    assert seen == ["y-a", "y-b"]
    assert CURRENT.get() == ""
    assert first.begun[0] == AttemptBegun(
        job_id="a", kind="k", queue="q", attempt=0, started_at_ms=START_MS
    )


def test_what_no_handler_of_one_job_gets_has_no_beginning(store: Any) -> None:
    sink, registry = Follower("x"), Registry()

    @task("many")
    @frozen
    class Many:
        number: int

    def together(jobs: list[BatchJob[Many]]) -> list[None]:
        assert CURRENT.get() == ""
        return [None] * len(jobs)

    registry.batch_handler(Many, max_size=2, max_delay="1ms")(together)
    put(store, "a", "b", kind="many", payload=b'{"number": 1}')
    put(store, "c", kind="unknown")
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: len(sink.of(JobSpan)) == 3, "the spans")
    assert sink.begun == []
    assert {span.live for span in sink.of(JobSpan)} == {None}


def test_a_sink_that_does_not_follow_costs_nothing_before_the_handler(
    store: Any, monkeypatch: Any
) -> None:
    from headgate_sync.worker import reporting

    sink, registry = Sink(), Registry()
    registry.task("k")(lambda: None)
    put(store, "a")

    def made(**keywords: Any) -> Any:
        raise AssertionError("a beginning was made for nobody")

    monkeypatch.setattr(reporting, "AttemptBegun", made)
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: bool(sink.about("a")), "the span")
    assert sink.about("a")[0].outcome == "success"


def test_lines_beyond_the_cap_are_counted_before_the_span(store: Any) -> None:
    sink, registry = Sink(), Registry()

    def chatty() -> None:
        for number in range(MAX_LOG_LINES + 50):
            logging.getLogger("shop").warning("line %d", number)

    registry.task("k")(chatty)
    registry.task("quiet")(lambda: logging.getLogger("shop").warning("one"))
    put(store, "a")
    put(store, "b", kind="quiet")
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: len(sink.of(JobSpan)) == 2, "both spans")
    (told,) = sink.of(LogDropped)
    assert told == LogDropped(
        worker=WORKER, job_id="a", detail="50 lines beyond 100", count=50
    )
    assert sink.events.index(told) < sink.events.index(*sink.about("a"))
    assert {span.worker for span in sink.of(JobSpan)} == {WORKER}


def test_a_kind_without_a_handler_is_reported_and_a_code_of_that_name_is_not(
    store: Any,
) -> None:
    sink, registry = Sink(), Registry()

    def fails() -> None:
        raise ValueError("UNKNOWN_JOB_TYPE: of the handler's own making")

    registry.task("k")(fails)
    put(store, "a")
    put(store, "b", kind="unknown")
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: len(sink.of(JobSpan)) == 2, "both spans")
    assert sink.of(Unhandled) == [Unhandled(queue="q", kind="unknown")]


def test_an_ack_that_waits_for_a_lock_and_is_lost_ends_in_a_span_too(
    store: Any,
) -> None:
    sink, registry, tap = Sink(), Registry(), Tap(store)
    registry.task("k")(lambda: None)
    put(store, "a")
    answers: list[Exception] = [
        StoreConflict("locked"),
        LeaseRejected("a", missing=False),
    ]
    tap.around["ack_batch"] = lambda real, acks: [answers.pop(0) for _ in acks]
    with working(tap, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: bool(sink.about("a")), "the span")
    assert [span.outcome for span in sink.about("a")] == ["lease_lost"]


def test_counters_of_the_gate_that_were_put_right_are_reported(
    postgres: Any, admin: Any
) -> None:
    store, sink, steps = postgres.make_store(), Sink(), Steps()
    put(store, "a", "b")
    admin.execute(
        "UPDATE headgate.headgate_job SET gate_hold = 'quarantine' WHERE id = 'a'"
    )
    claim_one(store)  # where the gate has been the marks are looked at
    duties = Duties(store, "w", interval_ms=1_000, now_s=steps, emit=Emitter(sink))
    for _ in range(3):
        steps.advance(60)
        duties.step()
        duties.release(PATIENCE_S)
    assert sink.of(GateCorrected) == [GateCorrected(count=1)]
