"""Routes of worker processes and of the fleet as a whole."""

from __future__ import annotations

from headgate_sync.api.answers import Answer, as_json, no_content
from headgate_sync.api.paging import PAGED, PAGED_HEADERS, cursor_of, limit_of, page
from headgate_sync.api.routing import Call, Route
from headgate_sync.api.shapes import (
    OUT_BOOLEAN,
    OUT_INTEGER,
    OUT_NUMBER,
    OUT_TEXT,
    Given,
    listed,
    optional,
    shape,
)

WORKER = shape(
    "Worker",
    worker_id=OUT_TEXT,
    host=OUT_TEXT,
    pid=OUT_INTEGER,
    queues=listed(OUT_TEXT),
    concurrency=OUT_INTEGER,
    started_at_ms=OUT_INTEGER,
    heartbeat_at_ms=OUT_INTEGER,
    inflight=OUT_INTEGER,
    polls=OUT_INTEGER,
    empty_polls=OUT_INTEGER,
    utilization=OUT_NUMBER,
    empty_poll_ratio=OUT_NUMBER,
    status=OUT_TEXT,
    duties_active=OUT_BOOLEAN,
    beat_ms=OUT_INTEGER,
    pending_command=optional(OUT_TEXT),
)
_COVER = shape(
    "QueueCover", queue=OUT_TEXT, live_workers=OUT_INTEGER, late_workers=OUT_INTEGER
)
_COUNTED = shape(
    "WorkerCounts",
    live=OUT_INTEGER,
    late=OUT_INTEGER,
    stale=OUT_INTEGER,
    total=OUT_INTEGER,
)
CLUSTER = shape(
    "Cluster",
    now_ms=OUT_INTEGER,
    workers=(_COUNTED, lambda view: view),
    capacity_total=OUT_INTEGER,
    inflight_total=OUT_INTEGER,
    utilization=OUT_NUMBER,
    polls_total=OUT_INTEGER,
    empty_polls_total=OUT_INTEGER,
    empty_poll_ratio=OUT_NUMBER,
    queues=listed(_COVER),
)


def _list(call: Call) -> Answer:
    limit, after = limit_of(call.query), cursor_of(call.query)
    rest = [
        worker
        for worker in call.inspect.list_workers()
        if after is None or worker.worker_id > after
    ]
    shown = rest[:limit]
    return page(WORKER, shown, shown[-1].worker_id if len(rest) > limit else None)


def _cluster(call: Call) -> Answer:
    return as_json(CLUSTER.write(call.inspect.cluster()))


def _signal(call: Call) -> Answer:
    call.inspect.signal_worker(call.path["id"], call.body["command"])
    return no_content()


ROUTES = (
    Route(
        method="GET",
        path="/workers",
        shared=True,
        run=_list,
        summary="Workers that have beaten within 15 minutes, by id",
        query=PAGED,
        answers=listed(WORKER),
        headers=PAGED_HEADERS,
    ),
    Route(
        method="GET",
        path="/cluster",
        shared=True,
        run=_cluster,
        summary="The fleet as a whole, and who serves which queue",
        answers=CLUSTER,
    ),
    Route(
        method="POST",
        path="/workers/{id}/signal",
        run=_signal,
        summary="Ask a worker to do something; null takes it back",
        body=(
            Given(
                "command",
                required=True,
                nullable=True,
                meaning="quiet, resume, restart, terminate, resign or null",
            ),
        ),
        status=204,
        errors=(404,),
    ),
)
