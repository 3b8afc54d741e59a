"""Whatever a caller puts in: a typed refusal, in the same words on each store."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from headgate_sync.errors import HeadgateError, InvalidRequest
from headgate_sync.idempotency import ClaimStatus, KeyClaim, StoredAnswer
from headgate_sync.lease import (
    Ack,
    AdmitRequest,
    Checkpoint,
    JobResult,
    LeaseRef,
    ProgressUpdate,
)
from headgate_sync.lifecycle import Outcome
from headgate_sync.operations import BulkAction, BulkRequest
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.schedule import Schedule, ScheduleEvent
from headgate_sync.search import JobFilter
from headgate_sync.store import CAPABILITIES, Store
from headgate_sync.workers import WorkerMeta
from tests.builders import envelope

GOOD: dict[str, Any] = {
    "after": (1, "s"),
    "acks": [Ack(lease=LeaseRef("a", "l", 1), outcome=Outcome.SUCCESS)],
    "at_ms": 5,
    "actual_weight": 1,
    "batch": [envelope("a")],
    "checkpoint": Checkpoint(),
    "before_event_id": 5,
    "bucket_ms": 60_000,
    "cursor": None,
    "cutoff_ms": 5,
    "delay_ms": 5,
    "error": "e",
    "error_code": "E",
    "event": ScheduleEvent(
        schedule_id="s", tick_ms=1, job_id="", outcome="failed", reason="r"
    ),
    "filter": JobFilter(),
    "fingerprint": "f",
    "force": False,
    "from_ms": 5,
    "holder": "h",
    "ids": ["a"],
    "include_payload": False,
    "job_id": "a",
    "latency_ms": 1,
    "lease": LeaseRef("a", "l", 1),
    "lease_ms": 1_000,
    "leases": [LeaseRef("a", "l", 1)],
    "limit": 5,
    "logs": ("l",),
    "month": "202501",
    "name": "n",
    "names": ["n"],
    "new_id": "n",
    "older_than_ms": 5,
    "operation_id": "o",
    "outcome": Outcome.RETRY,
    "output": JobResult(1, b""),
    "partition_key": "p",
    "paused": True,
    "payload": b"",
    "progress": ProgressUpdate(current=1, total=2),
    "quantum": 1,
    "queue": "q",
    "queues": ["q"],
    "reason": "r",
    "reason_code": "r",
    "request": AdmitRequest(
        worker="w", lease_id="l", queues=("q",), capacity=1, lease_ms=1_000
    ),
    "result": JobResult(1, b""),
    "retention_ms": 5,
    "run_at_ms": 5,
    "schedule": Schedule(id="s", kind="k", spec="@daily", next_run_ms=5),
    "schedule_id": "s",
    "schema_version": 1,
    "since_ms": 0,
    "stale_after_ms": 5,
    "started_at_ms": 5,
    "states": ["completed"],
    "to_ms": 9,
    "weight": 1,
    "answer": StoredAnswer(status=200, headers="{}", body=b""),
    "claim": KeyClaim(status=ClaimStatus.STARTED),
    "key": "k",
    "request_sha256": "d",
    "route": "GET /",
    "ttl_ms": 5,
    "worker_id": "w",
    "command": "quiet",
    "meta": WorkerMeta(
        worker_id="w", host="h", pid=1, queues=("q",), concurrency=1, started_at_ms=5
    ),
}
NOT_TEXT = ("\0", "a\0b", "\ud800", 5, b"q", ["q"], True, 2.5)
NOT_INT = ("1", 1.0, True, None, b"1", 2**63, 2**80, -(2**63) - 1, -1)
NOT_SEQUENCE = (5, None, "text", [None], [5], ["\0"], [b"x"], {"a": 1}, object())
HOSTILE: dict[type, tuple[Any, ...]] = {
    str: NOT_TEXT,
    int: NOT_INT,
    bool: (1, None, "yes"),
    bytes: ("text", None, 5, bytearray(b"x")),
    list: NOT_SEQUENCE,
    tuple: (5, "text", [5], ["\ud800x", None]),
    object: (None, 5, "text", object()),
}
# Texts that are stored for people to read are made storable, not refused.
MADE_STORABLE = {"error", "logs"}
OPTIONAL = {
    *("actual_weight", "command", "delay_ms", "latency_ms", "limit", "quantum"),
    "cursor",
}
# Arguments that hold for a connection of the database: other suites have them.
SURFACES = {
    "store": Store,
    **{
        n: p for n, p in CAPABILITIES.items() if n not in ("transactional", "notifying")
    },
}
# Of two arguments that exclude each other the second is left out.
EXCLUDES = {("queue_stats", "cursor"): "queues"}
# Whatever is asked for is cut to what a page may hold.
CLAMPED = {("list_jobs", "limit"), ("sample_queue_memory", "limit")}
FOR_ONE = {
    ("reindex_concurrently", "name"): "headgate_job_due",
    ("run_pending_operations", "batch"): 5,
    ("create_operation", "request"): BulkRequest(
        id="o", action=BulkAction.CANCEL, queue="q"
    ),
}
ARCHIVE_ENDS_AT_MS = 1_956_528_000_000
CONFIGS = {
    "upsert_rate_class": RateClassConfig(name="n", limit=1, window_ms=1, burst=1),
    "upsert_concurrency_limit": Ceiling(name="n", queue="q", max_concurrent=1),
}


def methods() -> Iterator[tuple[str, str]]:
    for surface, protocol in SURFACES.items():
        for name, member in inspect.getmembers(protocol, inspect.isfunction):
            if (
                not name.startswith("_")
                and len(inspect.signature(member).parameters) > 1
            ):
                yield surface, name


def good(name: str, parameter: str) -> Any:
    if (name, parameter) in FOR_ONE:
        return FOR_ONE[name, parameter]
    return CONFIGS[name] if parameter == "config" else GOOD[parameter]


def hostile(name: str, parameter: inspect.Parameter, value: Any) -> list[Any]:
    if parameter.name in MADE_STORABLE:
        return []
    kind = next(
        kind
        for kind in HOSTILE
        if isinstance("" if value is None else value, kind)
        and not (kind is int and type(value) is not int)
    )
    bad = list(HOSTILE[kind])
    if (name, parameter.name) in CLAMPED:
        bad = [b for b in bad if type(b) is not int or abs(b) > 2**63]
    if parameter.default is None or parameter.name in OPTIONAL:
        bad = [b for b in bad if b is not None]
    return bad


CASES = [
    pytest.param(surface, name, parameter.name, id=f"{name}-{parameter.name}")
    for surface, name in methods()
    for parameter in list(
        inspect.signature(getattr(SURFACES[surface], name)).parameters.values()
    )[1:]
]


def told(store: Any, surface: str, name: str, arguments: dict[str, Any]) -> Any:
    owner = store if surface == "store" else getattr(store, surface)
    if owner is None:
        return None
    try:
        getattr(owner, name)(**arguments)
    except HeadgateError as error:
        return type(error), str(error)
    return "accepted"


@pytest.mark.parametrize(("surface", "name", "argument"), CASES)
def test_no_argument_gets_past_the_port_unchecked(
    memory: Any, postgres: Any, surface: str, name: str, argument: str
) -> None:
    stores = [memory.make_store(), postgres.make_store()]
    if argument == "month":  # one that has not ended is refused, rightly
        postgres.clock.freeze_at(ARCHIVE_ENDS_AT_MS)
    function = getattr(SURFACES[surface], name)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    arguments = {p.name: good(name, p.name) for p in parameters}
    arguments.pop(EXCLUDES.get((name, argument), ""), None)
    parameter = next(p for p in parameters if p.name == argument)
    for store in stores:
        said = told(store, surface, name, arguments)
        assert said is None or said[0] is not InvalidRequest, said
    for bad in hostile(name, parameter, arguments[argument]):
        given = {**arguments, argument: bad}
        answers = [told(store, surface, name, given) for store in stores]
        answers = [answer for answer in answers if answer is not None]
        assert len(set(answers)) == 1, f"{name}({argument}={bad!r}): {answers}"
        assert answers[0][0] is InvalidRequest, f"{name}({argument}={bad!r}): {answers}"


@pytest.mark.parametrize(
    "fields",
    [("a\0", "l", 1), ("a", "\ud800", 1), (5, "l", 1), ("a", "l", -1), ("a", "l", "1")],
)
def test_a_lease_that_exists_can_be_looked_up(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest):
        LeaseRef(*fields)
