"""A fleet of worker processes over a database whose clock runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from headgate_sync.postgres.migrate import migrate_up
from tests.crash.fleet import Fleet
from tests.servers import new_database


@pytest.fixture(scope="session")
def migrated(server_url: str) -> Iterator[str]:
    """The name of a database to be copied, which takes half as long as to migrate."""
    with new_database(server_url) as url:
        migrate_up(url)
        yield str(conninfo_to_dict(url)["dbname"])


@pytest.fixture
def fleet(server_url: str, migrated: str, tmp_path: Path) -> Iterator[Fleet]:
    """No worker yet, and an empty database."""
    with (
        new_database(server_url, migrated) as url,
        Fleet(url, tmp_path) as made,
    ):
        yield made
