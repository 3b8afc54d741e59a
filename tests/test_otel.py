"""Spans and metrics through the SDK of OpenTelemetry, with exporters in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headgate_sync.client import Client
from headgate_sync.context import JobContext
from headgate_sync.envelope import MAX_HEADERS_BYTES
from headgate_sync.errors import InvalidRequest, LeaseRejected
from headgate_sync.otel import OpenTelemetry, trace_enqueues
from headgate_sync.registry import Registry
from headgate_sync.signals import RateLimited, Revoke, Skip, Snooze
from headgate_sync.telemetry import (
    AckFailed,
    AdmissionMade,
    Admitted,
    Evicted,
    GateCorrected,
    LogDropped,
    Quarantined,
    Rejected,
    RenewFailed,
    Stuck,
    Unhandled,
    WorkerMemory,
    WorkerSaturation,
)
from tests.builders import START_MS, WORKER, envelope, job
from tests.worker.rig import Tap, wait_for, working

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "v=1"}


class Otel:
    """The sink under test, with what it exported."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self._meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.sink = OpenTelemetry(
            tracer_provider=self.provider, meter_provider=self._meters, **options
        )

    def spans(self, name: str = "headgate.process") -> list[Any]:
        return [s for s in self._exporter.get_finished_spans() if s.name == name]

    def points(self) -> dict[str, list[tuple[dict[str, Any], Any]]]:
        """Attributes and value (count and sum of a histogram) by metric."""
        read = self._reader.get_metrics_data()
        if read is None:
            return {}
        return {
            metric.name: [
                (
                    dict(point.attributes),
                    getattr(point, "value", None)
                    if hasattr(point, "value")
                    else (point.count, point.sum),
                )
                for point in metric.data.data_points
            ]
            for resource in read.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def close(self) -> None:
        self.provider.shutdown()
        self._meters.shutdown()


@pytest.fixture
def otel() -> Iterator[Otel]:
    made = Otel()
    yield made
    made.close()


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def test_an_attempt_is_one_span_below_the_producers_and_above_the_handlers(
    store: Any, otel: Otel
) -> None:
    registry = Registry()
    tracer = otel.provider.get_tracer("shop")

    @registry.task("k")
    def handler() -> None:
        with tracer.start_as_current_span("inner"):
            pass

    put(store, "a", headers=HEADERS)
    with working(store, registry, telemetry=otel.sink, run_duties=False):
        wait_for(lambda: bool(otel.spans()), "the span")
    (span,), (inner,) = otel.spans(), otel.spans("inner")
    assert span.kind is SpanKind.CONSUMER
    assert span.parent.is_remote
    assert f"{span.parent.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("v") == "1"
    assert dict(span.attributes) == {
        "headgate.job.id": "a",
        "headgate.job.kind": "k",
        "headgate.queue": "q",
        "headgate.attempt": 0,
        "headgate.outcome": "success",
    }
    assert span.start_time == START_MS * 1_000_000
    assert span.end_time >= span.start_time
    assert inner.parent.span_id == span.context.span_id
    assert inner.context.trace_id == span.context.trace_id
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize(
    ("ends", "outcome", "status"),
    [
        (lambda: None, "success", StatusCode.OK),
        (lambda: 1 / 0, "retry", StatusCode.ERROR),
        (lambda: Skip("x"), "skip", StatusCode.UNSET),
        (lambda: Revoke(), "revoke", StatusCode.UNSET),
        (lambda: Snooze("1h"), "snooze", StatusCode.UNSET),
        (lambda: RateLimited("1h"), "rate_limited", StatusCode.UNSET),
    ],
)
def test_the_outcome_decides_the_status(
    store: Any, otel: Otel, ends: Any, outcome: str, status: StatusCode
) -> None:
    registry = Registry()
    registry.task("k")(ends)
    put(store, "a", rate_class="c" if outcome == "rate_limited" else "")
    with working(store, registry, telemetry=otel.sink, run_duties=False):
        wait_for(lambda: bool(otel.spans()), "the span")
    (span,) = otel.spans()
    assert span.attributes["headgate.outcome"] == outcome
    assert span.status.status_code is status
    assert span.parent is None
    assert otel.points()["headgate.job.duration"] == [
        (
            {
                "headgate.queue": "q",
                "headgate.kind": "k",
                "headgate.outcome": outcome,
            },
            (1, (span.end_time - span.start_time) // 1_000_000),
        )
    ]


def test_jobs_that_no_handler_gets_have_a_span_too(store: Any, otel: Otel) -> None:
    registry = Registry()
    registry.task("k")(lambda: None)
    put(store, "unread", payload=b"?")
    put(store, "unknown", kind="unknown", headers=HEADERS)
    put(store, "late", deadline_ms=1)
    with working(store, registry, telemetry=otel.sink, run_duties=False):
        wait_for(lambda: len(otel.spans()) == 3, "the spans")
    found = {s.attributes["headgate.job.id"]: s for s in otel.spans()}
    assert {id: s.attributes["headgate.outcome"] for id, s in found.items()} == {
        "unread": "undecodable",
        "unknown": "snooze",
        "late": "skip",
    }
    assert f"{found['unknown'].parent.trace_id:032x}" == TRACE
    assert found["unread"].status.status_code is StatusCode.ERROR


def test_a_lease_that_is_lost_ends_its_span_and_counts(store: Any, otel: Otel) -> None:
    registry, tap = Registry(), Tap(store)
    registry.task("k")(lambda: None)
    put(store, "a")
    tap.around["ack_batch"] = lambda real, acks: [LeaseRejected("a") for _ in acks]
    with working(tap, registry, telemetry=otel.sink, run_duties=False):
        wait_for(lambda: bool(otel.spans()), "the span")
    (span,) = otel.spans()
    assert span.attributes["headgate.outcome"] == "lease_lost"
    assert span.status.status_code is StatusCode.UNSET
    assert otel.points()["headgate.leases.lost"] == [({"headgate.worker": WORKER}, 1)]


@pytest.mark.parametrize(
    "state", ["", "=", "a" * 5000, "é=1", "a=1,b=2,,a=3", "\n", "v=1,V=2"]
)
def test_a_hostile_tracestate_costs_no_span(store: Any, otel: Otel, state: str) -> None:
    registry = Registry()
    registry.task("k")(lambda: None)
    put(store, "a", headers=HEADERS | {"tracestate": state})
    with working(store, registry, telemetry=otel.sink, run_duties=False):
        wait_for(lambda: bool(otel.spans()), "the span")
    assert f"{otel.spans()[0].parent.trace_id:032x}" == TRACE


def test_attempts_at_the_same_time_do_not_see_each_others_spans(
    store: Any, otel: Otel
) -> None:
    registry, together = Registry(), threading.Barrier(4)
    seen: dict[str, str] = {}

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        together.wait(20)
        seen[ctx.job_id] = trace.get_current_span().attributes[  # type: ignore[attr-defined]
            "headgate.job.id"
        ]

    put(store, "a", "b", "c", "d")
    with working(store, registry, telemetry=otel.sink, run_duties=False):
        wait_for(lambda: len(otel.spans()) == 4, "the spans")
    assert seen == {id: id for id in "abcd"}


def test_every_event_has_its_instrument(otel: Otel) -> None:
    on = otel.sink.on_event
    on(Admitted(queue="q", count=2))
    on(Rejected(queue="q", policy="rate_class"))
    on(Quarantined(fingerprint="f", crashes=3))
    on(Evicted(count=7))
    on(Unhandled(queue="q", kind="k"))
    on(AckFailed(worker="w", job_id="a", detail="d"))
    on(RenewFailed(worker="w", job_id="", detail="d"))
    on(Stuck(worker="w", job_id="a", detail="timeout"))
    on(LogDropped(worker="w", job_id="a", detail="d", count=5))
    made = AdmissionMade(worker="w", asked=4, admitted=3, refused={"fairness": 2}, ms=2)
    on(made)
    on(GateCorrected(count=3))
    on(
        WorkerSaturation(
            worker="w",
            inflight=3,
            capacity=4,
            utilization=0.75,
            empty_poll_ratio=0.5,
            polls=2,
            empty_polls=1,
        )
    )
    on(WorkerMemory(worker="w", used_bytes=10, limit_bytes=9, restart_requested=True))
    on(object())  # type: ignore[arg-type]
    worker = {"headgate.worker": "w"}
    assert otel.points() == {
        "headgate.jobs.admitted": [({"headgate.queue": "q"}, 2)],
        "headgate.jobs.rejected": [
            ({"headgate.queue": "q", "headgate.policy": "rate_class"}, 1)
        ],
        "headgate.jobs.quarantined": [({}, 1)],
        "headgate.jobs.evicted": [({"headgate.queue": ""}, 7)],
        "headgate.jobs.unhandled": [({"headgate.queue": "q"}, 1)],
        "headgate.ack.failures": [(worker, 1)],
        "headgate.renew.failures": [(worker, 1)],
        "headgate.handlers.stuck": [(worker, 1)],
        "headgate.log.lines_dropped": [(worker, 5)],
        "headgate.jobs.refused": [({"headgate.policy": "fairness"}, 2)],
        "headgate.admission.duration": [({}, (1, 2))],
        "headgate.gate.corrections": [({}, 3)],
        "headgate.worker.utilization": [(worker, 0.75)],
        "headgate.worker.empty_poll_ratio": [(worker, 0.5)],
        "headgate.worker.inflight": [(worker, 3)],
        "headgate.worker.capacity": [(worker, 4)],
        "headgate.worker.memory": [(worker, 10)],
        "headgate.worker.memory_limit": [(worker, 9)],
        "headgate.worker.restarts": [(worker, 1)],
    }


def test_the_number_of_attribute_sets_is_bounded() -> None:
    otel = Otel(max_label_sets=2)
    for number in range(5):
        otel.sink.on_event(Admitted(queue=f"q{number}"))
    assert otel.points()["headgate.jobs.admitted"] == [
        ({"headgate.queue": "q0"}, 1),
        ({"headgate.queue": "q1"}, 1),
        ({"headgate.queue": "_other"}, 3),
    ]
    otel.close()
    with pytest.raises(InvalidRequest, match="max_label_sets"):
        OpenTelemetry(max_label_sets=0)


# Producers.


def producer(store: Any) -> Client:
    return Client(store, middleware=[trace_enqueues])


def headers_of(store: Any, id: str) -> dict[str, str]:
    return dict(job(store, id).headers or {})


def test_a_job_continues_the_trace_in_which_it_is_enqueued(
    store: Any, otel: Otel
) -> None:
    with otel.provider.get_tracer("shop").start_as_current_span("request") as span:
        producer(store).enqueue(envelope("a", headers={"h": "v"}))
    context = span.get_span_context()
    assert headers_of(store, "a") == {
        "h": "v",
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}"
        f"-{context.trace_flags:02x}",
    }


def test_a_header_that_is_there_is_kept_and_without_a_span_none_is_made(
    store: Any, otel: Otel
) -> None:
    producer(store).enqueue(envelope("bare"))
    with otel.provider.get_tracer("shop").start_as_current_span("request"):
        producer(store).enqueue(envelope("own", headers=HEADERS))
        producer(store).enqueue(envelope("odd", headers={"traceparent": "mine"}))
    assert headers_of(store, "bare") == {}
    assert headers_of(store, "own") == HEADERS
    assert headers_of(store, "odd") == {"traceparent": "mine"}


def test_a_job_whose_headers_fill_the_limit_is_enqueued_all_the_same(
    store: Any, otel: Otel
) -> None:
    full = {"h": "v" * (MAX_HEADERS_BYTES - 1)}
    with otel.provider.get_tracer("shop").start_as_current_span("request"):
        producer(store).enqueue(envelope("a", headers=full))
    assert headers_of(store, "a") == full


def test_a_follow_up_job_lies_below_the_span_of_its_handler(
    store: Any, otel: Otel
) -> None:
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ctx.client.enqueue(envelope("child"))
        ctx.client.enqueue(
            envelope("own", headers={"traceparent": f"00-{TRACE}-{'1' * 16}-01"})
        )

    put(store, "a", headers=HEADERS)
    config = {"telemetry": otel.sink, "producer": producer(store), "run_duties": False}
    with working(store, registry, **config):
        wait_for(lambda: bool(otel.spans()), "the span")
    span = next(s for s in otel.spans() if s.attributes["headgate.job.id"] == "a")
    assert headers_of(store, "child") == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "v=1",
    }
    assert headers_of(store, "own")["traceparent"].endswith(f"{'1' * 16}-01")


def test_without_an_sdk_nothing_happens_and_traces_are_handed_on(store: Any) -> None:
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ctx.client.enqueue(envelope("child"))

    put(store, "a", headers=HEADERS)
    sink = OpenTelemetry(
        tracer_provider=trace.NoOpTracerProvider(),
    )
    config = {"telemetry": sink, "producer": producer(store), "run_duties": False}
    with working(store, registry, **config):
        wait_for(lambda: job(store, "a").state == "completed", "it ran")
    assert headers_of(store, "child") == HEADERS
