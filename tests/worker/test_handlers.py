"""The handler threads: every claim finds one, and none is lost."""

from __future__ import annotations

import threading
from typing import Any, Self

import pytest

from headgate_sync.errors import BackendError
from headgate_sync.lifecycle import State
from headgate_sync.registry import Registry
from headgate_sync.worker.handlers import HandlerThreads
from tests.builders import envelope, state_of
from tests.worker.rig import PATIENCE_S, Bench, Gate, Tap, wait_for


class Pool:
    """Handler threads around a bench."""

    def __init__(self, store: Any, registry: Registry, **config: Any) -> None:
        self.bench = Bench(Tap(store), registry, **config)
        self.threads = HandlerThreads(
            self.bench.runner, self.bench.acks, self.bench.room
        )

    def feed(self) -> int:
        attempts = self.bench.admit()
        self.threads.feed(attempts)
        return len(attempts)

    def drain(self) -> None:
        wait_for(lambda: len(self.bench.inflight) == 0, "all slots are free")

    def __enter__(self) -> Self:
        self.threads.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.threads.end()
        assert self.threads.join(PATIENCE_S) == []


def put(store: Any, count: int, **fields: Any) -> list[str]:
    ids = [f"j{number:03}" for number in range(count)]
    store.enqueue(
        [envelope(id, **{"kind": "k", "payload": b"{}", **fields}) for id in ids]
    )
    return ids


def test_as_many_handlers_run_together_as_there_are_slots(store: Any) -> None:
    gate, registry = Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    ids = put(store, 8)
    with Pool(store, registry, capacity=8) as pool:
        pool.feed()
        gate.wait(8)
        gate.open()
        pool.drain()
    assert {state_of(store, id) for id in ids} == {State.COMPLETED}


def test_no_look_at_the_slots_finds_one_too_many(store: Any, monkeypatch: Any) -> None:
    """Else `--threads 1` now and then runs two handlers at once."""
    put(store, 2)
    inflight = Bench(store, capacity=1).inflight
    ended, runs = Bench(store, capacity=2).admit()
    inflight.add([ended])
    inflight.finish(ended, acks=True)
    inflight.take_off([ended])
    inflight.add([runs])
    free: list[int] = []
    look = threading.Thread(target=lambda: free.append(inflight.free))

    class Watched(dict[Any, Any]):
        def pop(self, *args: Any) -> Any:
            popped = super().pop(*args)
            look.start()
            look.join(0.1)  # time enough, unless it has to wait for the rest
            return popped

    monkeypatch.setattr(inflight, "_attempts", Watched(inflight._attempts))
    inflight.conclude([ended])
    look.join(PATIENCE_S)
    assert free == [0]


def test_an_ack_does_not_wait_for_a_handler_that_runs(store: Any) -> None:
    gate, registry = Gate(), Registry()

    @registry.task("k")
    def handler(slow: bool) -> None:
        if slow:
            gate.hold()

    store.enqueue(
        [
            envelope("quick", kind="k", payload=b'{"slow":false}', priority=1),
            envelope("slow", kind="k", payload=b'{"slow":true}'),
        ]
    )
    with Pool(store, registry, capacity=2) as pool:
        assert pool.feed() == 2
        wait_for(
            lambda: state_of(store, "quick") is State.COMPLETED,
            "the quick one is acked",
        )
        assert state_of(store, "slow") is State.RUNNING
        gate.open()
        pool.drain()


def test_an_ack_that_gets_ready_at_the_end_is_sent(store: Any) -> None:
    """Else a job that was done runs again when its lease has run out."""
    gate, registry = Gate(), Registry()
    registry.task("k")(lambda: gate.hold())
    [id] = put(store, 1)
    with Pool(store, registry, capacity=1) as pool:
        pool.feed()
        gate.wait()
        pool.threads.end()
        gate.open()
        assert pool.threads.join(PATIENCE_S) == []
    assert state_of(store, id) is State.COMPLETED


def test_a_thread_that_a_handler_ended_is_replaced(store: Any, caplog: Any) -> None:
    registry = Registry()

    @registry.task("k")
    def handler(leaves: bool) -> None:
        if leaves:
            raise SystemExit(1)

    with Pool(store, registry, capacity=2, catch_base_exceptions=False) as pool:
        before = threading.active_count()
        for number in range(6):
            body = b'{"leaves":%s}' % (b"true" if number % 2 == 0 else b"false")
            store.enqueue([envelope(f"j{number}", kind="k", payload=body)])
            pool.feed()
            pool.drain()
        assert threading.active_count() == before
        states = [state_of(store, f"j{number}") for number in range(6)]
        assert states == [State.RUNNING, State.COMPLETED] * 3
        assert "a handler ended its thread" in caplog.text


class DirectlyBase(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError(), SystemExit(), KeyboardInterrupt(), DirectlyBase()]
)
def test_whatever_handlers_raise_the_number_of_threads_stays(
    store: Any, error: BaseException
) -> None:
    registry = Registry()

    @registry.task("k")
    def handler() -> None:
        raise error

    with Pool(store, registry, capacity=4) as pool:
        before = threading.active_count()
        ids = put(store, 20)
        for _ in range(5):
            pool.feed()
            pool.drain()
        assert threading.active_count() == before
        assert {state_of(store, id) for id in ids} == {State.RETRYABLE}


@pytest.mark.parametrize(
    "error",
    [BackendError("no such text"), ValueError("bug"), SystemExit(1), DirectlyBase()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_comes_of_their_acks_the_number_of_threads_stays(
    store: Any, error: BaseException
) -> None:
    """A hundred jobs whose outcome no store takes are left to the reclaimer."""
    registry = Registry()
    registry.task("k")(lambda: None)

    def refuse(real: Any, acks: Any) -> Any:
        raise error

    with Pool(store, registry, capacity=4) as pool:
        before = threading.active_count()
        pool.bench.store.around["ack_batch"] = refuse
        ids = put(store, 100)
        for _ in range(25):
            assert pool.feed() == 4
            pool.drain()
        # One that is replaced may be seen at its end.
        wait_for(lambda: threading.active_count() == before, "as many as before")
        assert {state_of(store, id) for id in ids} == {State.RUNNING}
        assert not pool.bench.accepted
        pool.bench.store.around.clear()
        store.enqueue([envelope("later", kind="k", payload=b"{}")])
        pool.feed()
        pool.drain()
        assert state_of(store, "later") is State.COMPLETED


def test_a_fault_around_a_handler_wedges_no_slot(store: Any, caplog: Any) -> None:
    registry = Registry()
    registry.task("k")(lambda: None)
    (id,) = put(store, 1)
    with Pool(store, registry, capacity=1) as pool:
        resolve = registry.resolve
        broken = [True]

        def fail_once(kind: str) -> Any:
            if broken.pop() if broken else False:
                raise RuntimeError("registry is broken")
            return resolve(kind)

        registry.resolve = fail_once  # type: ignore[method-assign]
        pool.feed()
        pool.drain()
        assert "headgate failed around a handler" in caplog.text
        assert state_of(store, id) is State.RUNNING  # left to the reclaimer
        store.enqueue([envelope("later", kind="k", payload=b"{}")])
        pool.feed()
        pool.drain()
        assert state_of(store, "later") is State.COMPLETED
