"""Commands from afar, and what a worker shows of itself."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from headgate_sync.__main__ import main
from headgate_sync.context import JobContext
from headgate_sync.errors import (
    BackendError,
    ConfigurationError,
    StoreConflict,
    StoreUnavailable,
)
from headgate_sync.policy import Poll
from headgate_sync.registry import Registry
from headgate_sync.worker import ExitStatus, Worker, WorkerConfig, loops
from headgate_sync.worker.health import Health, Pulse, Pulses
from headgate_sync.worker.readyfile import ReadyFile
from headgate_sync.workers import WorkerMeta, WorkerState
from tests.builders import QUEUE, WORKER, envelope, job, steer
from tests.worker.rig import PATIENCE_S, Gate, Tap, wait_for, working

QUICK = {"lease": "900ms", "duty_interval": "20ms"}
# Where a handler runs: its lease must outlive the moments of a busy machine.
HOLDS = {"lease": "3s", "duty_interval": "20ms"}
OFTEN = Poll(floor_ms=10, ceiling_ms=20)


class TappedInspect(Tap):
    """A store whose registry of workers is tapped as well."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.inspect = Tap(store.inspect)


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def row(store: Any, worker_id: str = WORKER) -> WorkerState:
    (found,) = [w for w in steer(store).list_workers() if w.worker_id == worker_id]
    return found


def asked(store: Any, command: str, worker_id: str = WORKER) -> None:
    """Signal a worker, and wait until it has applied the command."""
    steer(store).signal_worker(worker_id, command)
    wait_for(
        lambda: row(store, worker_id).pending_command is None, f"{command} is applied"
    )


def healthy(worker: Worker) -> Health:
    """What a worker says of itself when it is well.

    Where beats come every few milliseconds, one that a busy machine delays is overdue.
    """
    seen = [worker.health()]

    def well() -> bool:
        seen.append(worker.health())
        return seen[-1].healthy

    wait_for(well, "it is well")
    return seen[-1]


# The registry row.


def test_a_ready_worker_is_listed_and_one_that_ended_is_not(store: Any) -> None:
    config = {"queues": ("a", "b"), "capacity": 3, "lease": "30s"}
    with working(store, Registry(), **config) as worker:
        assert worker.ready.is_set()
        shown = row(store)
        assert (shown.queues, shown.concurrency) == (("a", "b"), 3)
        assert (shown.pid, shown.host) == (os.getpid(), os.uname().nodename)
        assert (shown.status, shown.duties_active) == ("running", True)
        assert shown.beat_ms == 10_000
    assert steer(store).list_workers() == []


def test_a_beat_shows_running_handlers_and_the_last_admits(store: Any) -> None:
    registry, gate = Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(store, registry, poll=OFTEN, capacity=2, **HOLDS):
        gate.wait()
        wait_for(lambda: row(store).inflight == 1, "the handler is seen")
        wait_for(lambda: row(store).polls == 128, "a full window")
        wait_for(lambda: row(store).empty_polls == 128, "of nothing")
        gate.open()
        wait_for(lambda: row(store).inflight == 0, "the end is seen")


def test_a_worker_without_duties_says_so(store: Any) -> None:
    with working(store, Registry(), run_duties=False):
        assert row(store).duties_active is False


def test_a_worker_is_ready_by_its_first_admit_where_nobody_lists_workers() -> None:
    from headgate_sync.memory.store import MemStore

    class Blind(Tap):
        inspect = None

    with working(Blind(MemStore()), Registry()) as worker:
        assert worker.ready.is_set()
        assert worker.health().ready


# Commands.


def test_a_quiet_worker_admits_nothing_until_it_is_to_resume(store: Any) -> None:
    registry, tap = Registry(), Tap(store)
    registry.task("k")(lambda: None)
    with working(tap, registry, poll=OFTEN, **QUICK) as worker:
        asked(store, "quiet")
        assert row(store).status == "quiet"
        assert worker.health().status == "quiet"
        put(store, "a")
        before = tap.count("admit")
        # Several beats, and with them several polls of a worker that is not quiet.
        beats = row(store).heartbeat_at_ms, tap.count("duty_tick")
        wait_for(lambda: tap.count("duty_tick") > beats[1] + 5, "time goes by")
        assert tap.count("admit") == before
        assert worker.health().duties
        healthy(worker)
        asked(store, "resume")
        assert row(store).status == "running"
        wait_for(lambda: job(store, "a").state == "completed", "it ran")


def test_a_worker_that_resigns_leaves_the_duties_to_others_for_good(
    store: Any,
) -> None:
    registry = Registry()
    registry.task("k")(lambda: None)
    with working(store, registry, worker_id="w1", **QUICK) as first:
        wait_for(lambda: bool(first.health().duties), "it holds them")
        held = first.health().duties
        with working(store, registry, worker_id="w2", **QUICK) as second:
            asked(store, "resign", "w1")
            wait_for(lambda: second.health().duties == held, "the other has them")
            assert first.health().duties == ()
            shown = row(store, "w1")
            assert (shown.status, shown.duties_active) == ("running", False)
        put(store, "a")
        wait_for(lambda: job(store, "a").state == "completed", "it works on")
        assert first.health().duties == ()
        healthy(first)


def test_a_worker_that_is_to_terminate_drains_within_its_time(store: Any) -> None:
    registry, started = Registry(), threading.Event()

    @registry.task("k")
    def waits(ctx: JobContext) -> None:
        started.set()
        ctx.sleep(PATIENCE_S)

    put(store, "a")
    with working(store, registry, shutdown_timeout="50ms", **HOLDS) as worker:
        assert started.wait(PATIENCE_S)
        steer(store).signal_worker(WORKER, "terminate")
        worker._over.wait(PATIENCE_S)
        assert worker.exit_status == ExitStatus(10, 1, 0)
    assert (job(store, "a").state, job(store, "a").attempt) == ("available", 0)


def test_a_worker_that_is_to_restart_waits_for_its_handlers(store: Any) -> None:
    """However short its patience is otherwise; the duties go to others at once."""
    registry, gate = Registry(), Gate()
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    config = {"shutdown_timeout": "1ms", "cancel_grace": "0s", **HOLDS}
    with working(store, registry, worker_id="old", **config) as old:
        gate.wait()
        wait_for(lambda: bool(old.health().duties), "it holds duties")
        with working(store, Registry(), worker_id="new", **QUICK) as new:
            asked(store, "restart", "old")
            wait_for(lambda: len(new.health().duties) >= 4, "duties are taken over")
            shown = row(store, "old")
            assert (shown.status, shown.duties_active) == ("restarting", False)
            assert old.health().status == "restarting"
            put(store, "b")
            before = row(store, "old").heartbeat_at_ms
            assert old.exit_status is None
            assert before <= row(store, "old").heartbeat_at_ms
            gate.open()
            old._over.wait(PATIENCE_S)
            assert old.exit_status == ExitStatus(0, 0, 0)
            wait_for(lambda: job(store, "a").state == "completed", "it is done")


def test_a_stop_bounds_the_drain_of_a_restart(store: Any) -> None:
    registry, started = Registry(), threading.Event()

    @registry.task("k")
    def waits(ctx: JobContext) -> None:
        started.set()
        ctx.sleep(PATIENCE_S)

    put(store, "a")
    with working(store, registry, shutdown_timeout="0s", **HOLDS) as worker:
        assert started.wait(PATIENCE_S)
        asked(store, "restart")
        assert row(store).status == "restarting"
    assert worker.exit_status == ExitStatus(10, 1, 0)


def test_a_command_that_an_operator_replaces_meanwhile_is_followed(
    store: Any,
) -> None:
    """Nothing is lost between hearing of one command and clearing it."""
    tap = TappedInspect(store)

    def beat(real: Any, meta: WorkerMeta) -> Any:
        command = real(meta)
        if command == "quiet" and meta.applied is None:
            steer(store).signal_worker(WORKER, "resign")
        return command

    tap.inspect.around["heartbeat_worker"] = beat
    with working(tap, Registry(), **QUICK) as worker:
        steer(store).signal_worker(WORKER, "quiet")
        wait_for(lambda: row(store).duties_active is False, "it resigned, too")
        assert worker.health().status == "quiet"
        wait_for(lambda: row(store).pending_command is None, "the slot is empty")


def test_a_beat_that_fails_after_a_command_says_it_again(store: Any) -> None:
    tap = TappedInspect(store)
    failed = threading.Event()

    def beat(real: Any, meta: WorkerMeta) -> Any:
        if meta.applied == "quiet" and not failed.is_set():
            failed.set()
            raise StoreUnavailable("away")
        return real(meta)

    tap.inspect.around["heartbeat_worker"] = beat
    with working(tap, Registry(), **QUICK):
        asked(store, "quiet")
        assert failed.is_set()
        assert row(store).status == "quiet"


def test_a_word_of_a_later_release_is_ignored(store: Any) -> None:
    tap = TappedInspect(store)
    said = threading.Event()

    def beat(real: Any, meta: WorkerMeta) -> Any:
        real(meta)
        said.set()
        return "dance"

    registry = Registry()
    registry.task("k")(lambda: None)
    with working(tap, registry, **QUICK) as worker:
        tap.inspect.around["heartbeat_worker"] = beat
        assert said.wait(PATIENCE_S)
        put(store, "a")
        wait_for(lambda: job(store, "a").state == "completed", "it works on")
        assert worker.health().status == "running"


# Health.


def test_a_healthy_worker_says_so_and_how_old_its_calls_are(store: Any) -> None:
    with working(store, Registry(), **QUICK) as worker:
        wait_for(lambda: worker.health().last_admit_ok_ms is not None, "it asked")
        health = healthy(worker)
    assert (health.healthy, health.ready, health.store) == (True, True, "ok")
    assert health.last_renew_ok_ms is None
    assert health.last_beat_ok_ms is not None
    assert {"admission", "heartbeat", "watchdog", "duties"} <= set(health.threads)
    assert {"duty-promoter", "duty-reclaimer"} <= set(health.threads)
    told = json.loads(health.to_json())
    assert told["healthy"] is True
    assert told["threads"]["heartbeat"]["alive"] is True
    assert "\n" not in health.to_json()


def test_transactions_that_collide_are_no_outage() -> None:
    pulse = Pulse(1.0)
    pulse.failed(StoreUnavailable("away"))
    assert pulse.away
    pulse.failed(StoreConflict("busy"))
    assert not pulse.away


def test_an_outage_is_not_unhealthy(store: Any) -> None:
    tap = TappedInspect(store)

    def away(real: Any, *args: Any, **keywords: Any) -> Any:
        raise StoreUnavailable("away")

    with working(tap, Registry(), poll=OFTEN, **QUICK) as worker:
        for name in ("admit", "duty_tick"):
            tap.around[name] = away
        tap.inspect.around["heartbeat_worker"] = away
        wait_for(lambda: worker.health().store == "unavailable", "it is noticed")
        wait_for(
            lambda: (worker.health().last_beat_ok_ms or 0) > 400, "beats are overdue"
        )
        assert worker.health().healthy
        tap.around.clear()
        tap.inspect.around.clear()
        wait_for(lambda: worker.health().store == "ok", "the store is back")
        healthy(worker)


def test_a_beat_that_is_refused_again_and_again_is_unhealthy(
    store: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(loops, "FAILURES_UNTIL_DEAD", 10**6)
    tap = TappedInspect(store)

    def broken(real: Any, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError("broken")

    with working(tap, Registry(), **QUICK) as worker:
        tap.inspect.around["heartbeat_worker"] = broken
        wait_for(lambda: not worker.health().healthy, "it is unhealthy")
        health = worker.health()
        assert health.threads["heartbeat"].last_error == "RuntimeError: broken"
        assert health.store == "ok"


def test_a_registry_that_refuses_beats_costs_no_lease(store: Any, caplog: Any) -> None:
    registry, gate, tap = Registry(), Gate(), TappedInspect(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(tap, registry, **QUICK) as worker:
        gate.wait()

        def refused(real: Any, *args: Any) -> Any:
            raise BackendError("no such table", sqlstate="42P01")

        tap.inspect.around["heartbeat_worker"] = refused
        renewed = tap.count("renew")
        wait_for(lambda: tap.count("renew") > renewed + 5, "leases are renewed")
        wait_for(lambda: not worker.health().healthy, "and it is seen")
        gate.open()
    assert worker.exit_status == ExitStatus(0, 0, 0)


def test_a_full_or_quiet_worker_is_not_overdue() -> None:
    pulse = Pulse(1.0)
    assert not pulse.overdue(100.0)  # nothing was to be done yet
    pulse.expect(100.0)
    assert not pulse.overdue(103.0)
    assert pulse.overdue(103.1)
    pulse.good(103.1)
    assert not pulse.overdue(106.0)
    pulse.rest()
    assert not pulse.overdue(10_000.0)
    pulse.expect(10_000.0)
    assert not pulse.overdue(10_003.0)
    assert pulse.overdue(10_003.1)


def test_an_admit_that_hangs_is_not_judged_before_the_beat_can_tell_why() -> None:
    pulses = Pulses(beat_s=10.0, poll_s=2.0)
    pulses.admit.expect(0.0)
    assert not pulses.overdue(30.0)
    assert pulses.overdue(30.1)
    assert Pulses(beat_s=1.0, poll_s=2.0).admit.interval_s == 2.0


# The ready file.


def test_the_ready_file_lives_as_long_as_jobs_are_taken(
    store: Any, tmp_path: Path
) -> None:
    path, registry, gate = tmp_path / "ready", Registry(), Gate()
    path.write_text("of a process that was killed")
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(store, registry, ready_file=path, **HOLDS) as worker:
        wait_for(path.exists, "it is written")
        assert json.loads(path.read_text())["worker_id"] == WORKER
        first = path.stat().st_mtime_ns
        wait_for(lambda: path.stat().st_mtime_ns > first, "it is written again")
        gate.wait()
        stops = threading.Thread(target=lambda: worker.stop(wait=True))
        stops.start()
        wait_for(lambda: not path.exists(), "it is gone while a handler runs")
        assert worker.health().in_flight == 1
        gate.open()
        stops.join(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def checked(*arguments: str) -> Any:
    """The exit code of a probe."""
    with pytest.raises(SystemExit) as ended:
        main(["worker", "check", *arguments])
    return ended.value.code


def test_the_ready_file_goes_on_through_an_outage(store: Any, tmp_path: Path) -> None:
    path, tap = tmp_path / "ready", TappedInspect(store)

    def away(real: Any, *args: Any, **keywords: Any) -> Any:
        raise StoreUnavailable("away")

    with working(tap, Registry(), ready_file=path, **QUICK):
        wait_for(path.exists, "it is written")
        tap.inspect.around["heartbeat_worker"] = away

        def told() -> Any:
            return json.loads(path.read_text())

        wait_for(lambda: told()["store"] == "unavailable", "it tells of the outage")
        first = path.stat().st_mtime_ns
        wait_for(lambda: path.stat().st_mtime_ns > first, "it is written again")
        assert checked(str(path)) == 0


def test_a_ready_file_that_cannot_be_written_any_more_costs_no_beat(
    store: Any, tmp_path: Path, caplog: Any
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "ready"
    with working(store, Registry(), ready_file=path, **QUICK) as worker:
        wait_for(path.exists, "it is written")
        path.unlink()
        folder.rmdir()
        wait_for(
            lambda: worker.health().threads["heartbeat"].failures > 3, "it is noticed"
        )
        healthy(worker)
    assert caplog.text.count("the ready file cannot be written") == 1
    assert worker.exit_status == ExitStatus(0, 0, 0)


def test_a_ready_file_that_cannot_be_written_is_a_mistake_of_the_setup(
    store: Any, tmp_path: Path
) -> None:
    path = tmp_path / "no" / "such" / "ready"
    worker = Worker(store, Registry(), WorkerConfig(queues=(QUEUE,), ready_file=path))
    with pytest.raises(ConfigurationError, match="cannot be written"):
        worker.run()


@pytest.mark.parametrize(
    ("text", "age_s", "code", "says"),
    [
        (None, 0, 1, "does not exist"),
        ('{"healthy": true, "status": "running"}', 0, 0, ""),
        ('{"healthy": true, "status": "running"}', 59, 0, ""),
        ('{"healthy": true, "status": "running"}', 62, 1, "allowed are 60000"),
        ('{"healthy": false, "status": "failing"}', 0, 1, "unhealthy, status failing"),
        ("", 0, 1, "is no ready file"),
        ("[]", 0, 1, "is no ready file"),
        ("{}", 0, 1, "is no ready file"),
    ],
)
def test_a_probe_judges_by_age_and_content(
    text: str | None,
    age_s: float,
    code: int,
    says: str,
    tmp_path: Path,
    capsys: Any,
) -> None:
    path = tmp_path / "ready"
    if text is not None:
        path.write_text(text)
        then_s = path.stat().st_mtime - age_s
        os.utime(path, (then_s, then_s))
    assert checked(str(path)) == code
    assert says in capsys.readouterr().err


def test_a_probe_has_an_age_of_its_own(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "ready"
    ReadyFile(path).write('{"healthy": true, "status": "running"}')
    os.utime(path, (path.stat().st_mtime - 30,) * 2)
    assert checked(str(path), "--max-age", "20s") == 1
    assert checked(str(path), "--max-age", "40s") == 0
    assert checked(str(path), "--max-age", "20") == 2
    assert "--max-age" in capsys.readouterr().err


# Signals and commands together.


def test_a_signal_and_a_command_steer_the_same_switch(store: Any) -> None:
    """Told to be quiet from afar, a worker gets loud again by a signal."""
    worker = Worker(
        store,
        Registry(),
        WorkerConfig(queues=(QUEUE,), worker_id=WORKER, **QUICK),  # type: ignore[arg-type]
    )
    seen: list[str] = []

    def drive() -> None:
        assert worker.ready.wait(PATIENCE_S)
        asked(store, "quiet")
        seen.append(row(store).status)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: row(store).status == "running", "it is loud")
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: row(store).status == "quiet", "it is quiet")
        asked(store, "resume")
        seen.append(row(store).status)
        worker.stop()

    drives = threading.Thread(target=drive)
    drives.start()
    assert worker.run() == ExitStatus(0, 0, 0)
    drives.join(PATIENCE_S)
    assert seen == ["quiet", "running"]
