"""Routes of queues."""

from __future__ import annotations

from headgate_sync.api.answers import Answer, as_json, no_content
from headgate_sync.api.jobs import STATE_COUNT, counts_of
from headgate_sync.api.paging import PAGED, PAGED_HEADERS, cursor_of, limit_of, page
from headgate_sync.api.routing import Call, Route
from headgate_sync.api.shapes import (
    BOOLEAN,
    INTEGER,
    OUT_BOOLEAN,
    OUT_INTEGER,
    OUT_NUMBER,
    OUT_TEXT,
    Given,
    listed,
    optional,
    shape,
)
from headgate_sync.backlog import MINUTE_MS

_QUIET = shape(
    "QuietGroups",
    arrival_rate=OUT_NUMBER,
    drain_rate=OUT_NUMBER,
    time_to_drain_ms=optional(OUT_INTEGER),
    oldest_available_ms=optional(OUT_INTEGER),
    noisy_partitions=OUT_INTEGER,
    approximate=OUT_BOOLEAN,
)
QUEUE = shape(
    "Queue",
    queue=OUT_TEXT,
    weight=OUT_INTEGER,
    paused=OUT_BOOLEAN,
    unfinished_jobs=OUT_INTEGER,
    max_unfinished_jobs=optional(OUT_INTEGER),
    by_state=(listed(STATE_COUNT), lambda stats: counts_of(stats.by_state)),
    count_is_approximate=(OUT_BOOLEAN, lambda stats: stats.by_state.approximate),
    arrival_rate=OUT_NUMBER,
    drain_rate=OUT_NUMBER,
    time_to_drain_ms=optional(OUT_INTEGER),
    oldest_available_ms=optional(OUT_INTEGER),
    memory_bytes=optional(OUT_INTEGER),
    quiet_groups=_QUIET,
)
_BUCKET = shape(
    "HistoryBucket",
    at_ms=OUT_INTEGER,
    arrived=OUT_INTEGER,
    completed=OUT_INTEGER,
    failed=OUT_INTEGER,
    retried=OUT_INTEGER,
    admission_rejections=OUT_INTEGER,
    latency_ms_sum=OUT_INTEGER,
    latency_count=OUT_INTEGER,
)
_SAMPLED = shape("Sampled", sampled_queues=OUT_INTEGER)
_DELETION = shape("QueueDeletion", operation_id=OUT_TEXT)


def _list(call: Call) -> Answer:
    limit = limit_of(call.query)
    found = call.inspect.queue_stats(limit, cursor_of(call.query))
    return page(QUEUE, found, found[-1].queue if len(found) == limit else None)


def _get(call: Call) -> Answer:
    [stats] = call.inspect.queue_stats(queues=[call.path["queue"]])
    return as_json(QUEUE.write(stats))


def _stats(call: Call, queue: str) -> Answer:
    [stats] = call.inspect.queue_stats(queues=[queue])
    call.hub.publish([queue])
    return as_json(QUEUE.write(stats))


def _set_weight(call: Call) -> Answer:
    call.inspect.set_queue_weight(call.path["queue"], call.body["weight"])
    return _stats(call, call.path["queue"])


def _set_limit(call: Call) -> Answer:
    call.inspect.set_enqueue_limit(call.path["queue"], call.body["max_unfinished_jobs"])
    return _stats(call, call.path["queue"])


def _clear_limit(call: Call) -> Answer:
    call.inspect.set_enqueue_limit(call.path["queue"], None)
    call.hub.publish([call.path["queue"]])
    return no_content()


def _pause(call: Call) -> Answer:
    call.inspect.set_queue_paused(call.path["queue"], True)
    call.hub.publish([call.path["queue"]])
    return no_content()


def _resume(call: Call) -> Answer:
    call.inspect.set_queue_paused(call.path["queue"], False)
    call.hub.publish([call.path["queue"]])
    return no_content()


def _delete(call: Call) -> Answer:
    queue = call.path["queue"]
    operation = call.inspect.delete_queue(queue, call.query["force"])
    call.hub.publish([queue])
    if operation is None:
        return no_content()
    return as_json({"operation_id": operation}, status=202)


def _sample(call: Call) -> Answer:
    sampled = call.inspect.sample_queue_memory(call.body["limit"])
    return as_json({"sampled_queues": sampled})


def _history(call: Call) -> Answer:
    found = call.inspect.history(
        call.path["queue"], call.query["since_ms"], call.query["bucket_ms"]
    )
    return as_json(listed(_BUCKET).write(found))


ROUTES = (
    Route(
        method="GET",
        path="/queues",
        shared=True,
        run=_list,
        summary="Queues by name, with their backlog",
        query=PAGED,
        answers=listed(QUEUE),
        headers=PAGED_HEADERS,
    ),
    Route(
        method="POST",
        path="/queues/actions/sample-memory",
        run=_sample,
        summary="Estimate the stored bytes of up to 200 queues",
        body=(
            Given(
                "limit", INTEGER, default=100, meaning="jobs looked at in each queue"
            ),
        ),
        answers=_SAMPLED,
    ),
    Route(
        method="GET",
        path="/queues/{queue}",
        shared=True,
        run=_get,
        summary="One queue; a name that nobody used is an empty one",
        answers=QUEUE,
    ),
    Route(
        method="PUT",
        path="/queues/{queue}",
        run=_set_weight,
        summary="Set the queue's share of admissions",
        body=(Given("weight", INTEGER, required=True, meaning="1 or more"),),
        answers=QUEUE,
    ),
    Route(
        method="DELETE",
        path="/queues/{queue}",
        run=_delete,
        summary="Remove a queue; with force also its jobs, by an operation",
        query=(Given("force", BOOLEAN, default=False),),
        status=204,
        also={202: _DELETION},
    ),
    Route(
        method="PUT",
        path="/queues/{queue}/enqueue-limit",
        run=_set_limit,
        summary="Bound the unfinished jobs of a queue; 0 closes it",
        body=(Given("max_unfinished_jobs", INTEGER, required=True),),
        answers=QUEUE,
    ),
    Route(
        method="DELETE",
        path="/queues/{queue}/enqueue-limit",
        run=_clear_limit,
        summary="Lift the bound",
        status=204,
    ),
    Route(
        method="POST",
        path="/queues/{queue}/pause",
        run=_pause,
        summary="Let admission skip the queue",
        status=204,
    ),
    Route(
        method="POST",
        path="/queues/{queue}/resume",
        run=_resume,
        summary="Let admission look at the queue again",
        status=204,
    ),
    Route(
        method="GET",
        path="/queues/{queue}/history",
        shared=True,
        run=_history,
        summary="What happened to a queue, by stretches of time",
        query=(
            Given("since_ms", INTEGER, default=0),
            Given("bucket_ms", INTEGER, default=MINUTE_MS, meaning="60,000 or more"),
        ),
        answers=listed(_BUCKET),
    ),
)
