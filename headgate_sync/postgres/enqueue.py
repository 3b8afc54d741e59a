"""Taking jobs in: one call of a database function per batch, refusals as errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, eq, lt
from typing import Any

from psycopg.types.numeric import Int4, Int8

from headgate_sync.envelope import Envelope, headers_json, lane_key
from headgate_sync.errors import (
    Backpressure,
    DuplicateJob,
    FingerprintQuarantined,
    IdConflict,
    StoreConflict,
    StoreError,
)
from headgate_sync.postgres.database import Database, Session
from headgate_sync.validation import validate_enqueue

# Producers of one process use few lanes, and the hash costs as much as all else here.
_lane_key = lru_cache(maxsize=4096)(lane_key)


class Intake:
    """Enqueues batches, each as one round trip."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take in a batch in a transaction of its own; see `Store.enqueue`."""
        validate_enqueue(batch)
        if batch:
            _enqueue(self._db.rows, batch, own=True)

    def enqueue_in(self, session: Session, batch: Sequence[Envelope]) -> None:
        """Take in a batch in a transaction of the store's own that ends at once."""
        validate_enqueue(batch)
        _enqueue(session.rows, batch, own=True)

    def enqueue_on(self, session: Session, batch: Sequence[Envelope]) -> None:
        """Take in a batch in a transaction that somebody else will end.

        Limits are not exact here: they count what is committed and the transaction's
        own jobs. A lock would let one slow transaction stop all producers of a queue.
        """
        validate_enqueue(batch)
        if batch:
            _enqueue(session.rows, batch, own=False)


def _enqueue(
    rows: Callable[..., list[tuple[Any, ...]]], batch: Sequence[Envelope], *, own: bool
) -> None:
    first = batch[0]
    if len(batch) > 1 and _are_alike(batch):
        answer = rows("enqueue_alike", own=own, **_contents(batch), **_shared(first))
    elif len(batch) > 1 or _is_special(first):
        answer = rows("enqueue", own=own, **_columns(batch))
    elif _rest_of(first) == _PLAIN:
        answer = rows("enqueue_plain", own=own, **_plain(first))
    else:
        answer = rows("enqueue_one", own=own, **_plain(first), **_rest(first))
    refusal = answer[0][0]
    if refusal is not None:
        raise _refusal(*refusal)


def _is_special(envelope: Envelope) -> bool:
    """Whether the job asks for what few jobs ask for, which the quick road lacks."""
    return any(_special_of(envelope))


def _are_alike(batch: Sequence[Envelope]) -> bool:
    """Whether the quick road of batches takes them; written for speed.

    Their rows are inserted as they come, so ids must come in the one order in which all
    batches take them.
    """
    first = batch[0]
    if first.unique_key is not None or first.tags or _is_special(first):
        return False
    ids = list(map(_id_of, batch))
    return all(map(lt, ids, ids[1:])) and all(
        map(eq, map(_nature_of, batch), repeat(_nature_of(first)))
    )


def _refusal(verdict: str, *facts: str) -> StoreError:
    """The error for an answer of the database function."""
    match verdict, facts:
        case "id_conflict", (job_id,):
            return IdConflict(job_id)
        case "quarantine", (fingerprint,):
            return FingerprintQuarantined(fingerprint)
        case "backpressure", (queue, limit, current, incoming):
            return Backpressure(
                queue, limit=int(limit), current=int(current), incoming=int(incoming)
            )
        case "duplicate", (existing_id, replaced):
            return DuplicateJob(existing_id, replaced=replaced == "true")
        case _:
            return StoreConflict("the holder of a unique key kept changing")


_id_of = attrgetter("id")
_SPECIAL = (
    "unique_window_ms",
    "unique_replace",
    "unique_debounce_ms",
    "pending",
    "unique_states",
    "periodic_schedule_id",
)
_special_of = attrgetter(*_SPECIAL)
_REST = (
    "schema_version",
    "rate_class",
    "sticky_worker",
    "weight",
    "priority",
    "max_attempts",
    "scheduled_at_ms",
    "delay_ms",
    "timeout_ms",
    "deadline_ms",
    "deadline_in_ms",
    "retention_ms",
    "unique_key",
    "headers",
    "tags",
)
_rest_of = attrgetter(*_REST)
_nature_of = attrgetter(*_REST, *_SPECIAL)
# What the database function takes for arguments that are not given.
_PLAIN = _rest_of(Envelope(id="plain", kind="plain"))


def _plain(envelope: Envelope) -> dict[str, Any]:
    """The arguments of `enqueue_plain` but `own`; written for speed.

    Integers travel as text: the driver would choose their width by their value, and
    each combination of widths would be another statement to prepare.
    """
    return {
        "id": envelope.id,
        "kind": envelope.kind,
        "payload": envelope.payload,
        "queue": envelope.queue,
        "partition_key": envelope.partition_key,
        "lane_key": str(_lane_of(envelope)),
        "fingerprint": envelope.fingerprint,
    }


def _rest(envelope: Envelope) -> dict[str, Any]:
    """What `enqueue_one` takes besides."""
    return _shared(envelope) | {
        "unique_key": envelope.effective_unique_key,
        "tags": list(envelope.tags) or None,
    }


def _shared(envelope: Envelope) -> dict[str, Any]:
    """What `enqueue_one` and `enqueue_alike` both take besides."""
    (
        schema_version, rate_class, sticky_worker, weight, priority, max_attempts,
        scheduled_at_ms, delay_ms, timeout_ms, deadline_ms, deadline_in_ms,
        retention_ms, _, headers, _,
    ) = _rest_of(envelope)  # fmt: skip
    return {
        "schema_version": str(schema_version),
        "rate_class": rate_class,
        "sticky_worker": sticky_worker,
        "weight": str(weight),
        "priority": str(priority),
        "max_attempts": str(max_attempts),
        "scheduled_at_ms": str(scheduled_at_ms),
        "delay_ms": str(delay_ms),
        "timeout_ms": str(timeout_ms),
        "deadline_ms": str(deadline_ms),
        "deadline_in_ms": str(deadline_in_ms),
        "retention_ms": str(retention_ms),
        "headers": headers_json(headers),
    }


def _lane_of(envelope: Envelope) -> int:
    return _lane_key(
        envelope.queue,
        envelope.partition_key,
        envelope.rate_class,
        envelope.sticky_worker,
    )


def _column(values: list[Any], width: type[int] | None = None) -> list[Any]:
    """A column over the batch; one element where all are equal, as in most columns."""
    if values.count(values[0]) == len(values):
        del values[1:]
    return values if width is None else list(map(width, values))


def _contents(batch: Sequence[Envelope]) -> dict[str, Any]:
    """What differs in any batch."""
    return {
        "ids": [e.id for e in batch],
        "kinds": _column([e.kind for e in batch]),
        "payloads": _column([e.payload for e in batch]),
        "queues": _column([e.queue for e in batch]),
        "partition_keys": _column([e.partition_key for e in batch]),
        "lane_keys": _column([_lane_of(e) for e in batch], Int8),
        "fingerprints": _column([e.fingerprint for e in batch]),
    }


def _columns(batch: Sequence[Envelope]) -> dict[str, Any]:
    keys = [envelope.effective_unique_key for envelope in batch]
    keyed = any(key is not None for key in keys)
    windows = [envelope.unique_window_ms for envelope in batch]
    labels = [(place, t) for place, e in enumerate(batch, 1) for t in e.tags]
    return _contents(batch) | {
        "schema_versions": _column([e.schema_version for e in batch], Int4),
        "rate_classes": _column([e.rate_class for e in batch]),
        "sticky_workers": _column([e.sticky_worker for e in batch]),
        "weights": _column([e.weight for e in batch], Int4),
        "priorities": _column([e.priority for e in batch], Int4),
        "max_attempts": _column([e.max_attempts for e in batch], Int4),
        "scheduled_at_ms": _column([e.scheduled_at_ms for e in batch], Int8),
        "delay_ms": _column([e.delay_ms for e in batch], Int8),
        "pending": _column([e.pending for e in batch]),
        "timeout_ms": _column([e.timeout_ms for e in batch], Int8),
        "deadline_ms": _column([e.deadline_ms for e in batch], Int8),
        "deadline_in_ms": _column([e.deadline_in_ms for e in batch], Int8),
        "retention_ms": _column([e.retention_ms for e in batch], Int8),
        "unique_keys": keys if keyed else None,
        "unique_states": _column([e.unique_states for e in batch], Int4),
        "periodic_schedule_ids": _column([e.periodic_schedule_id for e in batch]),
        "periodic_ticks_ms": _column([e.periodic_tick_ms for e in batch], Int8),
        "headers": _column([headers_json(e.headers) for e in batch]),
        "tag_places": [Int4(place) for place, _ in labels] or None,
        "tags": [tag for _, tag in labels] or None,
        "unique_windows_ms": _column(windows, Int8) if any(windows) else None,
        "unique_replace": Int4(batch[0].unique_replace),
        "debounce_ms": Int8(batch[0].unique_debounce_ms),
    }
