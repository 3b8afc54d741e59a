"""A batch script that is killed while it sends, and while it follows its jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headgate_sync.postgres.migrate import migrate_up
from tests.servers import new_database
from tests.worker.rig import wait_for

pytestmark = pytest.mark.crash

COUNT = 3_000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    with new_database(server_url) as made:
        migrate_up(made)
        yield made


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.batch_script", str(COUNT)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HEADGATE_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def rows(connection: psycopg.Connection[Any], condition: str) -> int:
    row = connection.execute(
        f"SELECT count(*) FROM headgate.headgate_job WHERE {condition}"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_script_killed_while_it_sends_sends_nothing_twice(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for enough in (200, 1_200):
            process = start(url)
            wait_for(lambda n=enough: rows(connection, "true") >= n, "rows")  # type: ignore[misc]
            kill(process)
        assert rows(connection, "true") < COUNT
        process = start(url)
        told = process.communicate(timeout=180)[0]
        assert process.returncode == 0
        assert rows(connection, "true") == COUNT
        assert rows(connection, "fence = 1 AND state = 'completed'") == COUNT
    items = sorted(tuple(map(int, line.split())) for line in told.splitlines())
    assert items == [(n, 2 * n) for n in range(COUNT)]


def test_a_script_killed_while_it_follows_is_told_of_every_job_again(url: str) -> None:
    process = start(url)
    assert process.stdout is not None
    for _ in range(100):
        assert process.stdout.readline()
    kill(process)
    process = start(url)
    told = process.communicate(timeout=180)[0]
    assert process.returncode == 0
    items = sorted(tuple(map(int, line.split())) for line in told.splitlines())
    assert items == [(n, 2 * n) for n in range(COUNT)]
    with psycopg.connect(url) as connection:
        assert rows(connection, "true") == COUNT
        assert rows(connection, "attempt > 0") == 0
