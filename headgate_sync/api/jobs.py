"""Routes of jobs: looking at them, enqueueing, and the verbs on one of them."""

from __future__ import annotations

import math
from typing import Any

from attrs import evolve

from headgate_sync.api.answers import Answer, HttpError, as_json, no_content
from headgate_sync.api.routing import Call, Route
from headgate_sync.api.shapes import (
    BASE64,
    BOOLEAN,
    INTEGER,
    OUT_BOOLEAN,
    OUT_BYTES,
    OUT_COUNTS,
    OUT_INTEGER,
    OUT_PAIRS,
    OUT_TEXT,
    PAIRS,
    TEXT,
    TEXTS,
    Given,
    Out,
    either,
    listed,
    optional,
    shape,
)
from headgate_sync.envelope import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    MAX_PAYLOAD_BYTES,
    Envelope,
    fingerprint,
)
from headgate_sync.errors import DuplicateJob, InvalidRequest, NotFound
from headgate_sync.inspection import JobSummary
from headgate_sync.lifecycle import STORED
from headgate_sync.loglines import LogLine, read_line
from headgate_sync.request import JobHandle
from headgate_sync.schedule import PeriodicOrigin
from headgate_sync.search import JobFilter, parse_query
from headgate_sync.validation import check_written

# Base64 of the largest payload.
MAX_PAYLOAD_CHARS = 4 * -(-MAX_PAYLOAD_BYTES // 3)
STATES = sorted(STORED)


def _scalars(line: LogLine) -> dict[str, Any]:
    """The fields of a line; what no writer of this package makes is shown as text."""
    return {
        name: value
        if value is None
        or isinstance(value, str | int)
        or (isinstance(value, float) and math.isfinite(value))
        else str(value)
        for name, value in line.fields.items()
    }


_LOG = shape(
    "LogLine",
    level=OUT_TEXT,
    message=OUT_TEXT,
    at_ms=(optional(OUT_INTEGER), lambda line: line.at_ms or None),
    fields=(Out({"type": "object"}), _scalars),
    truncated=OUT_BOOLEAN,
)
_ATTEMPT = shape(
    "Attempt",
    at_ms=OUT_INTEGER,
    outcome=OUT_TEXT,
    attempt=optional(OUT_INTEGER),
    crash_attempt=optional(OUT_INTEGER),
    error=optional(OUT_TEXT),
    logs=(listed(_LOG), lambda entry: [read_line(text) for text in entry.logs]),
    latency_ms=optional(OUT_INTEGER),
    error_code=OUT_TEXT,
    worker=OUT_TEXT,
    fence=OUT_INTEGER,
)
_ORIGIN = shape("PeriodicOrigin", schedule_id=OUT_TEXT, tick_ms=OUT_INTEGER)


def _origin(job: JobSummary) -> PeriodicOrigin | None:
    return PeriodicOrigin.of(job.periodic_schedule_id, job.periodic_tick_ms)


_FIELDS: dict[str, Any] = {
    "id": OUT_TEXT,
    "kind": OUT_TEXT,
    "queue": OUT_TEXT,
    "state": OUT_TEXT,
    "schema_version": OUT_INTEGER,
    "priority": OUT_INTEGER,
    "attempt": OUT_INTEGER,
    "crash_attempt": OUT_INTEGER,
    "max_attempts": OUT_INTEGER,
    "partition_key": OUT_TEXT,
    "rate_class": OUT_TEXT,
    "sticky_worker": OUT_TEXT,
    "weight": OUT_INTEGER,
    "fingerprint": OUT_TEXT,
    "enqueued_at_ms": OUT_INTEGER,
    "scheduled_at_ms": OUT_INTEGER,
    "claimed_at_ms": optional(OUT_INTEGER),
    "finalized_at_ms": optional(OUT_INTEGER),
    "timeout_ms": OUT_INTEGER,
    "deadline_ms": OUT_INTEGER,
    "retention_ms": OUT_INTEGER,
    "orphaned": OUT_BOOLEAN,
    "tags": listed(OUT_TEXT),
    "periodic_origin": (optional(_ORIGIN), _origin),
    "errors": listed(_ATTEMPT),
    "fence": OUT_INTEGER,
    "lease_expires_at_ms": optional(OUT_INTEGER),
    "claimed_by": optional(OUT_TEXT),
    "replay_of": OUT_TEXT,
    "reason_code": OUT_TEXT,
    "error_code": OUT_TEXT,
    "latency_ms": optional(OUT_INTEGER),
}
JOB = shape("Job", **_FIELDS)
JOB_WITH_PAYLOAD = shape(
    "JobWithPayload",
    **_FIELDS,
    payload=optional(OUT_BYTES),
    metadata=(optional(OUT_PAIRS), "headers"),
)
_PAGE = shape(
    "JobPage",
    jobs=listed(JOB),
    next_cursor=optional(OUT_TEXT),
    count_is_approximate=(OUT_BOOLEAN, lambda page: False),
)
STATE_COUNT = shape("StateCount", state=OUT_TEXT, count=OUT_INTEGER)
_COUNTS = shape(
    "StateCounts",
    counts=(listed(STATE_COUNT), lambda counts: counts_of(counts)),
    count_is_approximate=(OUT_BOOLEAN, "approximate"),
)
_BLOB: dict[str, Any] = {"schema_version": OUT_INTEGER, "bytes": (OUT_BYTES, "data")}
_RESULT = shape("JobResult", **_BLOB)
_OUTPUT = shape("JobOutput", **_BLOB, fence=OUT_INTEGER, updated_at_ms=OUT_INTEGER)
_PROGRESS = shape(
    "JobProgress",
    current=OUT_INTEGER,
    total=OUT_INTEGER,
    message=optional(OUT_TEXT),
    fence=OUT_INTEGER,
    updated_at_ms=OUT_INTEGER,
)
_CHECKPOINT = shape(
    "Checkpoint",
    last_completed_step=(
        optional(OUT_TEXT),
        lambda kept: kept.completed_steps[-1] if kept.completed_steps else None,
    ),
    completed_steps=listed(OUT_TEXT),
    in_progress_step=optional(OUT_TEXT),
    cursor_step=optional(OUT_TEXT),
    cursor=optional(OUT_BYTES),
    schema_version=OUT_INTEGER,
    step_set_hash=OUT_TEXT,
    crashes_by_step=OUT_COUNTS,
    remaining_weight=optional(OUT_INTEGER),
)
_EXPLAIN = shape(
    "AdmissionExplain",
    job_id=OUT_TEXT,
    state=OUT_TEXT,
    admissible=OUT_BOOLEAN,
    blocked_by=optional(OUT_TEXT),
    detail=OUT_PAIRS,
    estimated_admission_ms=optional(OUT_INTEGER),
    live_workers=OUT_INTEGER,
)
_CREATED = shape("Enqueued", id=OUT_TEXT)
DROPPED = shape("DroppedByMiddleware", id=OUT_TEXT, dropped=OUT_BOOLEAN)
_REPLAYED = shape("ReplayedJob", id=OUT_TEXT, replay_of=OUT_TEXT)


def counts_of(counts: Any) -> list[dict[str, Any]]:
    """Counts by state as a list, in the order of their names."""
    return [{"state": s, "count": n} for s, n in sorted(counts.counts.items())]


# Looking


def _list(call: Call) -> Answer:
    asked = call.query
    given = JobFilter(
        queue=asked["queue"],
        state=asked["state"],
        kind=asked["kind"],
        partition_key=asked["partition_key"],
        tags_all=_commas(asked["tags_all"]),
        tags_any=_commas(asked["tags_any"]),
    )
    wanted = given if asked["q"] is None else parse_query(asked["q"], given)
    page = call.inspect.list_jobs(wanted, asked["cursor"], asked["limit"])
    return as_json(_PAGE.write(page))


def _commas(text: str | None) -> tuple[str, ...]:
    return tuple(part for part in (text or "").split(",") if part)


def _counts(call: Call) -> Answer:
    return as_json(_COUNTS.write(call.inspect.counts(call.query["queue"])))


def _get(call: Call) -> Answer:
    with_payload = call.query["include_payload"]
    job = call.inspect.get_job(call.path["id"], include_payload=with_payload)
    if job is None:
        raise HttpError(404, "no such job")
    if not with_payload:
        return as_json(JOB.write(job))
    redact = call.config.redact_payload
    if redact is not None:
        job = evolve(job, payload=redact(job))
    return as_json(JOB_WITH_PAYLOAD.write(job))


def _result(call: Call) -> Answer:
    return _value(call, "result", "results", "read_result", _RESULT)


def _output(call: Call) -> Answer:
    return _value(call, "output", "outputs", "read_output", _OUTPUT)


def _progress(call: Call) -> Answer:
    return _value(call, "progress", "progress", "read_progress", _PROGRESS)


def _value(call: Call, what: str, capability: str, read: str, out: Any) -> Answer:
    kept = getattr(call.source.store, capability)
    if kept is None:
        raise HttpError(501, f"this store keeps no {what} of jobs")
    value = getattr(kept, read)(call.path["id"])
    if value is None:
        raise HttpError(404, f"no {what} for job")
    return as_json(out.write(value))


def _checkpoint(call: Call) -> Answer:
    kept = call.inspect.read_checkpoint(call.path["id"])
    if kept is None:
        raise HttpError(404, "no such job")
    return as_json(_CHECKPOINT.write(kept))


def _explain(call: Call) -> Answer:
    job_id = call.path["id"]
    job = call.inspect.get_job(job_id)
    explained = call.inspect.explain_admission(job_id)
    if job is None or explained is None:
        raise HttpError(404, "no such job")
    # Nothing blocks a job whose queue nobody serves, and yet it never runs.
    workers = call.inspect.list_workers(60_000)
    told = {
        "job_id": job_id,
        "state": explained.state,
        "admissible": explained.admissible,
        "blocked_by": explained.blocked_by,
        "detail": explained.detail,
        "estimated_admission_ms": explained.estimated_admission_ms,
        "live_workers": sum(job.queue in worker.queues for worker in workers),
    }
    return as_json(_EXPLAIN.write(told))


# Enqueueing


def _enqueue(call: Call) -> Answer:
    given = dict(call.body)
    if given["unique_replace"] and given["unique_key"] is None:
        raise HttpError(400, "unique_replace requires caller-supplied unique_key")
    check_written(given)
    envelope = Envelope(
        **{
            **given,
            "id": given["id"] or call.new_id(),
            "tags": given["tags"] or (),
            "headers": given["headers"] or {},
        },
        fingerprint=fingerprint_of(given["kind"], given["payload"]),
    )
    handle = call.source.client.enqueue(envelope, identity=call.identity)
    if handle.replaced:
        raise DuplicateJob(handle.id, replaced=True)
    return enqueued(call, handle, status=201)


def enqueued(call: Call, handle: JobHandle, *, status: int) -> Answer:
    """The answer to an enqueue; 200 for a job that a middleware dropped."""
    call.hub.publish([handle.queue])
    if handle.dropped:
        return as_json(DROPPED.write(handle))
    return as_json({"id": handle.id}, status=status)


def fingerprint_of(kind: str, payload: bytes) -> str:
    """The content identity, also of a kind that the envelope is going to refuse."""
    try:
        return fingerprint(kind, payload)
    except UnicodeEncodeError:
        return ""


def _replay(call: Call) -> Answer:
    asked = call.body
    made = call.inspect.replay_job(
        call.path["id"],
        queue=asked["queue"],
        run_at_ms=asked["run_at_ms"],
        new_id=asked["id"] or call.new_id(),
    )
    return as_json({"id": made, "replay_of": call.path["id"]}, status=201)


# Verbs


def _verb(name: str) -> Any:
    def run(call: Call) -> Answer:
        getattr(call.inspect, name)(call.path["id"])
        return no_content()

    return run


def _reschedule(call: Call) -> Answer:
    call.inspect.reschedule_job(call.path["id"], call.body["scheduled_at_ms"])
    return no_content()


def _edit(call: Call) -> Answer:
    job_id, payload = call.path["id"], call.body["payload"]
    job = call.inspect.get_job(job_id)
    if job is None:
        raise NotFound.job(job_id)
    version = call.body["schema_version"]
    if version is None:
        version = job.schema_version
    elif version < 1:
        raise InvalidRequest("schema_version must be >= 1")
    made = fingerprint(job.kind, payload)
    registry = call.source.registry
    binding = None if registry is None else registry.resolve(job.kind)
    if binding is not None:
        # The handler would find it undecodable; whoever edits can still mend it.
        binding.decode(
            Envelope(id=job_id, kind=job.kind, schema_version=version, payload=payload)
        )
    call.inspect.edit_payload(job_id, payload, schema_version=version, fingerprint=made)
    return no_content()


_PAYLOAD = Given(
    "payload", BASE64, required=True, limits={"maxLength": MAX_PAYLOAD_CHARS}
)
_ONE = (404,)
_STEER = (404, 409)

ROUTES = (
    Route(
        method="GET",
        path="/jobs",
        run=_list,
        summary="Jobs that a filter asks for, newest first, without payloads",
        query=(
            Given("q", meaning="a search such as `queue:mail state:archived tag:eu`"),
            Given("queue"),
            Given("state", limits={"enum": STATES}),
            Given("kind"),
            Given("partition_key"),
            Given("tags_all", meaning="separated by commas; each must be there"),
            Given("tags_any", meaning="separated by commas; one must be there"),
            Given("cursor", meaning="`next_cursor` of the page before"),
            Given(
                "limit", INTEGER, default=50, meaning="taken as 1 or 200 beyond that"
            ),
        ),
        answers=_PAGE,
    ),
    Route(
        method="POST",
        path="/jobs",
        run=_enqueue,
        summary="Enqueue a job",
        body=(
            Given("kind", required=True),
            _PAYLOAD,
            Given("schema_version", INTEGER, default=1),
            Given("queue", default=DEFAULT_QUEUE),
            Given("priority", INTEGER, default=0),
            Given("partition_key", default=""),
            Given("rate_class", default=""),
            Given("weight", INTEGER, default=1),
            Given("scheduled_at_ms", INTEGER, default=0, meaning="0 is now"),
            Given("unique_key", BASE64),
            Given("unique_window_ms", INTEGER, default=0),
            Given("unique_debounce_ms", INTEGER, default=0),
            Given("unique_exclude_kind", BOOLEAN, default=False),
            Given("unique_replace", INTEGER, default=0),
            Given("tags", TEXTS),
            Given("pending", BOOLEAN, default=False),
            Given("sticky_worker", default=""),
            Given("max_attempts", INTEGER, default=DEFAULT_MAX_ATTEMPTS),
            Given("retention_ms", INTEGER, default=0),
            Given("timeout_ms", INTEGER, default=0),
            Given("deadline_ms", INTEGER, default=0),
            Given("headers", PAIRS),
            Given("id", TEXT, meaning="made up when absent"),
        ),
        status=201,
        answers=_CREATED,
        also={200: DROPPED},
        errors=(409, 423),
        replays=True,
    ),
    Route(
        method="GET",
        path="/jobs/counts",
        shared=True,
        run=_counts,
        summary="Jobs by state, from a bounded sample",
        query=(Given("queue"),),
        answers=_COUNTS,
    ),
    Route(
        method="GET",
        path="/jobs/{id}",
        run=_get,
        summary="One job with its history",
        query=(Given("include_payload", BOOLEAN, default=False),),
        answers=either(JOB, JOB_WITH_PAYLOAD),
        errors=_ONE,
    ),
    Route(
        method="DELETE",
        path="/jobs/{id}",
        run=_verb("delete_job"),
        summary="Remove a job that is not running",
        status=204,
        errors=_STEER,
    ),
    *(
        Route(
            method="GET",
            path=f"/jobs/{{id}}/{what}",
            run=run,
            summary=summary,
            answers=out,
            errors=(404, 501),
        )
        for what, run, out, summary in (
            ("result", _result, _RESULT, "What the handler returned"),
            ("output", _output, _OUTPUT, "What the handler published while it ran"),
            ("progress", _progress, _PROGRESS, "How far the handler has come"),
            ("checkpoint", _checkpoint, _CHECKPOINT, "The steps that are done"),
            ("admission", _explain, _EXPLAIN, "Why the job runs or waits"),
        )
    ),
    *(
        Route(
            method="POST",
            path=f"/jobs/{{id}}/{verb}",
            run=_verb(method),
            summary=summary,
            status=204,
            errors=_STEER,
        )
        for verb, method, summary in (
            ("retry", "operator_retry", "Give an ended job one more run, now"),
            ("cancel", "operator_cancel", "Cancel an unfinished job"),
            ("promote", "promote_job", "Make a pending job available now"),
        )
    ),
    Route(
        method="POST",
        path="/jobs/{id}/replay",
        run=_replay,
        summary="Enqueue a new job like this one",
        body=(
            Given("queue", meaning="that of the job when absent"),
            Given("run_at_ms", INTEGER),
            Given("id", meaning="made up when absent"),
        ),
        status=201,
        answers=_REPLAYED,
        errors=(404, 409, 423),
    ),
    Route(
        method="POST",
        path="/jobs/{id}/reschedule",
        run=_reschedule,
        summary="Move a scheduled or retryable job; the past means now",
        body=(Given("scheduled_at_ms", INTEGER, required=True),),
        status=204,
        errors=_STEER,
    ),
    Route(
        method="PUT",
        path="/jobs/{id}/payload",
        run=_edit,
        summary="Replace the payload of a job that is not running",
        body=(
            _PAYLOAD,
            Given("schema_version", INTEGER, meaning="that of the job when absent"),
        ),
        status=204,
        errors=_STEER,
    ),
)
