"""`Client`: turns jobs into envelopes and makes one store call per enqueue."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from attrs import evolve

from headgate_sync.client.building import build, request_of
from headgate_sync.client.pinned import PinnedJobs
from headgate_sync.client.schedules import Schedules
from headgate_sync.client.tx import join
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import (
    DuplicateJob,
    EnqueueForbidden,
    InvalidRequest,
    Unsupported,
    WaitTimeout,
)
from headgate_sync.identity import (
    LIBRARY,
    Authorizer,
    Identity,
    Source,
    check_identity,
    current_identity,
)
from headgate_sync.ids import UlidGenerator
from headgate_sync.options import (
    NO_DEFAULTS,
    TaskOptions,
    check_defaults,
)
from headgate_sync.request import JobHandle, JobRequest, identity_of
from headgate_sync.store import Store
from headgate_sync.task import Task
from headgate_sync.validation import MAX_BATCH_JOBS, check_iterable

if TYPE_CHECKING:
    from headgate_sync.client.circuit import CircuitBreaker
    from headgate_sync.client.pipeline import (
        EnqueueRequest,
        InsertHook,
        Middleware,
        Pipeline,
        Plugin,
    )
    from headgate_sync.client.waiting import Completion, Pace, Watch
    from headgate_sync.events import EventBus
    from headgate_sync.registry import Registry

logger = logging.getLogger(__name__)


class PipelineParts(TypedDict, total=False):
    """The parts of a `Pipeline`, as clients and facades take them."""

    authorizer: Authorizer | None
    circuit_breaker: CircuitBreaker | None
    middleware: Iterable[Middleware]
    insert_hooks: Iterable[InsertHook]
    plugins: Iterable[Plugin]


class Client:
    """Enqueues jobs into one store; every method may be called from any thread.

    A job is an instance of a payload class, a `JobRequest` (`task.job(...)`) or an
    `Envelope`. Nothing is buffered: when the store does not answer, the caller gets
    `StoreUnavailable` and decides.

    With `tx` the job lives and dies with the caller's transaction, which is borrowed:
    never begun, committed, rolled back or closed here; `headgate_sync.client.tx` says
    what counts as one.

    Args:
        store: stays the caller's; it is never closed here.
        defaults: options of jobs whose call and task set none.
        registry: whose handlers say how results are read.
        tx: "immediate" sends a job with `tx` at once, past the caller's transaction;
            for tests over a store that cannot join one.
        pipeline: made before, instead of its parts.
        event_bus: tells of the ends of jobs that run in this process, so that waits for
            them end at once.
        pace: the time that `enqueue_and_wait` is made of; tests step another one.
        **parts: what stands between an enqueue and the store: `middleware`,
            `authorizer`, `circuit_breaker`, `insert_hooks` and `plugins`; see
            `headgate_sync.client.pipeline`.
    """

    def __init__(
        self,
        store: Store,
        *,
        defaults: TaskOptions = NO_DEFAULTS,
        registry: Registry | None = None,
        tx: Literal["refuse", "immediate"] = "refuse",
        pipeline: Pipeline | None = None,
        event_bus: EventBus | None = None,
        pace: Pace | None = None,
        **parts: Unpack[PipelineParts],
    ) -> None:
        if parts and pipeline is None:
            from headgate_sync.client.pipeline import Pipeline

            pipeline = Pipeline(**parts)
        elif parts:
            raise InvalidRequest(f"pipeline excludes {', '.join(parts)}")
        check_defaults(defaults)
        self.store = store
        self.defaults = defaults
        self.registry = registry
        self.event_bus = event_bus
        self.source: Source = LIBRARY
        self._pipeline = pipeline
        self._pace = pace
        self._immediate = tx == "immediate"
        self._new_id = UlidGenerator()
        self._pid = os.getpid()
        self._watch_lock = threading.Lock()  # guards the next field
        self._watch: Watch | None = None
        self._pinned = PinnedJobs(store)

    def as_source(self, source: Source) -> Client:
        """This client, for jobs of another origin than calls of the program."""
        other = copy(self)
        other.source = source
        return other

    def enqueue(
        self,
        job: Any,
        /,
        *,
        identity: Identity | None = None,
        tx: Any = None,
        **options: Any,
    ) -> JobHandle:
        """Put one job in.

        The same id with the same content again is a success that changes nothing.

        Args:
            job: see the class.
            identity: who enqueues; None is what `enqueue_identity` says.
            tx: the caller's transaction.
            **options: those of `CallOptions`; none with an `Envelope`.

        Raises:
            InvalidRequest: job or transaction cannot be used; nothing was written.
            DuplicateJob: its unique key is held, and nothing was changed.
            IdConflict: its id belongs to a job of other content.
            FingerprintQuarantined: jobs of this content killed their workers.
            Backpressure: its queue is full.
            Unsupported: a `tx` of a driver, or in a store, that cannot be joined.
            StoreUnavailable: what happened is not known; the same id may be sent again.
            EnqueueForbidden: the authorizer refused it; nothing was asked or done.
            CircuitRejected: the store did not answer lately, and was not asked.
        """
        envelope = self.envelope(job, **options)
        if identity is None:
            identity = identity_of(job)
        return self._many([envelope], identity, tx)[0]

    def enqueue_or_join(
        self,
        job: Any,
        /,
        *,
        identity: Identity | None = None,
        tx: Any = None,
        **options: Any,
    ) -> JobHandle:
        """`enqueue`, or the handle of the job that holds the unique key.

        Returns:
            With `joined` the id is the holder's; a throttle key may name a job that is
            gone.
        """
        envelope = self.envelope(job, **options)
        if identity is None:
            identity = identity_of(job)
        try:
            return self._many([envelope], identity, tx)[0]
        except DuplicateJob as duplicate:
            return _handle(envelope, id=duplicate.existing_id, joined=True)

    def enqueue_and_wait(
        self,
        job: Any,
        /,
        *,
        timeout: timedelta | str,
        identity: Identity | None = None,
        **options: Any,
    ) -> Completion[Any]:
        """Put one job in and wait for its end.

        The store is read at once, when the job ends in this process, and every 100 ms,
        once for all threads that wait; an outage meanwhile is waited out. A job that
        was there and is finished answers at once. Inside of a handler it holds a slot
        of the worker: with every slot waiting, nobody is left to run what they wait
        for.

        Args:
            job: see the class.
            timeout: from the call; the job goes on after it.
            identity: as for `enqueue`.
            **options: those of `CallOptions`.

        Raises:
            WaitTimeout: it is not finished; `job_id` names it.
            EnqueueForbidden: also when middleware dropped the job.
            StoreUnavailable: it is finished, and its result could not be read in time.
            Unsupported: the store cannot be inspected; nothing was enqueued.
            HeadgateError: as `enqueue`.
        """
        if "tx" in options:
            raise InvalidRequest(
                "enqueue_and_wait takes no tx: nobody can run the job before the commit"
            )
        return self.follow(
            lambda: self.enqueue(job, identity=identity, **options),
            timeout=timeout,
            task=job.task if isinstance(job, JobRequest) else None,
        )

    def follow(
        self,
        send: Callable[[], JobHandle],
        *,
        timeout: timedelta | str,
        task: Task | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Completion[Any]:
        """Wait for the end of a job, as `enqueue_and_wait` does.

        Args:
            send: enqueues it, after everything else was checked.
            timeout: from the call.
            task: says how the result is read; None is the registry's task of its kind.
            check: called about every 100 ms; what it raises ends the wait.
        """
        from headgate_sync.client.waiting import completion_of, reader_of

        timeout_ms = duration_ms("timeout", timeout)
        watch = self._watching()
        until_s = watch.now_s() + timeout_ms / 1000
        handle = send()
        if handle.dropped:
            raise EnqueueForbidden(handle.kind)
        _warn_in_handler(handle)
        try:
            found = watch.wait(handle.id, until_s, check)
        except TimeoutError as late:
            raise WaitTimeout(handle.id) from late.__cause__
        read = reader_of(handle.kind, task, self.registry)
        completion = completion_of(self.store, handle.id, found, read)
        return watch.pace.sit_out(completion.loaded, until_s)

    def enqueue_many(
        self,
        jobs: Iterable[Any],
        *,
        identity: Identity | None = None,
        tx: Any = None,
    ) -> list[JobHandle]:
        """Put up to 1,000 jobs in, all or none; kinds may be mixed.

        Returns:
            One handle per job, in order.

        Raises:
            InvalidRequest: more than 1,000 jobs or 16 MiB, before any is sent; or jobs
                of different identities.
            StoreError: as `enqueue`; a refusal of one job refuses all.
        """
        batch, identity = self.batch_of(jobs, identity)
        return self._many(batch, identity, tx)

    def enqueue_chunks(
        self,
        jobs: Iterable[Any],
        *,
        size: int = 500,
        identity: Identity | None = None,
    ) -> Iterator[list[JobHandle]]:
        """Put any number of jobs in, `size` at a time, as the result is iterated.

        Each chunk is all or none; what was sent before an error stays sent.

        Args:
            jobs: taken one chunk ahead of the sending.
            size: 1 to 1,000.
            identity: as for `enqueue`.

        Raises:
            InvalidRequest: a size out of range, at the call.
        """
        if type(size) is not int or not 1 <= size <= MAX_BATCH_JOBS:
            raise InvalidRequest(f"size is {size!r}, allowed is 1 to {MAX_BATCH_JOBS}")
        check_iterable("jobs", jobs)
        return self._chunks(iter(jobs), size, identity)

    def _chunks(
        self, jobs: Iterator[Any], size: int, identity: Identity | None
    ) -> Iterator[list[JobHandle]]:
        while chunk := list(islice(jobs, size)):
            yield self.enqueue_many(chunk, identity=identity)

    @property
    def schedules(self) -> Schedules:
        """Jobs that come again."""
        return Schedules(self)

    def envelope(self, job: Any, /, **options: Any) -> Envelope:
        """What would be stored for a job, its id included.

        Raises:
            InvalidRequest: the job cannot be sent.
        """
        if isinstance(job, Envelope):
            if options:
                raise InvalidRequest(
                    f"an Envelope takes no options, got {', '.join(options)}"
                )
            if job.fingerprint:
                return job
            return evolve(job, fingerprint=fingerprint(job.kind, job.payload))
        return build(request_of(job, options), self.defaults, self._new_id)

    def batch_of(
        self, jobs: Iterable[Any], identity: Identity | None = None
    ) -> tuple[list[Envelope], Identity | None]:
        """What would be stored for jobs of one call, and who enqueues them.

        Raises:
            InvalidRequest: a job cannot be sent, or they name different identities.
        """
        check_iterable("jobs", jobs)
        batch: list[Envelope] = []
        named: Identity | None = None
        for job in jobs:
            batch.append(self.envelope(job))
            own = identity_of(job)
            if own is not None and named not in (None, own):
                raise InvalidRequest("jobs of one batch have different identities")
            named = own or named
        return batch, identity or named

    def member(
        self, request: JobRequest, *, id: str, tag: str, keep_ms: int
    ) -> Envelope:
        """What would be stored for a job of a batch.

        Args:
            request: the job.
            id: in the place of any other.
            tag: beside its own.
            keep_ms: retention, where its own is shorter.

        Raises:
            InvalidRequest: the job cannot be sent.
        """

        def join(fields: dict[str, Any]) -> None:
            fields["tags"] = (*fields.get("tags", ()), tag)
            fields["retention_ms"] = max(fields.get("retention_ms", 0), keep_ms)

        return build(request, self.defaults, self._new_id, id=id, change=join)

    def authorize(
        self, batch: Sequence[Envelope], *, identity: Identity | None = None
    ) -> None:
        """Ask the authorizer about jobs that something else will enqueue later.

        Raises:
            EnqueueForbidden: the first kind that is refused.
        """
        if self._pipeline is not None:
            self._pipeline.authorize(self._passing(batch, identity, None))

    def _many(
        self, batch: Sequence[Envelope], identity: Identity | None, tx: Any
    ) -> list[JobHandle]:
        try:
            sent = self._send(batch, identity, tx)
        except DuplicateJob as duplicate:
            if not duplicate.replaced:
                raise
            # Only a request that is alone in its batch can replace.
            return [_handle(batch[0], id=duplicate.existing_id, replaced=True)]
        if sent is None:
            return [_handle(envelope) for envelope in batch]
        return _handles(batch, sent)

    def _send(
        self, batch: Sequence[Envelope], identity: Identity | None, tx: Any
    ) -> list[Envelope] | None:
        """Make the store call; None where nothing stood between it and the caller.

        Otherwise the jobs as they were stored, none of them when they were dropped.
        """
        if self._pid != os.getpid():
            # The connections belong to the parent; talking over them would mix two
            # programs in one session.
            raise RuntimeError(
                "client used after fork: its store belongs to the parent process; "
                "make store and client in the child, or use a Headgate made from a URL"
            )
        if self._pipeline is None:
            check_identity(identity)
            self._target(tx)(batch)
            if tx is None:
                self._pinned.look_at(batch)
            return None
        final: list[Envelope] = []
        stored = self._pipeline.send(
            self._passing(batch, identity, tx), lambda: self._target(tx), final
        )
        if stored and tx is None:
            self._pinned.look_at(final)
        return final if stored else []

    def _passing(
        self, batch: Sequence[Envelope], identity: Identity | None, tx: Any
    ) -> EnqueueRequest:
        from headgate_sync.client.pipeline import EnqueueRequest

        check_identity(identity)
        return EnqueueRequest(
            batch=list(batch),
            operation="direct" if tx is None else "transactional",
            source=self.source,
            identity=identity or current_identity(),
        )

    def _target(self, tx: Any) -> Callable[[Sequence[Envelope]], None]:
        """The store call, in the caller's transaction where there is one."""
        if tx is None or self._immediate:
            return self.store.enqueue
        transactional = self.store.transactional
        if transactional is None:
            raise Unsupported(
                "transactional",
                f"{type(self.store).__name__} cannot join a transaction: the job would "
                'survive a rollback; in a test `hg.override(store, tx="immediate")` '
                "sends it at once all the same",
            )
        return partial(transactional.enqueue_tx, join(transactional, tx))

    def _watching(self) -> Watch:
        from headgate_sync.client.waiting import Watch, inspection_of

        with self._watch_lock:
            if self._watch is None:
                self._watch = Watch(
                    inspection_of(self.store),
                    pace=self._pace,
                    bus=lambda: self.event_bus,
                )
            return self._watch


def _handles(given: Sequence[Envelope], stored: Sequence[Envelope]) -> list[JobHandle]:
    """One handle per job of the caller, after middleware had its hands on the batch."""
    if len(given) == len(stored):
        return [_handle(envelope) for envelope in stored]
    found = {envelope.id: envelope for envelope in stored}
    return [
        _handle(found[job.id]) if job.id in found else _handle(job, dropped=True)
        for job in given
    ]


def _warn_in_handler(handle: JobHandle) -> None:
    from headgate_sync.context import current_job

    try:
        running = current_job()
    except LookupError:
        return
    logger.warning(
        "job %s in queue %s waits for job %s in queue %s inside its handler: "
        "when every slot waits, nobody runs what they wait for",
        *(running.job_id, running.queue, handle.id, handle.queue),
    )


def _handle(envelope: Envelope, **differing: Any) -> JobHandle:
    return JobHandle(
        **{"id": envelope.id, "kind": envelope.kind, "queue": envelope.queue}
        | differing
    )
