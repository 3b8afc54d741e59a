"""Every kind of outage, one after the other, under workers that must outlive them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from headgate_sync.envelope import Envelope
from headgate_sync.postgres.migrate import migrate_up
from tests.crash.fleet import PATIENCE_S, QUEUE, Fleet
from tests.postgres.proxy import Proxy, proxy_to
from tests.scenarios.gate import ceiling
from tests.servers import OwnServer, own_server

pytestmark = pytest.mark.crash

JOBS = 120
PLAIN = Envelope(
    id="plain", kind="plain", payload=b"{}", queue=QUEUE, retention_ms=3_600_000
)
ANCHORS = "SELECT id, next_run_ms FROM headgate.headgate_schedule"
LATENESS = """
SELECT headgate.headgate_now_ms() - min(next_run_ms) FROM headgate.headgate_schedule
"""
LOOPS = {"admission", "heartbeat", "watchdog", "duties", "notify"}


@pytest.fixture
def server() -> Iterator[OwnServer]:
    with own_server(max_connections="50") as owned:
        migrate_up(owned.conninfo)
        yield owned


@pytest.fixture
def proxy(server: OwnServer) -> Iterator[Proxy]:
    with proxy_to(server.conninfo) as made:
        yield made


@pytest.fixture
def fleet(server: OwnServer, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(server.conninfo, tmp_path) as made:
        yield made


def rounds(path: Path) -> dict[str, int]:
    """Good rounds of every service loop, as the worker tells."""
    told: Any = json.loads(path.read_text())
    return {name: told["threads"][name]["rounds"] for name in LOOPS}


def become_read_only(server: OwnServer) -> None:
    """As after a failover: the address leads to a server that only replays."""
    server.stop("fast")
    (server.pgdata / "standby.signal").touch()
    server.start()


def become_primary(server: OwnServer) -> None:
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        assert connection.execute("SELECT pg_promote(true, 30)").fetchone() == (True,)


OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND application_name <> 'crowd'
"""


def crowd_out(server: OwnServer, fleet: Fleet) -> None:
    """Others take every connection that the server has, and keep them for a time."""
    crowd = make_conninfo(server.conninfo, application_name="crowd")
    with ExitStack() as taken:
        first = taken.enter_context(psycopg.connect(crowd, autocommit=True))
        for _ in range(20):
            first.execute(OTHERS)
            with suppress(psycopg.OperationalError):
                while True:
                    taken.enter_context(psycopg.connect(crowd))
            fleet.let_pass(0.2)


def lock_out(server: OwnServer, fleet: Fleet) -> None:
    """Nobody is let in for a time, as after a change of the password."""
    rules = server.pgdata / "pg_hba.conf"
    usual = rules.read_text()
    crowd = make_conninfo(server.conninfo, application_name="crowd")
    with psycopg.connect(crowd, autocommit=True) as admin:
        rules.write_text("local all all reject\n")
        admin.execute("SELECT pg_reload_conf()")
        admin.execute(OTHERS)
        fleet.let_pass(4)
        rules.write_text(usual)
        admin.execute("SELECT pg_reload_conf()")


def test_workers_outlive_a_storm_of_outages(
    server: OwnServer, proxy: Proxy, fleet: Fleet, tmp_path: Path
) -> None:
    for number in range(5):  # somebody is always in the middle of a tick
        fleet.facade.schedules.upsert(f"s{number}", PLAIN, "@every 500ms")
    fleet.facade.close()
    paths = [tmp_path / f"ready-{number}" for number in range(2)]
    workers = [
        fleet.start(
            *("--ready-file", str(path), "--lease", "6s", "--threads", "4"),
            HEADGATE_DATABASE_URL=proxy.conninfo,
        )
        for path in paths
    ]
    fleet.wait_for(lambda: all(path.exists() for path in paths), "all are ready")
    ids: list[str] = []

    def more(count: int) -> None:
        """Jobs to be in the middle of, enqueued while the server answers."""
        fleet.reconnect()
        fresh = [f"j{len(ids) + number:03}" for number in range(count)]
        fleet.enqueue("effect", *fresh[::2])
        fleet.enqueue("waits", *fresh[1::2], payload=b'{"seconds":0.2}')
        fleet.facade.close()
        ids.extend(fresh)

    part = JOBS // 8
    more(part)
    server.restart("fast")
    more(part)
    server.restart("kill")
    for _ in range(3):
        more(part // 3)
        server.terminate_backends()
        fleet.let_pass(0.5)
    more(part)
    proxy.silent = True  # nothing is answered, and nothing says so
    fleet.let_pass(9)  # longer than a lease
    proxy.cut()
    proxy.silent = False
    more(part)
    become_read_only(server)
    fleet.let_pass(4)
    become_primary(server)
    more(part)
    crowd_out(server, fleet)
    more(part)
    lock_out(server, fleet)
    more(part)

    def completed() -> int:
        [(count,)] = fleet.query(
            "SELECT count(*) FROM headgate.headgate_job"
            " WHERE state = 'completed' AND id LIKE 'j%'"
        )
        return int(count)

    fleet.wait_for(lambda: completed() == len(ids), "all are completed", 2 * PATIENCE_S)
    assert [worker.ended for worker in workers] == [False, False]
    assert {count for job, count in fleet.effects().items()} == {1}
    assert set(fleet.effects()) == set(_effects(fleet, ids))
    anchors = dict(fleet.query(ANCHORS))
    fleet.wait_for(
        lambda: all(next_ms > anchors[id] for id, next_ms in fleet.query(ANCHORS)),
        "every schedule goes on",
    )
    [(late_ms,)] = fleet.query(LATENESS)
    assert late_ms < 10_000
    before = [rounds(path) for path in paths]
    for path, earlier in zip(paths, before, strict=True):
        fleet.wait_for(
            lambda path=path, earlier=earlier: all(
                rounds(path)[name] > earlier[name] for name in LOOPS
            ),
            "every loop ticks",
        )
        told: Any = json.loads(path.read_text())
        assert (told["healthy"], told["store"]) == (True, "ok")
    assert [worker.stop() for worker in workers] == [0, 0]
    assert not any("could not be revived" in worker.said for worker in workers)


def _effects(fleet: Fleet, ids: list[str]) -> list[str]:
    rows = fleet.query(
        "SELECT id FROM headgate.headgate_job WHERE kind = 'effect' AND id = ANY (%s)",
        ids,
    )
    return [id for (id,) in rows]


def test_a_storm_of_restarts_never_exceeds_a_ceiling(fleet: Fleet) -> None:
    """Workers come back while their dead selves still count, and duties run at once."""
    ceiling(fleet.facade.store, 2, "queue", queue=QUEUE, scope="queue")
    ids = [f"j{number:02}" for number in range(60)]
    fleet.enqueue("holds", *ids, payload=b'{"seconds":0.3}')
    places = [fleet.start("--threads", "4") for _ in range(2)]
    for turn in range(20):
        place = turn % 2
        seen = len(fleet.query("SELECT 1 FROM public.held"))
        fleet.wait_for(
            lambda seen=seen: len(fleet.query("SELECT 1 FROM public.held")) > seen,
            "somebody works",
        )
        dead = places[place]
        dead.kill()
        fleet.query(
            "UPDATE public.held SET until = clock_timestamp()"
            " WHERE pid = %s AND until IS NULL",
            dead.pid,
        )
        places[place] = fleet.start("--threads", "4")
    fleet.wait_for(
        lambda: (
            not fleet.query(
                "SELECT 1 FROM headgate.headgate_job WHERE state NOT IN"
                " ('completed', 'quarantined')"
            )
        ),
        "all is done",
        2 * PATIENCE_S,
    )
    assert [worker.stop() for worker in places] == [0, 0]
    [(most,)] = fleet.query(
        "SELECT max((SELECT count(*) FROM public.held AS other"
        " WHERE other.since <= held.since AND other.until > held.since))"
        " FROM public.held"
    )
    assert most == 2
