"""What the worker's tests share: stepped time, stores that can be tapped, steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from headgate_sync.attempt import LiveAttempt
from headgate_sync.client import Client
from headgate_sync.context import JobContext
from headgate_sync.injection import WorkerInfo
from headgate_sync.lease import Claim
from headgate_sync.registry import Registry
from headgate_sync.worker import Worker, WorkerConfig
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.prefetch import WaitingRoom
from headgate_sync.worker.runner import Runner
from tests.builders import QUEUE, WORKER, admit

PATIENCE_S = 20.0
"""How long a test waits for what must happen; never that long when all is well."""

START_S = 5_000.0


class Steps:
    """Monotonic time that moves only when a test says so."""

    def __init__(self) -> None:
        self.at_s = START_S

    def __call__(self) -> float:
        return self.at_s

    def advance(self, seconds: float) -> None:
        self.at_s += seconds

    @property
    def passed_ms(self) -> int:
        """Milliseconds since the start."""
        return round((self.at_s - START_S) * 1000)


class Tap:
    """A store with a tap on its calls: they are noted, and may be held or failed.

    Attributes:
        calls: names of the calls made, in order.
        around: by name, a function that gets the real call and its arguments instead.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []
        self.arguments: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.around: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            self.arguments.append((name, args, keywords))
            around = self.around.get(name)
            if around is None:
                return found(*args, **keywords)
            return around(found, *args, **keywords)

        return call

    def count(self, name: str) -> int:
        """How often a call was made."""
        return self.calls.count(name)

    def given(self, name: str) -> list[Any]:
        """The first argument of each such call."""
        return [args[0] for called, args, _ in self.arguments if called == name]

    def fail(self, name: str, *errors: BaseException) -> None:
        """Let the next calls raise these errors, one each, and the later ones work."""
        left = list(errors)

        def around(real: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
            if left:
                raise left.pop(0)
            return real(*args, **keywords)

        self.around[name] = around


def over(store: Any, **parts: Any) -> Tap:
    """The store with some of its capabilities replaced."""
    tapped = Tap(store)
    for name, part in parts.items():
        setattr(tapped, name, part)
    return tapped


class Gate:
    """Holds threads at a point until the test lets them go."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._open = threading.Event()

    def hold(self) -> None:
        """Say that the point is reached, and stay there."""
        self._arrived.release()
        assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    def wait(self, count: int = 1) -> None:
        """Wait until so many have arrived."""
        for _ in range(count):
            assert self._arrived.acquire(timeout=PATIENCE_S), "nobody came"

    def open(self) -> None:
        """Let all go, now and later."""
        self._open.set()


class Together:
    """Jobs of kind `k`, and how many of them ran at the same time.

    The first ones stay until as many run as are expected, however slowly a busy machine
    starts them; the others take a moment, in which one too many would be seen.

    Attributes:
        most: so many did.
    """

    def __init__(self, registry: Registry, expected: int) -> None:
        self.most = running = 0
        lock = threading.Lock()
        met = threading.Event()

        @registry.task("k")
        def handler(ctx: JobContext) -> None:
            nonlocal running
            with lock:
                running += 1
                self.most = max(self.most, running)
                if running >= expected:
                    met.set()
            assert met.wait(PATIENCE_S), f"only {running} of {expected} run together"
            ctx.wait(0.001)
            with lock:
                running -= 1


def take_ahead(monkeypatch: Any) -> None:
    """Let workers claim all that `prefetch` allows, whatever their pace."""
    monkeypatch.setattr(WaitingRoom, "_allowed", lambda room: room._prefetch)


def add_batch_handler(
    registry: Registry,
    handler: Callable[[list[Any]], Any],
    *,
    kind: str = "k",
    max_size: int = 2,
    max_delay: str = "1s",
) -> None:
    """Register a handler of many jobs, which have no parameters."""

    @registry.task(kind)
    @attrs.frozen
    class Work:
        pass

    registry.batch_handler(Work, max_size=max_size, max_delay=max_delay)(handler)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds that other threads bring about.

    For what has no event to wait on, as the state of a row; nothing is measured by it.
    """
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"never: {what}")


class Bench:
    """The parts of a worker around one store, without its threads."""

    def __init__(
        self,
        store: Any,
        registry: Registry | None = None,
        *,
        now_s: Callable[[], float] | None = None,
        **config: Any,
    ) -> None:
        self.store = store
        self.now_s = now_s or Steps()
        self.config = WorkerConfig(**{"queues": (QUEUE,), **config})
        self.registry = registry or Registry()
        self.freed = 0
        slots = self.config.capacity + self.config.prefetch
        self.inflight = InFlight(slots, self._count_freed)
        self.room = WaitingRoom(
            self.config.capacity, self.config.prefetch, now_s=self.now_s
        )
        self.accepted: list[Any] = []
        self.acks = AckBox(
            store,
            self.inflight,
            now_s=self.now_s,
            accepted=lambda attempt, ack: self.accepted.append(ack),
        )
        info = WorkerInfo(
            worker_id=WORKER, queues=(QUEUE,), capacity=self.config.capacity
        )
        self.runner = Runner(
            self.registry,
            self.config,
            self.inflight,
            self.acks,
            info,
            now_s=self.now_s,
        )

    def _count_freed(self) -> None:
        self.freed += 1

    def hold(self, claim: Claim) -> LiveAttempt:
        """Take a slot for a claim, as the admission loop does."""
        now_s = self.now_s()
        attempt = LiveAttempt(
            claim,
            self.store,
            lease_due_s=now_s + self.config.lease_ms / 1000,
            returned_s=now_s,
            now_s=self.now_s,
            producer=lambda: Client(self.store),
        )
        self.inflight.add([attempt])
        return attempt

    def admit(self, **request: Any) -> list[LiveAttempt]:
        """Admit what is there and take slots for it."""
        batch = admit(self.store, **{"capacity": self.inflight.free, **request})
        return [self.hold(claim) for claim in batch.claims]

    def run(self, attempt: LiveAttempt) -> None:
        """Run a claim on this thread and send its ack."""
        if self.runner.run(attempt):
            self.acks.fly()

    def run_next(self, **request: Any) -> LiveAttempt:
        """Admit one job and run it to the end of its ack."""
        (attempt,) = self.admit(**{"capacity": 1, **request})
        self.run(attempt)
        return attempt


@contextmanager
def working(store: Any, registry: Registry, **config: Any) -> Iterator[Worker]:
    """A whole worker on threads of its own, on queue `q` unless said otherwise."""
    settings = {
        "queues": (QUEUE,),
        "capacity": 4,
        "worker_id": WORKER,
        "shutdown_timeout": "5s",
        **config,
    }
    with Worker(store, registry, WorkerConfig(**settings)) as worker:
        yield worker
