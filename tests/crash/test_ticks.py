"""Nodes that are killed and a clock that jumps: no tick lost, none doubled."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from headgate_sync.cron import next_after
from headgate_sync.envelope import Envelope
from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.postgres.store import PgStore
from headgate_sync.schedule import Schedule
from headgate_sync.worker.scheduler import scheduler_sweep
from tests import testschema
from tests.builders import START_MS, steer
from tests.crash.fleet import ROOT, Fleet
from tests.servers import new_database

pytestmark = pytest.mark.crash

PATIENCE_S = 60.0
KILLS = 10
HOLDER = "SELECT holder FROM headgate.headgate_duty WHERE name = 'scheduler'"
PLAIN = Envelope(
    id="plain", kind="plain", payload=b"{}", queue="crash", retention_ms=3_600_000
)
SPECS = {
    "second": "* * * * * *",
    "often": "@every:700",
    "minute": "* * * * *",
    "zoned": "CRON_TZ=Europe/Berlin */5 * * * *",
}


class Node:
    """One sweeping process."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.ticker", url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def nodes(url: str, count: int) -> Iterator[list[Node]]:
    started: list[Node] = []
    try:
        while len(started) < count:
            started.append(Node(url))
        yield started
    finally:
        for node in started:
            node.kill()


@pytest.fixture
def database(server_url: str) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    """A database whose clock the test moves."""
    with new_database(server_url) as url:
        migrate_up(url)
        with psycopg.connect(url, autocommit=True) as connection:
            testschema.install_clock(connection, "headgate")
            yield url, connection


def test_nodes_that_are_killed_at_any_point_lose_and_double_no_tick(database):
    """Also when the store's clock steps far ahead, and back."""
    url, admin = database
    luck, pause = random.Random(11), threading.Event()
    store = PgStore.connect(url, pool_size=2)

    def set_clock(now_ms: int) -> None:
        admin.execute(
            "UPDATE headgate.headgate_test_clock SET frozen_at_ms = %s", [now_ms]
        )

    def anchor_ms(id: str) -> int:
        one = steer(store).get_schedule(id)
        assert one is not None
        return one.next_run_ms

    now_ms = START_MS
    set_clock(now_ms)
    for id, spec in SPECS.items():
        steer(store).upsert_schedule(
            Schedule(
                id=id, kind="k", spec=spec, next_run_ms=next_after(spec, now_ms),
                on_missed="backfill", backfill_limit=1_000,
            )
        )  # fmt: skip
    highest_ms = now_ms
    with nodes(url, 3) as running:
        for _ in range(KILLS):
            for _ in range(8):
                now_ms += luck.choice([300, 1_000, 2_500, 60_000, 200_000, -50_000])
                set_clock(now_ms)
                highest_ms = max(highest_ms, now_ms)
                pause.wait(luck.uniform(0.0, 0.05))
                give_up_at_s = time.monotonic() + PATIENCE_S
                # Further behind, the policy would rightly leave ticks out.
                while highest_ms - min(map(anchor_ms, SPECS)) > 300_000:
                    assert time.monotonic() < give_up_at_s, "nobody fires"
                    set_clock(highest_ms)
                    pause.wait(0.01)
            running.pop(luck.randrange(len(running))).kill()
            running.append(Node(url))
    set_clock(highest_ms)
    scheduler_sweep(store)
    rows = admin.execute(
        "SELECT periodic_schedule_id, periodic_tick_ms FROM headgate.headgate_job"
    ).fetchall()
    assert max(Counter(rows).values()) == 1
    for id, spec in SPECS.items():
        expected, at_ms = [], START_MS
        while (at_ms := next_after(spec, at_ms)) <= highest_ms:
            expected.append(at_ms)
        assert sorted(tick for name, tick in rows if name == id) == expected, id
        assert anchor_ms(id) == next_after(spec, highest_ms)
        newest = steer(store).list_schedule_events(id, limit=100)
        assert len(newest) == min(100, len(expected))
        assert {event.outcome.value for event in newest} == {"enqueued"}
    store.close()


def test_the_holder_killed_just_before_a_tick_is_followed_within_its_lease(fleet):
    """Workers, their duties and the real clock: the tick comes late, but comes once."""
    client = fleet.facade.client
    for _ in range(2):
        start_started(fleet)
    for round in range(3):
        now_ms = steer(fleet.facade.store).store_now_ms()
        tick_ms = now_ms + 1_500
        id = f"killed-{round}"
        client.schedules.upsert(
            id, PLAIN, "@every 365d",
            start_at=_instant(tick_ms),
        )  # fmt: skip
        fleet.wait_for(lambda: bool(fleet.query(HOLDER)), "the duty is held")
        [(holder,)] = fleet.query(HOLDER)
        fleet.wait_for(
            lambda tick_ms=tick_ms: (
                steer(fleet.facade.store).store_now_ms() >= tick_ms - 100
            ),
            "shortly before the tick",
        )
        victim = next(p for p in fleet.processes if f"-{p.pid}-" in holder)
        victim.kill()
        job_id = f"sched-{id}-{tick_ms}"
        fleet.wait_for(
            lambda job_id=job_id: fleet.facade.get(job_id) is not None, "it fired"
        )
        late_ms = fleet.job(job_id).enqueued_at_ms - tick_ms
        assert 0 <= late_ms <= 4_000
        [fired] = client.schedules.events(id).items
        assert (fired.tick_ms, fired.job_id) == (tick_ms, job_id)
        start_started(fleet)


def start_started(fleet: Fleet) -> None:
    """Start a worker, which may not be the one that takes a job, and see it run."""
    process = fleet.start()
    fleet.wait_for(lambda: " starts: " in process.said, "it starts")


def _instant(at_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=at_ms)


def one_job_per_tick(fleet: Fleet, id: str, period_ms: int) -> None:
    """Wait for a dozen ticks of a schedule: none is left out, and each ran once."""
    fleet.wait_for(
        lambda: len(fleet.facade.schedules.events(id, limit=100).items) >= 12,
        "twelve ticks",
    )
    found = fleet.facade.schedules.events(id, limit=100).items
    ticks = [event.tick_ms for event in reversed(found)]
    assert ticks == list(range(ticks[0], ticks[-1] + 1, period_ms))
    assert {event.outcome.value for event in found} == {"enqueued"}
    fleet.wait_for(
        lambda: all(fleet.state(e.job_id) == "completed" for e in found), "all ran"
    )
    assert all(len(fleet.runs(event.job_id)) == 1 for event in found)


def test_workers_of_one_name_make_one_job_per_tick(fleet):
    """Identity by name would make each of them the leader."""
    fleet.facade.client.schedules.upsert(
        "fast", PLAIN, "@every 500ms",
        on_missed="backfill", backfill_limit=100,
    )  # fmt: skip
    for _ in range(3):
        fleet.start("--worker-id", "same")
    one_job_per_tick(fleet, "fast", 500)


FORKING = """
import os, signal, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from tests.crash.app import QUEUE, hg, plain
plain.enqueue()  # the parent has a session by now, with threads around it
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        sys.exit(hg.worker(queues=[QUEUE], threads=1, lease="2s").run().code)
    children.append(pid)
sys.stdin.read()
for pid in children:
    os.kill(pid, signal.SIGTERM)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


def test_workers_forked_from_one_application_make_one_job_per_tick(fleet):
    """As under a server of applications that forks what it has loaded."""
    fleet.facade.client.schedules.upsert(
        "fast", PLAIN, "@every 500ms",
        on_missed="backfill", backfill_limit=100,
    )  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "HEADGATE_DATABASE_URL": fleet.url,
            "PYTHONPATH": str(ROOT),
        },
    )
    try:
        one_job_per_tick(fleet, "fast", 500)
    finally:
        told, _ = parent.communicate(timeout=PATIENCE_S)
    assert told == b"[0, 0, 0, 0]\n"
