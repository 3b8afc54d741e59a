"""The whole worker on its threads."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import ConfigurationError, InvalidRequest, StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.worker import Worker, WorkerConfig, loops, watchdog
from headgate_sync.worker.startup import warn_of_mistyped_queues
from tests.builders import QUEUE, envelope, job, state_of
from tests.worker.rig import (
    PATIENCE_S,
    Gate,
    Tap,
    Together,
    wait_for,
    working,
)


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


def test_jobs_of_many_queues_are_run_to_their_end(store: Any) -> None:
    registry = Registry()
    seen: list[int] = []

    @registry.task("k")
    def handler(n: int) -> int:
        seen.append(n)
        return n

    for number in range(60):
        put(store, f"j{number}", queue=f"q{number % 3}", payload=b'{"n":%d}' % number)
    with working(store, registry, queues=("q0", "q1", "q2")):
        wait_for(lambda: len(seen) == 60, "all ran")
    assert sorted(seen) == list(range(60))
    assert {state_of(store, f"j{number}") for number in range(60)} == {State.COMPLETED}
    assert store.results.read_result("j7").data == b"7"


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
@pytest.mark.parametrize("fails", ["by raising", "by a timeout"])
def test_what_fails_runs_as_often_as_it_may_and_no_more(
    store: Any, clock: Any, fails: str, max_attempts: int
) -> None:
    registry = Registry()
    began: list[int] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        began.append(ctx.attempt)
        if fails == "by a timeout":
            ctx.wait(PATIENCE_S)
        raise ValueError("no")

    put(store, "a", max_attempts=max_attempts, timeout_ms=200)

    def given_up() -> bool:
        state = state_of(store, "a")
        if state is State.RETRYABLE:
            clock.advance_ms(100)
        return state is State.ARCHIVED

    with working(store, registry, retry=lambda info: "1s", duty_interval="10ms"):
        wait_for(given_up, "it is given up")
        put(store, "last", timeout_ms=200, max_attempts=1)
        wait_for(lambda: len(began) > max_attempts, "the worker goes on")
    assert began[:max_attempts] == list(range(max_attempts))
    assert job(store, "a").attempt == max_attempts


def test_an_idle_worker_finds_work_that_comes_later(store: Any) -> None:
    ran = threading.Event()
    registry = Registry()
    registry.task("k")(lambda: ran.set())
    with working(store, registry):
        put(store, "a")
        assert ran.wait(PATIENCE_S)
    assert state_of(store, "a") is State.COMPLETED


def test_due_jobs_are_promoted_and_lost_ones_reclaimed_by_any_worker(
    store: Any, clock: Any
) -> None:
    registry = Registry()
    registry.task("k")(lambda: None)
    put(store, "later", delay_ms=5_000, scheduled_at_ms=0)
    with working(store, registry, duty_interval="20ms"):
        clock.advance_ms(5_000)
        wait_for(lambda: state_of(store, "later") is State.COMPLETED, "it ran")


def test_an_outage_is_waited_out(store: Any, caplog: Any) -> None:
    registry, tap = Registry(), Tap(store)
    registry.task("k")(lambda: None)
    away = [True]

    def maybe(real: Any, *args: Any, **keywords: Any) -> Any:
        if away:
            raise StoreUnavailable("away")
        return real(*args, **keywords)

    with working(tap, registry, duty_interval="20ms") as worker:
        for name in ("admit", "duty_tick", "renew", "ack_batch"):
            tap.around[name] = maybe
        put(store, "a")
        asked = tap.count("admit")
        wait_for(lambda: tap.count("admit") > asked + 2, "it asks again and again")
        assert worker.health().status == "running"
        away.clear()
        wait_for(lambda: state_of(store, "a") is State.COMPLETED, "work goes on")
    assert worker.exit_status is not None
    assert worker.exit_status.code == 0


def test_acks_that_fail_every_other_time_leave_no_job_behind(store: Any) -> None:
    registry, tap = Registry(), Tap(store)
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)

    def fail_often(real: Any, acks: Any) -> Any:
        number = tap.count("ack_batch")
        if number % 4 == 1:
            raise StoreUnavailable("cut before the commit")
        answers = real(acks)
        if number % 4 == 3:
            raise StoreUnavailable("cut after the commit")
        return answers

    tap.around["ack_batch"] = fail_often
    kept = [f"k{number}" for number in range(20)]
    gone = [f"g{number}" for number in range(20)]
    put(store, *kept)
    put(store, *gone, retention_ms=0)
    with working(tap, registry):
        wait_for(
            lambda: (
                {state_of(store, id) for id in kept} == {State.COMPLETED}
                and {state_of(store, id) for id in gone} == {State.DELETED}
            ),
            "all are settled",
        )
    assert sorted(ran) == sorted(kept + gone)


def test_capacity_is_never_exceeded_and_a_slot_is_used_again_at_once(
    store: Any,
) -> None:
    registry, tap = Registry(), Tap(store)
    together = Together(registry, 3)
    ids = [f"j{number}" for number in range(40)]
    put(store, *ids)
    with working(tap, registry, capacity=3):
        wait_for(
            lambda: all(state_of(store, id) is State.COMPLETED for id in ids), "all ran"
        )
    assert together.most == 3
    assert max(request.capacity for request in tap.given("admit")) == 3


def test_a_lost_lease_keeps_its_slot_until_the_thread_returns(store: Any) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(tap, registry, capacity=1, lease="60ms") as worker:
        gate.wait()
        assert store.inspect is not None
        store.inspect.operator_cancel("a")
        put(store, "b")
        wait_for(lambda: "a" not in _renewed(tap), "the loss is known")
        assert worker.health().in_flight == 1
        assert state_of(store, "b") is State.AVAILABLE
        gate.open()
        wait_for(lambda: state_of(store, "b") is State.COMPLETED, "the slot is free")
    assert state_of(store, "a") is State.CANCELLED


def _renewed(tap: Tap) -> set[str]:
    beats = tap.count("renew")
    wait_until = threading.Event()
    wait_until.wait(0.1)
    return {lease.job_id for leases in tap.given("renew")[beats:] for lease in leases}


def test_a_worker_may_run_where_no_signal_handler_can_be_installed(
    store: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    worker = Worker(store, Registry(), WorkerConfig(queues=(QUEUE,)))
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert worker.ready.wait(PATIENCE_S)
    worker.stop(wait=True)
    thread.join(PATIENCE_S)
    assert "not on the main thread" in caplog.text


@pytest.mark.parametrize("name", ["headgate-handler-3", "headgate-admission"])
def test_a_thread_that_cannot_be_started_ends_the_worker(
    store: Any, caplog: Any, monkeypatch: Any, name: str
) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    put(store, "a")
    worker = Worker(store, Registry(), WorkerConfig(queues=(QUEUE,), capacity=4))
    status = worker.run(install_signal_handlers=False)
    assert (status.code, status.abandoned) == (13, 0)
    assert "no more threads can be started" in caplog.text
    assert not [t for t in threading.enumerate() if t.name.startswith("headgate-h")]
    assert state_of(store, "a") is State.AVAILABLE


def test_unknown_kinds_that_wait_are_named_once_at_the_start(
    store: Any, caplog: Any
) -> None:
    registry = Registry()
    registry.task("known")(lambda: None)
    for number, kind in enumerate(["known", "new:thing", "new:thing", "other"]):
        put(store, f"j{number}", kind=kind)
    put(store, "foreign", kind="foreign", queue="elsewhere")
    with working(store, registry):
        pass
    assert caplog.text.count("kind new:thing wait") == 1
    assert caplog.text.count("kind other wait") == 1
    assert "kind known" not in caplog.text
    assert "kind foreign" not in caplog.text  # other workers take from that queue


@pytest.mark.parametrize("declared", [False, True])
def test_a_worker_without_tasks_says_so_at_the_start(
    declared: bool, store: Any, caplog: Any
) -> None:
    registry = Registry()
    if declared:
        registry.task("known")(lambda: None)
    with working(store, registry):
        pass
    assert ("no task is declared" in caplog.text) != declared


@pytest.mark.parametrize(
    ("queues", "told"),
    [
        (("mial",), True),
        (("mial", "mail"), False),  # what is served needs no hint
        (("bulk",), False),  # calls may name queues of their own
        (("mail",), False),
    ],
)
def test_a_queue_that_looks_mistyped_is_named_at_the_start(
    queues: Any, told: bool, caplog: Any
) -> None:
    registry = Registry()
    registry.task("welcome", queue="mail")(lambda: None)
    warn_of_mistyped_queues(registry, queues)
    assert ("queue mial, and this worker leaves out queue mail" in caplog.text) == told


def test_an_outage_at_the_start_does_not_stop_the_start(
    store: Any, caplog: Any
) -> None:
    tap = Tap(store)
    inspect = Tap(store.inspect)
    inspect.fail("distinct_kinds", StoreUnavailable("away"))
    tap.__dict__["inspect"] = inspect
    tap.fail("admit", StoreUnavailable("away"))
    with working(tap, Registry()) as worker:
        assert worker.ready.is_set()
    assert "waiting kinds not looked at: away" in caplog.text


def test_a_result_that_no_store_could_keep_is_refused_at_the_start(store: Any) -> None:
    registry, tap = Registry(), Tap(store)
    tap.__dict__["results"] = None

    @registry.task("k")
    def handler() -> int:
        return 1

    with (
        pytest.raises(ConfigurationError, match="handlers of k return a result"),
        working(tap, registry),
    ):
        pass


def test_faults_of_the_registry_are_raised_before_anything_is_admitted(
    store: Any,
) -> None:
    registry, tap = Registry(), Tap(store)

    def late(n: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    registry.task("k")(late)
    with pytest.raises(InvalidRequest, match="Nowhere"), working(tap, registry):
        pass
    assert tap.count("admit") == 0


def test_a_worker_runs_once(store: Any) -> None:
    with working(store, Registry()) as worker:
        pass
    with pytest.raises(RuntimeError, match="runs once"):
        worker.run()


def test_a_worker_that_was_made_before_a_fork_is_refused(store: Any) -> None:
    worker = Worker(store, Registry(), WorkerConfig(queues=(QUEUE,)))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        try:
            worker.run()
            text = "it ran"
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "after fork" in told.read()


def test_two_workers_of_one_name_share_the_work_and_each_keeps_its_leases(
    store: Any,
) -> None:
    registry = Registry()
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)
        ctx.wait(0.002)

    ids = [f"j{number}" for number in range(40)]
    put(store, *ids, sticky_worker="w")
    with working(store, registry), working(store, registry):
        wait_for(lambda: len(ran) == 40, "all ran")
    assert sorted(ran) == sorted(ids)
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}


def test_a_time_out_wakes_a_watchdog_that_would_look_later(
    store: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_AT_LOOPS_S", 1_000.0)
    told: list[tuple[bool, str | None]] = []
    registry = Registry()

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        told.append((ctx.wait(PATIENCE_S), ctx.cancel_reason))

    with working(store, registry, stuck_threshold="1h") as worker:
        wait_for(lambda: worker.health().threads["watchdog"].rounds > 0, "it sleeps")
        put(store, "a", timeout_ms=20)
        wait_for(lambda: bool(told), "the handler ends")
    assert told == [(True, "timeout")]


# Health, and what happens when a loop fails


def test_health_names_the_loops_the_slots_and_the_duties(store: Any) -> None:
    gate, registry = Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(store, registry, duty_interval="20ms") as worker:
        gate.wait()
        wait_for(lambda: len(worker.health().duties) == 6, "duties are held")
        health = worker.health()
        gate.open()
    assert (health.status, health.worker_id) == ("running", "w")
    assert (health.in_flight, health.capacity) == (1, 4)
    loops_named = {"heartbeat", "watchdog", "duties", "admission"}
    assert loops_named <= set(health.threads)
    assert all(loop.alive and not loop.failures for loop in health.threads.values())


def test_a_heartbeat_that_fails_goes_on_beating_and_shows_it(
    store: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    tap.fail("renew", *[RuntimeError("bug")] * 3)
    with working(tap, registry, lease="900ms") as worker:
        gate.wait()
        wait_for(lambda: tap.count("renew") > 5, "it beats")
        health = worker.health().threads["heartbeat"]
        gate.open()
    assert (health.alive, health.failures, health.consecutive_failures) == (True, 3, 0)
    assert health.last_error == "RuntimeError: bug"
    assert "heartbeat failed" in caplog.text
    assert job(store, "a").state == "completed"


@pytest.mark.parametrize("call", ["admit", "renew", "duty_tick"])
def test_a_loop_that_cannot_be_revived_ends_the_worker_in_order(
    store: Any, monkeypatch: Any, caplog: Any, call: str
) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(loops, "LONGEST_PAUSE_S", 0.002)
    gate, registry, tap = Gate(), Registry(), Tap(store)
    registry.task("k")(lambda: gate.hold())
    put(store, "a")
    with working(tap, registry, lease="900ms", duty_interval="10ms") as worker:
        gate.wait()

        def break_down(real: Any, *args: Any, **keywords: Any) -> Any:
            raise RuntimeError("for ever")

        tap.around[call] = break_down
        wait_for(lambda: worker.health().status == "failing", "it gives up")
        gate.open()
        wait_for(lambda: worker.exit_status is not None, "it ends by itself")
    assert worker.exit_status is not None
    assert worker.exit_status.code == 13
    assert state_of(store, "a") is State.COMPLETED
    assert "could not be revived" in caplog.text


@pytest.mark.parametrize("gone", ["watchdog", "heartbeat"])
def test_a_thread_that_is_gone_without_a_word_ends_the_worker(
    store: Any, monkeypatch: Any, caplog: Any, gone: str
) -> None:
    run = loops.ServiceLoop._run

    def run_others(loop: Any) -> None:
        if loop.name != gone:
            run(loop)

    monkeypatch.setattr(loops.ServiceLoop, "_run", run_others)
    monkeypatch.setattr(watchdog, "LOOK_AT_LOOPS_S", 0.05)
    with Worker(store, Registry(), WorkerConfig()) as worker:
        wait_for(lambda: worker.exit_status is not None, "it ends by itself")
    assert worker.exit_status is not None
    assert worker.exit_status.code == 13
    assert f"{gone} could not be revived" in caplog.text
