"""Worker processes that are steered from afar, watched by probes, or break inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate_sync.workers import WorkerState
from tests.builders import steer
from tests.crash.fleet import ROOT, Fleet

pytestmark = pytest.mark.crash


def workers(fleet: Fleet) -> dict[str, WorkerState]:
    found = steer(fleet.facade.store).list_workers()
    return {worker.worker_id: worker for worker in found}


def holders(fleet: Fleet) -> set[str]:
    """Who holds duties now."""
    rows = fleet.query(
        "SELECT DISTINCT holder FROM headgate.headgate_duty"
        " WHERE expires_at_ms > headgate.headgate_now_ms()"
    )
    return {holder for (holder,) in rows}


def started(fleet: Fleet, id: str) -> None:
    fleet.wait_for(lambda: bool(fleet.runs(id)), f"{id} runs")


def check(path: Path, *arguments: str) -> int:
    """Ask as a container's probe does."""
    command = [sys.executable, "-m", "headgate_sync", "worker", "check", str(path)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, check=False)
    return done.returncode


def test_a_rolling_restart_loses_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """The new one first; then the old one, however short its patience is."""
    ready = tmp_path / "new.ready"
    old = fleet.start("--worker-id", "old", "--shutdown-timeout", "1ms")
    fleet.enqueue("awaits", "long", payload=b'{"point":"moved"}')
    started(fleet, "long")
    fleet.wait_for(lambda: holders(fleet) == {"old"}, "the old one holds the duties")
    new = fleet.start("--worker-id", "new", "--ready-file", str(ready))
    fleet.wait_for(ready.exists, "the new one is ready")
    steer(fleet.facade.store).signal_worker("old", "restart")
    fleet.wait_for(lambda: holders(fleet) == {"new"}, "the duties have moved")
    assert not old.ended
    shown = workers(fleet)["old"]
    assert (shown.status, shown.duties_active) == ("restarting", False)
    assert shown.pending_command is None
    fleet.reach("moved")
    assert old.wait() == 0
    job = fleet.job("long")
    assert (job.state, job.attempt, job.crash_attempt) == ("completed", 0, 0)
    assert fleet.runs("long") == [1]
    assert set(workers(fleet)) == {"new"}
    fleet.enqueue("plain", "next")
    fleet.wait_state("next", "completed")
    assert fleet.pids("next") == [new.pid]
    assert new.stop() == 0
    assert workers(fleet) == {}


def test_a_worker_terminates_when_told_from_afar(fleet: Fleet) -> None:
    worker = fleet.start_ready("--worker-id", "w", "--shutdown-timeout", "500ms")
    fleet.enqueue("waits", "a", payload=b'{"seconds":600}')
    started(fleet, "a")
    steer(fleet.facade.store).signal_worker("w", "terminate")
    assert worker.wait() == 10
    assert (fleet.state("a"), fleet.job("a").attempt) == ("available", 0)


def test_a_successor_of_the_name_is_not_stopped_by_an_old_command(
    fleet: Fleet,
) -> None:
    """The command was meant for a process that was killed before it heard of it."""
    first = fleet.start_ready("--worker-id", "w", "--lease", "30s")
    steer(fleet.facade.store).signal_worker("w", "restart")
    first.kill()
    fleet.start_ready("--worker-id", "w", "--lease", "2s")
    fleet.let_pass(1.5)  # two of its beats
    assert workers(fleet)["w"].pending_command is None
    assert workers(fleet)["w"].status == "running"


def told(path: Path) -> dict[str, Any]:
    """What a ready file says; nothing between the end of one and the next."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def test_a_probe_tells_a_killed_worker_from_one_that_drains(
    fleet: Fleet, tmp_path: Path
) -> None:
    path = tmp_path / "ready"
    victim = fleet.start_ready("--ready-file", str(path))
    fleet.wait_for(path.exists, "it is ready")
    assert check(path) == 0
    victim.kill()
    assert path.exists()
    fleet.let_pass(2)
    assert check(path, "--max-age", "1s") == 1

    killed = told(path)["worker_id"]
    worker = fleet.start("--ready-file", str(path), "--shutdown-timeout", "10m")
    fleet.wait_for(
        lambda: told(path).get("worker_id", killed) != killed, "the next is ready"
    )
    assert check(path) == 0
    assert told(path)["status"] == "running"
    fleet.enqueue("awaits", "a", payload=b'{"point":"asked"}')
    started(fleet, "a")
    worker.signal(signal.SIGTERM)
    fleet.wait_for(lambda: not path.exists(), "the file is gone")
    assert not worker.ended
    assert check(path) == 1
    fleet.reach("asked")
    assert worker.wait() == 0
    assert fleet.state("a") == "completed"


def test_a_ready_file_that_cannot_be_written_is_said_in_one_line(
    fleet: Fleet, tmp_path: Path
) -> None:
    worker = fleet.start("--ready-file", str(tmp_path / "no" / "ready"))
    assert worker.wait() == 2
    assert "cannot be written: No such file" in worker.said.splitlines()[-1]
    assert "Traceback" not in worker.said


def test_a_worker_that_has_grown_too_large_finishes_what_runs(fleet: Fleet) -> None:
    patient = ("--shutdown-timeout", "10m")  # longer than anybody waits here
    worker = fleet.start(*patient, CRASH_MEMORY_LIMIT="1000000")
    fleet.enqueue("waits", "a", payload=b'{"seconds":3}')
    assert worker.wait() == 12
    assert "bytes of memory are used, the limit is 1000000" in worker.said
    if fleet.runs("a"):
        assert fleet.state("a") == "completed"


@pytest.mark.parametrize("call", ["admit", "renew", "duty_tick"])
def test_a_process_is_never_alive_and_idle(fleet: Fleet, call: str) -> None:
    """A service loop that fails for ever ends the process, and no job is lost."""
    fleet.enqueue("waits", "a", payload=b'{"seconds":5}')
    worker = fleet.start(CRASH_BREAKS=call)
    assert worker.wait() == 13
    assert "could not be revived; the worker drains and ends" in worker.said
    assert "RuntimeError: broken for ever" in worker.said
    assert "ends with code 13" in worker.said
    fleet.start()
    fleet.wait_state("a", "completed")
    assert fleet.job("a").attempt == 0


def test_a_worker_whose_store_is_closed_ends(fleet: Fleet) -> None:
    worker = fleet.start_ready("--shutdown-timeout", "10m")  # nothing waits for it
    fleet.enqueue("closes", "a")
    assert worker.wait() == 13
    assert "could not be revived; the worker drains and ends" in worker.said


def test_a_worker_may_run_beside_the_main_thread(fleet: Fleet) -> None:
    """Main returns, and the worker goes on without signal handlers until stopped."""
    program = """
import logging, threading
logging.basicConfig(level="INFO")
from tests.crash.app import QUEUE, hg

worker = hg.worker(queues=[QUEUE], threads=1, lease="2s", shutdown_timeout="5s")

def stop_later():
    done.wait()
    worker.stop()

done = threading.Event()

@hg.task("ends", queue=QUEUE)
def ends():
    done.set()

threading.Thread(target=lambda: print("code", worker.run().code)).start()
threading.Thread(target=stop_later).start()
"""
    fleet.enqueue("ends", "last", scheduled_at_ms=1)
    environment = {"HEADGATE_DATABASE_URL": fleet.url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "code 0\n"), done.stderr
    assert "not on the main thread: signal handlers are not installed" in done.stderr
    assert fleet.state("last") == "completed"
