"""`Worker`: takes jobs, runs them on threads, and stops in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headgate_sync.attempt import LiveAttempt
from headgate_sync.injection import WorkerInfo
from headgate_sync.lease import Ack
from headgate_sync.loggers import guarded
from headgate_sync.registry import Registry
from headgate_sync.store import Store
from headgate_sync.validation import check_type
from headgate_sync.worker.acks import AckBox
from headgate_sync.worker.admission import Admission
from headgate_sync.worker.bell import Bell
from headgate_sync.worker.config import WorkerConfig, make_worker_id
from headgate_sync.worker.duties import Duties
from headgate_sync.worker.handlers import HandlerThreads
from headgate_sync.worker.health import Health, Pulses
from headgate_sync.worker.heartbeat import Heartbeat
from headgate_sync.worker.inflight import InFlight
from headgate_sync.worker.listening import Listening
from headgate_sync.worker.loops import ServiceLoop
from headgate_sync.worker.memory import MemoryWatch
from headgate_sync.worker.outcomes import RELEASED_AT_SHUTDOWN
from headgate_sync.worker.prefetch import WaitingRoom
from headgate_sync.worker.presence import Presence, Standing
from headgate_sync.worker.readyfile import ReadyFile
from headgate_sync.worker.reporting import Emitter, Report
from headgate_sync.worker.runner import Runner
from headgate_sync.worker.shutdown import (
    Drain,
    ExitStatus,
    Signals,
    exit_status,
    release,
    within,
)
from headgate_sync.worker.startup import (
    check_set_up,
    warn_of_a_namesake,
    warn_of_mistyped_queues,
    warn_of_no_tasks,
    warn_of_unknown_kinds,
)
from headgate_sync.worker.watchdog import Watchdog

if TYPE_CHECKING:
    from headgate_sync.client import Client

logger = guarded(__name__)

FIRST_LOOK_S = 5.0
JOIN_S = 1.0
CROSSED_S = 0.5  # below the time that the end waits for the admission's thread
LOOK_AT_WATCHDOG_S = 1.0


class Worker:
    """Runs jobs of a registry's kinds; one `run` per object.

    Args:
        store: where the jobs are. It is not closed.
        registry: the handlers.
        config: the settings.

    Attributes:
        config: its settings.
        worker_id: the identity shown to the store.
        ready: set once the store knows the worker, or has answered its first admit
            where it keeps no registry of workers.
    """

    def __init__(
        self, store: Store, registry: Registry, config: WorkerConfig | None = None
    ) -> None:
        check_type("registry", registry, Registry)
        if config is not None:
            check_type("config", config, WorkerConfig)
        self._store = store
        self._registry = registry
        self.config = self._config = config or WorkerConfig()
        self.worker_id = self._config.worker_id or make_worker_id()
        self.ready = threading.Event()
        self._now_s = time.monotonic
        self._pid = os.getpid()
        self._bell = Bell()
        self._signals = Signals(self._bell)
        self._stopping = self._restarting = self._memory_full = self._resigned = False
        self._toggles = 0  # signals to be quiet or loud that were followed
        self._ready_file: ReadyFile | None = None
        self._intake = threading.Lock()  # guards the next field, and no claim passes it
        self._closed = False
        self._dead_loop: str | None = None
        self._released = 0
        self._status = "starting"
        self._over = threading.Event()
        self._begun = threading.Event()  # answered, or over
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._producer: Client | None = self._config.producer
        self.exit_status: ExitStatus | None = None
        self._build()

    def _build(self) -> None:
        config, store, now_s = self._config, self._store, self._now_s
        slots = config.capacity + config.prefetch
        self._inflight = InFlight(slots, self._slot_freed)
        self._room = WaitingRoom(
            config.capacity,
            config.prefetch,
            now_s=now_s,
            half_empty=self._slot_freed,
        )
        self._pulses = Pulses(
            beat_s=config.beat_ms / 1000, poll_s=config.poll.ceiling_ms / 1000
        )
        sinks = config.telemetry
        emit = Emitter(*sinks, now_s=now_s) if sinks else None
        self._report: Report | None = None
        if emit or config.event_bus is not None or config.death_handlers:
            self._report = Report(
                self.worker_id,
                emit=emit,
                bus=config.event_bus,
                death_handlers=config.death_handlers,
                call=lambda work: self._handlers.call(work),
                keep=self._inflight.touch_down,
                conclude=self._inflight.conclude,
            )
        report = self._report
        self._acks = AckBox(
            store,
            self._inflight,
            now_s=now_s,
            accepted=self._accepted,
            lost=report.lost if report else None,
            failed=report.failed if report else None,
        )
        info = WorkerInfo(
            worker_id=self.worker_id,
            queues=tuple(sorted(config.queues)),
            capacity=config.capacity,
        )
        self._runner = Runner(
            self._registry,
            config,
            self._inflight,
            self._acks,
            info,
            now_s=now_s,
            begun=report.begun if report and report.follows else None,
            ended=report.ended if report else None,
        )
        self._runner.batches.opened = lambda: self._loops["watchdog"].nudge()
        self._handlers = HandlerThreads(
            self._runner, self._acks, self._room, begun_late=self._begun_late
        )
        self._admission = Admission(
            store,
            config,
            self._inflight,
            self.worker_id,
            self._hand_over,
            now_s=now_s,
            producer=self._client,
            invite=self._room.invite,
            notified=store.notifying is not None,
            pulse=self._pulses.admit,
            emit=emit,
        )
        heartbeat = Heartbeat(
            store,
            self._inflight,
            lease_ms=config.lease_ms,
            now_s=now_s,
            pulse=self._pulses.renew,
            show=self._show,
            emit=emit,
            worker_id=self.worker_id,
        )
        self._watch = Watchdog(
            config,
            self._inflight,
            self._acks,
            now_s=now_s,
            died=self._died,
            emit=emit,
            worker_id=self.worker_id,
            flush=self._flush,
        )
        self._duties: Duties | None = None
        if config.run_duties:
            self._duties = Duties(
                store,
                self.worker_id,
                interval_ms=config.duty_interval_ms,
                now_s=now_s,
                hooks=config.periodic_hooks,
                at_start=self._apply_schedules if config.sync_schedules else None,
                emit=emit,
            )
        self._loops = {
            "watchdog": self._loop("watchdog", self._watch.step),
            "heartbeat": self._loop("heartbeat", heartbeat.step),
            "admission": self._loop("admission", self._admit),
        }
        if store.notifying is not None:
            listening = Listening(
                store.notifying, config.queues, notice=self._noticed, now_s=now_s
            )
            self._loops["notify"] = self._loop("notify", listening.step)
        if self._duties is not None:
            self._loops["duties"] = self._loop("duties", self._duties.step)
        if config.memory_limit_bytes is not None:
            memory = MemoryWatch(
                config.memory_sampler,
                worker_id=self.worker_id,
                limit_bytes=config.memory_limit_bytes,
                interval_ms=config.memory_check_interval_ms,
                crossed=self._memory_crossed,
                emit=emit,
                note=lambda error: self._loops["memory"].guard.noted(error),
                now_s=now_s,
            )
            self._loops["memory"] = self._loop("memory", memory.step)
        self._emit = emit

    def _loop(self, name: str, step: Callable[[], float]) -> ServiceLoop:
        return ServiceLoop(name, step, died=self._died, now_s=self._now_s)

    def run(self, *, install_signal_handlers: bool = True) -> ExitStatus:
        """Work until stopped; blocks.

        Args:
            install_signal_handlers: for the time of the call, and only on the main
                thread.

        Returns:
            How it ended. With `abandoned` above 0 the process must end with `os._exit`.

        Raises:
            ConfigurationError: a handler declares a result and the store keeps none,
                schedules are declared and the store keeps none, or the ready file
                cannot be written.
            InvalidRequest: faults of the registry, all at once.
            RuntimeError: the worker was made before a fork, or has run already.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "worker used after fork; make it in the process that runs it"
            )
        if self._status != "starting":
            raise RuntimeError("a worker runs once; make another one")
        self._status = "running"
        try:
            check_set_up(self._store, self._registry, self._config)
            self._presence = self._make_presence()
            self._runner.capture.install()
            if not install_signal_handlers:
                return self._run()
            with self._signals:
                return self._run()
        finally:
            if self._ready_file is not None:
                self._ready_file.remove()
            self._runner.capture.uninstall()
            self._over.set()
            self._begun.set()

    def stop(self, *, wait: bool = False) -> None:
        """Begin the bounded drain, from any thread.

        Args:
            wait: return only when `run` has ended; not on the thread that runs it.
        """
        self._stopping = True
        self._bell.ring()
        if wait:
            self._over.wait()

    def health(self) -> Health:
        """How the worker is doing, from any thread."""
        now_s, pulses, duties = self._now_s(), self._pulses, self._duties
        status = self._status
        if status != "starting":
            status = self._standing(stops=status == "terminating").status
        if self._dead_loop is not None:
            status = "failing"
        threads = {name: loop.health() for name, loop in self._loops.items()}
        if duties is not None:
            threads |= duties.health()
        lost = any(lp.ended or lp.guard.dead for lp in self._loops.values())
        return Health(
            status=status,
            healthy=not lost and (pulses.away or not pulses.overdue(now_s)),
            ready=self.ready.is_set(),
            worker_id=self.worker_id,
            in_flight=self._inflight.taken,
            capacity=self._inflight.capacity,
            last_admit_ok_ms=pulses.admit.age_ms(now_s),
            last_renew_ok_ms=pulses.renew.age_ms(now_s),
            last_beat_ok_ms=pulses.beat.age_ms(now_s),
            store="unavailable" if pulses.away else "ok",
            duties=() if duties is None else tuple(sorted(duties.held)),
            threads=threads,
        )

    def __enter__(self) -> Self:
        """Run on a background thread; returns once the store has answered.

        Raises:
            Exception: what `run` raised instead.
        """
        self._thread = threading.Thread(
            target=self._run_apart, name="headgate-main", daemon=True
        )
        self._thread.start()
        try:
            self._begun.wait()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self.stop()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run_apart(self) -> None:
        try:
            self.run(install_signal_handlers=False)
        except Exception as error:  # the top of a thread; handed to the user's thread
            self._error = error

    def _apply_schedules(self) -> None:
        declared = self._registry.declared()
        if declared:
            from headgate_sync.client import Client

            # The producer's defaults, and this worker's store.
            client = Client(self._store, defaults=self._client().defaults)
            client.schedules.apply(declared)

    def _make_presence(self) -> Presence:
        if self._config.ready_file is not None:
            self._ready_file = ReadyFile(self._config.ready_file)
        return Presence(
            self._store,
            self._config,
            self.worker_id,
            self._inflight,
            self._pulses.beat,
            polled=self._admission.polled,
            standing=lambda: self._standing(stops=self._must_stop()),
            obey=self._obey,
            ready=self._answered,
            health=self.health,
            note=lambda error: self._loops["heartbeat"].guard.noted(error),
            emit=self._emit,
            file=self._ready_file,
            now_s=self._now_s,
        )

    def _run(self) -> ExitStatus:
        logger.info(
            "worker %s starts: queues %s, %d threads",
            self.worker_id,
            ", ".join(self._config.queues),
            self._config.capacity,
        )
        warn_of_no_tasks(self._registry)
        warn_of_mistyped_queues(self._registry, self._config.queues)
        within(FIRST_LOOK_S, "first-look", self._look_around)
        try:
            self._start_threads()
            self._supervise()
        except KeyboardInterrupt:
            # Where the caller keeps Python's own handler for it.
            self._stopping = True
        return self._shut_down()

    def _look_around(self) -> None:
        if self._config.worker_id is not None:  # made ones are never alike
            warn_of_a_namesake(self._store, self.worker_id)
        warn_of_unknown_kinds(self._store, self._registry, self._config.queues)

    def _start_threads(self) -> None:
        """Start everything, or note what could not be: the others are ended then."""
        try:
            self._handlers.start()
            self._watch.watch(
                [lp for name, lp in self._loops.items() if name != "watchdog"]
            )
            for loop in self._loops.values():
                loop.start()
        except RuntimeError:
            self._dead_loop = "start"
            logger.critical(
                "no more threads can be started; the worker ends", exc_info=True
            )

    def _supervise(self) -> None:
        """Wait for the end. No store call is made here, so that none can hold it up."""
        while not self._must_stop():
            self._bell.wait(LOOK_AT_WATCHDOG_S)
            while self._toggles < self._signals.toggles:
                self._toggles += 1
                self._be_quiet(not self._admission.quiet)
                self._loops["heartbeat"].nudge()  # which tells the others
            if self._loops["watchdog"].ended:
                self._died("watchdog")

    def _must_stop(self) -> bool:
        return self._restarting or self.ends_soon

    @property
    def ends_soon(self) -> bool:
        """The worker was told to end, or has to, and its drain is a bounded one."""
        stopped = self._stopping or self._signals.stops > 0
        return stopped or self._memory_full or self._dead_loop is not None

    def _standing(self, *, stops: bool) -> Standing:
        if stops and self._restarting and not self.ends_soon:
            status = "restarting"
        elif stops:
            status = "terminating"
        else:
            status = "quiet" if self._admission.quiet else "running"
        duties = self._duties is not None and not (stops or self._resigned)
        return Standing(status=status, duties_active=duties)

    def _be_quiet(self, quiet: bool) -> None:
        self._admission.quiet = quiet
        self._loops["admission"].nudge()

    # On the threads of the loops.

    def _admit(self) -> float:
        due_s = self._admission.step()
        if self._admission.answered and not self.ready.is_set():
            self._presence.answered()
        return due_s

    def _show(self) -> bool:
        return self._presence.beat()

    def _answered(self) -> None:
        if not self.ready.is_set():
            self.ready.set()
            self._begun.set()

    def _obey(self, command: str) -> None:
        if command in ("quiet", "resume"):
            self._be_quiet(command == "quiet")
        elif command == "resign":
            self._resign()
        else:
            self._restarting |= command == "restart"
            self._stopping |= command == "terminate"
            self._bell.ring()

    def _resign(self) -> None:
        self._resigned = True
        if self._duties is not None:
            self._duties.resign()
            self._loops["duties"].nudge()

    def _memory_crossed(self) -> None:
        if not self.ends_soon:
            self._memory_full = True
            self._bell.ring()

    def _hand_over(self, attempts: list[LiveAttempt]) -> None:
        with self._intake:
            crossed = self._closed
            if not crossed:
                self._inflight.add(attempts)
                look_s = self._handlers.feed(attempts)
        if crossed:
            # The answer crossed the stop: nothing is started any more.
            for attempt in attempts:
                attempt.never_begin()
            for attempt, ack in release(self._store, attempts, CROSSED_S):
                if self._report is not None and ack is not None:
                    self._report.released(attempt, ack)
        elif self._watch.must_wake(attempts, look_s):
            self._loops["watchdog"].nudge()

    def _begun_late(self, attempt: LiveAttempt) -> None:
        if self._watch.must_wake([attempt]):
            self._loops["watchdog"].nudge()

    def _flush(self) -> float:
        chunks, due_s = self._runner.batches.due()
        self._handlers.feed_chunks(chunks)
        return min(due_s, self._handlers.look())

    def _slot_freed(self) -> None:
        self._admission.slot_freed()
        self._loops["admission"].nudge()
        if self._inflight.draining:
            self._bell.ring()

    def _noticed(self) -> None:
        self._admission.notice()
        self._loops["admission"].nudge()

    # The end.

    def _shut_down(self) -> ExitStatus:
        if self._ready_file is not None:
            self._ready_file.remove()
        with self._intake:
            self._closed = True
        self._status = "terminating"
        self._handlers.close()
        self._handlers.feed_chunks(self._runner.batches.close())
        self._loops["watchdog"].nudge()  # which hands back what finds no thread
        logger.info(
            "worker %s stops, %d of its jobs still run",
            *(self.worker_id, len(self._inflight)),
        )
        for name in ("admission", "notify"):
            if name in self._loops:
                self._loops[name].stop()
        # Others take the upkeep over now, and hear what becomes of this worker.
        self._resign()
        self._loops["heartbeat"].nudge()
        report = self._report
        drain = Drain(
            self._store,
            self._inflight,
            self._acks,
            self._bell,
            now_s=self._now_s,
            hurried=lambda: self._signals.stops > 1,
            bounded=lambda: self.ends_soon,
            released=report.released if report else None,
            lost=report.lost if report else None,
        )
        released, left = drain.run(
            timeout_ms=self._config.shutdown_timeout_ms,
            grace_ms=self._config.cancel_grace_ms,
        )
        status = exit_status(
            released=released + self._released,
            abandoned=self._end_threads(left),
            loop_died=self._dead_loop is not None,
            memory_full=self._memory_full,
        )
        self.exit_status = status
        logger.info(
            "worker %s ends with code %d: %d jobs released, %d threads abandoned",
            self.worker_id,
            *(status.code, status.released, status.abandoned),
        )
        return status

    def _end_threads(self, left: list[LiveAttempt]) -> int:
        """Stop everything, the heartbeat after the handlers; then leave the fleet.

        Returns:
            How many threads are still running.
        """
        self._handlers.end()
        alive = self._handlers.join(JOIN_S, but={attempt.thread_id for attempt in left})
        for name in ("heartbeat", "duties"):
            if name in self._loops:
                self._loops[name].stop()
        if not within(JOIN_S, "leave", self._leave):
            alive.append("headgate-leave")
        until_s = self._now_s() + JOIN_S
        for name, loop in self._loops.items():
            loop.stop()
            if not loop.join(until_s - self._now_s()):
                alive.append(f"headgate-{name}")
        if alive:
            logger.warning("threads still running: %s", ", ".join(alive))
        return len(alive)

    def _leave(self) -> None:
        if self._duties is not None:
            self._loops["duties"].join(JOIN_S)
            self._duties.release(JOIN_S)
        # A beat that is still under way would put the worker back into the list.
        if self._loops["heartbeat"].join(JOIN_S):
            self._presence.leave()

    def _died(self, name: str) -> None:
        if self._dead_loop is None:
            self._dead_loop = name
            logger.critical("%s could not be revived; the worker drains and ends", name)
            self._bell.ring()

    def _accepted(self, attempt: LiveAttempt, ack: Ack) -> bool:
        if ack.error == RELEASED_AT_SHUTDOWN:
            self._released += 1  # by the pilot of the ack box alone
        return self._report is not None and self._report.accepted(attempt, ack)

    def _client(self) -> Client:
        if self._producer is None:
            from headgate_sync.client import Client

            self._producer = Client(self._store)
        return self._producer
