"""`PgStore`: the port on PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from psycopg.types.numeric import Int4, Int8
from psycopg_pool import ConnectionPool

from headgate_sync.callables import is_asynchronous
from headgate_sync.envelope import MAX_INT64, Envelope, check_int
from headgate_sync.errors import ConfigurationError, StoreError
from headgate_sync.inspection import (
    CRASH_LIMIT_REASON,
    LEASE_EXPIRED,
    LEASE_LOST_ERROR,
)
from headgate_sync.lease import (
    Ack,
    AdmissionBatch,
    AdmitRequest,
    Checkpoint,
    LeaseRef,
    Reclaimed,
    check_lease_ms,
)
from headgate_sync.lifecycle import Outcome
from headgate_sync.loggers import guarded
from headgate_sync.policy import LOCK_WAIT_MS, UPKEEP_INTERVAL_MS
from headgate_sync.postgres.acks import Acker, RetryOptions, random_jitter
from headgate_sync.postgres.capabilities import PgOutputs, PgProgress, PgResults
from headgate_sync.postgres.database import (
    DEFAULT_SCHEMA,
    Database,
    Pool,
    read_address,
)
from headgate_sync.postgres.enqueue import Intake
from headgate_sync.postgres.heartbeat import Heartbeat
from headgate_sync.postgres.idempotency import PgIdempotency
from headgate_sync.postgres.inspection import PgInspect
from headgate_sync.postgres.ledger import check_schema
from headgate_sync.postgres.listener import Listener
from headgate_sync.postgres.maintenance import PgMaintenance
from headgate_sync.postgres.pool import TellingPool
from headgate_sync.postgres.rows import admission_batch
from headgate_sync.postgres.transactions import PgTransactional
from headgate_sync.retry import (
    APART_MS,
    DEFAULT_CRASH_LIMIT,
    DEFAULT_RETRY_BASE_MS,
    DEFAULT_RETRY_CAP_MS,
)
from headgate_sync.store import AckError, Caps, derived_caps
from headgate_sync.validation import (
    check_duty,
    check_limit,
    check_name,
    check_sequence,
    check_texts,
    check_type,
)

logger = guarded(__name__)

DEFAULT_POOL_SIZE = 4
# A third of the usual lease: whoever waits longer for a connection had better be told.
DEFAULT_POOL_TIMEOUT_MS = 10_000
# The pool doubles the pauses between its tries to connect. Once it gave up, the next
# call makes it try at once, so that a long outage is followed by no long pause.
RECONNECT_TIMEOUT_S = 5
HEALTH_TIMEOUT_MS = 1_000

# An idle connection is probed and a sent request is given up, so that a server that
# vanished without a word is noticed. What the address says wins.
_CONNECTION = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


def _check_pool(pool: object) -> None:
    borrow = getattr(pool, "getconn", None)
    if not callable(borrow) or is_asynchronous(borrow):
        raise ConfigurationError(
            f"expected a psycopg_pool.ConnectionPool, got {type(pool).__name__}"
        )


class PgStore:
    """Jobs in a schema of a PostgreSQL database.

    The schema is created and changed by `headgate migrate up` alone; the first call
    checks that it is the one of this release. No call holds one pooled connection while
    it waits for another, and nothing is left behind on a connection.

    Args:
        pool: the caller's `ConnectionPool`; never closed here.
        schema: where the tables are.
        listen: conninfo for wake-ups, of the server itself and not of a pooler that
            moves transactions; None polls.
        retry_base_ms: delay after the first failure, doubled per further one.
        retry_cap_ms: upper bound of the delay.
        retry_jitter: called with `retry_base_ms`, added to the delay of a returned
            failure.
        crash_limit: lost leases after which a job is quarantined.
        heartbeat_connection: renew leases on one more connection beside the pool, so
            that handlers may hold all of the pool's.
        pool_timeout_ms: how long a call waits for a connection before it raises
            `StoreUnavailable`.

    Raises:
        ConfigurationError: it is no such pool, or `listen` no address; at the first
            call: the schema is missing, older or newer.
    """

    def __init__(
        self,
        pool: Pool,
        schema: str = DEFAULT_SCHEMA,
        *,
        listen: str | None = None,
        retry_base_ms: int = DEFAULT_RETRY_BASE_MS,
        retry_cap_ms: int = DEFAULT_RETRY_CAP_MS,
        retry_jitter: Callable[[int], int] = random_jitter,
        crash_limit: int = DEFAULT_CRASH_LIMIT,
        heartbeat_connection: bool = True,
        pool_timeout_ms: int = DEFAULT_POOL_TIMEOUT_MS,
    ) -> None:
        _check_pool(pool)
        check_int("pool_timeout_ms", pool_timeout_ms, 1, MAX_INT64)
        self._options = RetryOptions(
            base_ms=retry_base_ms,
            cap_ms=retry_cap_ms,
            jitter=retry_jitter,
            crash_limit=crash_limit,
        )
        self._db = db = Database(
            pool,
            schema,
            pool_timeout_ms=pool_timeout_ms,
            verify=lambda session: check_schema(session, schema),
        )
        self._owned_pool: ConnectionPool[Any] | None = None
        self._intake = Intake(db)
        self._acker = acker = Acker(db, self._options)
        self._heartbeat: Heartbeat | None = None
        if heartbeat_connection and isinstance(pool, ConnectionPool):
            self._heartbeat = Heartbeat(db, pool)
        self._results = PgResults(db, acker)
        self._outputs = PgOutputs(db)
        self._progress = PgProgress(db)
        self._transactional = PgTransactional(db, self._intake, acker)
        self._inspect = PgInspect(db, self._intake)
        self._inspect.heartbeat = self._heartbeat
        self._notifying = None if listen is None else Listener(listen, schema)
        self._idempotency = PgIdempotency(db)
        self._maintenance = PgMaintenance(db)
        self._lock = threading.Lock()  # guards the instant below
        self._upkeep_at_ms: int | None = None  # store time of the last due promoter

    @classmethod
    def connect(
        cls,
        conninfo: str,
        schema: str = DEFAULT_SCHEMA,
        *,
        pool_size: int = DEFAULT_POOL_SIZE,
        prepare: bool = True,
        **options: Any,
    ) -> Self:
        """Make a store with a pool of its own; it connects when it is first used.

        Args:
            conninfo: a URL or conninfo text.
            schema: where the tables are.
            pool_size: most connections; handlers that hold a transaction at the same
                time, and two.
            prepare: keep statements prepared on the server; False beside a pooler that
                moves transactions between sessions and does not know them.
            **options: as in the constructor.

        Raises:
            ConfigurationError: the text is no address of a PostgreSQL database.
        """
        given = read_address(conninfo)
        # Arguments would win over the address.
        limits = {name: n for name, n in _CONNECTION.items() if name not in given}
        kwargs: dict[str, Any] = {**limits, "autocommit": True}
        if not prepare:
            kwargs["prepare_threshold"] = None
        pool = TellingPool(
            conninfo,
            min_size=0,
            max_size=pool_size,
            kwargs=kwargs,
            name="headgate",
            reconnect_timeout=RECONNECT_TIMEOUT_S,
            open=False,
        )
        store = cls(pool, schema, **options)
        store._owned_pool = pool
        pool.open()
        return store

    def close(self) -> None:
        """Close what this store opened: its own pool, the heartbeat, the listener."""
        if self._notifying is not None:
            self._notifying.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._owned_pool is not None:
            self._owned_pool.close()

    # The port.

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take in up to 1,000 jobs, all or none; see `Store.enqueue`."""
        self._intake.enqueue(batch)

    def admit(self, request: AdmitRequest) -> AdmissionBatch:
        """Decide what the worker may run; see `Store.admit`."""
        check_type("request", request, AdmitRequest)
        if not request.queues or not request.capacity:
            return AdmissionBatch()
        rows = self._db.rows(
            "admit",
            worker=request.worker,
            lease_id=request.lease_id,
            queues=list(request.queues),
            capacity=Int4(request.capacity),
            lease_ms=Int8(request.lease_ms),
            quantum=Int4(request.quantum),
        )
        if passed_over := rows[-1][6]:
            self._mark_holds(passed_over)
        return admission_batch(rows, request.lease_id)

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
        """Settle an attempt; see `Store.ack`."""
        self._acker.ack(
            Ack(
                lease=lease,
                outcome=outcome,
                error=error,
                delay_ms=delay_ms,
                logs=logs,
                actual_weight=actual_weight,
                latency_ms=latency_ms,
                error_code=error_code,
                reason_code=reason_code,
            )
        )

    def ack_batch(self, acks: Sequence[Ack]) -> list[AckError | None]:
        """Settle up to 1,000 attempts, each judged alone; see `Store.ack_batch`."""
        return self._acker.ack_batch(acks)

    def renew(self, leases: Sequence[LeaseRef], *, lease_ms: int) -> list[LeaseRef]:
        """Extend leases and report the ones that are lost; see `Store.renew`.

        On the heartbeat connection a call takes a third of the lease at most.
        """
        check_sequence("leases", leases, LeaseRef)
        check_lease_ms(lease_ms)
        if not leases:
            return []
        params: dict[str, Any] = {
            "job_ids": [lease.job_id for lease in leases],
            "lease_ids": [lease.lease_id for lease in leases],
            "fences": [Int8(lease.fence) for lease in leases],
            "lease_ms": Int8(lease_ms),
        }
        if self._heartbeat is None:
            lost = self._db.rows("renew", **params)
        else:
            lost = self._heartbeat.rows("renew", lease_ms // 3, **params)
        return [leases[place - 1] for (place,) in lost]

    def checkpoint(self, lease: LeaseRef, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint under the lease; see `Store.checkpoint`."""
        check_type("lease", lease, LeaseRef)
        check_type("checkpoint", checkpoint, Checkpoint)
        self._acker.checkpoint(lease, checkpoint)

    def reclaim_expired(self, limit: int) -> list[Reclaimed]:
        """Take back leases that ran out, oldest first; see `Store.reclaim_expired`."""
        check_limit(limit)
        rows = self._db.rows(
            "reclaim_expired",
            max_jobs=limit,
            crash_limit=self._options.crash_limit,
            error=LEASE_LOST_ERROR,
            code=LEASE_EXPIRED,
            reason=CRASH_LIMIT_REASON,
            apart_ms=Int8(APART_MS),
            **self._options.backoff,
        )
        return [
            Reclaimed(
                job_id=job_id,
                fingerprint=fingerprint,
                crash_attempt=crashes,
                quarantined=quarantined,
                kind=kind,
                queue=queue,
                worker=worker,
            )
            for job_id, fingerprint, crashes, quarantined, kind, queue, worker in rows
        ]

    def promote_due(self, limit: int) -> int:
        """Make due jobs available, earliest first; see `Store.promote_due`."""
        check_limit(limit)
        return int(self._db.rows("promote_due", max_jobs=limit)[0][0])

    def evict_retained(self, limit: int) -> int:
        """Delete finished jobs past their retention; see `Store.evict_retained`."""
        check_limit(limit)
        return int(self._db.rows("evict_retained", max_jobs=limit)[0][0])

    def claim_duty(self, name: str, holder: str, lease_ms: int) -> bool:
        """Take or renew a duty for a time; see `Store.claim_duty`."""
        check_duty(name, holder, lease_ms)
        return bool(self._take_duties([name], holder, lease_ms))

    def release_duty(self, name: str, holder: str) -> None:
        """Give a duty up, if held; see `Store.release_duty`."""
        check_name("name", name)
        check_name("holder", holder)
        self._db.rows("release_duty", name=name, holder=holder)

    def duty_tick(
        self, holder: str, names: Sequence[str], lease_ms: int
    ) -> dict[str, bool]:
        """`claim_duty` for many names; see `Store.duty_tick`."""
        check_texts("names", names)
        for name in names:
            check_duty(name, holder, lease_ms)
        if not names:
            return {}
        rows = self._take_duties(sorted(set(names)), holder, lease_ms)
        due = {name: due is None or due for name, due, _ in rows}
        if "promoter" in due:
            due["promoter"] = self._is_upkeep_due(due["promoter"], rows[0][2])
        return dict(sorted(due.items()))

    def health_check(self) -> None:
        """Answer, within a second, whether the store can work."""
        self._db.looking(
            lambda session: check_schema(session, self._db.schema),
            timeout_ms=HEALTH_TIMEOUT_MS,
        )

    @property
    def schema(self) -> str:
        """Where the tables are."""
        return self._db.schema

    def caps(self) -> Caps:
        """The capabilities as a number."""
        return derived_caps(self)

    @property
    def results(self) -> PgResults:
        """Results of successful jobs."""
        return self._results

    @property
    def outputs(self) -> PgOutputs:
        """Bytes that handlers publish while they run."""
        return self._outputs

    @property
    def progress(self) -> PgProgress:
        """Progress that handlers report."""
        return self._progress

    @property
    def transactional(self) -> PgTransactional:
        """Jobs and application rows in one commit."""
        return self._transactional

    @property
    def inspect(self) -> PgInspect:
        """Looking at jobs and steering them."""
        return self._inspect

    @property
    def notifying(self) -> Listener | None:
        """Wake-ups, where a connection for them was named."""
        return self._notifying

    @property
    def idempotency(self) -> PgIdempotency:
        """Answers kept under the caller's keys."""
        return self._idempotency

    @property
    def maintenance(self) -> PgMaintenance:
        """Upkeep of the gate's counters."""
        return self._maintenance

    def _mark_holds(self, seqs: Sequence[int]) -> None:
        """Set jobs aside that the gate passed over, or the next call meets them."""
        try:
            self._db.rows("mark_holds", seqs=seqs, lock_wait_ms=LOCK_WAIT_MS)
        except StoreError as error:
            logger.warning("could not mark %d jobs as held: %s", len(seqs), error)

    def _take_duties(
        self, names: Sequence[str], holder: str, lease_ms: int
    ) -> list[tuple[Any, ...]]:
        return self._db.rows("duty_tick", names=names, holder=holder, lease_ms=lease_ms)

    def _is_upkeep_due(self, due: bool, now_ms: int) -> bool:
        with self._lock:
            if self._upkeep_at_ms is None:
                self._upkeep_at_ms = now_ms
            if due or now_ms - self._upkeep_at_ms >= UPKEEP_INTERVAL_MS:
                self._upkeep_at_ms = now_ms
                return True
            return False
