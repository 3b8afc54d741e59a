"""Hostile text in a real browser: it stays text, runs nothing and loads nothing."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest

from headgate_sync.api.config import LiveUpdates
from headgate_sync.console.pages import PAGES
from headgate_sync.console.text import visible
from headgate_sync.identity import Identity
from headgate_sync.store import Store
from tests.backends import Clock, PostgresBackend
from tests.builders import counts, enqueue, steer
from tests.console.browsing import GO_ON, operating, wider_by
from tests.console.hostile import EVIL, HOSTILE, spread

pytestmark = pytest.mark.browser
HIDDEN = HOSTILE[4]
MARKS = frozenset("\u202e\u2066\u0007\u001b\u007f")
# What no page of ours has, and what each of these texts tries to make.
STRANGE = "img, iframe, object, link[href*=evil], [onload], [onerror], [style]"
# Pages that are about one of the texts, and the name they know it by.
ABOUT = {"queue": "name", "jobs": "queue", "job": "id", "partitions": "queue"}


@pytest.fixture
def clock(postgres: PostgresBackend) -> Clock:
    """The clock of the store."""
    return postgres.clock


@pytest.fixture
def store(postgres: PostgresBackend) -> Store:
    """An empty store over PostgreSQL."""
    return postgres.make_store()


def addresses() -> list[str]:
    """Every page, and those about something with each of the texts."""
    found = [page.path for page in PAGES if page.path not in ("queue", "job")]
    for place, text in enumerate(EVIL):
        found += [f"{path}?{urlencode({name: text})}" for path, name in ABOUT.items()]
        found += [f"job?id={name}-{place}" for name in ("dead", "given-up", "runs")]
    return [*found, "periodic?events=s-0"]


def test_every_page_is_whole_and_runs_nothing(store, clock, served, page):
    """At both widths; what happens that must not is a fault of the window."""
    spread(store, clock, EVIL)

    def somebody(environ: dict[str, Any]) -> Identity:
        return Identity(EVIL[1])

    base = served(title=EVIL[1], authenticate=somebody, live=LiveUpdates(max_streams=0))
    for address in addresses():
        page.set_viewport_size({"width": 1600, "height": 1000})
        page.goto(f"{base}/{address}", wait_until="domcontentloaded")
        assert wider_by(page) <= 0, address
        assert page.locator(STRANGE).count() == 0, address
        assert not MARKS & set(page.locator("body").inner_text()), address
        page.set_viewport_size({"width": 360, "height": 800})
        assert wider_by(page) <= 0, address


@pytest.mark.parametrize("text", [EVIL[1], HIDDEN, *EVIL[-3:]], ids=range(5))
def test_what_is_asked_and_told_stays_text_too(store, clock, served, page, text):
    """Questions, toasts, the payload on demand, and a verb on all that match."""
    spread(store, clock, [text])
    page.goto(f"{served()}/job?{urlencode({'id': text})}")
    for button in ("payload and headers", "output"):
        page.get_by_role("button", name=f"Show {button}").click()
        page.locator("#shown pre").first.wait_for()
        assert page.locator("#shown pre").first.inner_text() == visible(text)
    page.get_by_role("link", name=visible(text), exact=True).first.click()
    page.get_by_role("link", name="all of this queue").click()
    page.get_by_role("button", name="Cancel all that match").click()
    question = page.locator("#ask-text")
    question.wait_for()
    told = " ".join(question.inner_text().split())
    assert f"with queue {' '.join(visible(text).split())}?" in told
    with operating(store):
        page.locator(GO_ON).click()
        page.get_by_text("Done: 3 jobs").wait_for()
    page.get_by_label("Select all jobs").check()
    page.locator("[data-selection=cancel]").click()
    page.locator(GO_ON).click()
    refusals = page.locator(".toast.bad")
    refusals.first.wait_for()
    assert not MARKS & set(page.locator("body").inner_text())
    assert page.locator(STRANGE).count() == 0


@pytest.mark.parametrize("how", ["as it is", "as it is written"])
def test_a_name_with_hidden_marks_can_be_typed(store, served, page, how):
    enqueue(store, "a", queue=HIDDEN)
    steer(store).delete_job("a")
    page.goto(f"{served()}/queue?{urlencode({'name': HIDDEN})}")
    page.get_by_role("button", name="Delete the empty queue").click()
    shown = page.locator("#ask code").inner_text()
    assert shown == visible(HIDDEN)
    page.locator("#ask input").fill(HIDDEN if how == "as it is" else shown)
    page.locator(GO_ON).click()
    page.get_by_text("The queue is gone").wait_for()
    assert counts(store) == {}
