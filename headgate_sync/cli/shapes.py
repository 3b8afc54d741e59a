"""Values of the ports as plain JSON objects, in the shapes of the HTTP API."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs

from headgate_sync.backlog import QueueStats, StateCounts
from headgate_sync.inspection import JobSummary
from headgate_sync.lease import Checkpoint
from headgate_sync.loglines import read_line
from headgate_sync.policies import RateClassState
from headgate_sync.semantics import SEMANTICS
from headgate_sync.workers import ClusterView, WorkerState

Json = dict[str, Any]
_HEADERS = "headers"


def plain(value: Any) -> Any:
    """Attributes become keys, bytes base64, and what is no JSON its nearest form."""
    if attrs.has(type(value)):
        names = [attribute.name for attribute in attrs.fields(type(value))]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return value


def job(found: JobSummary) -> Json:
    """A job; with payload and metadata where they were read."""
    shape: Json = plain(found)
    del shape["periodic_schedule_id"], shape["periodic_tick_ms"]
    payload, headers = shape.pop("payload"), shape.pop(_HEADERS)
    if found.payload is not None:
        shape |= {"payload": payload, "metadata": headers}
    for entry in shape["errors"]:
        entry["logs"] = [_line(text) for text in entry["logs"]]
    return shape | {
        "orphaned": found.orphaned,
        "periodic_origin": plain(found.periodic_origin),
    }


def _line(text: str) -> Json:
    """A log line; a plain one has no instant."""
    line = read_line(text)
    shape: Json = plain(line)
    return shape | {"at_ms": line.at_ms or None}


def queue(stats: QueueStats) -> Json:
    """A queue with its backlog."""
    shape: Json = plain(stats)
    return shape | {
        "by_state": states(stats.by_state),
        "count_is_approximate": stats.by_state.approximate,
    }


def states(counts: StateCounts) -> list[Json]:
    """Jobs by state."""
    return [{"state": state, "count": n} for state, n in sorted(counts.counts.items())]


def rate_class(found: RateClassState) -> Json:
    """A rate class; the fields of its first budget stand beside its name too."""
    shape: Json = plain(found)
    first = found.budgets[0] if found.budgets else None
    return shape | {
        "limit_per_window": None if first is None else first.limit,
        "window_ms": None if first is None else first.window_ms,
        "burst": None if first is None else first.burst,
        "tokens_available": found.tokens_available,
    }


def worker(found: WorkerState) -> Json:
    """A worker with its ratios."""
    shape: Json = plain(found)
    return shape | {
        "utilization": found.utilization,
        "empty_poll_ratio": found.empty_poll_ratio,
    }


def semantics() -> list[Json]:
    """What is promised; which tests show it is for the documentation."""
    rows: list[Json] = [plain(row) for row in SEMANTICS]
    for row in rows:
        del row["tests"]
    return rows


def checkpoint(found: Checkpoint) -> Json:
    """The steps of a job that are done."""
    shape: Json = plain(found)
    done = found.completed_steps
    return shape | {"last_completed_step": done[-1] if done else None}


def cluster(view: ClusterView) -> Json:
    """The fleet with its ratios."""
    shape: Json = plain(view)
    counts = {name: shape.pop(name) for name in ("live", "late", "stale")}
    return shape | {
        "workers": counts | {"total": view.total},
        "utilization": view.utilization,
        "empty_poll_ratio": view.empty_poll_ratio,
    }
