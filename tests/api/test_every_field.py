"""Whatever stands in any field of any route is done or refused, and never half done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headgate_sync.api.routes import ROUTES
from headgate_sync.api.routing import Route
from headgate_sync.store import Store
from headgate_sync.workers import WorkerMeta
from tests.api.caller import Caller, b64, caller
from tests.builders import enqueue, envelope, steer
from tests.contract.test_schedules import schedule
from tests.observe import differences

# As they stand in JSON: Python's own writer would never send some of them.
HOSTILE = (
    r'"\u0000"', r'"\udfff\ud800x"', '""', r'"\r\nX-Injected: yes"',
    '"\'; DROP TABLE headgate.headgate_job; --"', '"' + "x" * 70_000 + '"',
    "-1", "9223372036854775807", "9223372036854775808", "1e999", "1.0", "true", "null",
    "[]", "{}", r'["\ud800"]', "[[]]", r'{"a\u0000": "x"}', '{"": ""}',
    "9" * 4_000, "[" * 2_000 + "]" * 2_000,
)  # fmt: skip
IN_PATHS = (
    "%00", "%ED%A0%80", "%FF", "..", "%2F", "%0d%0aX-Injected: y", "%27%3B--",
    "x" * 70_000, "%F0%9F%98%80",
)  # fmt: skip
IN_QUERIES = (
    *IN_PATHS, "", "0", "-1", "9223372036854775807", "9223372036854775808", "1e9",
    "%D9%A1", "1_0", "LTE", "OTk5OTk5OTk5", "state:", ":", "priority:%D9%A1", "tag:%00",
)  # fmt: skip


def fine(name: str) -> Any:
    """A value that a field of this name takes."""
    return {
        "payload": b64(b"ok"), "kind": "k", "spec": "@every:60000", "action": "retry",
        "ids": ["a"], "selector": {"queue": "none"}, "command": "quiet",
        "partition_key": "p", "queue": "q", "scheduled_at_ms": 2_000_000,
    }.get(name, 1)  # fmt: skip


def body_of(route: Route, but: str = "") -> dict[str, Any]:
    return {
        one.name: fine(one.name)
        for one in route.body or ()
        if one.required and one.name != but
    }


def path_of(route: Route, **instead: str) -> str:
    path = route.path
    for name in route.variables:
        known = {"id": "a", "queue": "q", "fingerprint": "f"}
        path = path.replace(f"{{{name}}}", instead.get(name, known.get(name, "n")))
    for one in route.query:
        if one.required and one.name not in instead:
            path += f"?{one.name}={fine(one.name)}"
    return path


def send(
    api: Caller, route: Route, key: str, path: str, data: str | None
) -> tuple[int, str]:
    """The status, and for a refusal what it says; of the key ids are made."""
    options: dict[str, Any] = {"key": key}
    if route.body is not None:
        options |= {"data": data, "content_type": "application/json"}
    answer = api.send(route.method, path, **options)
    assert answer.status_code < 500
    assert "X-Injected" not in answer.headers
    if answer.status_code < 400:
        return answer.status_code, ""
    assert answer.content_type == "application/json"
    return answer.status_code, answer.json["error"]


def fill(store: Store) -> Caller:
    enqueue(store, "a", rate_class="n", partition_key="p")
    store.enqueue([envelope("b", pending=True), envelope("c", delay_ms=60_000)])
    steer(store).upsert_schedule(schedule("a"))
    steer(store).heartbeat_worker(
        WorkerMeta(
            worker_id="a", host="h", pid=1, queues=("q",), concurrency=1,
            started_at_ms=1,
        )
    )  # fmt: skip
    return caller(store)


def requests(route: Route) -> Iterator[tuple[str, str | None]]:
    """Each field, name and parameter with each hostile value, the others being fine."""
    for one in route.body or ():
        rest = json.dumps(body_of(route, but=one.name))[:-1]
        for text in HOSTILE:
            comma = ", " if len(rest) > 1 else ""
            yield path_of(route), f'{rest}{comma}"{one.name}": {text}}}'
    whole = None if route.body is None else json.dumps(body_of(route))
    for name in route.variables:
        for text in IN_PATHS:
            yield path_of(route, **{name: text}), whole
    for one in route.query:
        for text in IN_QUERIES:
            path = path_of(route, **{one.name: ""})
            yield f"{path}{'&' if '?' in path else '?'}{one.name}={text}", whole


ALL = [route for route in ROUTES if route.path != "/events"]
NAMES = [f"{route.method} {route.path}" for route in ALL]


@pytest.mark.parametrize("route", ALL, ids=NAMES)
def test_a_hostile_value_is_done_or_refused_alike(memory, postgres, route):
    """A refusal leaves nothing behind; both stores refuse the same in equal words."""
    stores = memory.make_store(), postgres.make_store()
    apis = [fill(store) for store in stores]
    before = {**memory.image(), "idempotency": None}
    for number, (path, data) in enumerate(requests(route)):
        answers = [send(api, route, f"key-{number}", path, data) for api in apis]
        assert answers[0] == answers[1], (path[:200], (data or "")[:200])
        after = {**memory.image(), "idempotency": None}
        if answers[0][0] >= 400:
            assert after == before, (path[:200], (data or "")[:200], answers[0])
        before = after
    assert differences(memory.snapshot(), postgres.snapshot()) == []
