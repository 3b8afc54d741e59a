"""The fleet's upkeep: held by leases, done on threads of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headgate_sync.errors import BackendError, StoreUnavailable
from headgate_sync.lifecycle import State
from headgate_sync.policy import MANY_CLASSES
from headgate_sync.worker import duties as module
from headgate_sync.worker.duties import Duties
from tests.builders import (
    DAY_MS,
    QUEUE,
    bring_to,
    claim_one,
    enqueue,
    envelope,
    state_of,
)
from tests.worker.rig import PATIENCE_S, Gate, Steps, Tap, wait_for

NAMES = {
    "operations", "promoter", "quarantine", "reclaimer", "retention", "scheduler",
}  # fmt: skip


class Ticking:
    """Duties on stepped time over a tapped store."""

    def __init__(
        self, store: Any, holder: str = "w1", steps: Steps | None = None
    ) -> None:
        self.steps = steps or Steps()
        self.tap = Tap(store)
        self.duties = Duties(self.tap, holder, interval_ms=1_000, now_s=self.steps)

    def tick(self, after_s: float = 1.0) -> float:
        """Let time pass and tick; returns the seconds until the next tick."""
        self.steps.advance(after_s)
        return self.duties.step() - self.steps()

    def settle(self, but: str = "") -> None:
        """Wait for the sweeps that run; what no list of threads names may still end."""
        for duty in self.duties._duties.values():
            assert duty.name == but or duty.join(PATIENCE_S)


def test_the_first_tick_comes_after_one_interval(store: Any) -> None:
    ticking = Ticking(store)
    assert ticking.tick(0) == 1.0
    assert ticking.tick(0.4) == pytest.approx(0.6)
    assert ticking.tap.calls == []
    assert ticking.tick(0.6) == 1.0
    assert ticking.duties.held == NAMES


def test_the_books_of_the_gate_are_kept_although_no_job_is_due(store: Any) -> None:
    ticking = Ticking(store)
    ticking.tap.around["duty_tick"] = lambda real, *args, **keywords: dict.fromkeys(
        NAMES, False
    )
    for passed_s in range(1, 62):
        ticking.tick()
        ticking.settle()
        # Like every duty at the first tick, and then every 30 s.
        assert ticking.tap.count("promote_due") == (passed_s + 29) // 30
    assert ticking.tap.count("reclaim_expired") == 1


def test_schedules_that_a_worker_may_not_write_are_left_to_an_operator(
    store: Any, caplog: Any
) -> None:
    def refused() -> None:
        raise BackendError("no right", sqlstate="42501")

    steps = Steps()
    duties = Duties(store, "w1", interval_ms=1_000, now_s=steps, at_start=refused)
    for _ in range(2):
        duties.step()
    assert caplog.text.count("not applied: no right; an operator applies them") == 1


def test_quick_sweeps_are_done_one_after_the_other(
    store: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "STAGGER_S", PATIENCE_S)
    ticking = Ticking(store)
    under_way: set[str] = set()
    most = [0]

    def watched(real: Any, *args: Any, **keywords: Any) -> Any:
        under_way.add(real.__name__)
        most[0] = max(most[0], len(under_way))
        threading.Event().wait(0.02)  # so that another one would be met
        under_way.remove(real.__name__)
        return real(*args, **keywords)

    sweeps = ("reclaim_expired", "promote_due", "evict_retained")
    for name in sweeps:
        ticking.tap.around[name] = watched
    ticking.tap.around["duty_tick"] = lambda real, *args, **keywords: dict.fromkeys(
        NAMES, True
    )
    ticking.tick()
    ticking.settle()
    assert all(ticking.tap.count(name) for name in sweeps)
    assert most == [1]


def test_one_call_asks_for_all_duties_under_a_lease_of_two_intervals(
    store: Any,
) -> None:
    ticking = Ticking(store)
    ticking.tick()
    ((_, args, keywords),) = [c for c in ticking.tap.arguments if c[0] == "duty_tick"]
    assert args[0] == "w1"
    assert set(args[1]) == NAMES
    assert keywords == {"lease_ms": 2_000}
    ticking.settle()


def test_only_duties_with_work_run_a_sweep(
    backend: Any, store: Any, clock: Any
) -> None:
    ticking = Ticking(store)
    ticking.tick()
    ticking.settle()
    ticking.tap.calls.clear()
    bring_to(store, clock, "a", State.SCHEDULED)
    clock.advance_ms(60_000)
    ticking.tick()
    ticking.settle()
    assert state_of(store, "a") is State.AVAILABLE
    if backend.name == "postgres":  # MemStore cannot know and calls every duty due
        assert set(ticking.tap.calls) == {"duty_tick", "promote_due"}


def test_every_duty_does_its_work(store: Any, clock: Any) -> None:
    enqueue(store, "crash", fingerprint="f")
    for _ in range(3):
        claim_one(store)
        clock.advance_ms(30_000)
        store.reclaim_expired(10)
        clock.advance_ms(DAY_MS // 2)
        store.promote_due(10)
    bring_to(store, clock, "old", State.COMPLETED, retention_ms=1, fingerprint="g")
    enqueue(store, "lost", retention_ms=2, fingerprint="h")
    claim_one(store)
    clock.advance_ms(30_000)
    ticking = Ticking(store)
    ticking.tick()
    ticking.settle()
    assert state_of(store, "crash") is State.QUARANTINED
    assert state_of(store, "old") is State.DELETED
    assert state_of(store, "lost") is State.RETRYABLE


def test_each_duty_has_one_holder_at_a_time(store: Any, clock: Any) -> None:
    steps = Steps()
    fleet = [Ticking(store, f"w{n}", steps) for n in range(2)]
    steps.advance(1)  # nothing is due before one interval has passed
    for number in range(100):
        clock.advance_ms(500)
        fleet[number % 2].tick(0.5)
        held = [ticking.duties.held for ticking in fleet]
        assert not (held[0] & held[1])
        assert held[0] | held[1] == NAMES
    for ticking in fleet:
        ticking.settle()


def test_another_worker_holds_what_a_worker_released(store: Any) -> None:
    first, second = Ticking(store, "w1"), Ticking(store, "w2")
    first.tick()
    second.tick()
    assert second.duties.held == set()
    first.duties.release(PATIENCE_S)
    assert first.duties.held == set()
    second.tick()
    assert second.duties.held == NAMES
    second.settle()


def test_a_worker_that_got_no_answer_holds_nothing(store: Any, caplog: Any) -> None:
    ticking = Ticking(store)
    ticking.tick()
    ticking.settle()
    ticking.tap.fail("duty_tick", StoreUnavailable("away"))
    assert ticking.tick() == 1.0
    assert ticking.duties.held == set()
    assert "duties: away" in caplog.text
    ticking.tick()
    assert ticking.duties.held == NAMES
    ticking.settle()


def test_a_full_batch_is_followed_by_the_next_at_once(
    store: Any, clock: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "RECLAIM_LIMIT", 2)
    enqueue(store, *"abcde")
    for _ in range(5):
        claim_one(store)
    clock.advance_ms(30_000)
    ticking = Ticking(store)
    ticking.tick()
    ticking.settle()
    assert ticking.tap.given("reclaim_expired") == [2, 2, 2]
    assert {state_of(store, id) for id in "abcde"} == {State.RETRYABLE}


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), RuntimeError("bug"), SystemExit(1)]
)
def test_a_sweep_that_fails_runs_again_at_the_next_tick(
    store: Any, clock: Any, error: BaseException, caplog: Any
) -> None:
    enqueue(store, "a")
    claim_one(store)
    clock.advance_ms(30_000)
    ticking = Ticking(store)
    ticking.tap.fail("reclaim_expired", error)
    ticking.tick()
    ticking.settle()
    assert state_of(store, "a") is State.RUNNING
    assert "duty reclaimer" in caplog.text
    ticking.tick()
    ticking.settle()
    assert state_of(store, "a") is State.RETRYABLE


def test_a_sweep_that_hangs_stops_only_itself_and_loses_its_duty(
    store: Any, clock: Any
) -> None:
    gate = Gate()
    enqueue(store, "a")
    claim_one(store)
    clock.advance_ms(30_000)
    bring_to(store, clock, "b", State.SCHEDULED)
    clock.advance_ms(60_000)
    steps = Steps()
    first, second = Ticking(store, "w1", steps), Ticking(store, "w2", steps)
    first.tap.around["reclaim_expired"] = lambda real, limit: (
        gate.hold(),
        real(limit),
    )[1]

    def second_passes(count: int) -> None:
        for _ in range(count):
            clock.advance_ms(1_000)
            first.tick(1.0)
            second.tick(0.0)

    second_passes(1)
    gate.wait()
    first.settle(but="reclaimer")  # by stepped time they would seem to hang as well
    assert state_of(store, "b") is State.AVAILABLE
    second_passes(59)
    assert "reclaimer" in first.duties.held  # renewed while the sweep runs
    assert second.duties.held == set()
    second_passes(3)  # none is stepped while the other sweeps
    assert first.duties.held == NAMES - {"reclaimer"}
    assert second.duties.held == {"reclaimer"}
    wait_for(lambda: state_of(store, "a") is not State.RUNNING, "the other does it")
    gate.open()
    first.settle()
    second.duties.release(PATIENCE_S)
    second_passes(1)
    assert first.duties.held == NAMES
    first.settle()
    second.settle()


def test_the_gates_books_are_kept_at_least_every_thirty_seconds(postgres: Any) -> None:
    store = postgres.make_store()
    ticking = Ticking(store)
    maintenance = Tap(store.maintenance)
    ticking.tap.__dict__["maintenance"] = maintenance
    for _ in range(61):
        postgres.clock.advance_ms(1_000)
        ticking.tick()
        ticking.settle()
    assert maintenance.count("gate_fold") == 3
    assert maintenance.count("gate_reconcile") == 3


def test_a_partition_of_many_rate_classes_is_warned_of_once(
    postgres: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = postgres.make_store()
    for partition, classes in (("wide", MANY_CLASSES + 1), ("A", MANY_CLASSES)):
        for n in range(classes):
            rate_class = f"c{n}"
            job = f"{partition}{n}"
            store.enqueue(
                [envelope(job, partition_key=partition, rate_class=rate_class)]
            )
    ticking = Ticking(store)
    for _ in range(25):
        postgres.clock.advance_ms(30_000)
        ticking.tick(30.0)
        ticking.settle()
    [told] = [each.getMessage() for each in caplog.records if "classes" in each.msg]
    assert told.startswith(
        f"queue {QUEUE}: jobs of 65 rate classes wait in partition 'wide', more than 64"
    )


def test_a_fault_of_the_promotion_does_not_stop_the_gates_books(postgres: Any) -> None:
    store = postgres.make_store()
    ticking = Ticking(store)
    maintenance = Tap(store.maintenance)
    ticking.tap.__dict__["maintenance"] = maintenance
    ticking.tap.fail("promote_due", BackendError("no"))
    ticking.tick()
    ticking.settle()
    assert maintenance.count("gate_fold") == 1


def test_a_store_without_inspection_has_neither_quarantine_nor_schedules(
    store: Any,
) -> None:
    ticking = Ticking(store)
    ticking.tap.__dict__["inspect"] = None
    duties = Duties(ticking.tap, "w1", interval_ms=1_000, now_s=ticking.steps)
    ticking.steps.advance(1)
    duties.step()
    assert duties.held == NAMES - {"operations", "quarantine", "scheduler"}
    duties.release(PATIENCE_S)


def test_a_sweep_that_fails_for_ever_is_logged_once_a_minute_and_seen(
    store: Any, caplog: Any
) -> None:
    ticking = Ticking(store)
    ticking.tap.around["duty_tick"] = lambda real, *args, **keywords: {"promoter": True}

    def broken(real: Any, limit: int) -> int:
        raise BackendError("broken", sqlstate="XX000")

    ticking.tap.around["promote_due"] = broken
    for _ in range(50):
        ticking.tick()
        ticking.settle()
    health = ticking.duties.health()["duty-promoter"]
    assert (health.failures, health.consecutive_failures) == (50, 50)
    assert health.alive  # however often it fails, the next tick starts another
    assert health.last_error is not None
    assert health.last_error.startswith("BackendError")
    assert caplog.text.count("duty promoter failed") == 1
    ticking.tap.around.pop("promote_due")
    ticking.tick()
    ticking.settle()
    assert ticking.duties.health()["duty-promoter"].consecutive_failures == 0


def test_a_duty_whose_thread_cannot_be_started_holds_up_no_end(
    store: Any, monkeypatch: Any
) -> None:
    ticking = Ticking(store)
    enqueue(store, "a")
    claim_one(store, lease_ms=1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            ticking.tick()
    ticking.settle()
    ticking.duties.release(PATIENCE_S)
    assert ticking.tap.count("release_duty") == len(NAMES)


def test_a_worker_that_resigned_gives_everything_up_and_ticks_no_more(
    store: Any,
) -> None:
    ticking, other = Ticking(store), Ticking(store, "w2")
    ticking.tick()
    assert ticking.duties.held == NAMES
    ticking.duties.resign()
    assert ticking.duties.step() == float("inf")
    assert ticking.duties.held == frozenset()
    other.tick()
    assert other.duties.held == NAMES
    ticks = ticking.tap.count("duty_tick")
    assert ticking.tick(60) == float("inf")
    assert ticking.tap.count("duty_tick") == ticks
