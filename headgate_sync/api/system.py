"""Routes of the API itself: health, what it can do, live updates, its description."""

from __future__ import annotations

from headgate_sync import __version__
from headgate_sync.api.answers import TEXT, Answer, HttpError, as_json
from headgate_sync.api.openapi import document
from headgate_sync.api.routing import BASE, Call, Route
from headgate_sync.api.shapes import (
    INTEGER,
    OUT_INTEGER,
    OUT_TEXT,
    Given,
    Out,
    listed,
    optional,
    shape,
)
from headgate_sync.backlog import MAX_SAMPLE
from headgate_sync.errors import ConfigurationError, StoreError
from headgate_sync.inspection import MAX_PAGE
from headgate_sync.semantics import SEMANTICS
from headgate_sync.store import CAPABILITIES

EVENTS = "text/event-stream"
_RETRY_S = 15

_LIMITS = shape(
    "MetaLimits", max_page_size=OUT_INTEGER, approximate_count_threshold=OUT_INTEGER
)
_KEPT = Out({"type": ["boolean", "string"]})
_SEMANTIC = shape(
    "Semantic",
    id=OUT_TEXT,
    statement=OUT_TEXT,
    level=OUT_TEXT,
    memory=_KEPT,
    postgres=_KEPT,
)
_META = shape(
    "Meta",
    version=OUT_TEXT,
    backend=OUT_TEXT,
    schema=optional(OUT_TEXT),
    capabilities=listed(OUT_TEXT),
    limits=_LIMITS,
    semantics=listed(_SEMANTIC),
)
_POLL = shape("Activity", seq=OUT_INTEGER, queues=listed(OUT_TEXT))


def _healthz(call: Call) -> Answer:
    return Answer(body=b"ok", content_type=TEXT)


def _readyz(call: Call) -> Answer:
    try:
        call.source.store.health_check()
    except (StoreError, ConfigurationError):
        # Anybody may ask, so the reason is left to the log and to the routes behind
        # authentication.
        raise HttpError(503, "store unavailable") from None
    return Answer(body=b"ready", content_type=TEXT)


def _meta(call: Call) -> Answer:
    store = call.source.store
    told = {
        "version": __version__,
        "backend": call.config.backend_name or type(store).__name__,
        "schema": getattr(store, "schema", None),
        "capabilities": sorted(
            name for name in CAPABILITIES if getattr(store, name) is not None
        ),
        "limits": {
            "max_page_size": MAX_PAGE,
            "approximate_count_threshold": MAX_SAMPLE,
        },
        "semantics": SEMANTICS,
    }
    return as_json(_META.write(told))


def _events(call: Call) -> Answer:
    headers = {"X-Accel-Buffering": "no"}
    if call.method == "HEAD":
        return Answer(content_type=EVENTS, headers=headers)
    stream = call.hub.open()
    if stream is None:
        raise HttpError(
            503,
            "too many event streams; poll /events/poll instead",
            headers={"Retry-After": str(_RETRY_S)},
        )
    return Answer(content_type=EVENTS, headers=headers, stream=stream)


def _poll(call: Call) -> Answer:
    seq, queues = call.hub.poll(call.query["since"])
    return as_json(_POLL.write({"seq": seq, "queues": queues}))


def _openapi(call: Call) -> Answer:
    return as_json(document(call.routes, call.mount + BASE))


ROUTES = (
    Route(
        method="GET",
        path="/healthz",
        run=_healthz,
        summary="Whether this process answers; the store is not asked",
        answers=Out({"type": "string"}),
        media="text/plain",
        guarded=False,
        reads_store=False,
    ),
    Route(
        method="GET",
        path="/readyz",
        run=_readyz,
        summary="Whether the store can work",
        answers=Out({"type": "string"}),
        media="text/plain",
        errors=(503,),
        guarded=False,
        reads_store=False,
    ),
    Route(
        method="GET",
        path="/meta",
        run=_meta,
        summary="Version, kind of store, what it can do and what it promises",
        answers=_META,
    ),
    Route(
        method="GET",
        path="/events",
        run=_events,
        summary="Hints that something changed in a queue, as they come",
        answers=Out({"type": "string"}),
        media=EVENTS,
        errors=(503,),
        reads_store=False,
    ),
    Route(
        method="GET",
        path="/events/poll",
        run=_poll,
        summary="The same hints since a number that an earlier answer told",
        query=(Given("since", INTEGER),),
        answers=_POLL,
        reads_store=False,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        run=_openapi,
        summary="This description",
        answers=Out({"type": "object"}),
        reads_store=False,
    ),
)
