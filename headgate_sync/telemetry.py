"""What a worker reports: the events, and the sink that an exporter implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import field, frozen

from headgate_sync.tracing import TraceContext


@frozen(kw_only=True)
class Admitted:
    """A job was claimed."""

    queue: str
    count: int = 1


@frozen(kw_only=True)
class Rejected:
    """A handler handed its job back, or a full ceiling ended jobs that came in.

    Jobs that the gate leaves waiting are not reported.

    Attributes:
        policy: "rate_class" of a handler that met a limit itself; "discard" or
            "cancel_incoming" of ceilings, told by the worker that asked for work.
    """

    queue: str
    policy: str
    count: int = 1


@frozen(kw_only=True)
class Completed:
    """A job succeeded, and the store has taken the ack."""

    kind: str
    ms: int


@frozen(kw_only=True)
class Quarantined:
    """A job killed so many workers that it was set aside, with all of its content."""

    fingerprint: str
    crashes: int


@frozen(kw_only=True)
class Evicted:
    """Finished jobs past their retention were deleted; of any queue, which is ""."""

    count: int
    queue: str = ""


@frozen(kw_only=True)
class Unhandled:
    """A job was claimed whose kind this worker has no handler for."""

    queue: str
    kind: str


@frozen(kw_only=True)
class AttemptBegun:
    """A handler is about to be called; the fields are those of `JobSpan`."""

    job_id: str
    kind: str
    queue: str
    attempt: int
    started_at_ms: int
    trace: TraceContext | None = None


@frozen(kw_only=True)
class JobSpan:
    """One attempt from its claim to its end; the last event of an attempt.

    Attributes:
        attempt: failures before this attempt.
        outcome: "success", "retry", "skip", "revoke", "snooze", "undecodable",
            "rate_limited", or "lease_lost" where the store did not take an outcome.
        started_at_ms: store time of the claim.
        ms: length, the wait for the ack not included.
        trace: from the headers of the job, or None.
        worker: who ran it.
        live: what the sink's `begin_attempt` returned for this attempt; None without.
    """

    job_id: str
    kind: str
    queue: str
    attempt: int
    outcome: str
    started_at_ms: int
    ms: int
    trace: TraceContext | None = None
    worker: str = ""
    live: object = field(default=None, eq=False, repr=False)


@frozen(kw_only=True)
class WorkerSaturation:
    """How busy a worker is, with every beat; the fields are those of `WorkerMeta`."""

    worker: str
    inflight: int
    capacity: int
    utilization: float
    empty_poll_ratio: float
    polls: int
    empty_polls: int


@frozen(kw_only=True)
class WorkerMemory:
    """One sample of a worker's memory.

    Attributes:
        restart_requested: the limit is reached; the worker drains and ends.
    """

    worker: str
    used_bytes: int
    limit_bytes: int
    restart_requested: bool


@frozen(kw_only=True)
class RenewFailed:
    """The leases of a worker could not be renewed; nothing is known to be lost.

    Attributes:
        job_id: "", because a renewal is about all jobs of the worker.
    """

    worker: str
    job_id: str
    detail: str


@frozen(kw_only=True)
class AckFailed:
    """An outcome could not be stored.

    Attributes:
        job_id: of a job whose outcome is given up; "" for a call that is repeated.
    """

    worker: str
    job_id: str
    detail: str


@frozen(kw_only=True)
class Stuck:
    """A handler goes on although it was told to stop.

    Attributes:
        detail: why it was told to stop.
    """

    worker: str
    job_id: str
    detail: str


@frozen(kw_only=True)
class LogDropped:
    """An attempt logged more lines than are kept; told at its end.

    Attributes:
        count: lines that are not kept.
    """

    worker: str
    job_id: str
    detail: str
    count: int


@frozen(kw_only=True)
class AdmissionMade:
    """The store has answered an admission.

    Attributes:
        asked: how many jobs the worker had room for.
        admitted: how many it got.
        refused: by policy, how many jobs it met that have to wait: `rate_class`,
            `concurrency_limit`, `fairness`, `quarantine`. A job is met again by later
            admissions, and the first of a class that must wait stands for the rest.
        ms: from the question to the answer.
    """

    worker: str
    asked: int
    admitted: int
    refused: Mapping[str, int]
    ms: float


@frozen(kw_only=True)
class GateCorrected:
    """The gate's counters were wrong and are put right.

    Attributes:
        count: partitions whose counters were wrong.
    """

    count: int


TelemetryEvent = (
    Admitted
    | Rejected
    | Completed
    | Quarantined
    | Evicted
    | Unhandled
    | JobSpan
    | WorkerSaturation
    | WorkerMemory
    | RenewFailed
    | AckFailed
    | Stuck
    | LogDropped
    | AdmissionMade
    | GateCorrected
)


class Telemetry(Protocol):
    """A sink for events, such as an exporter of metrics."""

    def on_event(self, event: TelemetryEvent) -> None:
        """Take an event in, on whichever thread of the worker it happens.

        Must be quick and must not call the store: acks wait for it. What it raises is
        logged once per minute and disturbs nothing. Unknown classes must be ignored;
        later releases add some.
        """
        ...


class Tracer(Telemetry, Protocol):
    """A sink that also wants to hear of the beginning of attempts, to trace them."""

    def begin_attempt(self, begun: AttemptBegun) -> object:
        """Called on the handler's thread, inside of its context variables.

        What it sets there (`ContextVar.set`) the handler sees, and nobody after it.
        Not called for handlers of batches, whose call belongs to many jobs, nor for
        jobs that no handler gets.

        Returns:
            What the attempt's `JobSpan` carries as `live`.
        """
        ...
