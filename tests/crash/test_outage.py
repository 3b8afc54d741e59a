"""The database goes away and comes back under running workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate_sync.postgres.migrate import migrate_up
from tests.crash.fleet import Fleet, timed
from tests.crash.test_signals import SLACK_S
from tests.servers import OwnServer, own_server

pytestmark = pytest.mark.crash


@pytest.fixture
def server() -> Iterator[OwnServer]:
    with own_server() as owned:
        migrate_up(owned.conninfo)
        yield owned


@pytest.fixture
def fleet(server: OwnServer, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(server.conninfo, tmp_path) as made:
        yield made


@pytest.mark.parametrize("mode", ["fast", "kill"])
def test_a_worker_outlives_a_restart_of_the_server(
    server: OwnServer, fleet: Fleet, mode: str
) -> None:
    worker = fleet.start_ready("--threads", "4", "--lease", "10s")
    ids = [f"j{number}" for number in range(4)]
    fleet.enqueue("waits", *ids, payload=b'{"seconds":3}')
    fleet.wait_for(lambda: all(fleet.runs(id) for id in ids), "all run")
    fleet.facade.close()
    server.restart(mode)  # type: ignore[arg-type]
    fleet.reconnect()
    for id in ids:
        fleet.wait_state(id, "completed")
    assert {fleet.job(id).fence for id in ids} == {1}
    fleet.enqueue("plain", "later")
    fleet.wait_state("later", "completed")
    assert worker.stop() == 0


def test_a_handler_stops_when_an_outage_outlasts_its_lease(
    server: OwnServer, fleet: Fleet
) -> None:
    worker = fleet.start_ready("--lease", "2s")
    fleet.enqueue("waits", "a", payload=b'{"seconds":600}')
    fleet.wait_for(lambda: bool(fleet.runs("a")), "it runs")
    fleet.facade.close()
    server.stop("fast")
    fleet.wait_for(
        lambda: "job a (queue crash): its lease was not confirmed" in worker.said,
        "the handler is stopped",
    )
    server.start()
    fleet.reconnect()
    # Nothing was booked as done: the job is taken back as a crash, or handed back.
    fleet.wait_for(lambda: len(fleet.runs("a")) == 2, "it runs again")
    assert fleet.job("a").attempt == 0
    assert worker.stop() in {0, 10}


def test_a_worker_whose_database_is_away_ends_at_once(
    server: OwnServer, fleet: Fleet
) -> None:
    worker = fleet.start_ready()
    fleet.facade.close()
    server.stop("fast")
    fleet.wait_for(lambda: "admission: " in worker.said, "it has noticed")
    fleet.let_pass(3)  # its loops pause between two tries, or wait for a connection
    with timed() as passed_s:
        assert worker.stop() in {0, 11}  # 11 where a thread that waits is left behind
        assert passed_s() < 2.0 + SLACK_S
    assert "Traceback" not in worker.said


def test_jobs_survive_connections_that_are_cut_all_the_time(
    server: OwnServer, fleet: Fleet
) -> None:
    ids = [f"j{number:03}" for number in range(200)]
    fleet.enqueue("effect", *ids)
    fleet.facade.close()
    workers = [fleet.start("--threads", "4") for _ in range(2)]
    for round_number in range(8):
        done = 20 * (round_number + 1)
        fleet.wait_for(lambda done=done: _done(fleet) >= done, f"{done} are done")
        server.terminate_backends()
    fleet.wait_for(lambda: _done(fleet) == 200, "all are done")
    fleet.reconnect()
    fleet.wait_for(
        lambda: all(fleet.state(id) == "completed" for id in ids), "all are completed"
    )
    assert set(fleet.effects().values()) == {1}
    assert [worker.stop() for worker in workers] == [0, 0]


def _done(fleet: Fleet) -> int:
    return len(fleet.effects())


def test_a_worker_waits_for_its_database_at_the_start(
    server: OwnServer, fleet: Fleet
) -> None:
    fleet.enqueue("plain", "a")
    fleet.facade.close()
    server.stop("fast")
    worker = fleet.start("--connect-timeout", "30s")
    server.start()
    fleet.reconnect()
    fleet.wait_state("a", "completed")
    assert worker.stop() == 0
