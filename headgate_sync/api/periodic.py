"""Routes of schedules."""

from __future__ import annotations

from headgate_sync.api.answers import Answer, as_json, no_content
from headgate_sync.api.jobs import DROPPED, enqueued
from headgate_sync.api.paging import PAGED, PAGED_HEADERS, cursor_of, limit_of, page
from headgate_sync.api.routing import Call, Route
from headgate_sync.api.shapes import (
    BASE64,
    BOOLEAN,
    INTEGER,
    OUT_BOOLEAN,
    OUT_INTEGER,
    OUT_TEXT,
    PAIRS,
    TEXTS,
    Given,
    listed,
    optional,
    shape,
)
from headgate_sync.client.schedules import Schedules
from headgate_sync.envelope import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
)
from headgate_sync.errors import NotFound
from headgate_sync.schedule import (
    MAX_SCHEDULE_EVENTS,
    OnMissed,
    ScheduleDef,
    check_schedule_id,
)
from headgate_sync.schedules import DEFAULT_SCHEDULE_EVENTS

# A payload belongs to the jobs, and to nobody who only looks at a list of schedules.
SCHEDULE = shape(
    "Schedule",
    id=OUT_TEXT,
    kind=OUT_TEXT,
    spec=OUT_TEXT,
    queue=OUT_TEXT,
    partition_key=OUT_TEXT,
    rate_class=OUT_TEXT,
    priority=OUT_INTEGER,
    max_attempts=OUT_INTEGER,
    retention_ms=OUT_INTEGER,
    timeout_ms=OUT_INTEGER,
    schema_version=OUT_INTEGER,
    weight=OUT_INTEGER,
    tags=listed(OUT_TEXT),
    sticky_worker=OUT_TEXT,
    next_run_ms=OUT_INTEGER,
    last_enqueued_ms=optional(OUT_INTEGER),
    on_missed=(OUT_TEXT, lambda schedule: str(schedule.on_missed)),
    backfill_limit=OUT_INTEGER,
    paused=OUT_BOOLEAN,
)
_EVENT = shape(
    "ScheduleEvent",
    event_id=OUT_INTEGER,
    schedule_id=OUT_TEXT,
    tick_ms=OUT_INTEGER,
    job_id=OUT_TEXT,
    outcome=(OUT_TEXT, lambda event: event.outcome.value),
    reason=OUT_TEXT,
    recorded_at_ms=OUT_INTEGER,
)
_EVENTS = shape(
    "ScheduleEvents",
    events=(listed(_EVENT), "items"),
    next_cursor=optional(OUT_TEXT),
)
_RUN = shape("RunNow", id=OUT_TEXT)


def _list(call: Call) -> Answer:
    limit = limit_of(call.query)
    found = call.inspect.list_schedules(
        limit, cursor_of(call.query), include_payload=False
    )
    return page(SCHEDULE, found, found[-1].id if len(found) == limit else None)


def _put(call: Call) -> Answer:
    given, schedule_id = dict(call.body), check_schedule_id(call.path["id"])
    paused = given.pop("paused")
    given["payload"] = given["payload"] or b""
    given["tags"], given["headers"] = given["tags"] or (), given["headers"] or {}
    stored = Schedules(call.source.client).put(
        schedule_id, ScheduleDef(**given), paused=paused, identity=call.identity
    )
    return as_json(SCHEDULE.write(stored))


def _delete(call: Call) -> Answer:
    call.inspect.delete_schedule(call.path["id"])
    return no_content()


def _pause(call: Call) -> Answer:
    call.inspect.set_schedule_paused(call.path["id"], True)
    return no_content()


def _resume(call: Call) -> Answer:
    call.inspect.set_schedule_paused(call.path["id"], False)
    return no_content()


def _run(call: Call) -> Answer:
    schedule = call.inspect.get_schedule(call.path["id"])
    if schedule is None:
        raise NotFound.schedule(call.path["id"])
    envelope = schedule.envelope(id=call.new_id())
    handle = call.source.client.enqueue(envelope, identity=call.identity)
    return enqueued(call, handle, status=202)


def _events(call: Call) -> Answer:
    limit = limit_of(call.query, MAX_SCHEDULE_EVENTS)
    found = Schedules(call.source.client).events(
        call.path["id"], limit=limit, cursor=call.query["cursor"]
    )
    return as_json(_EVENTS.write(found))


_JOB = (
    Given("kind", required=True),
    Given("spec", required=True, meaning="five fields of cron, or `@every:MS`"),
    Given("payload", BASE64),
    Given("queue", default=DEFAULT_QUEUE),
    Given("partition_key", default=""),
    Given("rate_class", default=""),
    Given("priority", INTEGER, default=0),
    Given("max_attempts", INTEGER, default=DEFAULT_MAX_ATTEMPTS),
    Given("retention_ms", INTEGER, default=0),
    Given("on_missed", default=OnMissed.SKIP.value),
    Given("backfill_limit", INTEGER, default=0),
    Given("paused", BOOLEAN, meaning="absent keeps what is stored"),
    Given("schema_version", INTEGER, default=1),
    Given("timeout_ms", INTEGER, default=0),
    Given("weight", INTEGER, default=1),
    Given("tags", TEXTS),
    Given("headers", PAIRS),
    Given("sticky_worker", default=""),
)
_LIMIT = Given(
    "limit",
    INTEGER,
    default=DEFAULT_SCHEDULE_EVENTS,
    limits={"minimum": 1, "maximum": MAX_SCHEDULE_EVENTS},
)

ROUTES = (
    Route(
        method="GET",
        path="/periodic",
        run=_list,
        summary="Schedules by id, without payloads",
        query=PAGED,
        answers=listed(SCHEDULE),
        headers=PAGED_HEADERS,
    ),
    Route(
        method="PUT",
        path="/periodic/{id}",
        run=_put,
        summary="Create or replace a schedule; an equal spec keeps the next tick",
        body=_JOB,
        answers=SCHEDULE,
    ),
    Route(
        method="DELETE",
        path="/periodic/{id}",
        run=_delete,
        summary="Remove a schedule; its jobs and events stay",
        status=204,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/periodic/{id}/pause",
        run=_pause,
        summary="Let no tick fire",
        status=204,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/periodic/{id}/resume",
        run=_resume,
        summary="Let ticks fire again",
        status=204,
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/periodic/{id}/run",
        run=_run,
        summary="Enqueue the schedule's job once more, now; its ticks are left alone",
        status=202,
        answers=_RUN,
        also={200: DROPPED},
        errors=(404, 409, 423),
        replays=True,
    ),
    Route(
        method="GET",
        path="/periodic/{id}/enqueue-events",
        run=_events,
        summary="What became of the newest 100 ticks, newest first",
        query=(_LIMIT, Given("cursor", meaning="`next_cursor` of the page before")),
        answers=_EVENTS,
    ),
)
