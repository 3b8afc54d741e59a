"""The memory ceiling: a worker that has grown too large drains and ends."""

from __future__ import annotations

from collections.abc import Callable

from headgate_sync.loggers import guarded
from headgate_sync.telemetry import WorkerMemory
from headgate_sync.worker.reporting import Emitter

logger = guarded(__name__)


class MemoryWatch:
    """Compares a sample with the limit, once per interval.

    Args:
        sampler: returns bytes; what it raises skips the sample.
        crossed: called with each sample at or above the limit.
        note: told what the telemetry sink raised.
    """

    def __init__(
        self,
        sampler: Callable[[], int],
        *,
        worker_id: str,
        limit_bytes: int,
        interval_ms: int,
        crossed: Callable[[], None],
        emit: Emitter | None,
        note: Callable[[BaseException], None],
        now_s: Callable[[], float],
    ) -> None:
        self._sampler = sampler
        self._worker_id = worker_id
        self._limit_bytes = limit_bytes
        self._interval_s = interval_ms / 1000
        self._crossed = crossed
        self._emit = emit
        self._note = note
        self._now_s = now_s
        self._next_s = now_s() + self._interval_s

    def step(self) -> float:
        """Sample if it is time; returns the local instant of the next sample."""
        now_s = self._now_s()
        if now_s < self._next_s:
            return self._next_s
        self._next_s = now_s + self._interval_s
        try:
            used_bytes = self._sampler()
        except Exception as error:
            logger.debug("no sample of the memory: %s", error)
            return self._next_s
        over = used_bytes >= self._limit_bytes
        if over:
            logger.warning(
                "%d bytes of memory are used, the limit is %d: the worker drains",
                used_bytes,
                self._limit_bytes,
            )
            self._crossed()
        if self._emit is not None:
            failure = self._emit(
                WorkerMemory(
                    worker=self._worker_id,
                    used_bytes=used_bytes,
                    limit_bytes=self._limit_bytes,
                    restart_requested=over,
                )
            )
            if failure is not None:
                self._note(failure)
        return self._next_s
