"""The pages as data: what each reads from the API and hands to its template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from headgate_sync.console import charts, views
from headgate_sync.console.reader import Reader, Refused
from headgate_sync.inspection import MAX_PAGE
from headgate_sync.policy import OnSaturated, Scope
from headgate_sync.workers import COMMANDS

CHARTED_QUEUES = 8
SPARK_QUEUES = 12
FAIRNESS_QUEUES = 6
OVERVIEW_FAIRNESS_QUEUES = 2
ROWS_PER_PAGE = 100  # of what has actions
QUEUES_PER_PAGE = 50  # whose figures cost more than other rows
NAMED_QUEUES = 200
LOADED_QUEUES = 20
COVERED_QUEUES = 200
SHOWN_PARTITIONS = 8
JOBS_PER_PAGE = 50
TRAIL_PAGES = 50
EVENTS_PER_PAGE = 100

Query = Mapping[str, str]
Context = dict[str, Any]


@frozen(kw_only=True)
class Page:
    """One page.

    Attributes:
        path: below the mount, without its slash; "" is the first page.
        title: in the navigation and the window; a page that is reached from others
            only has `within`, the path of the one it belongs to.
    """

    path: str
    title: str
    template: str
    build: Callable[[Reader, Query], Context]
    within: str | None = None


class Missing(Exception):
    """A parameter without which a page shows nothing is not there."""


def _required(query: Query, name: str) -> str:
    value = query.get(name, "")
    if not value:
        raise Missing(name)
    return value


def _range(query: Query) -> charts.Range:
    return charts.RANGES.get(query.get("range", "1h"), charts.RANGES["1h"])


def _history(reader: Reader, queue: str, span: charts.Range) -> Any:
    since_ms = span.since_ms(reader.now_ms)
    return reader.get(
        "queues", queue, "history", since_ms=since_ms, bucket_ms=span.bucket_ms
    )


def _histories(reader: Reader, queues: list[Any], span: charts.Range) -> list[Any]:
    return [_history(reader, stats["queue"], span) for stats in queues]


def _chart(reader: Reader, histories: list[Any], span: charts.Range) -> Context:
    filled = charts.buckets(histories, span, reader.now_ms)
    return {"chart": charts.chart(filled, span), "range": span.name}


def _overview(reader: Reader, query: Query) -> Context:
    queues = reader.get("queues", limit=MAX_PAGE)
    more_queues = reader.next_cursor is not None
    cluster = reader.maybe("cluster")
    classes = reader.maybe("rate-classes") or []
    quarantine = reader.maybe("quarantine", limit=MAX_PAGE) or []
    busiest = sorted(
        queues,
        key=lambda s: (-s["arrival_rate"] - s["drain_rate"], -s["unfinished_jobs"]),
    )[:CHARTED_QUEUES]
    span, hour = _range(query), charts.RANGES["1h"]
    histories = _histories(reader, busiest, span)
    last_hour = histories if span is hour else _histories(reader, busiest, hour)
    rejected = sum(
        bucket["admission_rejections"] for history in last_hour for bucket in history
    )
    urgent = views.by_urgency(queues)
    worst = urgent[0] if urgent else None
    oldest = [s for s in queues if s["oldest_available_ms"] is not None]
    return {
        **_chart(reader, histories, span),
        "charted": len(busiest),
        "queues": urgent[:8],
        "queue_count": len(queues),
        "more_queues": more_queues,
        "unfinished": sum(s["unfinished_jobs"] for s in queues),
        "oldest": max(oldest, key=lambda s: s["oldest_available_ms"], default=None),
        "worst": worst,
        "cluster": cluster,
        "covers": views.covers(cluster),
        "notices": views.attention(queues, cluster, len(quarantine), rejected),
        "rate_classes": [
            (one, min(one["budgets"], key=_share, default=None))
            for one in sorted(classes, key=_pressure)[:6]
        ],
        "rate_class_count": len(classes),
        "quarantine": quarantine[:5],
        "quarantine_count": len(quarantine),
        "fairness": _fairness(reader, urgent, OVERVIEW_FAIRNESS_QUEUES),
    }


def _share(budget: Any) -> float:
    """How full a budget is."""
    return float(budget["tokens_available"] / budget["burst"])


def _pressure(rate_class: Any) -> tuple[bool, float, str]:
    """Order of rate classes: the ones that hold jobs back come first."""
    shares = map(_share, rate_class["budgets"])
    waiting = bool(rate_class["jobs_waiting"])
    return not waiting, min(shares, default=1.0), rate_class["name"]


def _fairness(
    reader: Reader, queues: list[Any], most: int = FAIRNESS_QUEUES
) -> list[Context]:
    """The first queues that share their workers among several partitions.

    Args:
        most: how many of them; more queues than `FAIRNESS_QUEUES` are not looked at.
    """
    found: list[Context] = []
    for stats in [s for s in queues if s["unfinished_jobs"]][:FAIRNESS_QUEUES]:
        if len(found) == most:
            break
        listed = reader.maybe(
            "partitions", queue=stats["queue"], limit=SHOWN_PARTITIONS
        )
        if listed is not None and len(listed) > 1:
            found.append({"queue": stats["queue"], "partitions": listed})
    return found


def _names(reader: Reader) -> list[str]:
    """Queues to choose from, by name: their figures would cost far more."""
    cluster = reader.maybe("cluster")
    listed = [] if cluster is None else cluster["queues"]
    return [cover["queue"] for cover in listed[:NAMED_QUEUES]]


def _queues(reader: Reader, query: Query) -> Context:
    listed = reader.get("queues", limit=QUEUES_PER_PAGE, cursor=query.get("cursor"))
    next_cursor = reader.next_cursor
    urgent = views.by_urgency(listed)
    sparks = {}
    for stats in urgent[:SPARK_QUEUES]:
        history = _history(reader, stats["queue"], charts.SPARK)
        filled = charts.buckets([history], charts.SPARK, reader.now_ms)
        sparks[stats["queue"]] = charts.spark(filled)
    return {
        "queues": urgent,
        "sparks": sparks,
        "next_cursor": next_cursor,
        "covers": views.covers(reader.maybe("cluster")),
        "fairness": _fairness(reader, urgent),
    }


def _queue(reader: Reader, query: Query) -> Context:
    name = _required(query, "name")
    stats = reader.get("queues", name)
    partitions = reader.maybe("partitions", queue=name, limit=SHOWN_PARTITIONS)
    more = reader.next_cursor is not None
    ceilings = reader.maybe("concurrency-limits") or []
    span = _range(query)
    return {
        **_chart(reader, _histories(reader, [stats], span), span),
        "name": name,
        "stats": stats,
        "covers": views.covers(reader.maybe("cluster")),
        "partitions": partitions or [],
        "more_partitions": more,
        "ceilings": [one for one in ceilings if one["queue"] == name],
    }


def _jobs(reader: Reader, query: Query) -> Context:
    q, state, queue = (query.get(n, "").strip() for n in ("q", "state", "queue"))
    chosen = {"state": state or None, "queue": queue or None}
    error, page = None, dict[str, Any](jobs=[], next_cursor=None)
    try:
        page = reader.get(
            "jobs",
            q=q or None,
            cursor=query.get("cursor"),
            limit=JOBS_PER_PAGE,
            **chosen,
        )
    except Refused as refused:
        if refused.status != 400:
            raise
        error = refused.message
    counted = reader.maybe("jobs", "counts", queue=chosen["queue"])
    trail = [c for c in query.get("trail", "").split(".") if c][-TRAIL_PAGES:]
    return {
        "q": q,
        "state": state,
        "queue": queue,
        "cursor": query.get("cursor"),
        "trail": trail,
        "jobs": page["jobs"],
        "next_cursor": page["next_cursor"],
        "error": error,
        "status": 200 if error is None else 400,
        "counts": None if counted is None else views.state_counts(counted["counts"]),
        "approximate": counted is not None and counted["count_is_approximate"],
        "queues": _names(reader),
        "selector": None if error else views.bulk_selector(q, chosen),
    }


def _job(reader: Reader, query: Query) -> Context:
    job_id = _required(query, "id").strip()
    job = reader.get("jobs", job_id)
    told = reader.maybe("jobs", job_id, "admission")
    return {
        "job": job,
        "told": told,
        "why": None if told is None else views.why(job, told, reader.now_ms),
        "stages": views.lifecycle(job, reader.now_ms),
        "verbs": views.verbs(job["state"]),
        "progress": reader.maybe("jobs", job_id, "progress"),
        "checkpoint": reader.maybe("jobs", job_id, "checkpoint"),
    }


def _rate_classes(reader: Reader, query: Query) -> Context:
    listed = sorted(reader.get("rate-classes"), key=_pressure)
    shown, next_cursor = _part(listed, query)
    return {"rate_classes": shown, "next_cursor": next_cursor}


def _part(listed: list[Any], query: Query) -> tuple[list[Any], str | None]:
    """One page of a list that the API gives whole; its cursor is a place in it."""
    cursor = query.get("cursor", "")
    start = int(cursor) if re.fullmatch("[0-9]{1,9}", cursor) else 0
    end = start + ROWS_PER_PAGE
    return listed[start:end], str(end) if end < len(listed) else None


def _limits(reader: Reader, query: Query) -> Context:
    listed, next_cursor = _part(reader.get("concurrency-limits"), query)
    counts = {
        name: reader.maybe("jobs", "counts", queue=name)
        for name in _queues_of(listed, Scope.QUEUE)[:LOADED_QUEUES]
    }
    partitions = {
        name: reader.maybe("partitions", queue=name, limit=MAX_PAGE)
        for name in _queues_of(listed, Scope.PARTITION)[:FAIRNESS_QUEUES]
    }
    return {
        "limits": [
            {**one, "load": views.ceiling_load(one, counts, partitions)}
            for one in listed
        ],
        "next_cursor": next_cursor,
        "queues": _names(reader),
        "scopes": [scope.value for scope in Scope],
        "strategies": [strategy.value for strategy in OnSaturated],
    }


def _queues_of(ceilings: list[Any], scope: Scope) -> list[str]:
    """Queues with a ceiling of that scope, each once."""
    return list(dict.fromkeys(c["queue"] for c in ceilings if c["scope"] == scope))


def _partitions(reader: Reader, query: Query) -> Context:
    queue = query.get("queue", "")
    if not queue and (listed := reader.get("queues", limit=MAX_PAGE)):
        queue = views.by_urgency(listed)[0]["queue"]
    partitions, next_cursor = [], None
    if queue:
        cursor = query.get("cursor")
        partitions = reader.get(
            "partitions", queue=queue, limit=ROWS_PER_PAGE, cursor=cursor
        )
        next_cursor = reader.next_cursor
    return {
        "queue": queue,
        "queues": _names(reader),
        "partitions": partitions,
        "next_cursor": next_cursor,
    }


def _quarantine(reader: Reader, query: Query) -> Context:
    listed = reader.get("quarantine", limit=ROWS_PER_PAGE, cursor=query.get("cursor"))
    return {"quarantine": listed, "next_cursor": reader.next_cursor}


def _periodic(reader: Reader, query: Query) -> Context:
    events = None
    if wanted := query.get("events", ""):
        events = reader.maybe(
            "periodic",
            wanted,
            "enqueue-events",
            limit=EVENTS_PER_PAGE,
            cursor=query.get("event_cursor"),
        )
    schedules = reader.get("periodic", limit=ROWS_PER_PAGE, cursor=query.get("cursor"))
    next_cursor = reader.next_cursor
    return {
        "schedules": schedules,
        "covers": views.covers(reader.maybe("cluster")),
        "next_cursor": next_cursor,
        "shown": wanted,
        "events": events,
    }


def _workers(reader: Reader, query: Query) -> Context:
    cluster = reader.get("cluster")
    workers = reader.get("workers", limit=ROWS_PER_PAGE, cursor=query.get("cursor"))
    covers = sorted(
        cluster["queues"],
        key=lambda q: (q["live_workers"] - q["late_workers"] > 0, q["queue"]),
    )
    return {
        "cluster": cluster,
        "covers": covers[:COVERED_QUEUES],
        "more_covers": len(covers[COVERED_QUEUES:]),
        "workers": workers,
        "next_cursor": reader.next_cursor,
        "commands": COMMANDS,
    }


PAGES = (
    Page(path="", title="Overview", template="overview.html", build=_overview),
    Page(path="queues", title="Queues", template="queues.html", build=_queues),
    Page(
        path="queue",
        title="Queue",
        template="queue.html",
        build=_queue,
        within="queues",
    ),
    Page(path="jobs", title="Jobs", template="jobs.html", build=_jobs),
    Page(path="job", title="Job", template="job.html", build=_job, within="jobs"),
    Page(
        path="rate-classes",
        title="Rate classes",
        template="rate_classes.html",
        build=_rate_classes,
    ),
    Page(path="limits", title="Ceilings", template="limits.html", build=_limits),
    Page(
        path="partitions",
        title="Fairness",
        template="partitions.html",
        build=_partitions,
    ),
    Page(
        path="quarantine",
        title="Quarantine",
        template="quarantine.html",
        build=_quarantine,
    ),
    Page(path="periodic", title="Schedules", template="periodic.html", build=_periodic),
    Page(path="workers", title="Workers", template="workers.html", build=_workers),
)
BY_PATH = {page.path: page for page in PAGES}
