"""A console over each store, and a browser's view of its pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from werkzeug.test import Client

from headgate_sync.api import ApiConfig
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.store import Store
from tests.console.browsing import serving, window


@pytest.fixture
def open_console(store: Store) -> Iterator[Callable[..., Client]]:
    """Make a client of a console over the store, with settings of its API."""
    made = []

    def open_one(*, title: str = "headgate", **api: Any) -> Client:
        app = create_app(store, ConsoleConfig(title=title, api=ApiConfig(**api)))
        made.append(app)
        return Client(app)

    yield open_one
    for app in made:
        app.close()


@pytest.fixture
def console(open_console: Callable[..., Client]) -> Client:
    """A client of a console that lets everybody do everything."""
    return open_console(rate_limit=None)


# A real browser


@pytest.fixture(scope="package")
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
def served(store: Store) -> Iterator[Callable[..., str]]:
    """Serve a console over the store, with settings of its API; returns its address."""
    with ExitStack() as ending:
        yield lambda **settings: ending.enter_context(serving(store, **settings))


@pytest.fixture
def faults() -> list[str]:
    """What went wrong in `page`; a test that means it takes it out."""
    return []


@pytest.fixture
def page(browser: Any, faults: list[str]) -> Iterator[Any]:
    """A page of a wide window, whose faults fail the test."""
    with window(browser, faults) as opened:
        yield opened
