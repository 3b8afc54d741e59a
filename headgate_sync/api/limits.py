"""Routes of what admission obeys: rate classes, ceilings, partitions, quarantine."""

from __future__ import annotations

from typing import Any

from headgate_sync.api.answers import Answer, as_json, no_content
from headgate_sync.api.paging import (
    PAGED,
    PAGED_HEADERS,
    cursor_of,
    limit_of,
    page,
    slice_page,
)
from headgate_sync.api.routing import Call, Route
from headgate_sync.api.shapes import (
    BOOLEAN,
    INTEGER,
    OUT_BOOLEAN,
    OUT_INTEGER,
    OUT_TEXT,
    Given,
    list_kind,
    listed,
    object_kind,
    optional,
    shape,
)
from headgate_sync.errors import NotFound
from headgate_sync.policy import (
    BudgetConfig,
    Ceiling,
    OnSaturated,
    RateClassConfig,
    Scope,
)

_BUDGET = shape(
    "Budget",
    slot=OUT_INTEGER,
    limit=OUT_INTEGER,
    window_ms=OUT_INTEGER,
    burst=OUT_INTEGER,
    tokens_available=OUT_INTEGER,
)


def _first(name: str) -> Any:
    def find(state: Any) -> Any:
        return getattr(state.budgets[0], name) if state.budgets else None

    return optional(OUT_INTEGER), find


RATE_CLASS = shape(
    "RateClass",
    name=OUT_TEXT,
    tokens_available=optional(OUT_INTEGER),
    burst=_first("burst"),
    limit_per_window=_first("limit"),
    window_ms=_first("window_ms"),
    jobs_waiting=OUT_INTEGER,
    paused=OUT_BOOLEAN,
    paused_until_ms=optional(OUT_INTEGER),
    pause_reason=OUT_TEXT,
    budgets=listed(_BUDGET),
)
LIMIT = shape(
    "ConcurrencyLimit",
    name=OUT_TEXT,
    scope=(OUT_TEXT, lambda ceiling: ceiling.scope.value),
    queue=OUT_TEXT,
    rate_class=OUT_TEXT,
    max_concurrent=OUT_INTEGER,
    on_saturated=(OUT_TEXT, lambda ceiling: ceiling.on_saturated.value),
)
PARTITION = shape(
    "Partition",
    partition_key=OUT_TEXT,
    deficit=OUT_INTEGER,
    waiting=OUT_INTEGER,
    inflight=OUT_INTEGER,
    noisy=OUT_BOOLEAN,
    quantum_override=optional(OUT_INTEGER),
)
QUARANTINED = shape(
    "QuarantineEntry",
    fingerprint=OUT_TEXT,
    kind=OUT_TEXT,
    crash_count=OUT_INTEGER,
    quarantined_at_ms=OUT_INTEGER,
    reason=OUT_TEXT,
)
_PAUSED = shape("PausedUntil", paused_until_ms=OUT_INTEGER)


def _class_of(call: Call) -> Any:
    """The class that the path names, which somebody may have deleted meanwhile."""
    for found in call.inspect.rate_classes():
        if found.name == call.path["name"]:
            return found
    raise _no_class(call)


def _rate_classes(call: Call) -> Answer:
    return as_json(listed(RATE_CLASS).write(call.inspect.rate_classes()))


def _put_rate_class(call: Call) -> Answer:
    given, name = call.body, call.path["name"]
    burst = max(given["limit"], 1) if given["burst"] is None else given["burst"]
    further = given["further"]
    if further is not None:
        further = tuple(
            BudgetConfig(
                one["limit"],
                one["window_ms"],
                max(one["limit"], 1) if one["burst"] is None else one["burst"],
            )
            for one in further
        )
    call.inspect.upsert_rate_class(
        RateClassConfig(
            name=name,
            limit=given["limit"],
            window_ms=given["window_ms"],
            burst=burst,
            paused=given["paused"],
            further=further,
        )
    )
    return as_json(RATE_CLASS.write(_class_of(call)))


def _delete_rate_class(call: Call) -> Answer:
    waiting = call.inspect.delete_rate_class(call.path["name"])
    if waiting is None:
        raise _no_class(call)
    return no_content(x_waiting_jobs=str(waiting))


def _no_class(call: Call) -> NotFound:
    return NotFound(f"rate class {call.path['name']} does not exist")


def _pause(call: Call) -> Answer:
    name, given = call.path["name"], call.body
    call.inspect.pause_rate_class(name, given["delay_ms"], given["reason"] or "")
    paused = _class_of(call)
    return as_json({"paused_until_ms": paused.paused_until_ms})


def _resume(call: Call) -> Answer:
    if not call.inspect.resume_rate_class(call.path["name"]):
        raise _no_class(call)
    return no_content()


def _limits(call: Call) -> Answer:
    return as_json(listed(LIMIT).write(call.inspect.concurrency_limits()))


def _put_limit(call: Call) -> Answer:
    given = call.body
    ceiling = Ceiling(
        name=call.path["name"],
        queue=given["queue"],
        rate_class=given["rate_class"],
        scope=given["scope"],
        max_concurrent=given["max_concurrent"],
        on_saturated=given["on_saturated"],
    )
    call.inspect.upsert_concurrency_limit(ceiling)
    return as_json(LIMIT.write(ceiling))


def _delete_limit(call: Call) -> Answer:
    if not call.inspect.delete_concurrency_limit(call.path["name"]):
        raise NotFound(f"concurrency limit {call.path['name']} does not exist")
    return no_content()


def _partitions(call: Call) -> Answer:
    limit_of(call.query)
    return slice_page(
        PARTITION, call.inspect.partitions(call.query["queue"]), call.query
    )


def _put_partition(call: Call) -> Answer:
    given = call.body
    call.inspect.set_partition_quantum(
        given["queue"], given["partition_key"], given["quantum"]
    )
    return no_content()


def _quarantine(call: Call) -> Answer:
    limit = limit_of(call.query)
    found = call.inspect.quarantine_list(limit, cursor_of(call.query))
    return page(QUARANTINED, found, found[-1].cursor if len(found) == limit else None)


def _release(call: Call) -> Answer:
    released = call.inspect.quarantine_release(call.path["fingerprint"])
    return no_content(x_released_jobs=str(released))


_NUMBERS = (
    Given("limit", INTEGER, required=True, meaning="units of weight in a window"),
    Given("window_ms", INTEGER, required=True),
    Given("burst", INTEGER, meaning="`limit`, or 1, when absent"),
)
_MISSING = (404,)

ROUTES = (
    Route(
        method="GET",
        path="/rate-classes",
        shared=True,
        run=_rate_classes,
        summary="All rate classes, by name",
        answers=listed(RATE_CLASS),
    ),
    Route(
        method="PUT",
        path="/rate-classes/{name}",
        run=_put_rate_class,
        summary="Create or change a rate class",
        body=(
            *_NUMBERS,
            Given("paused", BOOLEAN, default=False),
            Given(
                "further",
                list_kind(object_kind(*_NUMBERS)),
                meaning="up to three more budgets; absent keeps what is stored",
            ),
        ),
        answers=RATE_CLASS,
    ),
    Route(
        method="DELETE",
        path="/rate-classes/{name}",
        run=_delete_rate_class,
        summary="Remove a rate class: jobs that name it become unlimited",
        status=204,
        headers={"x-waiting-jobs": "waiting jobs that name it, counted up to 1,000"},
        errors=_MISSING,
    ),
    Route(
        method="POST",
        path="/rate-classes/{name}/pause",
        run=_pause,
        summary="Let nothing of a class pass for a time",
        body=(Given("delay_ms", INTEGER, required=True), Given("reason", default="")),
        answers=_PAUSED,
    ),
    Route(
        method="POST",
        path="/rate-classes/{name}/resume",
        run=_resume,
        summary="End such a pause",
        status=204,
        errors=_MISSING,
    ),
    Route(
        method="GET",
        path="/concurrency-limits",
        shared=True,
        run=_limits,
        summary="All ceilings, by name",
        answers=listed(LIMIT),
    ),
    Route(
        method="PUT",
        path="/concurrency-limits/{name}",
        run=_put_limit,
        summary="Create or change a ceiling",
        body=(
            Given("max_concurrent", INTEGER, required=True),
            Given("scope", default=Scope.PARTITION.value),
            Given("queue", default="", meaning="what the first two scopes count"),
            Given("rate_class", default="", meaning="what the scope `class` counts"),
            Given("on_saturated", default=OnSaturated.QUEUE.value),
        ),
        answers=LIMIT,
    ),
    Route(
        method="DELETE",
        path="/concurrency-limits/{name}",
        run=_delete_limit,
        summary="Remove a ceiling",
        status=204,
        errors=_MISSING,
    ),
    Route(
        method="GET",
        path="/partitions",
        shared=True,
        run=_partitions,
        summary="Up to 1,000 partitions of a queue, the most waiting jobs first",
        query=(Given("queue", required=True), *PAGED),
        answers=listed(PARTITION),
        headers=PAGED_HEADERS,
    ),
    Route(
        method="PUT",
        path="/partitions",
        run=_put_partition,
        summary="Give a partition a share of its own, or take it away",
        body=(
            Given("queue", required=True),
            Given("partition_key", required=True),
            Given("quantum", INTEGER, required=True, nullable=True),
        ),
        status=204,
    ),
    Route(
        method="GET",
        path="/quarantine",
        shared=True,
        run=_quarantine,
        summary="Registered fingerprints, newest first",
        query=PAGED,
        answers=listed(QUARANTINED),
        headers=PAGED_HEADERS,
    ),
    Route(
        method="DELETE",
        path="/quarantine/{fingerprint}",
        run=_release,
        summary="Release a fingerprint and its jobs",
        status=204,
        headers={"x-released-jobs": "jobs that were moved"},
        errors=_MISSING,
    ),
)
