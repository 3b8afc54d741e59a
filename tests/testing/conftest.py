"""The fixtures of the plugin, over the database of this run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate_sync.testing import PgTestStore, PostgresTestDatabase
from headgate_sync.testing.plugin import headgate_mem as headgate_mem
from headgate_sync.testing.plugin import headgate_store as headgate_store


@pytest.fixture
def headgate_pg(database_url: str) -> Iterator[PgTestStore]:
    """As the plugin's, without the variable."""
    with PostgresTestDatabase(database_url) as database:
        yield database.store()
