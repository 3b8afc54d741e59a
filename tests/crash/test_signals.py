"""Worker processes that are told to end: in time, and with the right code."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from headgate_sync.postgres.migrate import migrate_up
from headgate_sync.worker.__main__ import FLUSH_S, LATE_S, LOOK_S
from tests.crash.fleet import Fleet, timed
from tests.servers import own_server

pytestmark = pytest.mark.crash

SLACK_S = 6.0  # starting an interpreter and ending it, on a busy machine


def started(fleet: Fleet, id: str) -> None:
    fleet.wait_for(lambda: bool(fleet.runs(id)), f"{id} runs")


@contextmanager
def hangup(action: signal.Handlers) -> Iterator[None]:
    """What a process that is started here does about a terminal that closes."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def at_a_terminal() -> Iterator[None]:
    """Nobody ignores its end, although `nohup` may have started the tests."""
    with hangup(signal.SIG_DFL):
        yield


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_idle_worker_ends_at_once(fleet: Fleet, signum: int) -> None:
    worker = fleet.start_ready()
    with timed() as passed_s:
        worker.signal(signum)
        assert worker.wait() == 0
        assert passed_s() < 2.0 + SLACK_S
    assert "Traceback" not in worker.said


def test_a_terminal_that_closes_may_say_so_more_than_once(fleet: Fleet) -> None:
    worker = fleet.start_ready()
    fleet.enqueue("waits", "a", payload=b'{"seconds":2}')
    started(fleet, "a")
    worker.signal(signal.SIGHUP)
    fleet.wait_for(lambda: "stops" in worker.said, "it drains")
    for _ in range(2):
        worker.signal(signal.SIGHUP)
    assert worker.wait() == 0
    assert fleet.state("a") == "completed"


def test_a_worker_that_outlives_its_terminal_goes_on(fleet: Fleet) -> None:
    """As under `nohup`, which has its command ignore the signal."""
    with hangup(signal.SIG_IGN):
        worker = fleet.start_ready()
    worker.signal(signal.SIGHUP)
    fleet.enqueue("plain", "a")
    fleet.wait_for(lambda: fleet.state("a") == "completed", "it works on")
    assert worker.stop() == 0


def test_a_busy_worker_finishes_what_runs_and_takes_nothing_more(
    fleet: Fleet,
) -> None:
    worker = fleet.start_ready("--threads", "1")
    fleet.enqueue("waits", "a", payload=b'{"seconds":2}')
    started(fleet, "a")
    worker.signal(signal.SIGTERM)
    fleet.wait_for(lambda: "stops" in worker.said, "it drains")
    fleet.enqueue("plain", "b")
    assert worker.wait() == 0
    assert fleet.state("a") == "completed"
    assert (fleet.state("b"), fleet.runs("b")) == ("available", [])


def test_a_handler_that_obeys_is_handed_back(fleet: Fleet) -> None:
    worker = fleet.start_ready("--shutdown-timeout", "500ms")
    fleet.enqueue("waits", "a", payload=b'{"seconds":600}')
    started(fleet, "a")
    with timed() as passed_s:
        assert worker.stop() == 10
        assert passed_s() < 0.5 + 1 + 0.5 + SLACK_S
    job = fleet.job("a")
    assert (job.state, job.attempt, job.crash_attempt) == ("available", 0, 0)


def test_a_handler_that_does_not_is_left_behind(fleet: Fleet) -> None:
    worker = fleet.start_ready("--shutdown-timeout", "500ms")
    fleet.enqueue("waits", "a", payload=b'{"seconds":600,"obeys":false}')
    started(fleet, "a")
    with timed() as passed_s:
        assert worker.stop() == 11
        assert passed_s() < 0.5 + 1 + 0.5 + SLACK_S
    job = fleet.job("a")
    assert (job.state, job.attempt, job.crash_attempt) == ("available", 0, 0)
    assert "its handler did not return" in worker.said
    assert "ends with code 11" in worker.said


@pytest.mark.parametrize("obeys", [True, False])
def test_a_handler_that_holds_every_connection_does_not_hold_up_the_end(
    fleet: Fleet, obeys: bool
) -> None:
    """All loops wait for a connection by the time of the signal."""
    worker = fleet.start_ready("--shutdown-timeout", "500ms")
    body = b'{"obeys":true}' if obeys else b'{"obeys":false}'
    fleet.enqueue("hogs", "a", payload=body)
    fleet.wait_point("hogs")
    fleet.let_pass(3)
    with timed() as passed_s:
        assert worker.stop() == (10 if obeys else 11)
        assert passed_s() < 0.5 + 1 + 2 + SLACK_S
    if obeys:
        job = fleet.job("a")
        assert (job.state, job.attempt, job.crash_attempt) == ("available", 0, 0)


def test_a_log_that_takes_no_line_does_not_hold_up_the_end_for_ever(
    fleet: Fleet,
) -> None:
    """The main thread waits in its own line about the stop."""
    worker = fleet.start_ready("--shutdown-timeout", "100ms")
    fleet.enqueue("silences", "a")
    fleet.wait_point("silences")
    with timed() as passed_s:
        assert worker.stop() == 11
        assert passed_s() < 6 + LOOK_S + LATE_S + FLUSH_S + SLACK_S


def test_a_second_signal_does_not_wait_for_handlers(fleet: Fleet) -> None:
    worker = fleet.start_ready("--shutdown-timeout", "60s")
    fleet.enqueue("waits", "a", payload=b'{"seconds":600}')
    started(fleet, "a")
    worker.signal(signal.SIGINT)
    fleet.wait_for(lambda: "stops" in worker.said, "it drains")
    with timed() as passed_s:
        worker.signal(signal.SIGINT)
        assert worker.wait() == 10
        assert passed_s() < 2.0 + SLACK_S
    assert fleet.state("a") == "available"


def test_a_third_signal_ends_the_process_as_it_is(fleet: Fleet) -> None:
    worker = fleet.start_ready("--shutdown-timeout", "60s")
    fleet.enqueue("waits", "a", payload=b'{"seconds":600,"obeys":false}')
    started(fleet, "a")
    for _ in range(3):
        worker.signal(signal.SIGTERM)
        # Two signals of one kind that are pending together are one signal.
        fleet.let_pass(0.3)
    assert worker.wait() == 128 + signal.SIGTERM
    assert "ends with code" not in worker.said


def test_a_process_that_a_handler_forks_can_be_ended(fleet: Fleet) -> None:
    fleet.start_ready()
    fleet.enqueue("forks", "a")
    fleet.wait_state("a", "completed")


def test_a_draining_worker_keeps_its_leases(fleet: Fleet) -> None:
    """However much longer than a lease the drain takes, with others looking on."""
    worker = fleet.start("--lease", "1s", "--no-duties", "--shutdown-timeout", "30s")
    fleet.enqueue("waits", "a", payload=b'{"seconds":6}')
    started(fleet, "a")
    fleet.start("--threads", "1")
    assert worker.stop() == 0
    job = fleet.job("a")
    assert (job.state, job.crash_attempt, job.fence) == ("completed", 0, 1)
    assert fleet.runs("a") == [1]


def test_graceful_restarts_cost_a_long_job_nothing(fleet: Fleet) -> None:
    fleet.enqueue("waits", "a", payload=b'{"seconds":600}')
    for number in range(5):
        worker = fleet.start("--shutdown-timeout", "0s")
        fleet.wait_for(lambda n=number: len(fleet.runs("a")) == n + 1, "it runs")
        assert worker.stop() == 10
    job = fleet.job("a")
    assert (job.state, job.attempt, job.crash_attempt) == ("available", 0, 0)
    assert job.errors == ()


def test_a_quiet_worker_takes_nothing_until_it_is_loud_again(fleet: Fleet) -> None:
    worker = fleet.start_ready()
    worker.signal(signal.SIGUSR1)
    fleet.let_pass(0.5)
    fleet.enqueue("plain", "a")
    fleet.let_pass(3)  # longer than the longest wait between two questions
    assert fleet.state("a") == "available"
    worker.signal(signal.SIGUSR1)
    fleet.wait_state("a", "completed")
    assert worker.stop() == 0


def test_a_signal_shows_all_stacks(fleet: Fleet) -> None:
    worker = fleet.start_ready()
    worker.signal(signal.SIGUSR2)
    fleet.wait_for(lambda: "Current thread" in worker.said, "stacks are shown")
    fleet.wait_for(lambda: worker.said.count("Thread 0x") > 5, "of all threads")
    assert worker.stop() == 0


def test_a_database_that_froze_cannot_hold_the_end_up(tmp_path: Path) -> None:
    """The worker hangs in its calls when it is told to end; it ends all the same."""
    with own_server() as server:
        migrate_up(server.conninfo)
        with Fleet(server.conninfo, tmp_path) as fleet:
            worker = fleet.start_ready("--shutdown-timeout", "1s")
            frozen = psutil.Process(server.pid).children(recursive=True)
            for process in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):  # it came and went
                    process.suspend()
            try:
                fleet.let_pass(3)  # its next question hangs by now
                with timed() as passed_s:
                    worker.signal(signal.SIGTERM)
                    assert worker.wait() == 11  # the threads that hang are left behind
                    assert passed_s() < 1 + 2 + SLACK_S
            finally:
                for process in frozen:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
