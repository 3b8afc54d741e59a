"""What only a worker over a real server can show."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from headgate_sync.context import JobContext
from headgate_sync.lifecycle import State
from headgate_sync.policy import Poll
from headgate_sync.postgres.database import Session
from headgate_sync.postgres.store import PgStore
from headgate_sync.registry import Registry
from headgate_sync.worker import loops
from headgate_sync.worker.admission import Admission
from headgate_sync.worker.duties import Duties
from headgate_sync.worker.health import Pulse
from headgate_sync.worker.heartbeat import Heartbeat
from headgate_sync.worker.listening import WAIT_MS, Listening
from headgate_sync.worker.presence import Presence, Standing
from tests.builders import WORKER, envelope, job, state_of, steer
from tests.worker.rig import PATIENCE_S, Bench, Gate, Steps, Tap, wait_for, working


def put(store: Any, *ids: str, **fields: Any) -> None:
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )


@pytest.fixture
def own_store(postgres: Any, database_url: str) -> Iterator[PgStore]:
    """A store with a pool of two connections and a listener, over an empty schema."""
    made = PgStore.connect(database_url, pool_size=2, listen=database_url)
    yield made
    made.close()


def test_a_query_that_blocks_a_handler_is_cancelled_with_its_lease(
    own_store: PgStore, database_url: str
) -> None:
    started, ended, registry = threading.Event(), threading.Event(), Registry()
    raised: list[BaseException] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        with psycopg.connect(database_url) as connection:
            ctx.on_cancel(connection.cancel_safe)
            started.set()
            try:
                connection.execute("SELECT pg_catalog.pg_sleep(600)")
            except psycopg.errors.QueryCanceled as error:
                raised.append(error)
                raise
            finally:
                ended.set()

    put(own_store, "a")
    with working(own_store, registry, lease="900ms"):
        assert started.wait(PATIENCE_S)
        steer(own_store).operator_cancel("a")
        assert ended.wait(PATIENCE_S)
    assert len(raised) == 1
    row = job(own_store, "a")
    assert (row.state, row.attempt, row.errors) == ("cancelled", 0, ())


def test_an_idle_worker_is_woken_by_the_commit_of_a_job(own_store: PgStore) -> None:
    ran, registry, tap = threading.Event(), Registry(), Tap(own_store)
    registry.task("k")(lambda: ran.set())
    seldom = Poll(floor_ms=20, ceiling_ms=500_000, multiplier=1_000)
    with working(tap, registry, poll=seldom, run_duties=False):
        wait_for(lambda: _asks_no_more(tap), "it falls asleep")
        put(own_store, "a")
        assert ran.wait(PATIENCE_S)
    wait_for(lambda: state_of(own_store, "a") is State.COMPLETED, "it is acked")


def _asks_no_more(tap: Tap) -> bool:
    asked = tap.count("admit")
    threading.Event().wait(0.3)
    return asked > 1 and tap.count("admit") == asked


def test_leases_are_renewed_while_effects_hold_every_connection(
    own_store: PgStore,
) -> None:
    gate, registry, tap = Gate(), Registry(), Tap(own_store)

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ctx.once(lambda tx: gate.hold())

    put(own_store, "a", "b")
    with working(tap, registry, capacity=2, lease="900ms", run_duties=False) as worker:
        gate.wait(2)
        beats = tap.count("renew")
        wait_for(lambda: tap.count("renew") > beats + 5, "beats go on")
        assert worker.health().threads["heartbeat"].failures == 0
        gate.open()
        wait_for(
            lambda: {state_of(own_store, id) for id in "ab"} == {State.COMPLETED},
            "both are completed",
        )


def test_no_transaction_is_open_while_a_handler_runs(
    postgres: Any, database_url: str
) -> None:
    """Or the claim would be lost with a session that was idle for too long."""
    name = "headgate-idle"
    gate, registry = Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    store = PgStore.connect(
        make_conninfo(database_url, application_name=name), pool_size=2
    )
    put(store, "a", "b")

    def older_than(began: Any) -> int:
        [[count]] = postgres.connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name = %s AND xact_start < %s",
            [name, began],
        ).fetchall()
        return int(count)

    with working(store, registry, capacity=2):
        gate.wait(2)
        [[began]] = postgres.connection.execute("SELECT clock_timestamp()").fetchall()
        wait_for(lambda: older_than(began) == 0, "what was under way is over")
        gate.open()
        wait_for(
            lambda: {state_of(store, id) for id in "ab"} == {State.COMPLETED},
            "both are completed",
        )
    store.close()


def test_jobs_and_the_services_need_no_more_than_two_spare_connections(
    own_store: PgStore,
) -> None:
    registry = Registry()
    ran: list[str] = []

    @registry.task("k")
    def handler(ctx: JobContext) -> None:
        ctx.report_progress(1, 2)
        ran.append(ctx.job_id)

    ids = [f"j{number:02}" for number in range(60)]
    put(own_store, *ids)
    with working(own_store, registry, capacity=16, duty_interval="10ms"):
        wait_for(lambda: len(ran) == 60, "all ran")
    assert {state_of(own_store, id) for id in ids} == {State.COMPLETED}


def test_a_listener_that_was_closed_makes_nobody_spin() -> None:
    steps = Steps()
    answers: list[str | None] = ["q", "", None]
    noticed: list[float] = []

    class Closed:
        def wait_wakeup(self, queues: Any, timeout_ms: int) -> str | None:
            return answers.pop(0)

        def close(self) -> None: ...

    listening = Listening(
        Closed(), ("q",), notice=lambda: noticed.append(steps()), now_s=steps
    )
    waits = [listening.step() - steps() for _ in range(3)]
    assert waits == [0, 0, WAIT_MS / 1000]
    assert len(noticed) == 2


def test_a_worker_that_can_never_listen_again_ends_in_order(
    own_store: PgStore, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(loops, "LONGEST_PAUSE_S", 0.002)
    gate, registry, tap = Gate(), Registry(), Tap(own_store)
    registry.task("k")(lambda: gate.hold())
    put(own_store, "a")
    listener = Tap(own_store.notifying)
    tap.__dict__["notifying"] = listener
    with working(tap, registry) as worker:
        gate.wait()
        listener.fail("wait_wakeup", *[RuntimeError("for ever")] * 99)
        wait_for(lambda: worker.health().status == "failing", "it gives up")
        assert not worker.health().threads["notify"].alive
        gate.open()
        wait_for(lambda: worker.exit_status is not None, "it ends by itself")
    assert worker.exit_status is not None
    assert worker.exit_status.code == 13
    assert state_of(own_store, "a") is State.COMPLETED
    assert "could not be revived" in caplog.text


def test_an_idle_worker_costs_the_server_two_statements_a_second(
    postgres: Any, monkeypatch: Any
) -> None:
    """A minute of its loops, on stepped time, with the shortest of all waits."""
    store = postgres.make_store()
    sent: list[str] = []
    real = Session.rows

    def rows(session: Session, name: str, **parameters: Any) -> Any:
        sent.append(name)
        return real(session, name, **parameters)

    monkeypatch.setattr(Session, "rows", rows)
    steps = Steps()
    bench = Bench(store, now_s=steps)
    admission = Admission(
        store,
        bench.config,
        bench.inflight,
        WORKER,
        lambda attempts: None,
        now_s=steps,
        notified=True,
        uniform=lambda: 1.0,
    )
    duties = Duties(store, WORKER, interval_ms=1_000, now_s=steps)
    presence = Presence(
        store,
        bench.config,
        WORKER,
        bench.inflight,
        Pulse(10),
        polled=admission.polled,
        standing=lambda: Standing(status="running", duties_active=True),
        obey=lambda command: None,
        ready=lambda: None,
        health=lambda: None,  # type: ignore[arg-type,return-value]
        note=lambda error: None,
        emit=None,
        file=None,
        now_s=steps,
    )
    heartbeat = Heartbeat(
        store, bench.inflight, lease_ms=30_000, now_s=steps, show=presence.beat
    )

    def tick() -> float:
        due_s = duties.step()
        for duty in duties._duties.values():
            assert duty.join(PATIENCE_S)
        return due_s

    loops = [admission.step, heartbeat.step, tick]
    due_s = [steps()] * 3

    def live(seconds: int) -> int:
        """Let time pass; returns how many statements were sent meanwhile."""
        sent.clear()
        until_s = steps() + seconds
        while (first_s := min(due_s)) < until_s:
            if first_s > steps():
                postgres.clock.advance_ms(round((first_s - steps()) * 1_000))
                steps.at_s = first_s
            number = due_s.index(first_s)
            due_s[number] = loops[number]()
        steps.at_s = until_s
        return len(sent)

    live(10)
    assert 60 < live(60) <= 120, Counter(sent)
    assert duties.held
    assert {"admit", "duty_tick", "heartbeat_worker", "gate_fold"} <= set(sent)
