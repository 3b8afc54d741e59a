"""Every button and every form of every page sends what the API takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from werkzeug.test import Client

from headgate_sync import MemStore
from headgate_sync.api import ApiConfig
from headgate_sync.api.routes import ROUTES
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.lifecycle import STORED, State
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.schedule import Schedule
from headgate_sync.workers import WorkerMeta
from tests.api.caller import b64
from tests.builders import START_MS, bring_to, enqueue
from tests.console.pages import look

PAGES = (
    "/", "/queues", "/queue?name=q", "/queue?name=idle", "/jobs?queue=q",
    "/rate-classes", "/limits", "/partitions?queue=q", "/periodic", "/workers",
    "/quarantine", *(f"/job?id={state}" for state in sorted(STORED)),
)  # fmt: skip
# What is claimed on the way must be alone; steps of the clock come first.
STATES = (
    State.QUARANTINED, State.ARCHIVED, State.CANCELLED, State.COMPLETED,
    State.UNDECODABLE, State.RETRYABLE, State.RUNNING, State.PENDING, State.SCHEDULED,
    State.AVAILABLE,
)  # fmt: skip
# What somebody types where the page offers nothing; text that is a choice stays out.
TYPED = {"int": 3, "minutes": START_MS + 60_000, "base64": b64(b"ok")}
# A queue that is not empty, as the button says; content that is in quarantine.
REFUSED = {"DELETE /queues/q", "POST /jobs/quarantined/replay"}
_keys = itertools.count()


def filled() -> Client:
    """A console over a store in which there is one of everything."""
    store = MemStore()
    store.freeze_clock_at(START_MS)
    for state in STATES:
        bring_to(
            store, Clock(store), state.value, state, payload=state.value.encode()
        )  # fmt: skip
    enqueue(store, "waiting", partition_key="p", rate_class="c")
    inspect = store.inspect
    inspect.set_queue_weight("idle", 2)
    inspect.set_queue_paused("idle", True)
    for name, paused in (("c", False), ("stopped", True), ("resting", False)):
        inspect.upsert_rate_class(
            RateClassConfig(name=name, limit=1, window_ms=1, burst=1, paused=paused)
        )
    inspect.pause_rate_class("resting", 60_000, "")
    inspect.upsert_concurrency_limit(Ceiling(name="l", queue="q", max_concurrent=1))
    for name, stopped in (("on", False), ("off", True)):
        inspect.upsert_schedule(
            Schedule(
                id=name, kind="k", spec="@daily", next_run_ms=1, paused=stopped
            )
        )  # fmt: skip
    for name in ("w", "asked"):
        inspect.heartbeat_worker(
            WorkerMeta(
                worker_id=name, host="h", pid=1, queues=("q",), concurrency=1,
                started_at_ms=1,
            )
        )  # fmt: skip
    inspect.signal_worker("asked", "quiet")
    api = ApiConfig(rate_limit=None)
    return Client(create_app(store, ConsoleConfig(api=api)))


class Clock:
    """The clock of a store, as builders step it."""

    def __init__(self, store: MemStore) -> None:
        self._store = store

    def now_ms(self) -> int:
        return self._store.inspect.store_now_ms()

    def freeze_at(self, ms: int) -> None:
        self._store.freeze_clock_at(ms)

    def advance_ms(self, by_ms: int) -> None:
        self.freeze_at(self.now_ms() + by_ms)


def sent(console: Client, act: dict[str, Any]) -> Any:
    """Send what the script of the page would send for a button or a form."""
    path, body = act["path"], act.get("body")
    for given in act.get("fields", ()):
        if "data-part" in given:
            path += "made"
        elif given.get("name") and (given.get("value") or "required" in given):
            typed = given.get("value") or TYPED[given["data-type"]]
            whole = given.get("data-type") == "int"
            if given.get("data-type") == "minutes":
                typed = TYPED["minutes"]
            body = {**(body or {}), given["name"]: int(typed) if whole else typed}
        elif given.get("name") == "queue":
            body = {**(body or {}), "queue": "q"}
        elif given.get("data-empty") == "null":
            body = {**(body or {}), given["name"]: None}
    if body == {} and "emptyMethod" in act:
        return console.open(
            f"/api/v1{path}",
            method=act["emptyMethod"],
            headers={"Idempotency-Key": f"k{next(_keys)}"},
        )
    return console.open(
        f"/api/v1{path}",
        method=act["method"],
        json=body,
        headers={"Idempotency-Key": f"k{next(_keys)}"},
    )


@pytest.mark.parametrize("address", PAGES)
def test_what_a_page_offers_is_done(address: str) -> None:
    for place in range(len(look(filled(), address).acts)):
        console = filled()
        act = look(console, address).acts[place]
        if f"{act['method']} {act['path']}" in REFUSED:
            continue
        answer = sent(console, act)
        assert answer.status_code < 300, (act, answer.text)


def test_the_table_of_states_is_whole() -> None:
    assert {state.value for state in STATES} == set(STORED)


def test_the_pages_offer_every_change_of_the_api() -> None:
    offered = {
        (act["method"], act["path"].partition("?")[0])
        for address in PAGES
        for act in look(filled(), address).acts
    }
    # What the script sends by itself, for selections and for all that match; jobs and
    # schedules are made by code, and a schedule is declared there.
    elsewhere = {
        ("POST", "/jobs"), ("POST", "/jobs/actions"), ("POST", "/jobs/bulk"),
        ("PUT", "/periodic/{id}"), ("DELETE", "/queues/{queue}/enqueue-limit"),
    }  # fmt: skip
    for route in ROUTES:
        if not route.mutates or (route.method, route.path) in elsewhere:
            continue
        found = [
            path
            for method, path in offered
            if method == route.method
            and route.match(tuple((path + "x" * path.endswith("/")).split("/")[1:]))
            is not None
        ]
        assert found, f"{route.method} {route.path}"
