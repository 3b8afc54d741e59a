"""Every button and every form of every page sends what the API takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from werkzeug.test import Client

from headgate_sync.api import ApiConfig
from headgate_sync.api.routes import ROUTES
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.lifecycle import STORED
from tests.api.caller import b64
from tests.backends import MemoryBackend
from tests.builders import START_MS
from tests.console.furnished import ADDRESSES, REFUSED, STATES, furnish, typed
from tests.console.pages import look

# As the script of the page sends what was typed.
READERS = {
    "int": int,
    "minutes": lambda text: START_MS + int(text) * 60_000,
    "base64": lambda text: b64(text.encode()),
}
_keys = itertools.count()


def filled() -> Client:
    """A console over a store in which there is one of everything."""
    backend = MemoryBackend()
    store = backend.make_store()
    furnish(store, backend.clock)
    api = ApiConfig(rate_limit=None)
    return Client(create_app(store, ConsoleConfig(api=api)))


def sent(console: Client, act: dict[str, Any], *, whole: bool) -> Any:
    """Send what the script of the page would send for a button or a form."""
    path, body = act["path"], act.get("body")
    method = act["method"]
    empty = True
    for given in act.get("fields", ()):
        text = typed(given, whole=whole)
        text = given.get("value") if text is None else text
        if "data-part" in given:
            path += text
        elif text:
            empty = False
            read = READERS.get(given.get("data-type"), str)
            body = {**(body or {}), given["name"]: read(text)}
        elif given.get("data-empty") == "null":
            body = {**(body or {}), given["name"]: None}
    if empty and "emptyMethod" in act:
        method, body = act["emptyMethod"], None
    return console.open(
        f"/api/v1{path}",
        method=method,
        json=body,
        headers={"Idempotency-Key": f"k{next(_keys)}"},
    )


@pytest.mark.parametrize("whole", [False, True], ids=["needed", "whole"])
@pytest.mark.parametrize("address", ADDRESSES)
def test_what_a_page_offers_is_done(address: str, whole: bool) -> None:
    for place, offered in enumerate(look(filled(), address).acts):
        if whole and "fields" not in offered:
            continue
        console = filled()
        act = look(console, address).acts[place]
        if f"{act['method']} {act['path']}" in REFUSED:
            continue
        answer = sent(console, act, whole=whole)
        assert answer.status_code < 300, (act, answer.text)


def test_the_table_of_states_is_whole() -> None:
    assert {state.value for state in STATES} == set(STORED)


def test_the_pages_offer_every_change_of_the_api() -> None:
    offered = {
        (act["method"], act["path"].partition("?")[0])
        for address in ADDRESSES
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
