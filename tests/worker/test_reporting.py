"""What a telemetry sink and death handlers hear of attempts."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import StoreUnavailable
from headgate_sync.events import DeathReason, JobDeath
from headgate_sync.policy import Ceiling
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Revoke, Skip, Snooze
from headgate_sync.telemetry import (
    AckFailed,
    AdmissionMade,
    Admitted,
    Completed,
    Evicted,
    JobSpan,
    Quarantined,
    Rejected,
    RenewFailed,
    Stuck,
    WorkerSaturation,
)
from headgate_sync.worker.reporting import Emitter
from tests.builders import DAY_MS, WORKER, envelope, job, run_one, steer
from tests.worker.rig import PATIENCE_S, Gate, Steps, Tap, take_ahead, wait_for, working


class Sink:
    """Keeps what it hears; raises where it is told to."""

    def __init__(self, *, fails: BaseException | None = None) -> None:
        self.events: list[Any] = []
        self.fails = fails
        self._lock = threading.Lock()

    def on_event(self, event: Any) -> None:
        with self._lock:
            self.events.append(event)
        if self.fails is not None:
            raise self.fails

    def of(self, kind: type) -> list[Any]:
        """Those of one class, in order."""
        with self._lock:
            return [event for event in self.events if isinstance(event, kind)]

    def about(self, job_id: str) -> list[Any]:
        """Spans of one job, in order."""
        return [span for span in self.of(JobSpan) if span.job_id == job_id]


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def state(store: Any, id: str) -> str:
    found = steer(store).get_job(id)
    return "deleted" if found is None else found.state


# Telemetry.


def test_a_success_is_admitted_completed_and_a_span(store: Any, clock: Any) -> None:
    sink, registry = Sink(), Registry()
    registry.task("k")(lambda: None)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    put(store, "a", headers={"traceparent": trace, "tracestate": "v=1"})
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: bool(sink.about("a")), "the span")
    of_worker = (WorkerSaturation, AdmissionMade)
    about = [e for e in sink.events if not isinstance(e, of_worker)]
    assert about[0] == Admitted(queue="q", count=1)
    assert [type(event) for event in about] == [Admitted, Completed, JobSpan]
    assert about[1].kind == "k"
    span = about[2]
    assert (span.kind, span.queue, span.attempt, span.outcome) == (
        *("k", "q", 0),
        "success",
    )
    assert span.started_at_ms == clock.now_ms()
    assert span.ms == about[1].ms
    assert span.trace is not None
    assert (span.trace.to_traceparent(), span.trace.trace_state) == (trace, "v=1")


@pytest.mark.parametrize(
    ("ends", "outcome", "rejected"),
    [
        (lambda: Skip("x"), "skip", 0),
        (lambda: Revoke(), "revoke", 0),
        (lambda: Snooze("1h"), "snooze", 0),
        (lambda: RateLimited("1h"), "rate_limited", 1),
        (lambda: 1 / 0, "retry", 0),
    ],
)
def test_every_outcome_is_one_span(
    store: Any, ends: Any, outcome: str, rejected: int
) -> None:
    sink, registry = Sink(), Registry()
    registry.task("k")(ends)
    put(store, "a", rate_class="c" if rejected else "", headers={"traceparent": "x"})
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: bool(sink.about("a")), "the span")
    (span,) = sink.about("a")
    assert (span.outcome, span.trace) == (outcome, None)
    assert sink.of(Rejected) == [Rejected(queue="q", policy="rate_class")] * rejected
    assert sink.of(Completed) == []


@pytest.mark.parametrize("policy", ["discard", "cancel_incoming"])
def test_jobs_that_a_full_ceiling_sends_away_are_rejected(
    store: Any, policy: str
) -> None:
    sink, registry, gate = Sink(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    steer(store).upsert_concurrency_limit(
        Ceiling(name="one", queue="q", max_concurrent=1, on_saturated=policy)
    )
    put(store, "a", "b", "c")
    with working(store, registry, telemetry=sink, run_duties=False):
        gate.wait()
        wait_for(lambda: bool(sink.of(Rejected)), "the rejection")
        put(store, "d")
        wait_for(lambda: len(sink.of(Rejected)) == 2, "one that came alone")
        gate.open()
    told = [(event.queue, event.policy, event.count) for event in sink.of(Rejected)]
    assert told == [("q", policy, 2), ("q", policy, 1)]
    assert len(sink.of(Admitted)) == 1


def test_an_admission_tells_its_length_and_what_it_left_waiting(store: Any) -> None:
    sink, registry, gate = Sink(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    steer(store).upsert_concurrency_limit(
        Ceiling(name="one", queue="q", max_concurrent=1, on_saturated="queue")
    )
    put(store, "a", "b")
    with working(store, registry, telemetry=sink, capacity=3, run_duties=False):
        gate.wait()
        wait_for(lambda: bool(sink.of(AdmissionMade)), "the admission")
        gate.open()
    first = sink.of(AdmissionMade)[0]
    assert (first.worker, first.asked, first.admitted) == (WORKER, 3, 1)
    assert dict(first.refused) == {"concurrency_limit": 1}
    assert first.ms > 0
    assert sum(made.admitted for made in sink.of(AdmissionMade)) == len(
        sink.of(Admitted)
    )


def test_an_attempt_that_cannot_be_decoded_is_a_span_too(store: Any) -> None:
    sink, registry = Sink(), Registry()
    registry.task("k")(lambda: None)
    put(store, "a", payload=b"?")
    put(store, "b", kind="unknown")
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: len(sink.of(JobSpan)) == 2, "both spans")
    assert [span.outcome for span in sink.about("a")] == ["undecodable"]
    assert [span.outcome for span in sink.about("b")] == ["snooze"]


def test_a_lease_that_is_lost_ends_in_a_span_that_says_so(store: Any) -> None:
    sink, registry = Sink(), Registry()

    @registry.task("k")
    def is_cancelled(ctx: JobContext) -> None:
        steer(store).operator_cancel(ctx.job_id)
        if ctx.job_id == "noticed":
            ctx.wait(PATIENCE_S)

    put(store, "unnoticed", "noticed")
    with working(store, registry, telemetry=sink, lease="600ms", run_duties=False):
        wait_for(lambda: len(sink.of(JobSpan)) == 2, "both spans")
    assert {span.outcome for span in sink.of(JobSpan)} == {"lease_lost"}


@pytest.mark.needs("transactional")
def test_a_job_that_settles_itself_is_one_span(store: Any, backend: Any) -> None:
    sink, registry = Sink(), Registry()

    @registry.task("k")
    def settles(ctx: JobContext) -> None:
        if ctx.job_id == "done":
            ctx.once(lambda tx: None)
        else:
            steer(store).set_queue_paused("q", True)
            ctx.release()

    put(store, "done")
    with working(store, registry, telemetry=sink, run_duties=False):
        wait_for(lambda: bool(sink.about("done")), "the first span")
        put(store, "released")
        wait_for(lambda: bool(sink.about("released")), "the second span")
    assert [span.outcome for span in sink.about("done")] == ["success"]
    assert [span.outcome for span in sink.about("released")] == ["rate_limited"]
    assert sink.of(Rejected) == []
    assert len(sink.of(Completed)) == 1


def test_a_job_handed_back_at_the_end_is_a_span_and_no_rejection(store: Any) -> None:
    sink, registry, gate = Sink(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    config = {"shutdown_timeout": "0s", "cancel_grace": "0s", "run_duties": False}
    with working(store, registry, telemetry=sink, **config):
        gate.wait()
    gate.open()
    assert [span.outcome for span in sink.about("a")] == ["rate_limited"]
    assert sink.of(Rejected) == []


def test_a_handler_that_is_left_behind_is_stuck_and_settled_once(store: Any) -> None:
    sink, registry, gate = Sink(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a", timeout_ms=1)
    with working(store, registry, telemetry=sink, stuck_threshold="1ms") as worker:
        gate.wait()
        wait_for(lambda: bool(sink.about("a")), "it is given up")
        gate.open()
        wait_for(lambda: worker.health().in_flight == 0, "it is back")
    assert sink.of(Stuck) == [Stuck(worker=WORKER, job_id="a", detail="timeout")]
    assert [span.outcome for span in sink.about("a")] == ["retry"]


def test_calls_that_fail_are_reported(store: Any) -> None:
    sink, registry, tap, gate = Sink(), Registry(), Tap(store), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    tap.fail("renew", StoreUnavailable("no answer"))
    tap.fail("ack_batch", StoreUnavailable("no reply"))
    with working(tap, registry, telemetry=sink, lease="900ms", run_duties=False):
        gate.wait()
        wait_for(lambda: bool(sink.of(RenewFailed)), "a renewal failed")
        gate.open()
        wait_for(lambda: bool(sink.about("a")), "the job ends")
    assert sink.of(RenewFailed) == [
        RenewFailed(worker=WORKER, job_id="", detail="no answer")
    ]
    assert sink.of(AckFailed) == [
        AckFailed(worker=WORKER, job_id="", detail="no reply")
    ]
    assert [span.outcome for span in sink.about("a")] == ["success"]


def test_an_outcome_that_is_given_up_is_reported_with_its_job(store: Any) -> None:
    sink, registry, tap = Sink(), Registry(), Tap(store)
    registry.task("k")(lambda: None)
    put(store, "a")

    def away(real: Any, acks: Any) -> Any:
        raise StoreUnavailable("away")

    tap.around["ack_batch"] = away
    tap.around["renew"] = lambda real, *args, **keywords: away(real, args)
    with working(tap, registry, telemetry=sink, lease="900ms", run_duties=False):
        wait_for(lambda: bool(sink.about("a")), "it is given up")
    assert AckFailed(worker=WORKER, job_id="a", detail="away") in sink.of(AckFailed)
    assert [span.outcome for span in sink.about("a")] == ["lease_lost"]


def test_a_beat_tells_how_busy_the_worker_is(store: Any) -> None:
    sink, registry, gate = Sink(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(store, registry, telemetry=sink, lease="900ms", capacity=4):
        gate.wait()
        wait_for(
            lambda: any(s.inflight for s in sink.of(WorkerSaturation)), "it is busy"
        )
        gate.open()
    told = next(s for s in sink.of(WorkerSaturation) if s.inflight)
    assert (told.worker, told.inflight, told.capacity) == (WORKER, 1, 4)
    assert told.utilization == 0.25
    assert told.polls >= told.empty_polls
    assert told.empty_poll_ratio == told.empty_polls / told.polls


def test_what_waits_for_a_thread_makes_a_worker_look_neither_idle_nor_busier(
    store: Any, monkeypatch: Any
) -> None:
    """Else the fleet is judged by it: a full worker scaled down, an idle one hidden."""
    take_ahead(monkeypatch)
    monkeypatch.setattr("headgate_sync.worker.prefetch.PATIENCE_S", 1_000.0)
    sink, registry, gate = Sink(), Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a", "b", "c", "d")
    busy = {"telemetry": sink, "lease": "900ms", "capacity": 2, "prefetch": 8}
    with working(store, registry, **busy) as worker:
        gate.wait(2)
        wait_for(lambda: worker.health().in_flight == 4, "two wait for a thread")
        before = len(sink.of(WorkerSaturation))
        wait_for(lambda: len(sink.of(WorkerSaturation)) > before + 1, "it beats")
        told = sink.of(WorkerSaturation)[-1]
        assert (told.inflight, told.capacity, told.utilization) == (2, 2, 1.0)
        shown = steer(store).cluster()
        assert (shown.inflight_total, shown.utilization) == (2, 1.0)
        gate.open()


def test_sweeps_tell_of_what_they_found(make_store: Any, clock: Any) -> None:
    store, sink = make_store(crash_limit=1), Sink()
    for number in range(7):
        run_one(store, f"j{number}", retention_ms=1_000)
        store.ack_batch([])
        steer(store).operator_cancel(f"j{number}")
    clock.advance_ms(DAY_MS)
    run_one(store, "bad")
    clock.advance_ms(DAY_MS)
    with working(store, Registry(), telemetry=sink, duty_interval="10ms"):
        wait_for(lambda: bool(sink.of(Evicted)), "they are gone")
        wait_for(lambda: bool(sink.of(Quarantined)), "it is set aside")
    assert sink.of(Evicted) == [Evicted(queue="", count=7)]
    (told,) = sink.of(Quarantined)
    assert told == Quarantined(fingerprint=job(store, "bad").fingerprint, crashes=1)


def test_a_sink_that_raises_is_logged_once_a_minute_and_disturbs_nothing(
    caplog: Any,
) -> None:
    now_s, sink = Steps(), Sink(fails=RuntimeError("sink is broken"))
    emit = Emitter(sink, now_s=now_s)
    for _ in range(10):
        assert isinstance(emit(Admitted(queue="q")), RuntimeError)
    assert caplog.text.count("the telemetry sink failed") == 1
    now_s.advance(60)
    emit(Admitted(queue="q"))
    assert "failed (10 times since the last report)" in caplog.text
    assert caplog.text.count("RuntimeError: sink is broken") == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("sink is broken"), SystemExit(1), BaseException("directly")]
)
def test_a_sink_that_raises_costs_neither_a_job_nor_a_beat(
    store: Any, caplog: Any, error: BaseException
) -> None:
    sink, registry = Sink(fails=error), Registry()
    registry.task("k")(lambda: None)
    with working(store, registry, telemetry=sink, lease="900ms") as worker:
        put(store, "a")
        wait_for(lambda: state(store, "a") == "completed", "it ran")
        beats = len(sink.of(WorkerSaturation))
        wait_for(lambda: len(sink.of(WorkerSaturation)) > beats + 2, "beats go on")
        wait_for(lambda: worker.health().healthy, "it is well")
        health = worker.health()
    assert health.threads["heartbeat"].failures > 2
    assert health.threads["heartbeat"].last_error == f"{type(error).__name__}: {error}"


def test_without_a_listener_no_event_is_made(store: Any, monkeypatch: Any) -> None:
    from headgate_sync.worker import admission, presence, reporting

    def made(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("an event was made for nobody")

    for module, names in (
        (reporting, ("JobEvent", "JobDeath", "JobSpan", "Completed")),
        (admission, ("Admitted",)),
        (presence, ("WorkerSaturation",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, made)
    registry = Registry()
    registry.task("k")(lambda: None)
    put(store, "a")
    with working(store, registry, run_duties=False):
        wait_for(lambda: state(store, "a") == "completed", "it ran")


# Death handlers.


def test_a_job_dies_once_when_its_last_attempt_fails(store: Any, clock: Any) -> None:
    registry, deaths = Registry(), []
    registry.task("k")(lambda: 1 / 0)
    put(store, "a", max_attempts=2, headers={"h": "v"})
    config = {"death_handlers": [deaths.append], "duty_interval": "10ms"}
    with working(store, registry, **config):
        wait_for(lambda: state(store, "a") == "retryable", "it failed once")
        assert deaths == []
        clock.advance_ms(DAY_MS)
        wait_for(lambda: bool(deaths), "it died")
    (death,) = deaths
    assert isinstance(death, JobDeath)
    assert (death.reason, death.state.value) == (
        DeathReason.ATTEMPTS_EXHAUSTED,
        "archived",
    )
    assert (death.envelope.id, death.envelope.attempt) == ("a", 1)
    assert death.envelope.headers == {"h": "v"}
    assert death.error is not None
    assert death.error.startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("ends", "fields", "reason", "error"),
    [
        (lambda: Skip("why"), {}, "skipped", "why"),
        (lambda: None, {"deadline_ms": 1}, "deadline_exceeded", "deadline exceeded"),
    ],
)
def test_a_job_that_is_given_up_dies(
    store: Any, ends: Any, fields: Any, reason: str, error: str
) -> None:
    registry, deaths = Registry(), []
    registry.task("k")(ends)
    put(store, "a", **fields)
    with working(store, registry, death_handlers=[deaths.append]):
        wait_for(lambda: bool(deaths), "it died")
    (death,) = deaths
    assert (death.reason.value, death.error) == (reason, error)
    assert job(store, "a").attempt == 0


def test_only_an_archived_job_is_dead(store: Any) -> None:
    registry, deaths = Registry(), []
    ends = {
        "retried": lambda: 1 / 0,
        "revoked": Revoke,
        "put-off": lambda: Snooze("1h"),
    }

    @registry.task("k")
    def handler(ctx: JobContext) -> Any:
        return ends[ctx.job_id]() if ctx.job_id in ends else None

    put(store, *ends, "done")
    put(store, "undecodable", payload=b"?")
    with working(store, registry, death_handlers=[deaths.append]):
        wait_for(
            lambda: {"available", "running"}.isdisjoint(
                state(store, id) for id in (*ends, "done", "undecodable")
            ),
            "all have ended",
        )
    assert deaths == []


def test_a_death_that_the_store_did_not_take_is_none(store: Any) -> None:
    registry, deaths, sink = Registry(), [], Sink()

    @registry.task("k")
    def is_cancelled(ctx: JobContext) -> None:
        steer(store).operator_cancel(ctx.job_id)
        raise Skip("too late")

    put(store, "a")
    config = {"death_handlers": [deaths.append], "telemetry": sink}
    with working(store, registry, **config):
        wait_for(lambda: bool(sink.about("a")), "it ended")
    assert deaths == []


@pytest.mark.parametrize("raised", [LookupError, SystemExit])
def test_death_handlers_run_in_order_on_a_handler_thread_and_one_may_fail(
    store: Any, caplog: Any, raised: type[BaseException]
) -> None:
    registry, sink = Registry(), Sink()
    seen: list[tuple[str, str]] = []

    def first(death: JobDeath) -> None:
        seen.append(("first", threading.current_thread().name))
        raise raised("broken")

    def second(death: JobDeath) -> None:
        seen.append(("second", threading.current_thread().name))

    registry.task("k")(lambda: Skip("x"))
    put(store, "a")
    config = {"death_handlers": [first, second], "telemetry": sink}
    with working(store, registry, **config) as worker:
        wait_for(lambda: bool(sink.about("a")), "the span, which comes last")
        assert [name for name, _ in seen] == ["first", "second"]
        wait_for(lambda: worker.health().in_flight == 0, "the slot is free")
    assert all(thread.startswith("headgate-handler-") for _, thread in seen)
    assert "job a (queue q): death handler" in caplog.text
    assert f"{raised.__name__}: broken" in caplog.text
    assert worker.exit_status is not None
    assert worker.exit_status.code == 0


def test_a_slow_death_handler_holds_no_other_ack_up(store: Any) -> None:
    registry, gate = Registry(), Gate()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        if ctx.job_id == "dead":
            raise Skip("x")

    put(store, "dead")
    slow = {"death_handlers": [lambda death: gate.hold()], "capacity": 2}
    with working(store, registry, **slow) as worker:
        gate.wait()
        put(store, "a", "b", "c")
        wait_for(
            lambda: {state(store, id) for id in "abc"} == {"completed"},
            "the others are done",
        )
        assert worker.health().in_flight == 1  # the slot of the dead one is taken
        gate.open()
    assert worker.exit_status is not None
    assert worker.exit_status.code == 0


def test_a_handler_of_deaths_that_ends_its_thread_costs_no_thread(
    store: Any, caplog: Any
) -> None:
    registry = Registry()

    def ends(death: JobDeath) -> None:
        raise SystemExit(1)

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        if ctx.job_id.startswith("dead"):
            raise Skip("x")

    put(store, *(f"dead{number}" for number in range(5)))
    with working(store, registry, death_handlers=[ends], capacity=1) as worker:
        put(store, "a")
        wait_for(lambda: state(store, "a") == "completed", "there is still a thread")
        wait_for(lambda: worker.health().in_flight == 0, "all slots are free")
    assert worker.exit_status is not None
    assert worker.exit_status.code == 0
