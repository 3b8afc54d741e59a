"""The console in a real browser, against a real server: clicks, refreshes, widths."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from headgate_sync import MemStore
from headgate_sync.console.pages import PAGES
from headgate_sync.console.server import serve
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.store import Store
from tests.builders import enqueue, envelope, steer

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=alert(1)>\u202e\u0007" + "w" * 180


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        # Without a sandbox, since root has none; nothing foreign is opened.
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """Serve a console over a store; the address is returned."""
    with ExitStack() as ending:

        def start(store: Store, **options: Any) -> str:
            at: SimpleQueue[Any] = SimpleQueue()
            stop: SimpleQueue[object] = SimpleQueue()
            given = {"address": "127.0.0.1:0", "environ": {}, **options}
            thread = threading.Thread(
                target=serve,
                args=(store,),
                kwargs={**given, "listening": at.put, "stop": stop},
            )
            thread.start()
            ending.callback(thread.join, 30)
            ending.callback(stop.put, None)
            return f"http://{at.get(timeout=20)}"

        yield start


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a wide window, whose errors fail the test."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    opened = context.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
    yield opened
    context.close()
    assert faults == []


def test_a_click_pauses_a_queue_and_the_page_shows_it(served, page):
    store = MemStore()
    enqueue(store, "a", queue="mail/eu")
    page.goto(f"{served(store)}/queues")
    with page.expect_request("**/pause") as sent:
        page.get_by_role("button", name="Pause").click()
        page.locator("#ask button[value=yes]").click()
    assert re.fullmatch(r"[0-9a-f]{32}", sent.value.headers["idempotency-key"])
    page.get_by_role("button", name="Resume").wait_for()
    assert steer(store).queue_stats()[0].paused


def test_a_refusal_is_told(served, page):
    store = MemStore()
    enqueue(store, "a")
    page.goto(f"{served(store)}/job?id=a")
    steer(store).operator_cancel("a")
    page.locator('[data-key="acts"]').get_by_role("button", name="Cancel").click()
    page.locator("#ask button[value=yes]").click()
    page.get_by_text("operator_cancel is not defined from cancelled").wait_for()


def test_a_name_that_no_address_can_carry_reaches_nothing_else(served, page):
    """A browser takes the part out: this would be the queue `enqueue-limit`."""
    store = MemStore()
    enqueue(store, "a", queue=".")
    steer(store).set_queue_weight("enqueue-limit", 2)
    steer(store).set_enqueue_limit(".", 5)
    page.goto(f"{served(store)}/queue?name=.")
    page.get_by_label("limit").fill("")
    page.get_by_label("limit").press("Enter")
    page.get_by_text("No browser can send the name").wait_for()
    assert {q.queue for q in steer(store).queue_stats()} == {".", "enqueue-limit"}


def test_deleting_a_queue_needs_its_name(served, page):
    store = MemStore()
    enqueue(store, "a")
    steer(store).delete_job("a")
    page.goto(f"{served(store)}/queue?name=q")
    page.get_by_role("button", name="Delete the empty queue").click()
    go_on = page.locator("#ask button[value=yes]")
    assert go_on.is_disabled()
    page.locator("#ask input").fill("q")
    go_on.click()
    page.get_by_text("The queue is gone").wait_for()
    assert steer(store).queue_stats() == []


def test_a_page_refreshes_and_leaves_what_is_being_done_alone(served, page):
    store = MemStore()
    enqueue(store, "first")
    page.goto(f"{served(store)}/jobs")
    page.get_by_label("Select first").check()
    page.locator('input[name="q"]').fill("half a wo")
    enqueue(store, "second")
    page.get_by_role("link", name="second").wait_for(timeout=15_000)
    assert page.get_by_label("Select first").is_checked()
    assert page.locator('input[name="q"]').input_value() == "half a wo"
    assert page.locator("#selected").inner_text() == "1 selected"


def test_a_verb_on_all_that_match_estimates_asks_and_is_followed(served, page):
    store = MemStore()
    enqueue(store, *(f"j{n}" for n in range(30)))
    page.goto(f"{served(store)}/jobs?queue=q")
    page.get_by_role("button", name="Cancel all that match").click()
    page.get_by_text("Cancel 30 jobs with queue q?").wait_for()
    page.locator("#ask button[value=yes]").click()
    page.get_by_text("Under way").wait_for()
    while steer(store).run_pending_operations(100):
        pass
    page.get_by_text("Done: 30 jobs").wait_for()
    assert steer(store).counts().counts == {"cancelled": 30}


def test_a_payload_is_shown_when_asked_for_and_keeps_its_digits(served, page):
    store = MemStore()
    store.enqueue([envelope("a", payload=b'{"ref":12345678901234567890,"x":[]}')])
    page.goto(f"{served(store)}/job?id=a")
    assert "12345678901234567890" not in page.content()
    page.get_by_role("button", name="Show payload").click()
    page.locator("#shown pre").wait_for()
    text = page.locator("#shown pre").first.inner_text()
    assert '"ref": 12345678901234567890' in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_no_page_is_wider_than_its_window(served, browser, width, scheme):
    store = MemStore()
    store.enqueue([envelope("a", queue=EVIL, partition_key=EVIL)])
    inspect = steer(store)
    inspect.upsert_rate_class(RateClassConfig(name=EVIL, limit=1, window_ms=1, burst=1))
    inspect.upsert_concurrency_limit(Ceiling(name=EVIL, queue=EVIL, max_concurrent=1))
    base = served(store, read_only=True)
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    opened = context.new_page()
    named = {"queue": "queue?name=q", "job": "job?id=a"}
    for shown in PAGES:
        opened.goto(f"{base}/{named.get(shown.path, shown.path)}")
        over = opened.evaluate(
            "document.documentElement.scrollWidth"
            " - document.documentElement.clientWidth"
        )
        assert over <= 0, shown.path
        assert opened.locator("[data-act]").count() == 0
        assert opened.locator("img").count() == 0
    context.close()


def test_the_first_key_leads_to_the_content(served, page):
    page.goto(served(MemStore()))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
