"""`WorkerConfig`: every setting of a worker, checked when it is made."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from attrs import field, frozen

from headgate_sync.binding import RetryPolicy
from headgate_sync.callables import is_asynchronous
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import MAX_INT32, MAX_INT64, check_int, check_text
from headgate_sync.errors import InvalidRequest
from headgate_sync.events import DeathHandler, EventBus, StuckCallback
from headgate_sync.extensions import Extensions
from headgate_sync.lease import MAX_CAPACITY, AdmitRequest, check_lease_ms
from headgate_sync.policy import Poll
from headgate_sync.telemetry import Telemetry
from headgate_sync.validation import listed
from headgate_sync.worker.around import Around, check_around
from headgate_sync.worker.samplers import rss_high_water
from headgate_sync.worker.scheduler import PeriodicHook

if TYPE_CHECKING:
    from headgate_sync.client import Client

MAX_WORKER_ID_BYTES = 200
SHORTEST_BEAT_MS = 10

T = TypeVar("T")


@frozen(kw_only=True)
class HandBack:
    """What happens to a job of a kind that this worker does not know.

    Attributes:
        delay: when it becomes available again.
        max_claims: the claim from which on it is archived instead; None hands back for
            ever, which is right while two builds serve one queue.
    """

    delay: timedelta | str = "30s"
    max_claims: int | None = None

    def __attrs_post_init__(self) -> None:
        duration_ms("unknown_kind delay", self.delay)
        if self.max_claims is not None:
            check_int("unknown_kind max_claims", self.max_claims, 1, MAX_INT64)

    @property
    def delay_ms(self) -> int:
        """When the job becomes available again."""
        return duration_ms("unknown_kind delay", self.delay)


HAND_BACK = HandBack()
DEFAULT_POLL = Poll()


def _every_exception(error: Exception) -> bool:
    return True


def _queues(queues: Sequence[str]) -> tuple[str, ...]:
    return listed("queues", queues)


def _hooks(hooks: Iterable[PeriodicHook]) -> tuple[PeriodicHook, ...]:
    made = listed("periodic_hooks", hooks)
    for hook in made:
        for name in ("begin", "end"):
            if not callable(getattr(hook, name, None)):
                raise InvalidRequest(
                    f"periodic_hooks: {type(hook).__name__} has no method {name}"
                )
    return made


def _sinks(
    sinks: Telemetry | Sequence[Telemetry] | None,
) -> tuple[Telemetry, ...]:
    if sinks is None:
        return ()
    if not callable(getattr(sinks, "on_event", None)) and isinstance(sinks, Sequence):
        made = tuple(sinks)
    else:
        made = (cast("Telemetry", sinks),)
    for sink in made:
        if not callable(getattr(sink, "on_event", None)):
            raise InvalidRequest(
                f"telemetry: {type(sink).__name__} has no method on_event"
            )
    return made


def _death_handlers(handlers: Iterable[DeathHandler]) -> tuple[DeathHandler, ...]:
    made = listed("death_handlers", handlers)
    for handler in made:
        _check_function("death_handlers", handler)
    return made


def _check_function(name: str, function: object) -> None:
    if not callable(function):
        raise InvalidRequest(f"{name} must be callable, got {type(function).__name__}")
    if is_asynchronous(function):
        raise InvalidRequest(f"{name} must be a plain function, not async def")


def _path(path: Path | str | None) -> Path | None:
    if not isinstance(path, Path | str | None):
        raise InvalidRequest(f"ready_file must be a path, got {type(path).__name__}")
    return None if path is None else Path(path)


@frozen(kw_only=True)
class WorkerConfig:
    """Settings of one worker. Durations are `timedelta` or text such as "30s".

    Attributes:
        queues: where to take jobs from; the order means nothing.
        capacity: handler threads.
        prefetch: jobs claimed beyond that, as long as the threads would begin them
            within a tenth of a second; they count as running while they wait. For
            queues of short jobs.
        lease: how long a claim is good for without a renewal.
        quantum: fair share per partition and admit; 0 is automatic.
        poll: waits between admits while there is nothing to do.
        shutdown_timeout: how long running handlers may go on after a stop; 0 is
            allowed.
        cancel_grace: how long they may react after that, before their jobs are handed
            back.
        stuck_threshold: how long a handler may ignore its cancellation before it counts
            as stuck.
        worker_id: stable identity for sticky jobs; None makes one from host and
            process.
        run_duties: take part in the fleet's upkeep (reclaim, promote, quarantine,
            retention, schedules).
        duty_interval: how often the upkeep is looked at.
        catch_base_exceptions: a handler's `SystemExit` and the like are failed
            attempts. With False the thread ends without an ack, and the lost lease
            counts as a crash.
        async_cancel: raise an exception inside of a handler's thread when it ignores
            its cancellation for longer than `cancel_grace`. It stops a loop, cannot
            stop a call that blocks in C, and may strike while a lock is held.
        on_stuck: "abandon" settles a timed-out job whose handler goes on, so that
            another worker can run it beside the old run; "hold" keeps it until the
            handler returns.
        lease_expiry: "cancel" stops a handler whose lease was not confirmed in time,
            "continue" only marks it (`ctx.lease_doubtful`). One that has not begun by
            then is not begun either way.
        is_failure: which exceptions count as failed attempts; the others hand the job
            back.
        retry: delays before the next attempt, for handlers without a policy of their
            own.
        around: each makes a context manager, such as `app.app_context`, that one call
            of a handler runs inside of; entered in this order on the handler's thread.
        extensions: values that handlers get by type (`Annotated[T, Data]`).
        capture_log_level: records below it are not kept with the attempt; those that a
            logger's own level drops never get here.
        producer: the client behind `ctx.client`; None makes one over the worker's
            store.
        unknown_kind: what happens to jobs of unknown kind.
        periodic_hooks: called around every enqueue of a schedule's tick.
        sync_schedules: apply the declared schedules at the start, with `run_duties`.
        telemetry: a sink for events, or several; without one none is made.
        event_bus: hears of every outcome that the store took.
        death_handlers: called in order, on a handler thread, with each job that an
            outcome of this worker archived; lost when the process dies meanwhile.
        stuck_handler: called on a thread of its own with each handler that counts as
            stuck.
        memory_limit_bytes: at or above it the worker drains and ends with code 12; None
            is no limit.
        memory_check_interval: how often the memory is sampled.
        memory_sampler: returns bytes; see `headgate_sync.worker.samplers`.
        ready_file: written with every beat while the worker takes jobs; for probes.
    """

    queues: tuple[str, ...] = field(default=("default",), converter=_queues)
    capacity: int = 16
    prefetch: int = 0
    lease: timedelta | str = "30s"
    quantum: int = 0
    poll: Poll = DEFAULT_POLL
    shutdown_timeout: timedelta | str = "25s"
    cancel_grace: timedelta | str = "1s"
    stuck_threshold: timedelta | str = "10s"
    worker_id: str | None = None
    run_duties: bool = True
    duty_interval: timedelta | str = "1s"
    catch_base_exceptions: bool = True
    async_cancel: bool = False
    on_stuck: Literal["abandon", "hold"] = "abandon"
    lease_expiry: Literal["cancel", "continue"] = "cancel"
    is_failure: Callable[[Exception], bool] = _every_exception
    retry: RetryPolicy | None = None
    around: tuple[Around, ...] = field(default=(), converter=check_around)
    extensions: Extensions = field(factory=Extensions)
    capture_log_level: int = logging.INFO
    producer: Client | None = None
    unknown_kind: HandBack = HAND_BACK
    periodic_hooks: tuple[PeriodicHook, ...] = field(default=(), converter=_hooks)
    sync_schedules: bool = True
    telemetry: tuple[Telemetry, ...] = field(default=(), converter=_sinks)
    event_bus: EventBus | None = None
    death_handlers: tuple[DeathHandler, ...] = field(
        default=(), converter=_death_handlers
    )
    stuck_handler: StuckCallback | None = None
    memory_limit_bytes: int | None = None
    memory_check_interval: timedelta | str = "30s"
    memory_sampler: Callable[[], int] = rss_high_water
    ready_file: Path | None = field(default=None, converter=_path)

    def __attrs_post_init__(self) -> None:
        if not self.queues:
            raise InvalidRequest("queues must name at least one queue")
        check_int("capacity", self.capacity, 1, MAX_CAPACITY)
        check_int("prefetch", self.prefetch, 0, MAX_CAPACITY - self.capacity)
        check_int("capture_log_level", self.capture_log_level, 0, MAX_INT32)
        self._check_parts()
        for name in (
            *("lease", "stuck_threshold"),
            *("duty_interval", "memory_check_interval"),
        ):
            duration_ms(name, getattr(self, name))
        for name in ("shutdown_timeout", "cancel_grace"):
            duration_ms(name, getattr(self, name), minimum_ms=0)
        check_lease_ms(self.lease_ms)
        if self.worker_id is not None:
            check_worker_id("worker_id", self.worker_id)
        if self.memory_limit_bytes is not None:
            check_int("memory_limit_bytes", self.memory_limit_bytes, 1, MAX_INT64)
        # The request that every admit repeats: its own checks cover queues and quantum.
        AdmitRequest(
            worker=self.worker_id or "",
            lease_id="check",
            queues=self.queues,
            capacity=self.capacity,
            lease_ms=self.lease_ms,
            quantum=self.quantum,
        )
        for name, allowed in (
            ("on_stuck", ("abandon", "hold")),
            ("lease_expiry", ("cancel", "continue")),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r}, "
                    f"allowed is {' or '.join(allowed)}"
                )

    def _check_parts(self) -> None:
        """Refuse at once what would fail, or mean something else, when it is used."""
        kinds: tuple[tuple[str, type], ...] = (
            ("run_duties", bool),
            ("sync_schedules", bool),
            ("catch_base_exceptions", bool),
            ("async_cancel", bool),
            ("extensions", Extensions),
            ("poll", Poll),
            ("unknown_kind", HandBack),
            ("event_bus", EventBus),
        )
        for name, kind in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind) and (name, value) != ("event_bus", None):
                raise InvalidRequest(
                    f"{name} must be {kind.__name__}, got {type(value).__name__}"
                )
        for name in ("is_failure", "memory_sampler"):
            _check_function(name, getattr(self, name))
        for name in ("retry", "stuck_handler"):
            if (function := getattr(self, name)) is not None:
                _check_function(name, function)

    @property
    def lease_ms(self) -> int:
        """Length of a lease."""
        return duration_ms("lease", self.lease)

    @property
    def beat_ms(self) -> int:
        """How often leases are renewed and the worker shows that it lives."""
        return max(self.lease_ms // 3, SHORTEST_BEAT_MS)

    @property
    def memory_check_interval_ms(self) -> int:
        """How often the memory is sampled."""
        return duration_ms("memory_check_interval", self.memory_check_interval)

    @property
    def shutdown_timeout_ms(self) -> int:
        """How long running handlers may go on after a stop."""
        return duration_ms("shutdown_timeout", self.shutdown_timeout, minimum_ms=0)

    @property
    def cancel_grace_ms(self) -> int:
        """How long handlers may react to their cancellation at the end."""
        return duration_ms("cancel_grace", self.cancel_grace, minimum_ms=0)

    @property
    def stuck_threshold_ms(self) -> int:
        """How long a handler may ignore its cancellation."""
        return duration_ms("stuck_threshold", self.stuck_threshold)

    @property
    def duty_interval_ms(self) -> int:
        """How often the upkeep is looked at."""
        return duration_ms("duty_interval", self.duty_interval)


def check_worker_id(name: str, worker_id: str) -> None:
    """Check the identity of a worker.

    Args:
        name: how the error text calls it.

    Raises:
        InvalidRequest: not 1 to 200 ASCII bytes.
    """
    check_text(name, worker_id)
    if not worker_id.isascii() or not 1 <= len(worker_id) <= MAX_WORKER_ID_BYTES:
        raise InvalidRequest(
            f"{name} is {worker_id!r}, "
            f"allowed are 1 to {MAX_WORKER_ID_BYTES} ASCII bytes"
        )


def make_worker_id() -> str:
    """A fresh identity of at most 200 ASCII bytes: host, process, random digits."""
    tail = f"-{os.getpid()}-{secrets.token_hex(4)}"
    host = socket.gethostname().encode("ascii", "replace").decode()
    return host[: MAX_WORKER_ID_BYTES - len(tail)] + tail
