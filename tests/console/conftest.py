"""A console over each store, and a browser's view of its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from werkzeug.test import Client

from headgate_sync.api import ApiConfig
from headgate_sync.console import ConsoleConfig, create_app
from headgate_sync.store import Store


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
