"""The console over each store in a real browser: clicks, refreshes, widths."""

from __future__ import annotations

import re

import pytest

from tests.builders import enqueue, envelope, steer
from tests.console.browsing import GO_ON, operating, take_out

pytestmark = pytest.mark.browser


def test_a_click_pauses_a_queue_and_the_page_shows_it(store, served, page):
    enqueue(store, "a", queue="mail/eu")
    page.goto(f"{served()}/queues")
    with page.expect_request("**/pause") as sent:
        page.get_by_role("button", name="Pause").click()
        page.locator(GO_ON).click()
    assert re.fullmatch(r"[0-9a-f]{32}", sent.value.headers["idempotency-key"])
    page.get_by_role("button", name="Resume").wait_for()
    assert steer(store).queue_stats()[0].paused


def test_a_refusal_is_told(store, served, page, faults):
    enqueue(store, "a")
    page.goto(f"{served()}/job?id=a")
    steer(store).operator_cancel("a")
    page.locator('[data-key="acts"]').get_by_role("button", name="Cancel").click()
    page.locator(GO_ON).click()
    page.get_by_text("operator_cancel is not defined from cancelled").wait_for()
    take_out(page, faults, "400")


def test_a_name_that_no_address_can_carry_reaches_nothing_else(store, served, page):
    """A browser takes the part out: this would be the queue `enqueue-limit`."""
    enqueue(store, "a", queue=".")
    steer(store).set_queue_weight("enqueue-limit", 2)
    steer(store).set_enqueue_limit(".", 5)
    page.goto(f"{served()}/queue?name=.")
    page.get_by_label("limit").fill("")
    page.get_by_label("limit").press("Enter")
    page.get_by_text("No browser can send the name").wait_for()
    assert {q.queue for q in steer(store).queue_stats()} == {".", "enqueue-limit"}


def test_deleting_a_queue_needs_its_name(store, served, page):
    enqueue(store, "a")
    steer(store).delete_job("a")
    page.goto(f"{served()}/queue?name=q")
    page.get_by_role("button", name="Delete the empty queue").click()
    go_on = page.locator(GO_ON)
    assert go_on.is_disabled()
    page.locator("#ask input").fill("q")
    go_on.click()
    page.get_by_text("The queue is gone").wait_for()
    assert steer(store).queue_stats() == []


def test_a_page_refreshes_and_leaves_what_is_being_done_alone(store, served, page):
    enqueue(store, "first")
    page.goto(f"{served()}/jobs")
    page.get_by_label("Select first").check()
    page.locator('input[name="q"]').fill("half a wo")
    enqueue(store, "second")
    page.get_by_role("link", name="second").wait_for(timeout=15_000)
    assert page.get_by_label("Select first").is_checked()
    assert page.locator('input[name="q"]').input_value() == "half a wo"
    assert page.locator("#selected").inner_text() == "1 selected"


def test_a_verb_on_all_that_match_estimates_asks_and_is_followed(store, served, page):
    enqueue(store, *(f"j{n}" for n in range(30)))
    page.goto(f"{served()}/jobs?queue=q")
    page.get_by_role("button", name="Cancel all that match").click()
    page.get_by_text("Cancel 30 jobs with queue q?").wait_for()
    page.locator(GO_ON).click()
    page.get_by_text("Under way").wait_for()
    with operating(store):
        page.get_by_text("Done: 30 jobs").wait_for()
    assert steer(store).counts().counts == {"cancelled": 30}


def test_a_payload_is_shown_when_asked_for_and_keeps_its_digits(store, served, page):
    store.enqueue([envelope("a", payload=b'{"ref":12345678901234567890,"x":[]}')])
    page.goto(f"{served()}/job?id=a")
    assert "12345678901234567890" not in page.content()
    page.get_by_role("button", name="Show payload").click()
    page.locator("#shown pre").wait_for()
    text = page.locator("#shown pre").first.inner_text()
    assert '"ref": 12345678901234567890' in text


def test_the_first_key_leads_to_the_content(store, served, page):
    page.goto(served())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
