"""Writes under a lease: acks, alone or in batches, and checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen
from psycopg.types.numeric import Int4, Int8

from headgate_sync.envelope import MAX_INT32, MAX_INT64, MAX_RELATIVE_MS, check_int
from headgate_sync.errors import BackendError, LeaseRejected, StoreConflict, StoreError
from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import (
    MAX_HISTORY,
    Ack,
    Checkpoint,
    LeaseRef,
)
from headgate_sync.lifecycle import Outcome, State
from headgate_sync.postgres.database import Database, Session
from headgate_sync.retry import (
    DEFAULT_CRASH_LIMIT,
    DEFAULT_RETRY_BASE_MS,
    DEFAULT_RETRY_CAP_MS,
    MAX_DOUBLINGS,
)
from headgate_sync.store import AckError
from headgate_sync.validation import MAX_ACKS, check_count, check_sequence

# Renewals and operators hold a row for moments; who holds it longer is waited for by
# trying again, so that the acks behind this one get through.
LOCK_WAIT_MS = 500

_EMPTY_CHECKPOINT = Checkpoint().to_json()


def random_jitter(base_ms: int) -> int:
    """Spread retries of jobs that failed together over one base delay."""
    return random.randint(0, base_ms)


@frozen(kw_only=True)
class RetryOptions:
    """What a store answers failures and lost leases with.

    Attributes:
        base_ms: delay after the first failure, doubled per further one.
        cap_ms: upper bound of the delay.
        jitter: called with `base_ms`; added to the delay of a returned failure.
        crash_limit: lost leases after which a job is quarantined.
    """

    base_ms: int = DEFAULT_RETRY_BASE_MS
    cap_ms: int = DEFAULT_RETRY_CAP_MS
    jitter: Callable[[int], int] = random_jitter
    crash_limit: int = DEFAULT_CRASH_LIMIT

    def __attrs_post_init__(self) -> None:
        check_int("retry_base_ms", self.base_ms, 1, MAX_INT64 >> MAX_DOUBLINGS + 1)
        check_int("retry_cap_ms", self.cap_ms, 1, MAX_RELATIVE_MS)
        check_int("crash_limit", self.crash_limit, 1, MAX_INT32)

    @property
    def backoff(self) -> dict[str, int]:
        """The arguments of a statement that computes a delay."""
        return {
            "retry_base_ms": Int8(self.base_ms),
            "retry_cap_ms": Int8(self.cap_ms),
            "max_doublings": Int4(MAX_DOUBLINGS),
            "max_history": Int4(MAX_HISTORY),
        }


class Acker:
    """Settles attempts and writes checkpoints, each under its own fence."""

    def __init__(self, db: Database, options: RetryOptions) -> None:
        self._db = db
        self._options = options
        self._constants = options.backoff

    def ack_batch(self, acks: Sequence[Ack]) -> list[AckError | None]:
        """Settle up to 1,000 attempts in one commit; see `Store.ack_batch`."""
        check_sequence("acks", acks, Ack)
        check_count("acks", len(acks), MAX_ACKS)
        if not acks:
            return []
        try:
            answers = self._answers(self._db.rows, acks)
            busy = [n for n, said in enumerate(answers) if _is_busy(said)]
            if busy:
                # In a transaction of their own: the others are settled by now.
                late = self._answers(
                    self._db.rows, [acks[n] for n in busy], lock_wait_ms=LOCK_WAIT_MS
                )
                for n, said in zip(busy, late, strict=True):
                    answers[n] = said
            return answers
        except BackendError as error:
            if len(acks) == 1:
                return [error]
        # One member holds something that the database refuses: alone each is judged as
        # before, and only that one fails.
        return [answer for ack in acks for answer in self.ack_batch([ack])]

    def ack(self, ack: Ack) -> None:
        """Settle one attempt.

        Raises:
            LeaseRejected: the caller does not hold the job.
            StoreConflict: another transaction holds the job locked.
        """
        for error in self.ack_batch([ack]):
            if error is not None:
                raise error

    def ack_on(self, session: Session, ack: Ack) -> None:
        """Settle one attempt in a transaction that somebody else will end.

        Raises:
            LeaseRejected: the caller does not hold the job; the transaction is usable.
            StoreConflict: another transaction holds the job locked; this one is usable.
        """
        for error in self._answers(session.rows, [ack], lock_wait_ms=LOCK_WAIT_MS):
            if error is not None:
                raise error

    def checkpoint(self, lease: LeaseRef, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint under the lease; see `Store.checkpoint`."""
        _write_checkpoint(self._db.rows, lease, checkpoint)

    def checkpoint_on(
        self, session: Session, lease: LeaseRef, checkpoint: Checkpoint
    ) -> None:
        """`checkpoint` in a transaction that somebody else will end."""
        _write_checkpoint(session.rows, lease, checkpoint)

    def _answers(
        self,
        rows: Callable[..., list[tuple[Any, ...]]],
        acks: Sequence[Ack],
        *,
        lock_wait_ms: int = 0,
    ) -> list[AckError | None]:
        found = rows(
            "ack",
            **self._columns(acks),
            **self._constants,
            lock_wait_ms=Int4(lock_wait_ms),
        )
        answers: list[AckError | None] = [None] * len(acks)
        for place, missing, busy in found:
            job_id = acks[place - 1].lease.job_id
            answers[place - 1] = (
                StoreConflict(f"job {job_id} is locked by another transaction")
                if busy
                else LeaseRejected(job_id, missing=missing)
            )
        return answers

    def _columns(self, acks: Sequence[Ack]) -> dict[str, Any]:
        """The acks as columns; one that no ack of the batch uses is null as a whole."""
        jitters = [
            self._options.jitter(self._options.base_ms)
            if ack.outcome is Outcome.RETRY and not ack.delay_ms
            else None
            for ack in acks
        ]
        limited = Outcome.RATE_LIMITED
        return {
            "job_ids": [ack.lease.job_id for ack in acks],
            "lease_ids": [ack.lease.lease_id for ack in acks],
            "fences": [Int8(ack.lease.fence) for ack in acks],
            "firsts": _firsts(acks),
            "outcomes": [str(ack.outcome) for ack in acks],
            "delays_ms": _column([ack.delay_ms or None for ack in acks], Int8),
            "jitters_ms": _column(jitters, Int8),
            "pauses_ms": _column(
                [ack.delay_ms if ack.outcome is limited else None for ack in acks], Int8
            ),
            "details": _column([_detail(ack) for ack in acks]),
            "latencies_ms": _column([ack.latency_ms for ack in acks], Int4),
            "error_codes": _column([ack.error_code or None for ack in acks]),
            "reason_codes": _column([ack.reason_code or None for ack in acks]),
            "actual_weights": _column([ack.actual_weight for ack in acks], Int4),
            "result_versions": _column(
                [ack.result and ack.result.schema_version for ack in acks], Int4
            ),
            "results": _column([ack.result and ack.result.data for ack in acks]),
        }


def _is_busy(answer: StoreError | None) -> bool:
    return isinstance(answer, StoreConflict)


def _column(values: list[Any], width: type[int] | None = None) -> list[Any] | None:
    """A column, or None where no ack has a value; integers state their width.

    Left to their values, each combination of widths would be prepared as a statement of
    its own.
    """
    if values.count(None) == len(values):
        return None
    if width is None:
        return values
    return [None if value is None else width(value) for value in values]


def _firsts(acks: Sequence[Ack]) -> list[bool] | None:
    """Whether each lease is shown for the first time; None where no lease comes twice.

    A second ack of a lease is judged on what the first one left.
    """
    if len({ack.lease.job_id for ack in acks}) == len(acks):
        return None
    seen: set[LeaseRef] = set()
    firsts = []
    for ack in acks:
        firsts.append(ack.lease not in seen)
        seen.add(ack.lease)
    return firsts


def _detail(ack: Ack) -> str | None:
    """The history entry as far as the worker knows it; None for none."""
    outcome = ack.outcome
    if outcome is Outcome.SUCCESS:
        if not ack.logs:
            return None
    elif outcome is not Outcome.RETRY and (
        outcome not in (Outcome.SKIP, Outcome.UNDECODABLE)
        or (ack.error is None and not ack.logs)
    ):
        return None
    entry = AttemptEntry(
        at_ms=0,
        outcome=State.ARCHIVED.value if outcome is Outcome.SKIP else outcome.value,
        error=None if outcome is Outcome.SUCCESS else ack.error,
        logs=ack.logs,
        latency_ms=ack.latency_ms,
        error_code=ack.error_code,
    )
    return json.dumps(entry.to_dict())


def _write_checkpoint(
    rows: Callable[..., list[tuple[Any, ...]]], lease: LeaseRef, checkpoint: Checkpoint
) -> None:
    text = checkpoint.to_json()
    [(written, exists)] = rows(
        "checkpoint",
        job_id=lease.job_id,
        lease_id=lease.lease_id,
        fence=lease.fence,
        checkpoint=None if text == _EMPTY_CHECKPOINT else text,
        cursor_data=checkpoint.cursor,
        charge_weight=checkpoint.remaining_weight,
    )
    if not written:
        raise LeaseRejected(lease.job_id, missing=not exists)
