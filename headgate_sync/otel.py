"""OpenTelemetry: spans of attempts joined to their producers' traces, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from headgate_sync import __version__
from headgate_sync.client.pipeline import EnqueueRequest, Proceed
from headgate_sync.context import running_attempt
from headgate_sync.envelope import Envelope
from headgate_sync.errors import InvalidRequest, MissingExtra
from headgate_sync.labels import DEFAULT_LABEL_SETS, LabelSets, clean
from headgate_sync.telemetry import (
    AckFailed,
    AdmissionMade,
    Admitted,
    AttemptBegun,
    Completed,
    Evicted,
    GateCorrected,
    JobSpan,
    LogDropped,
    Quarantined,
    Rejected,
    RenewFailed,
    Stuck,
    TelemetryEvent,
    Unhandled,
    WorkerMemory,
    WorkerSaturation,
)
from headgate_sync.tracing import TRACEPARENT, TRACESTATE, TraceContext, trace_of

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )
except ModuleNotFoundError as error:
    raise MissingExtra(
        "traces need opentelemetry-api: pip install 'headgate_sync[otel]'"
    ) from error

SCOPE = "headgate_sync"
SPAN = "headgate.process"
QUEUE = "headgate.queue"
KIND = "headgate.kind"
POLICY = "headgate.policy"
WORKER = "headgate.worker"
OUTCOME = "headgate.outcome"

_STATUS = {
    "success": trace.StatusCode.OK,
    "retry": trace.StatusCode.ERROR,
    "undecodable": trace.StatusCode.ERROR,
}
_COUNTERS = {
    "jobs.admitted": "{job}",
    "jobs.rejected": "{job}",
    "jobs.completed": "{job}",
    "jobs.quarantined": "{job}",
    "jobs.evicted": "{job}",
    "jobs.refused": "{job}",
    "jobs.unhandled": "{job}",
    "leases.lost": "{lease}",
    "ack.failures": "{call}",
    "renew.failures": "{call}",
    "handlers.stuck": "{handler}",
    "log.lines_dropped": "{line}",
    "gate.corrections": "{partition}",
    "worker.restarts": "{restart}",
}
_GAUGES = {
    "worker.utilization": "1",
    "worker.empty_poll_ratio": "1",
    "worker.inflight": "{job}",
    "worker.capacity": "{job}",
    "worker.memory": "By",
    "worker.memory_limit": "By",
}
_W3C = TraceContextTextMapPropagator()


class OpenTelemetry:
    """A telemetry sink that makes one span per attempt, and metrics.

    The span is current while the handler runs, so that what the handler traces lies
    below it; it is ended when the store has answered the ack. Its two instants are
    those of the store's clock. It continues the trace that the job brought.

    Needs the API alone: without an SDK it does nothing.

    Args:
        tracer_provider, meter_provider: None takes the global ones.
        max_label_sets: 1 to 10,000: so many sets of names each metric may have, later
            ones count as `_other`.

    Raises:
        InvalidRequest: the number is out of range.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        max_label_sets: int = DEFAULT_LABEL_SETS,
    ) -> None:
        self._tracer = trace.get_tracer(SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(SCOPE, __version__, meter_provider)
        self._metrics: dict[str, Callable[..., None]] = {}
        for name, unit in _COUNTERS.items():
            counter = meter.create_counter(f"headgate.{name}", unit)
            self._metrics[name] = counter.add
        for name, unit in _GAUGES.items():
            self._metrics[name] = meter.create_gauge(f"headgate.{name}", unit).set
        for name in ("job.duration", "admission.duration"):
            histogram = meter.create_histogram(f"headgate.{name}", "ms")
            self._metrics[name] = histogram.record
        self._sets = {
            name: LabelSets(f"headgate.{name}", max_label_sets)
            for name in self._metrics
        }
        self._takers: dict[type, Callable[[Any], None]] = {
            Admitted: lambda e: self._tell("jobs.admitted", e.count, {QUEUE: e.queue}),
            Rejected: self._rejected,
            Completed: lambda e: self._tell("jobs.completed", 1, {KIND: e.kind}),
            Quarantined: lambda e: self._tell("jobs.quarantined", 1, {}),
            Evicted: lambda e: self._tell("jobs.evicted", e.count, {QUEUE: e.queue}),
            Unhandled: lambda e: self._tell("jobs.unhandled", 1, {QUEUE: e.queue}),
            AckFailed: lambda e: self._tell("ack.failures", 1, {WORKER: e.worker}),
            RenewFailed: lambda e: self._tell("renew.failures", 1, {WORKER: e.worker}),
            Stuck: lambda e: self._tell("handlers.stuck", 1, {WORKER: e.worker}),
            LogDropped: lambda e: self._tell(
                "log.lines_dropped", e.count, {WORKER: e.worker}
            ),
            AdmissionMade: self._admission,
            GateCorrected: lambda e: self._tell("gate.corrections", e.count, {}),
            JobSpan: self._ended,
            WorkerSaturation: self._saturation,
            WorkerMemory: self._memory,
        }

    def begin_attempt(self, begun: AttemptBegun) -> trace.Span:
        """Start the span of an attempt and make it current for its handler."""
        span = self._start(begun)
        # Never detached: it is set in context variables that end with the attempt.
        otel_context.attach(trace.set_span_in_context(span))
        return span

    def on_event(self, event: TelemetryEvent) -> None:
        """Record an event; those of later releases are ignored."""
        taker = self._takers.get(type(event))
        if taker is not None:
            taker(event)

    def _start(self, told: AttemptBegun | JobSpan) -> trace.Span:
        return self._tracer.start_span(
            SPAN,
            context=_remote(told.trace),
            kind=trace.SpanKind.CONSUMER,
            attributes={
                "headgate.job.id": told.job_id,
                "headgate.job.kind": clean(told.kind),
                "headgate.queue": clean(told.queue),
                "headgate.attempt": told.attempt,
            },
            start_time=told.started_at_ms * 1_000_000,
        )

    def _ended(self, told: JobSpan) -> None:
        span = told.live if isinstance(told.live, trace.Span) else self._start(told)
        span.set_attribute(OUTCOME, told.outcome)
        span.set_status(_STATUS.get(told.outcome, trace.StatusCode.UNSET))
        span.end((told.started_at_ms + told.ms) * 1_000_000)
        self._tell(
            "job.duration",
            told.ms,
            {QUEUE: told.queue, KIND: told.kind},
            **{OUTCOME: told.outcome},
        )
        if told.outcome == "lease_lost":
            self._tell("leases.lost", 1, {WORKER: told.worker})

    def _rejected(self, told: Rejected) -> None:
        self._tell(
            "jobs.rejected", told.count, {QUEUE: told.queue}, **{POLICY: told.policy}
        )

    def _admission(self, made: AdmissionMade) -> None:
        self._tell("admission.duration", made.ms, {})
        for policy, count in made.refused.items():
            self._tell("jobs.refused", count, {}, **{POLICY: policy})

    def _saturation(self, told: WorkerSaturation) -> None:
        at = {WORKER: told.worker}
        self._tell("worker.utilization", told.utilization, at)
        self._tell("worker.empty_poll_ratio", told.empty_poll_ratio, at)
        self._tell("worker.inflight", told.inflight, at)
        self._tell("worker.capacity", told.capacity, at)

    def _memory(self, told: WorkerMemory) -> None:
        at = {WORKER: told.worker}
        self._tell("worker.memory", told.used_bytes, at)
        self._tell("worker.memory_limit", told.limit_bytes, at)
        if told.restart_requested:
            self._tell("worker.restarts", 1, at)

    def _tell(
        self, name: str, value: float, names: dict[str, str], **words: str
    ) -> None:
        """Record a value under names that are anybody's and words of this package."""
        known = self._sets[name].of(*names.values()) if names else ()
        self._metrics[name](value, {**dict(zip(names, known, strict=True)), **words})


def trace_enqueues(request: EnqueueRequest, proceed: Proceed) -> None:
    """Enqueue middleware that lets jobs continue the trace in which they are enqueued.

    The current span goes into the headers `traceparent` and `tracestate`. A job that
    has a `traceparent` keeps it, unless it has only inherited that of the job whose
    handler enqueues it: then the handler's own span is the nearer parent.
    """
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    if TRACEPARENT in carrier:
        running = running_attempt()
        headers = {} if running is None else running.claim.envelope.headers
        inherits = trace_of(headers)
        request.batch = [_joined(job, carrier, inherits) for job in request.batch]
    proceed(request)


def _joined(
    job: Envelope, carrier: dict[str, str], inherits: TraceContext | None
) -> Envelope:
    if TRACEPARENT in job.headers and (
        inherits is None or trace_of(job.headers) != inherits
    ):
        return job
    own = {k: v for k, v in job.headers.items() if k not in (TRACEPARENT, TRACESTATE)}
    try:
        return evolve(job, headers=own | carrier)
    except InvalidRequest:
        return job  # its own headers fill the limit, which tracing must not refuse


def _remote(parent: TraceContext | None) -> otel_context.Context:
    """The context of a producer, or none at all: never what happens to be current."""
    empty = otel_context.Context()
    if parent is None:
        return empty
    remote = trace.SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(parent.trace_flags),
        trace_state=trace.TraceState.from_header([parent.trace_state]),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), empty)
