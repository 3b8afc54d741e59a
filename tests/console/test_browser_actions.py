"""Every action of every page, clicked and filled in by hand over PostgreSQL."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headgate_sync.console.text import instant
from headgate_sync.store import Store
from tests.backends import PostgresBackend
from tests.builders import job, state_of
from tests.console.browsing import GO_ON, operating, serving, take_out
from tests.console.furnished import ADDRESSES, REFUSED, furnish, typed

pytestmark = pytest.mark.browser
# What can be acted on now: of each the words on it, and what it would send.
_OFFERED = """() => {
  const found = Array.from(document.querySelectorAll("#main [data-act]"), (el) => {
    const fields = Array.from(el.querySelectorAll("input, select, textarea"));
    return {
      act: el.dataset.act,
      words: [
        el.tagName,
        el.closest("dialog")?.getAttribute("aria-label") ?? "",
        el.tagName === "FORM" ? fields.map((f) => f.name).join() : el.textContent,
      ].join(" "),
      opener: el.closest("dialog")?.id ?? null,
      disabled: el.disabled === true,
    };
  });
  return found;
}"""
_FIELDS = """(form) => Array.from(
  form.querySelectorAll("input, textarea"),
  (el) => Object.fromEntries(Array.from(el.attributes, (a) => [a.name, a.value])),
)"""


@pytest.fixture
def store(postgres: PostgresBackend) -> Store:
    """An empty store over PostgreSQL."""
    return postgres.make_store()


class Operator:
    """Somebody at the page of a console whose store has one of everything."""

    def __init__(self, page: Any, address: str, backend: PostgresBackend, store: Store):
        self.page = page
        self._address = address
        self._backend = backend
        self._store = store

    def start_over(self) -> None:
        """Build the state anew and open the page."""
        self._backend.reset()
        furnish(self._store, self._backend.clock)
        self.page.goto(self._address)

    def offered(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The actions of each kind that the page offers: one of those alike."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for one in self.page.evaluate(_OFFERED):
            act = json.loads(one["act"])
            if not one["disabled"]:
                found.setdefault((act["method"], one["words"]), {**one, **act})
        return found

    def do(self, one: dict[str, Any], *, whole: bool) -> int:
        """Click or fill in and submit; returns the status of the answer."""
        page = self.page
        # The script reads the page again in the end, which then tells another instant.
        self._backend.clock.advance_ms(1)
        then = instant(self._backend.clock.now_ms())
        source = page.locator(f"[data-act={json.dumps(one['act'])}]").first
        with page.expect_response(lambda answer: self._is_act(answer, one)) as answered:
            if one["words"].startswith("FORM"):
                self._fill_in(source, one["opener"], whole=whole)
            else:
                source.click()
            if one.get("confirm"):
                self._answer(one)
        status: int = answered.value.status
        words = one["done"]
        if answered.value.request.method == one.get("emptyMethod"):
            words = "The limit is lifted"
        if status >= 300:
            page.locator(".toast.bad").wait_for()
        else:
            page.locator(".toast", has_text=words).wait_for()
        page.locator("#foot time", has_text=then).wait_for()
        page.evaluate("document.getElementById('toasts').replaceChildren()")
        return status

    def _is_act(self, answer: Any, one: dict[str, Any]) -> bool:
        methods = (one["method"], one.get("emptyMethod"))
        return "/api/v1/" in answer.url and answer.request.method in methods

    def _fill_in(self, form: Any, dialog: str | None, *, whole: bool) -> None:
        if dialog is not None:
            self.page.locator(f"[data-open={json.dumps(dialog)}]").click()
        inputs = form.locator("input, textarea")
        for place, field in enumerate(form.evaluate(_FIELDS)):
            text = typed(field, whole=whole)
            if text is not None:
                inputs.nth(place).fill(text)
        form.locator("button[type=submit]").click()

    def _answer(self, one: dict[str, Any]) -> None:
        dialog = self.page.locator("#ask")
        assert dialog.locator("#ask-text").inner_text() == one["confirm"]
        if one["typed"]:
            assert self.page.locator(GO_ON).is_disabled()
            dialog.locator("input").fill(one["typed"])
        self.page.locator(GO_ON).click()


# Of each verb the state that it is for; there is one job in it.
SELECTED = {
    "retry": "archived", "cancel": "available", "promote": "pending",
    "delete": "cancelled",
}  # fmt: skip


@pytest.mark.parametrize("verb", SELECTED)
def test_a_verb_on_a_selection_is_done(
    postgres: PostgresBackend, store: Store, served: Any, page: Any, verb: str
) -> None:
    furnish(store, postgres.clock)
    page.goto(f"{served()}/jobs?queue=q&q=id:{SELECTED[verb]}")
    page.get_by_label("Select all jobs").check()
    page.locator(f"[data-selection={verb}]").click()
    assert page.locator("#ask-text").inner_text() == f"{verb.capitalize()} 1 job?"
    page.locator(GO_ON).click()
    page.get_by_text("1 of 1 done").wait_for()
    assert state_of(store, SELECTED[verb]) != SELECTED[verb]


@pytest.mark.parametrize("verb", ["retry", "cancel", "delete"])
def test_a_verb_on_all_that_match_is_done(
    postgres: PostgresBackend, store: Store, served: Any, page: Any, verb: str
) -> None:
    furnish(store, postgres.clock)
    state = {**SELECTED, "cancel": "scheduled"}[verb]
    page.goto(f"{served()}/jobs?queue=q&state={state}")
    page.get_by_role("button", name=f"{verb.capitalize()} all that match").click()
    page.get_by_text(
        f"{verb.capitalize()} 1 job with queue q, state {state}?"
    ).wait_for()
    page.locator(GO_ON).click()
    with operating(store):
        page.get_by_text("Done: 1 job").wait_for()
    assert state_of(store, state) != state


def test_the_payload_is_loaded_to_be_edited(
    postgres: PostgresBackend, store: Store, served: Any, page: Any
) -> None:
    furnish(store, postgres.clock)
    page.goto(f"{served()}/job?id=pending")
    page.get_by_role("button", name="Edit payload").click()
    page.get_by_role("button", name="Load the present one").click()
    text = page.locator("#edit textarea")
    page.wait_for_function("document.querySelector('#edit textarea').value !== ''")
    assert text.input_value() == "pending"
    text.fill("pending, changed")
    page.get_by_role("button", name="Replace").click()
    page.get_by_text("The payload is replaced").wait_for()
    assert job(store, "pending").payload == b"pending, changed"


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_action_of_a_page_is_done(
    postgres: PostgresBackend, store: Store, page: Any, faults: list[str], address: str
) -> None:
    # Live updates would take away what is about to be clicked, and answers that are
    # shared would be those of the state before.
    page.add_init_script("localStorage.setItem('headgate:live', 'off')")
    with serving(store, share_ms=0) as base, operating(store):
        operator = Operator(page, base + address, postgres, store)
        operator.start_over()
        wanted = operator.offered()
        # What takes the least away comes first, so that little has to be built anew.
        for kind in sorted(wanted, key=lambda kind: kind[0] == "DELETE"):
            for whole in (False, True) if kind[1].startswith("FORM") else (False,):
                if kind not in operator.offered():
                    operator.start_over()
                one = operator.offered()[kind]
                status = operator.do(one, whole=whole)
                if f"{one['method']} {one['path']}" in REFUSED:
                    take_out(page, faults, f"status of {status}")
                else:
                    assert status < 300, one
                if page.locator("#main[data-refresh=error]").count() > 0:
                    assert kind[0] == "DELETE"  # what the page was about is gone
                    take_out(page, faults, f"404 (Not Found) at {page.url}")
