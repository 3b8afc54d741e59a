"""How a worker is present in the fleet: its registry row, commands, its ready file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from attrs import frozen

from headgate_sync.errors import StoreError
from headgate_sync.loggers import guarded
from headgate_sync.store import Store
from headgate_sync.telemetry import WorkerSaturation
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.health import Health, Pulse
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.loops import REPEAT_LOG_S
from headgate_sync.worker.readyfile import ReadyFile
from headgate_sync.worker.reporting import Emitter
from headgate_sync.workers import COMMANDS, WorkerMeta

logger = guarded(__name__)

HOST_BYTES = 255
# A beat that brought a command is followed by one that says it is applied, and that one
# may bring another.
BEATS_IN_A_ROW = 4


def host_name() -> str:
    """The name of this machine as workers show it."""
    return socket.gethostname().encode("ascii", "replace").decode()[:HOST_BYTES]


@frozen(kw_only=True)
class Standing:
    """What a worker shows of itself; the fields are those of `WorkerMeta`."""

    status: str
    duties_active: bool


class Presence:
    """Beats in the registry of workers, and obeys what the answer asks for.

    Used by the heartbeat's thread.

    Args:
        polled: admits lately, and how many brought nothing.
        standing: status and part in the duties, now.
        obey: carries out a command; quick, without a call of the store.
        ready: called when the store has answered.
        health: for the ready file.
        note: told what the telemetry sink or the ready file raised.
    """

    def __init__(
        self,
        store: Store,
        config: WorkerConfig,
        worker_id: str,
        inflight: InFlight,
        pulse: Pulse,
        *,
        polled: Callable[[], tuple[int, int]],
        standing: Callable[[], Standing],
        obey: Callable[[str], None],
        ready: Callable[[], None],
        health: Callable[[], Health],
        note: Callable[[BaseException], None],
        emit: Emitter | None,
        file: ReadyFile | None,
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._config = config
        self._worker_id = worker_id
        self._inflight = inflight
        self._pulse = pulse
        self._polled = polled
        self._standing = standing
        self._obey = obey
        self._ready = ready
        self._health = health
        self._note = note
        self._emit = emit
        self._file = file
        self._now_s = now_s
        self._host = host_name()
        self._started_at_ms = time.time_ns() // 1_000_000
        self._applied: str | None = None
        self._beaten = False
        self._file_logged_s = float("-inf")

    def beat(self) -> bool:
        """Show up once; returns False when the store did not answer."""
        if self._emit is not None:
            self._saturation(self._emit)
        answered = self._beat_in_registry()
        if self._file is not None and self._beaten:
            self._write(self._file)
        return answered

    def leave(self) -> None:
        """Take the worker out of the registry, so that nobody counts on it any more."""
        if not self._beaten or self._store.inspect is None:
            return
        try:
            self._store.inspect.forget_worker(self._worker_id, self._started_at_ms)
        except StoreError as error:
            logger.warning("the worker stays listed until it counts as late: %s", error)

    def answered(self) -> None:
        """An admit was answered; that is enough where the store keeps no registry."""
        if self._store.inspect is None:
            self._beaten = True
            self._ready()

    def _beat_in_registry(self) -> bool:
        inspect = self._store.inspect
        if inspect is None:
            return True
        self._pulse.expect(self._now_s())
        for _ in range(BEATS_IN_A_ROW):
            try:
                command = inspect.heartbeat_worker(self._meta())
            except StoreError as error:
                self._pulse.failed(error)
                logger.warning("worker %s could not beat: %s", self._worker_id, error)
                return False
            self._pulse.good(self._now_s())
            self._applied = None
            self._beaten = True
            self._ready()
            if command is None:
                return True
            if command not in COMMANDS:
                logger.debug("unknown command %s ignored", command)
                return True
            logger.info("worker %s was asked to %s", self._worker_id, command)
            self._obey(command)
            self._applied = command
        return True

    def _meta(self) -> WorkerMeta:
        polls, empty_polls = self._polled()
        standing = self._standing()
        return WorkerMeta(
            worker_id=self._worker_id,
            host=self._host,
            pid=os.getpid(),
            queues=self._config.queues,
            concurrency=self._config.capacity,
            started_at_ms=self._started_at_ms,
            inflight=self._busy(),
            polls=polls,
            empty_polls=empty_polls,
            status=standing.status,
            duties_active=standing.duties_active,
            beat_ms=self._config.beat_ms,
            applied=self._applied,
        )

    def _busy(self) -> int:
        """Handlers at work: what waits for one must not hide another worker's idle."""
        return min(self._inflight.taken, self._config.capacity)

    def _saturation(self, emit: Emitter) -> None:
        polls, empty_polls = self._polled()
        inflight, capacity = self._busy(), self._config.capacity
        error = emit(
            WorkerSaturation(
                worker=self._worker_id,
                inflight=inflight,
                capacity=capacity,
                utilization=inflight / capacity,
                empty_poll_ratio=empty_polls / polls if polls else 0.0,
                polls=polls,
                empty_polls=empty_polls,
            )
        )
        if error is not None:
            self._note(error)

    def _write(self, file: ReadyFile) -> None:
        try:
            file.write(self._health().to_json())
        except OSError as error:
            # A full disk is no reason to lose leases.
            self._note(error)
            now_s = self._now_s()
            if now_s - self._file_logged_s >= REPEAT_LOG_S:
                self._file_logged_s = now_s
                logger.error("the ready file cannot be written", exc_info=error)
