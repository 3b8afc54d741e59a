"""A console served to a browser, and windows that note what must not happen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from headgate_sync.api import ApiConfig
from headgate_sync.console import ConsoleConfig
from headgate_sync.console.server import serve
from headgate_sync.store import Store
from tests.builders import steer

HOST = "127.0.0.1"
TURN_S = 0.05
GO_ON = "#ask button[value=yes]"


@contextmanager
def serving(store: Store, *, title: str = "headgate", **api: Any) -> Iterator[str]:
    """Serve a console with settings of its API; yields its address."""
    at: SimpleQueue[Any] = SimpleQueue()
    stop: SimpleQueue[object] = SimpleQueue()
    settings = ApiConfig(**{"rate_limit": None, **api})
    thread = threading.Thread(
        target=serve,
        args=(store,),
        kwargs={
            "address": f"{HOST}:0",
            "config": ConsoleConfig(title=title, api=settings),
            "environ": {},
            "listening": at.put,
            "stop": stop,
        },
    )
    thread.start()
    try:
        yield f"http://{at.get(timeout=20)}"
    finally:
        stop.put(None)
        thread.join(30)


@contextmanager
def window(
    browser: Any,
    faults: list[str],
    *,
    width: int = 1600,
    height: int = 1000,
    **more: Any,
) -> Iterator[Any]:
    """A page in a window of its own.

    Args:
        faults: what must not happen is added here: errors of scripts and of the
            policy against foreign ones, refused calls, dialogs that no page of ours
            opens, and requests to anywhere else. At the end it must be empty.
    """
    context = browser.new_context(viewport={"width": width, "height": height}, **more)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda told: _note_message(told, faults))
    page.on("dialog", lambda dialog: _note_dialog(dialog, faults))
    page.on("request", lambda request: _note_request(request, faults))
    try:
        yield page
    finally:
        context.close()
    assert faults == []


def take_out(page: Any, faults: list[str], words: str) -> None:
    """Wait until the browser has told of a call that had to fail; it is no fault."""
    if not faults:
        page.wait_for_event("console")
    [told] = faults
    assert words in told
    faults.clear()


def _note_message(told: Any, faults: list[str]) -> None:
    if told.type == "error":
        faults.append(f"{told.text} at {told.location['url']}")


def _note_dialog(dialog: Any, faults: list[str]) -> None:
    faults.append(f"dialog {dialog.message}")
    dialog.dismiss()


def _note_request(request: Any, faults: list[str]) -> None:
    if urlsplit(request.url).hostname != HOST:
        faults.append(f"request to {request.url}")


@contextmanager
def operating(store: Store) -> Iterator[None]:
    """Carry out operations as workers do, all the while."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(TURN_S):
            steer(store).run_pending_operations(1_000)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


def wider_by(page: Any) -> int:
    """How far a page goes beyond its window."""
    over: int = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return over


def faint(page: Any) -> list[str]:
    """Texts whose colour is too near to what is behind them, by WCAG 2.2, 1.4.3."""
    found: list[str] = page.evaluate(_FAINT)
    return found


_FAINT = """() => {
  const pen = document.createElement("canvas").getContext("2d");
  const known = new Map();
  const read = (colour) => {
    if (!known.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      const parts = pen.getImageData(0, 0, 1, 1).data;
      known.set(colour, Array.from(parts, (part) => part / 255));
    }
    return known.get(colour);
  };
  const over = (top, below) =>
    [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
  const behind = (el) => {
    const own = read(getComputedStyle(el).backgroundColor);
    if (own[3] === 1) return own;
    return over(own, el.parentElement ? behind(el.parentElement) : [1, 1, 1, 1]);
  };
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) =>
    0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const seen = new Set(), found = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const el = texts.currentNode.parentElement;
    if (!texts.currentNode.nodeValue.trim() || seen.has(el)) continue;
    seen.add(el);
    if (!el.checkVisibility() || el.closest(":disabled, script, .skip, .vh")) continue;
    const style = getComputedStyle(el), back = behind(el);
    const pair = [light(over(read(style.color), back)), light(back)];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const words = el.textContent.slice(0, 40);
    if (ratio < least) found.add(`${ratio.toFixed(2)} ${el.className}: ${words}`);
  }
  return Array.from(found);
}"""
