"""The port: `Store` and the capability protocols a store may offer beside it.

One call is one atomic decision, tried once: whether to try again is the caller's
policy. Every method blocks and may be called from any thread. All instants are store
time; no call takes "now". Any method may raise `StoreUnavailable` (the database did not
answer), its subclass `StoreConflict`, or `BackendError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntFlag
from typing import Any, Protocol

from attrs import frozen

from headgate_sync.envelope import Envelope
from headgate_sync.errors import (
    BackendError,
    InvalidRequest,
    LeaseRejected,
    StoreConflict,
)
from headgate_sync.idempotency import Idempotency
from headgate_sync.inspection import Inspect
from headgate_sync.lease import (
    Ack,
    AdmissionBatch,
    AdmitRequest,
    Checkpoint,
    JobOutput,
    JobProgress,
    JobResult,
    LeaseRef,
    ProgressUpdate,
    Reclaimed,
)
from headgate_sync.lifecycle import Outcome

AckError = LeaseRejected | BackendError | StoreConflict


class Caps(IntFlag):
    """Capabilities as one number, for wire formats."""

    TRANSACTIONAL = 1
    NOTIFYING = 2
    INSPECT = 4


class ResultStore(Protocol):
    """Results of successful jobs."""

    def ack_success_with_result(
        self,
        lease: LeaseRef,
        result: JobResult,
        *,
        logs: Sequence[str] = (),
        actual_weight: int | None = None,
    ) -> None:
        """Ack success and store the result in the same write; see `Store.ack`."""
        ...

    def read_result(self, job_id: str) -> JobResult | None:
        """The result, or None without the job or a result."""
        ...


class OutputStore(Protocol):
    """Bytes that a handler publishes while it runs; each write replaces the last."""

    def write_job_output(self, lease: LeaseRef, output: JobResult) -> JobOutput:
        """Publish under the lease; raises `LeaseRejected` for any other holder."""
        ...

    def read_output(self, job_id: str) -> JobOutput | None:
        """The newest output, or None."""
        ...


class ProgressStore(Protocol):
    """Progress that a handler reports; each write replaces the last."""

    def write_job_progress(
        self, lease: LeaseRef, progress: ProgressUpdate
    ) -> JobProgress:
        """Report under the lease; raises `LeaseRejected` for any other holder."""
        ...

    def read_progress(self, job_id: str) -> JobProgress | None:
        """The newest progress, or None."""
        ...


class TxHandle(Protocol):
    """A transaction: the store's own, or one that a caller lends."""

    @property
    def connection(self) -> Any:
        """The driver's connection, for the application's own statements."""
        ...


class Transactional(Protocol):
    """Jobs and application rows in one commit.

    A handle belongs to the thread that opened it. One of another store, or a finished
    one, raises `InvalidRequest`.
    """

    def begin_tx(self) -> TxHandle:
        """Open a transaction on a connection of the store's pool."""
        ...

    def commit_tx(self, tx: TxHandle) -> None:
        """Commit and give the connection back; refused for a joined transaction."""
        ...

    def rollback_tx(self, tx: TxHandle) -> None:
        """Roll back and give the connection back; refused for a joined transaction."""
        ...

    def transaction(self) -> AbstractContextManager[TxHandle]:
        """Begin; commit at the end of the block, roll back on an exception."""
        ...

    def join(self, connection: Any) -> TxHandle:
        """Lend a caller's open transaction; the caller alone ends it.

        Raises:
            InvalidRequest: no connection of the driver, closed, in autocommit without
                an open transaction, or in an aborted transaction.
        """
        ...

    def owns(self, tx: TxHandle) -> bool:
        """Whether the handle came from this object."""
        ...

    def enqueue_tx(self, tx: TxHandle, batch: Sequence[Envelope]) -> None:
        """`Store.enqueue` inside the transaction: visible with its commit.

        A refusal leaves the transaction usable and nothing of the batch in it.
        """
        ...

    def claim_effect(self, tx: TxHandle, key: str) -> bool:
        """Claim a key once for ever; False when a committed transaction holds it.

        Waits for another open transaction that claims the same key.
        """
        ...

    def checkpoint_tx(
        self, tx: TxHandle, lease: LeaseRef, checkpoint: Checkpoint
    ) -> None:
        """`Store.checkpoint` inside the transaction."""
        ...

    def complete_tx(
        self, tx: TxHandle, lease: LeaseRef, *, actual_weight: int | None = None
    ) -> None:
        """Ack success inside the transaction: effects and completion are one commit."""
        ...


class Notifying(Protocol):
    """Wake-ups: hints that a queue got work. A lost or spurious one costs latency."""

    def wait_wakeup(self, queues: Sequence[str], timeout_ms: int) -> str | None:
        """Wait for a signal on one of the queues (none named: any).

        Returns:
            The queue's name, "" when signals overflowed (ask now), None at the
            time-out.
        """
        ...

    def close(self) -> None:
        """Stop listening and wake every waiter."""
        ...


@frozen(kw_only=True)
class IndexHealth:
    """An index of the tables of jobs and lanes, by the server's own statistics.

    An index over 64 MiB whose table has more dead rows than live ones is worth a
    rebuild.

    Attributes:
        scans: how often it was used.
        live_tuples, dead_tuples: rows of its table, estimated.
    """

    name: str
    bytes: int
    scans: int
    live_tuples: int
    dead_tuples: int


@frozen(kw_only=True)
class CrowdedPartition:
    """A partition with waiting jobs of more than `policy.MANY_CLASSES` rate classes.

    Attributes:
        classes: how many, closed ones included.
    """

    queue: str
    partition_key: str
    classes: int


@frozen(kw_only=True)
class Vacuumed:
    """What became of a table; `error` says why it was left alone."""

    table: str
    ok: bool
    error: str = ""


@frozen(kw_only=True)
class ArchivePolicy:
    """How long copies of a queue's jobs stay in the archive.

    Attributes:
        retention_ms: from the deletion of the job on; of copies made from now on.
    """

    queue: str
    retention_ms: int


class Maintenance(Protocol):
    """Upkeep of the database's own bookkeeping; bounded calls, safe on every node."""

    def index_health(self) -> list[IndexHealth]:
        """The indexes of jobs and lanes, by name."""
        ...

    def reindex_concurrently(self, name: str) -> None:
        """Rebuild one of these indexes while everything goes on; takes long.

        Raises:
            InvalidRequest: not one of them.
        """
        ...

    def vacuum(self) -> list[Vacuumed]:
        """Vacuum and analyse our tables one after another.

        A table that is busy is left alone; no fault of one stops the others.
        """
        ...

    def gate_fold(self, limit: int) -> int:
        """Fold up to `limit` appended rows per queue; returns how many."""
        ...

    def gate_reconcile(self, limit: int) -> int:
        """Recompute counters of up to `limit` partitions; returns how many were off."""
        ...

    def crowded_partitions(self, limit: int) -> list[CrowdedPartition]:
        """Partitions of many rate classes, the most crowded first.

        Their classes take turns, and what an admission costs grows with them. Of a
        queue up to 100,000 sets of jobs that share partition, class and worker are
        looked at.
        """
        ...

    def set_archive_policy(self, queue: str, retention_ms: int) -> None:
        """Keep a copy of each job of a queue that is deleted because of its age.

        `evict_retained` and `archive_completed_older_than` copy and delete in one
        transaction; copies that are there already keep their retention. When this has
        answered, no sweep deletes a job of the queue without a copy.

        Args:
            retention_ms: 1 to 31,536,000,000,000; see `ArchivePolicy`.

        Raises:
            StoreConflict: sweeps kept the policies locked; nothing was changed.
        """
        ...

    def clear_archive_policy(self, queue: str) -> None:
        """Keep no further copies of a queue's jobs; the ones that are there stay.

        Raises:
            StoreConflict: sweeps kept the policies locked; nothing was changed.
        """
        ...

    def archive_policies(self) -> list[ArchivePolicy]:
        """The queues whose jobs are archived, by name."""
        ...

    def prune_archive_month(self, month: str) -> int:
        """Empty a month of the archive, all queues; returns how many copies went.

        Args:
            month: `YYYYMM` in UTC, by the deletion of the jobs: 202501 to 203112.

        Raises:
            InvalidRequest: another text, or the month has not ended, or one of its
                copies is to be kept longer: then all of them stay.
            StoreConflict: somebody reads that month, or a copy is on its way into it.
            BackendError: the role does not own the tables.
        """
        ...

    def prune_effects(self, older_than_ms: int, limit: int) -> int:
        """Forget up to `limit` keys of effects whose job is gone; returns how many.

        Nothing calls this by itself: a forgotten key can be claimed again, so a job of
        the same id that comes after that runs its effect once more.

        Args:
            older_than_ms: since the claim of the key, at least 1; longer than any id
                may come back.
            limit: 1 to 1,000,000.
        """
        ...


class Store(Protocol):
    """A place that keeps jobs and decides who may run them."""

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take in up to 1,000 jobs, all or none.

        A job whose id exists with the same kind, fingerprint and queue is a replay: it
        succeeds and changes nothing.

        Raises:
            InvalidRequest: a rule of the batch is broken; nothing was read.
            IdConflict: an id stands twice or belongs to other content.
            FingerprintQuarantined: a fingerprint is quarantined.
            Backpressure: a queue is full.
            DuplicateJob: a unique key is held. With `replaced` the holder was changed
                as asked; every other refusal changes nothing.
        """
        ...

    def admit(self, request: AdmitRequest) -> AdmissionBatch:
        """Decide what the worker may run, claim it and lease it, as one atomic unit."""
        ...

    def ack(
        self,
        lease: LeaseRef,
        outcome: Outcome,
        *,
        error: str | None = None,
        delay_ms: int | None = None,
        logs: Sequence[str] = (),
        actual_weight: int | None = None,
        latency_ms: int | None = None,
        error_code: str = "",
        reason_code: str = "",
    ) -> None:
        """Settle an attempt. The arguments are those of `Ack`.

        The same ack again, while the job was not claimed again, changes nothing.

        Raises:
            InvalidRequest: an argument is out of range; nothing was written.
            LeaseRejected: the caller does not hold the job.
            StoreConflict: the job stays locked by another transaction; nothing was
                written, the same ack may be sent again.
        """
        ...

    def ack_batch(self, acks: Sequence[Ack]) -> list[AckError | None]:
        """Settle up to 1,000 attempts in one commit, each judged under its own fence.

        Returns:
            Per ack, in order, None or the error that it alone would have raised. With
            `StoreConflict` it is undecided and may be sent again.

        Raises:
            InvalidRequest: more than 1,000.
            StoreUnavailable: every member is undecided and may be sent again.
        """
        ...

    def renew(self, leases: Sequence[LeaseRef], *, lease_ms: int) -> list[LeaseRef]:
        """Extend leases and report the ones that are lost.

        A lease still held expires `lease_ms` from now; this may also shorten it. A row
        that another transaction holds locked counts as held for this call.

        Args:
            leases: any number in any order; none does no work.
            lease_ms: 1 to 86,400,000.

        Returns:
            The lost leases, in the order given. Their handlers must stop.
        """
        ...

    def checkpoint(self, lease: LeaseRef, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint under the lease; the next claim carries it."""
        ...

    def reclaim_expired(self, limit: int) -> list[Reclaimed]:
        """Take back up to `limit` leases that ran out, oldest first.

        Each counts as a crash: the job waits for its backoff, before its last chance
        apart from others of its worker (`retry.crash_backoff_ms`), or, at the crash
        limit, is quarantined together with its fingerprint.
        """
        ...

    def promote_due(self, limit: int) -> int:
        """Make up to `limit` due jobs available, earliest first; returns how many."""
        ...

    def evict_retained(self, limit: int) -> int:
        """Delete up to `limit` finished jobs past their retention; returns how many.

        Those of a queue with an archive policy are archived.
        """
        ...

    def claim_duty(self, name: str, holder: str, lease_ms: int) -> bool:
        """Take or renew a duty for a time; False while another holds it."""
        ...

    def release_duty(self, name: str, holder: str) -> None:
        """Give a duty up, if held."""
        ...

    def duty_tick(
        self, holder: str, names: Sequence[str], lease_ms: int
    ) -> dict[str, bool]:
        """`claim_duty` for many names in one round trip.

        Returns:
            The duties held now, each with whether work is due (True where the store
            cannot know).
        """
        ...

    def health_check(self) -> None:
        """Answer, within a second, whether the store can work.

        Raises:
            StoreUnavailable: the database did not answer.
            ConfigurationError: its tables are not those of this release; the text names
                the command that changes that.
        """
        ...

    def caps(self) -> Caps:
        """The capabilities as a number, derived from the properties below."""
        ...

    @property
    def results(self) -> ResultStore | None:
        """Results of successful jobs, or None."""
        ...

    @property
    def outputs(self) -> OutputStore | None:
        """Output of running jobs, or None."""
        ...

    @property
    def progress(self) -> ProgressStore | None:
        """Progress of running jobs, or None."""
        ...

    @property
    def transactional(self) -> Transactional | None:
        """Jobs and application rows in one commit, or None."""
        ...

    @property
    def inspect(self) -> Inspect | None:
        """Looking at jobs and steering them, or None."""
        ...

    @property
    def notifying(self) -> Notifying | None:
        """Wake-ups, or None."""
        ...

    @property
    def idempotency(self) -> Idempotency | None:
        """Answers kept under the caller's keys, or None."""
        ...

    @property
    def maintenance(self) -> Maintenance | None:
        """Upkeep of the store's own bookkeeping, or None."""
        ...


CAPABILITIES: Mapping[str, type] = {
    "results": ResultStore,
    "outputs": OutputStore,
    "progress": ProgressStore,
    "transactional": Transactional,
    "inspect": Inspect,
    "notifying": Notifying,
    "idempotency": Idempotency,
    "maintenance": Maintenance,
}


def derived_caps(store: Store) -> Caps:
    """What `caps` has to answer, read off the properties."""
    caps = Caps(0)
    if store.transactional is not None:
        caps |= Caps.TRANSACTIONAL
    if store.notifying is not None:
        caps |= Caps.NOTIFYING
    if store.inspect is not None:
        caps |= Caps.INSPECT
    return caps


def _methods(protocol: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    }


def _shape(function: Any) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


def _check_surface(owner: object, protocol: type, label: str) -> None:
    for name, wanted in _methods(protocol).items():
        found = getattr(owner, name, None)
        if found is None:
            raise InvalidRequest(f"{label} lacks {name}")
        if _shape(found) != _shape(wanted):
            raise InvalidRequest(f"{label}.{name} has another signature than the port")


def validate_store_capabilities(store: Store) -> None:
    """Check that a store is what it says it is.

    Raises:
        InvalidRequest: a property is neither None nor an object with every method of
            its protocol and equal signatures, or `caps` does not follow from the
            properties.
    """
    _check_surface(store, Store, "store")
    for name, protocol in CAPABILITIES.items():
        capability = getattr(store, name)
        if capability is not None:
            _check_surface(capability, protocol, name)
    if store.caps() != derived_caps(store):
        raise InvalidRequest("caps does not follow from the capability properties")
