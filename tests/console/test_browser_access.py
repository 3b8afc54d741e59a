"""Somebody who may only read, in a real browser: nothing is offered or done."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headgate_sync.api import TokenAuth
from headgate_sync.api.config import LiveUpdates
from headgate_sync.api.routes import ROUTES
from headgate_sync.identity import Identity
from headgate_sync.store import Store
from tests.backends import PostgresBackend
from tests.console.browsing import take_out, window
from tests.console.furnished import ADDRESSES, furnish

pytestmark = pytest.mark.browser
OFFERED = (
    "[data-act], [data-bulk], [data-selection], [data-open], [data-fill],"
    " dialog:not(#ask), main input[type=checkbox]"
)
TOKEN, READ_TOKEN = "t" * 20, "r" * 20
# A job that is ready, one that has ended, and all other pages.
LOOKED_AT = [
    a
    for a in ADDRESSES
    if "job?" not in a or a.partition("=")[2] in ("available", "archived")
]
NAMES = {"id": "waiting", "queue": "q", "name": "c", "fingerprint": "f"}
_SEND = """([method, path]) => fetch("/api/v1" + path, {
  method,
  headers: {
    "Idempotency-Key": crypto.randomUUID(), "Content-Type": "application/json",
  },
  body: "{}",
}).then((answer) => answer.status)"""


def only_reading(identity: Identity | None, method: str, path: str) -> bool:
    """A hook that allows nothing but looking."""
    return method == "GET"


READERS: dict[str, dict[str, Any]] = {
    "read_only": {"read_only": True},
    "hook": {"authorize": only_reading},
    "token": {"authenticate": TokenAuth(TOKEN, READ_TOKEN)},
}


@pytest.fixture
def store(postgres: PostgresBackend) -> Store:
    """A store over PostgreSQL that has one of everything."""
    made = postgres.make_store()
    furnish(made, postgres.clock)
    return made


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_is_offered_nothing_and_refused_everything(
    postgres, served, browser, faults, reader
):
    base = served(live=LiveUpdates(max_streams=0), **READERS[reader])
    before = postgres.image()
    credentials = {"username": "any", "password": READ_TOKEN}
    with window(browser, faults, http_credentials=credentials) as page:
        for address in LOOKED_AT:
            page.goto(base + address)
            page.get_by_text("read-only").wait_for()
            assert page.locator(OFFERED).count() == 0, address
        assert faults == []
        for route in ROUTES:
            if route.mutates:
                path = re.sub(r"\{(\w+)\}", lambda name: NAMES[name[1]], route.path)
                status = page.evaluate(_SEND, [route.method, path])
                assert status == 403, f"{route.method} {path}"
                take_out(page, faults, "403")
    assert postgres.image() == before
