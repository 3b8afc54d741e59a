"""`Client`: turns jobs into envelopes and makes one store call per enqueue."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from attrs import evolve

from headgate_sync.client.tx import join
from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import DuplicateJob, InvalidRequest, Unsupported
from headgate_sync.ids import UlidGenerator
from headgate_sync.options import (
    NO_DEFAULTS,
    CallOptions,
    TaskOptions,
    envelope_fields,
    make_options,
    merged,
    unique_of,
)
from headgate_sync.request import JobHandle, JobRequest, with_options
from headgate_sync.store import Store
from headgate_sync.task import task_of
from headgate_sync.validation import MAX_BATCH_JOBS


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
        tx: "immediate" sends a job with `tx` at once, past the caller's transaction;
            for tests over a store that cannot join one.
    """

    def __init__(
        self,
        store: Store,
        *,
        defaults: TaskOptions = NO_DEFAULTS,
        tx: Literal["refuse", "immediate"] = "refuse",
    ) -> None:
        self.store = store
        self.defaults = defaults
        self._immediate = tx == "immediate"
        self._new_id = UlidGenerator()
        self._pid = os.getpid()

    def enqueue(self, job: Any, /, *, tx: Any = None, **options: Any) -> JobHandle:
        """Put one job in.

        The same id with the same content again is a success that changes nothing.

        Args:
            job: see the class.
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
        """
        envelope = self.envelope(job, **options)
        try:
            self._send([envelope], tx)
        except DuplicateJob as duplicate:
            if not duplicate.replaced:
                raise
            return _handle(envelope, id=duplicate.existing_id, replaced=True)
        return _handle(envelope)

    def enqueue_or_join(
        self, job: Any, /, *, tx: Any = None, **options: Any
    ) -> JobHandle:
        """`enqueue`, or the handle of the job that holds the unique key.

        Returns:
            With `joined` the id is the holder's; a throttle key may name a job that is
            gone.
        """
        envelope = self.envelope(job, **options)
        try:
            self._send([envelope], tx)
        except DuplicateJob as duplicate:
            return _handle(
                envelope,
                id=duplicate.existing_id,
                joined=not duplicate.replaced,
                replaced=duplicate.replaced,
            )
        return _handle(envelope)

    def enqueue_many(self, jobs: Iterable[Any], *, tx: Any = None) -> list[JobHandle]:
        """Put up to 1,000 jobs in, all or none; kinds may be mixed.

        Returns:
            One handle per job, in order.

        Raises:
            InvalidRequest: more than 1,000 jobs or 16 MiB, before any is sent.
            StoreError: as `enqueue`; a refusal of one job refuses all.
        """
        batch = [self.envelope(job) for job in jobs]
        try:
            self._send(batch, tx)
        except DuplicateJob as duplicate:
            if not duplicate.replaced:
                raise
            # Only a request that is alone in its batch can replace.
            return [_handle(batch[0], id=duplicate.existing_id, replaced=True)]
        return [_handle(envelope) for envelope in batch]

    def enqueue_chunks(
        self, jobs: Iterable[Any], *, size: int = 500
    ) -> Iterator[list[JobHandle]]:
        """Put any number of jobs in, `size` at a time, as the result is iterated.

        Each chunk is all or none; what was sent before an error stays sent.

        Args:
            jobs: taken one chunk ahead of the sending.
            size: 1 to 1,000.

        Raises:
            InvalidRequest: a size out of range, at the call.
        """
        if type(size) is not int or not 1 <= size <= MAX_BATCH_JOBS:
            raise InvalidRequest(f"size is {size!r}, allowed is 1 to {MAX_BATCH_JOBS}")
        return self._chunks(iter(jobs), size)

    def _chunks(self, jobs: Iterator[Any], size: int) -> Iterator[list[JobHandle]]:
        while chunk := list(islice(jobs, size)):
            yield self.enqueue_many(chunk)

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
        if isinstance(job, JobRequest):
            made = make_options(CallOptions, job.task.label, options)
            return self._build(with_options(job, made))
        task = task_of(type(job))
        if task is None:
            raise InvalidRequest(
                f"{type(job).__name__} is no job: expected an instance of a payload "
                "class, task.job(...) or an Envelope"
            )
        made = make_options(CallOptions, task.label, options)
        task.check_templates(made)
        return self._build(task.request(job, made))

    def _build(self, request: JobRequest) -> Envelope:
        task = request.task
        values = merged((request.options, task.options, self.defaults))
        try:
            fields = envelope_fields(values)
            for option, name in (("partition", "partition_key"), ("rate_class",) * 2):
                if values.get(option) is not None:
                    fields[name] = request.render(option, values[option])
            unique = unique_of(values.get("unique"))
            if unique is not None:
                fields |= unique.fields()
                fields["unique_key"] = (
                    request.digest()
                    if unique.key is True
                    else request.render("unique", unique.key).encode()
                )
            return Envelope(
                id=values.get("id") or self._new_id(),
                kind=task.kind,
                schema_version=task.version,
                payload=request.data,
                fingerprint=fingerprint(task.kind, request.data),
                **fields,
            )
        except InvalidRequest as error:
            if error.message.startswith(task.label):
                raise
            raise InvalidRequest(f"{task.label}: {error.message}") from error

    def _send(self, batch: Sequence[Envelope], tx: Any) -> None:
        if self._pid != os.getpid():
            # The connections belong to the parent; talking over them would mix two
            # programs in one session.
            raise RuntimeError("client used after fork")
        if tx is None or self._immediate:
            self.store.enqueue(batch)
            return
        transactional = self.store.transactional
        if transactional is None:
            raise Unsupported(
                "transactional",
                f"{type(self.store).__name__} cannot join a transaction: the job would "
                "survive a rollback",
            )
        transactional.enqueue_tx(join(transactional, tx), batch)


def _handle(envelope: Envelope, **differing: Any) -> JobHandle:
    return JobHandle(
        **{"id": envelope.id, "kind": envelope.kind, "queue": envelope.queue}
        | differing
    )
