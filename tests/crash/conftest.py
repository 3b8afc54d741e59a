"""A fleet of worker processes over a database whose clock runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate_sync.postgres.migrate import migrate_up
from tests.crash.fleet import Fleet
from tests.servers import new_database


@pytest.fixture
def fleet(server_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """No worker yet, and an empty database."""
    with new_database(server_url) as url:
        migrate_up(url)
        with Fleet(url, tmp_path) as made:
            yield made
