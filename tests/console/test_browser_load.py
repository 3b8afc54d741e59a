"""The console in a real browser over a hundred thousand jobs.

With HEADGATE_SCREENSHOTS=directory each page is also left there as a picture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headgate_sync.api.config import LiveUpdates
from headgate_sync.console.pages import PAGES
from headgate_sync.lifecycle import STORED
from headgate_sync.postgres.store import PgStore
from headgate_sync.search import JobFilter
from tests.builders import enqueue, steer
from tests.console.browsing import GO_ON, faint, operating, serving, wider_by, window
from tests.console.load import BIG, CLOSED, PAUSED, RETIRED, loaded

pytestmark = pytest.mark.browser
PICTURES = os.environ.get("HEADGATE_SCREENSHOTS")
# An address, and what is there once the page shows what it is for.
LOOKS = {
    "": '[data-key="pressure"] tbody tr',
    "queues": ".queue.panel:nth-child(50)",
    f"queue?name={quote(BIG)}": '[data-key="partitions"] tbody tr',
    f"queue?name={quote(CLOSED)}": "text=closed to producers",
    f"queue?name={quote(PAUSED)}": ".title .badge.warn",
    "jobs": ".jobs tbody tr:nth-child(50)",
    "jobs?state=archived&q=tag:vip": ".jobs .s-archived",
    f"jobs?queue={quote(BIG)}": "[data-bulk]",
    "rate-classes": ".budget",
    "limits": "text=partitions full",
    f"partitions?queue={quote(BIG)}": "tbody tr:nth-child(100)",
    "quarantine": "tbody tr:nth-child(100)",
    "periodic": "tbody tr:nth-child(100)",
    "periodic?events=report-000": '[data-key="events"] tbody tr:nth-child(90)',
    "workers": "tbody tr:nth-child(100)",
}  # fmt: skip


@pytest.fixture(scope="module")
def store(server_url: str) -> Iterator[PgStore]:
    """The store that has it all."""
    with loaded(server_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def base(store: PgStore) -> Iterator[str]:
    """Where its console is served, for many pages in a short time."""
    with serving(store, live=LiveUpdates(max_streams=0)) as address:
        yield address


def looks(store: PgStore) -> dict[str, str]:
    """Every page, and a job in each state."""
    found = dict(LOOKS)
    for state in sorted(STORED):
        [job] = steer(store).list_jobs(JobFilter(state=state), None, 1).jobs
        found[f"job?id={job.id}"] = f".title .s-{state}"
    assert {address.partition("?")[0] for address in found} == {p.path for p in PAGES}
    return found


def keep_picture(page: Any, address: str, name: str) -> None:
    """Leave a picture for whoever wants to look."""
    if PICTURES is not None:
        shown = re.sub(r"\W+", "-", address) or "overview"
        page.screenshot(path=Path(PICTURES) / f"{shown}-{name}.png", full_page=True)


@pytest.mark.parametrize("width", [360, 1600])
def test_every_page_is_whole_at_each_width_and_in_each_colour(
    store, base, browser, faults, width
):
    with window(browser, faults, width=width, height=900) as page:
        for address, shown in looks(store).items():
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                if scheme == "light":
                    page.goto(f"{base}/{address}", wait_until="domcontentloaded")
                    page.locator(shown).first.wait_for()
                assert faint(page) == [], f"{address} in {scheme}"
                keep_picture(page, address, f"{width}-{scheme}")
            assert wider_by(page) <= 0, address


def test_too_faint_a_text_would_be_found(base, page):
    page.goto(f"{base}/quarantine")
    assert faint(page) == []
    page.evaluate("document.querySelector('h1').style.color = '#aaa'")
    assert len(faint(page)) == 1


# Finding jobs


def rows(page: Any) -> list[str]:
    """The jobs that a list shows, in its order."""
    found: list[str] = page.locator(".jobs tbody td:nth-child(2) a").all_inner_texts()
    return found


def test_a_search_and_its_pages_lead_forth_and_back(base, page):
    page.goto(f"{base}/jobs")
    page.keyboard.press("/")
    page.keyboard.type("tag:vip export")
    page.get_by_placeholder("any queue").fill(BIG)
    page.get_by_role("button", name="Search").click()
    page.get_by_role("link", name="available").first.click()
    page.wait_for_url("**state=available**")
    seen = [rows(page)]
    for _ in range(2):
        with page.expect_navigation():
            page.get_by_role("link", name="Next").click()
        seen.append(rows(page))
    assert [len(found) for found in seen] == [50, 50, 50]
    assert len({id for found in seen for id in found}) == 150
    assert set(page.locator(".jobs td:nth-child(3)").all_inner_texts()) == {
        "export:csv"
    }
    for earlier in reversed(seen[:-1]):
        with page.expect_navigation():
            page.get_by_role("link", name="Previous").click()
        assert rows(page) == earlier
    assert page.get_by_role("link", name="Previous").count() == 0


@pytest.mark.parametrize(
    "address",
    ["queues", f"partitions?queue={quote(BIG)}", "quarantine", "periodic", "workers"],
)
def test_every_list_has_a_next_page_and_a_way_back(base, page, address):
    page.goto(f"{base}/{address}")
    keys = "#main article[data-key], #main tbody tr[data-key]"
    read = "(all) => all.map((el) => el.dataset.key)"
    first = page.locator(keys).evaluate_all(read)
    with page.expect_navigation():
        page.get_by_role("link", name="Next page").click()
    second = page.locator(keys).evaluate_all(read)
    assert len(second) > 0
    with page.expect_navigation():
        page.get_by_role("link", name="First page").click()
    assert page.locator(keys).evaluate_all(read) == first
    if address != "queues":  # each of its pages shows some of the partitions too
        assert set(first).isdisjoint(second)


# Acting on many


def test_a_verb_on_all_that_are_selected(store, base, page):
    wanted = JobFilter(queue=RETIRED, state="cancelled")
    before = len(steer(store).list_jobs(wanted, None, 200).jobs)
    page.goto(f"{base}/jobs?queue={quote(RETIRED)}&state=available")
    page.get_by_label("Select all jobs").check()
    page.get_by_text("50 selected").wait_for()
    page.locator("[data-selection=cancel]").click()
    assert page.locator("#ask-text").inner_text() == "Cancel 50 jobs?"
    page.locator(GO_ON).click()
    page.get_by_text("50 of 50 done").wait_for()
    page.get_by_text("none selected").wait_for()
    assert len(steer(store).list_jobs(wanted, None, 200).jobs) == before + 50


def test_a_verb_on_all_that_match_is_followed_to_its_end(store, base, page):
    inspect = steer(store)
    page.goto(f"{base}/jobs?queue={quote(BIG)}&state=scheduled")
    page.get_by_role("button", name="Cancel all that match").click()
    question = page.locator("#ask-text")
    question.wait_for()
    told = re.search(r"Cancel ([\d,]+) jobs with queue", question.inner_text())
    assert told is not None
    estimated = int(told[1].replace(",", ""))
    assert estimated > 1_000
    with operating(store):
        page.locator(GO_ON).click()
        page.get_by_text("Under way").wait_for()
        page.get_by_text(f"Done: {estimated:,} jobs").wait_for()
    page.get_by_text("No job matches").wait_for()
    assert not inspect.list_jobs(JobFilter(queue=BIG, state="scheduled")).jobs


# Looking on while things change, with the store's own signals


def test_a_list_refreshes_while_an_operator_types(store, browser, faults):
    with serving(store) as address, window(browser, faults) as page:
        page.goto(f"{address}/jobs?queue={quote(RETIRED)}")
        box = page.locator('input[name="q"]')
        box.press_sequentially("half a wo")
        page.locator('input[name="job"]').nth(3).check()
        box.focus()
        enqueue(store, "comes-later", queue=RETIRED)
        page.get_by_role("link", name="comes-later").wait_for()
        box.press_sequentially("rd")
        assert box.input_value() == "half a word"
        assert page.locator("#selected").inner_text() == "1 selected"


def test_figures_follow_the_store_until_somebody_pauses_them(store, browser, faults):
    with serving(store) as address, window(browser, faults) as page:
        page.goto(f"{address}/queue?name=live")
        page.get_by_text("No job is kept in this queue").wait_for()
        for first, last in ((1, 7), (8, 27)):
            ids = (f"live-{number}" for number in range(first, last + 1))
            enqueue(store, *ids, queue="live")
            page.locator(".card .big", has_text=re.compile(f"^{last}$")).wait_for()
        page.get_by_role("button", name="Live").click()
        page.get_by_role("button", name="Paused").wait_for()
        enqueue(store, "unseen", queue="live")
        with page.expect_response("**/queue?name=live") as read:
            page.get_by_role("button", name="Paused").click()
        assert read.value.status == 200
        page.locator(".card .big", has_text=re.compile("^28$")).wait_for()
