"""What pages say about the API's figures: which is urgent, and what it means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from headgate_sync.backlog import sure_below
from headgate_sync.console.text import (
    NOTHING,
    counted,
    duration,
    instant,
    number,
    relative,
)
from headgate_sync.errors import InvalidRequest
from headgate_sync.lifecycle import TERMINAL, Event, State, sources_of
from headgate_sync.search import JobFilter, parse_query

Json = Mapping[str, Any]
Links = tuple[tuple[str, str, Mapping[str, str]], ...]

IDLE_POLLS = 0.8
"""Above this share of empty admits workers ask for jobs that are not there."""

LONG_WAIT_MS = 60_000
"""A backlog that grows is worth a line once a job has waited so long."""

STATES = (
    State.AVAILABLE,
    State.RUNNING,
    State.SCHEDULED,
    State.RETRYABLE,
    State.PENDING,
    State.QUARANTINED,
    State.ARCHIVED,
    State.UNDECODABLE,
    State.CANCELLED,
    State.COMPLETED,
)
_BULK_FIELDS = ("queue", "state", "kind", "partition_key")


@frozen(kw_only=True)
class Drain:
    """A headline of a queue: how long until its backlog is gone.

    Attributes:
        text: large.
        word: what it means.
        tone: "bad", "warn", "good" or "".
        rank: the larger, the more urgent.
    """

    text: str
    word: str
    tone: str
    rank: tuple[int, float]


def drain(stats: Json) -> Drain:
    """How urgent a queue is."""
    left, ms = stats["unfinished_jobs"], stats["time_to_drain_ms"]
    if left == 0:
        return Drain(text="empty", word="nothing to do", tone="good", rank=(0, 0))
    if stats["paused"]:
        return Drain(text="paused", word="admits nothing", tone="warn", rank=(2, left))
    if ms is not None:
        tone = "warn" if ms > 3_600_000 else ""
        return Drain(text=duration(ms), word="to drain", tone=tone, rank=(1, ms))
    if stats["oldest_available_ms"] is None:
        return Drain(text="∞", word="none ready yet", tone="", rank=(1, 0))
    if stats["arrival_rate"] > 0:
        return Drain(text="∞", word="growing", tone="bad", rank=(4, left))
    return Drain(text="∞", word="not moving", tone="bad", rank=(3, left))


def by_urgency(queues: Iterable[Json]) -> list[Json]:
    """Queues, the most urgent first."""
    return sorted(
        queues, key=lambda s: (*(-part for part in drain(s).rank), s["queue"])
    )


def state_counts(counts: Iterable[Json]) -> dict[str, int]:
    """Counts by state in the order of the pages."""
    known = {row["state"]: row["count"] for row in counts}
    return {state.value: known.get(state.value, 0) for state in STATES}


def figure(count: int, approximate: bool, queues: int = 1) -> str:
    """A count by state, with a sign where it may be more.

    Args:
        count: shown.
        approximate: some figure beside it is a lower bound.
        queues: among which it was counted.
    """
    return number(count, approximate and count >= sure_below(queues))


def covers(cluster: Json | None) -> dict[str, int] | None:
    """Workers that serve each queue and are probably alive."""
    if cluster is None:
        return None
    return {
        q["queue"]: q["live_workers"] - q["late_workers"] for q in cluster["queues"]
    }


@frozen(kw_only=True)
class Notice:
    """A line of the attention list, and the page that says more."""

    tone: str
    text: str
    subject: str = ""
    page: str
    query: Mapping[str, str]


def attention(
    queues: Iterable[Json], cluster: Json | None, quarantined: int, rejected: int
) -> list[Notice]:
    """What somebody should look at, the worst first."""
    found: list[Notice] = []
    serving = covers(cluster)
    for stats in by_urgency(queues):
        name, about = stats["queue"], {"name": stats["queue"]}
        left = stats["unfinished_jobs"]
        if left and serving is not None and serving.get(name, 0) < 1:
            told = f"has {counted(left, 'unfinished job')} and no live worker"
            found.append(
                Notice(tone="bad", text=told, subject=name, page="queue", query=about)
            )
        elif (
            drain(stats).tone == "bad" and stats["oldest_available_ms"] >= LONG_WAIT_MS
        ):
            waited = duration(stats["oldest_available_ms"])
            told = f"is {drain(stats).word}; its oldest job waits {waited}"
            found.append(
                Notice(tone="bad", text=told, subject=name, page="queue", query=about)
            )
        elif stats["paused"]:
            told = f"is paused with {counted(left, 'unfinished job')}"
            found.append(
                Notice(tone="warn", text=told, subject=name, page="queue", query=about)
            )
    if quarantined:
        sign = "≥ " if quarantined >= 200 else ""
        told = (
            f"{sign}{counted(quarantined, 'fingerprint')} in quarantine: "
            f"{'its' if quarantined == 1 else 'their'} jobs killed workers"
        )
        found.append(Notice(tone="bad", text=told, page="quarantine", query={}))
    if cluster is not None and cluster["workers"]["late"]:
        told = f"{counted(cluster['workers']['late'], 'worker')} late and probably dead"
        found.append(Notice(tone="warn", text=told, page="workers", query={}))
    if rejected:
        told = f"full ceilings sent {counted(rejected, 'job')} away in the last hour"
        found.append(Notice(tone="warn", text=told, page="limits", query={}))
    if cluster is not None and cluster["empty_poll_ratio"] > IDLE_POLLS:
        ready = [s for s in queues if s["oldest_available_ms"] is not None]
        if ready:  # jobs of a later instant keep nobody from anything
            left = sum(stats["unfinished_jobs"] for stats in ready)
            told = (
                f"{cluster['empty_poll_ratio']:.0%} of admits found nothing beside "
                f"{counted(left, 'unfinished job')}: look at limits before you add "
                "workers"
            )
            found.append(Notice(tone="warn", text=told, page="limits", query={}))
    order = {"bad": 0, "warn": 1}
    return sorted(found, key=lambda notice: order[notice.tone])


@frozen(kw_only=True)
class Why:
    """The answer to "why does it not run", in words.

    Attributes:
        links: pages where something can be done about it: label, page, query.
    """

    headline: str
    text: str
    tone: str
    estimate: str = ""
    links: Links = ()


def why(job: Json, told: Json, now_ms: int) -> Why:
    """Say what keeps a job from running, by the gate's own figures."""
    detail, blocked = told["detail"], told["blocked_by"]
    if told["state"] == State.RUNNING:
        return _running(detail, now_ms)
    if told["state"] in TERMINAL and blocked is None:
        return Why(
            headline=f"It is {told['state']}",
            text="A job in this state is finished and waits for nothing.",
            tone="good" if told["state"] == State.COMPLETED else "",
        )
    if blocked is not None:
        found = _BLOCKED[blocked](job, detail, now_ms)
        wait_ms = told["estimated_admission_ms"]
        if wait_ms is None:
            return found
        estimate = f"earliest in {duration(wait_ms)}" if wait_ms else "any moment"
        return Why(
            headline=found.headline,
            text=found.text,
            tone=found.tone,
            estimate=estimate,
            links=found.links,
        )
    return _admissible(job, told)


def _running(detail: Json, now_ms: int) -> Why:
    text = f"Worker {detail['claimed_by']} holds its lease"
    expires = detail.get("lease_expires_at_ms", "")
    if expires.isdigit():
        left_ms = int(expires) - now_ms
        text += (
            f", which runs out in {duration(left_ms)} unless it is renewed"
            if left_ms > 0
            else f", which ran out {duration(-left_ms)} ago and will be taken back"
        )
    return Why(headline="It is running", text=text + ".", tone="good")


def _admissible(job: Json, told: Json) -> Why:
    queue = job["queue"]
    link = (("the queue", "queue", {"name": queue}),)
    if told["live_workers"] < 1:
        return Why(
            headline="No live worker serves its queue",
            text="The gate would admit it, but nobody asks for jobs of this queue.",
            tone="bad",
            links=(("workers", "workers", {}), *link),
        )
    position = int(told["detail"].get("position_in_partition", "0"))
    ahead = "≥ 1,000 jobs" if position >= 1_000 else counted(position, "job")
    sticky = told["detail"].get("sticky_worker")
    if sticky:
        return Why(
            headline="It waits for one worker",
            text=f"Nothing blocks it; only worker {sticky} may take it.",
            tone="",
            links=(("workers", "workers", {}),),
        )
    if position == 0:
        text = "It is the next of its partition: the next worker with room takes it."
    else:
        text = (
            f"{ahead} of its partition {'comes' if position == 1 else 'come'} first. "
            "Workers with room take turns between partitions."
        )
    return Why(headline="Nothing blocks it", text=text, tone="good", links=link)


def _pending(job: Json, detail: Json, now_ms: int) -> Why:
    return Why(
        headline="It is held back",
        text="A pending job runs once somebody promotes it.",
        tone="warn",
    )


def _schedule(job: Json, detail: Json, now_ms: int) -> Why:
    again = job["state"] == State.RETRYABLE
    return Why(
        headline="It waits for its next try" if again else "It is scheduled",
        text=f"It becomes available at {instant(int(detail['scheduled_at_ms']))}.",
        tone="",
    )


def _quarantine(job: Json, detail: Json, now_ms: int) -> Why:
    return Why(
        headline="It is in quarantine",
        text=(
            "Jobs of this content were running when "
            f"{counted(int(detail['crash_count']), 'worker')} died. "
            "It runs again when somebody releases the fingerprint."
        ),
        tone="bad",
        links=(("quarantine", "quarantine", {}),),
    )


def _queue_paused(job: Json, detail: Json, now_ms: int) -> Why:
    return Why(
        headline="Its queue is paused",
        text="Admission skips the queue until somebody resumes it.",
        tone="warn",
        links=(("the queue", "queue", {"name": job["queue"]}),),
    )


def _sticky_worker(job: Json, detail: Json, now_ms: int) -> Why:
    seen = "is unknown"
    if detail["last_seen_ms"]:
        seen = f"was last seen {relative(int(detail['last_seen_ms']), now_ms)}"
    return Why(
        headline="The worker it is pinned to is away",
        text=f"Worker {detail['sticky_worker']} {seen}, and no other may take the job.",
        tone="bad",
        links=(("workers", "workers", {}),),
    )


def _rate_class(job: Json, detail: Json, now_ms: int) -> Why:
    name = detail["rate_class"]
    links: Links = (("rate classes", "rate-classes", {}),)
    if detail.get("paused") == "true":
        headline = "Its rate class is paused"
        text = f"Nothing of class {name} passes until somebody lifts the pause."
    elif "paused_until_ms" in detail:
        headline = "Its rate class is paused for a time"
        reason = detail["reason"]
        text = f"Nothing of class {name} passes before the pause is over"
        text += f" ({reason})." if reason else "."
    elif detail.get("oversize") == "true":
        headline = "It weighs more than its rate class ever has"
        text = (
            f"Its weight is {detail['weight']}, and the burst of class {name} is "
            f"{detail['burst'] or 'less'}. Raise the burst, or cancel the job."
        )
        return Why(headline=headline, text=text, tone="bad", links=links)
    elif "tokens_available" in detail:
        headline = "Its rate class is out of tokens"
        text = (
            f"Class {name} has {counted(int(detail['tokens_available']), 'token')}. "
            f"Jobs that come first need {detail['tokens_ahead_in_class']}, "
            f"this one {detail['weight']}."
        )
    else:
        headline = "Its rate class is closed"
        text = (
            f"A job of class {name} did not fit, so the gate leaves the class out "
            "until it may fit."
        )
    return Why(headline=headline, text=text, tone="warn", links=links)


def _ceiling(job: Json, detail: Json, now_ms: int) -> Why:
    text = (
        f"{detail['inflight']} of {detail['max_concurrent']} jobs run under ceiling "
        f"{detail['ceiling']}, which counts each {detail['scope']}."
    )
    if "next" in detail:
        text += f" When the gate reaches the job it becomes {detail['next']}."
    return Why(
        headline="A ceiling is full",
        text=text,
        tone="warn",
        links=(("ceilings", "limits", {}),),
    )


_BLOCKED = {
    "pending": _pending,
    "schedule": _schedule,
    "quarantine": _quarantine,
    "queue_paused": _queue_paused,
    "sticky_worker": _sticky_worker,
    "rate_class": _rate_class,
    "concurrency_limit": _ceiling,
}


@frozen(kw_only=True)
class Stage:
    """A point on the line of a job's life.

    Attributes:
        status: "done", "now" or "ahead".
    """

    name: str
    at_ms: int | None
    status: str


def lifecycle(job: Json, now_ms: int) -> list[Stage]:
    """Created, scheduled, waiting, running, ended: with the instants that are known."""
    state = job["state"]
    at = {
        "created": job["enqueued_at_ms"],
        "scheduled": job["scheduled_at_ms"],
        "waiting": job["scheduled_at_ms"] if job["scheduled_at_ms"] <= now_ms else None,
        "running": job["claimed_at_ms"],
        "ended": job["finalized_at_ms"],
    }
    reached = {
        State.PENDING: "created",
        State.SCHEDULED: "scheduled",
        State.RETRYABLE: "scheduled",
        State.AVAILABLE: "waiting",
        State.RUNNING: "running",
    }.get(State(state), "ended")
    names = list(at)
    place = names.index(reached)
    stages = [
        Stage(
            name=name,
            at_ms=at[name] if number <= place else None,
            status="done" if number < place else "now" if number == place else "ahead",
        )
        for number, name in enumerate(names)
    ]
    last = stages[-1]
    if reached == "ended":
        stages[-1] = Stage(name=state, at_ms=last.at_ms, status="now")
    return stages


_VERBS = {
    "retry": Event.OPERATOR_RETRY,
    "cancel": Event.OPERATOR_CANCEL,
    "promote": Event.OPERATOR_PROMOTE,
    "reschedule": Event.OPERATOR_RESCHEDULE,
    "edit": Event.EDIT_PAYLOAD,
    "delete": Event.OPERATOR_DELETE,
}


def verbs(state: str) -> frozenset[str]:
    """What an operator may do to a job in a state, by the table of transitions."""
    found = {name for name, event in _VERBS.items() if state in sources_of(event)}
    return frozenset({*found, "replay"})


def bulk_selector(q: str, given: Mapping[str, Any]) -> dict[str, str] | None:
    """What a bulk operation would select for a search; None when it cannot.

    A search that names anything but queue, state, kind or partition has no selector: a
    selector that left something out would touch more jobs than the list shows.
    """
    try:
        wanted = parse_query(q, JobFilter(**given))
    except InvalidRequest:
        return None
    if wanted.queue is None and wanted.state is None:
        return None
    chosen = {n: v for n in _BULK_FIELDS if (v := getattr(wanted, n)) is not None}
    return chosen if wanted == JobFilter(**chosen) else None


def ceiling_load(
    ceiling: Json,
    counts: Mapping[str, Json | None],
    partitions: Mapping[str, list[Json] | None],
) -> str:
    """How full a ceiling is, as far as the figures of a page tell."""
    most, queue = ceiling["max_concurrent"], ceiling["queue"]
    states = counts.get(queue) if ceiling["scope"] == "queue" else None
    if states is not None:
        running = state_counts(states["counts"])[State.RUNNING.value]
        return f"{running:,} of {most:,} running"
    listed = partitions.get(queue) if ceiling["scope"] == "partition" else None
    if listed is not None:
        full = sum(one["inflight"] >= most for one in listed)
        sign = "≥ " if len(listed) >= 200 else ""
        return f"{sign}{full:,} of {sign}{counted(len(listed), 'partition')} full"
    return NOTHING
