"""The gate under random processes that are killed, and without any upkeep of its own.

What an admission does not hear of stays unheard here, however long one waits: nothing
folds or reconciles. So everything that was committed being done in the end shows that
the bounds from which admissions read hide nothing.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import psycopg
import pytest

from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from tests.crash.fleet import PATIENCE_S, ROOT
from tests.servers import new_database

pytestmark = pytest.mark.crash

SECONDS = 15.0
PRODUCERS, ADMITTERS = 3, 3
LEFT = "SELECT 1 FROM headgate.headgate_job WHERE state <> 'completed' LIMIT 1"
TWICE = """
SELECT FROM headgate.headgate_lane
GROUP BY queue, partition_key, rate_class, sticky_worker HAVING count(*) > 1
"""
DEADLOCKS = """
SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()
"""


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    with new_database(server_url) as made:
        migrate_up(made)
        yield made


def start(role: str, url: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crash.hammer", role, url]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PATIENCE_S)
    assert process.stdout is not None
    process.stdout.close()


class Spectator:
    """Somebody who looks for a while, and may have written something first."""

    def __init__(self, url: str, luck: random.Random) -> None:
        self._url, self._luck = url, luck
        self._open: psycopg.Connection[tuple[object, ...]] | None = None

    def leave(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def turn(self) -> None:
        """Leave, or come again."""
        if self._open is not None:
            self.leave()
        else:
            self._open = psycopg.connect(self._url)
            self._open.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._open.execute("SELECT 1")
            if self._luck.random() < 0.3:
                self._open.execute("CREATE TEMP TABLE written (n int)")


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_or_stuck_though_nobody_keeps_the_gate(
    url: str, seed: int
) -> None:
    luck, pause = random.Random(seed), threading.Event()
    store, spectator = PgStore.connect(url), Spectator(url, luck)
    producers = [
        start("produce", url, 100 * seed + n, SECONDS) for n in range(PRODUCERS)
    ]
    admitters = [start("admit", url, 200 * seed + n) for n in range(ADMITTERS)]
    kills = 0

    def service() -> None:
        """What gives jobs of the dead and of the past back to the gate."""
        pause.wait(0.3)
        store.reclaim_expired(500)
        store.promote_due(500)

    try:
        while any(producer.poll() is None for producer in producers):
            service()
            if luck.random() < 0.25:
                place = luck.randrange(ADMITTERS)
                end(admitters[place])
                kills += 1
                admitters[place] = start("admit", url, 300 * seed + kills)
            if luck.random() < 0.1:
                spectator.turn()
        committed = {
            name
            for producer in producers
            for name in producer.communicate(timeout=PATIENCE_S)[0].split()
        }
        with psycopg.connect(url, autocommit=True) as looker:
            for _ in range(200):
                if not looker.execute(LEFT).fetchall():
                    break
                service()
            assert looker.execute(LEFT).fetchall() == []
            stored = looker.execute("SELECT id FROM headgate.headgate_job").fetchall()
            assert looker.execute(TWICE).fetchall() == []
            assert looker.execute(DEADLOCKS).fetchall() == [(0,)]
        assert {id for (id,) in stored} == committed
        assert kills > 5
        assert len(committed) > 500
        assert [admitter.poll() for admitter in admitters] == [None] * ADMITTERS
    finally:
        for process in (*producers, *admitters):
            end(process)
        spectator.leave()
    assert sum(store.maintenance.gate_reconcile(100) for _ in range(20)) == 0
    store.close()
