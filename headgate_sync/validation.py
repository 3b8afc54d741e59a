"""Checks that need more than one value: rules of a batch and limits of calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from headgate_sync.envelope import (
    MAX_HEADERS_BYTES,
    MAX_IDENTIFIER_BYTES,
    MAX_TAG_BYTES,
    MAX_TAGS,
    MAX_UNIQUE_KEY_BYTES,
    Envelope,
    check_identifier,
    check_int,
    check_text,
)
from headgate_sync.errors import IdConflict, InvalidRequest
from headgate_sync.lease import check_lease_ms

T = TypeVar("T")

MAX_BATCH_JOBS = 1000
MAX_BATCH_BYTES = 16_777_216
# Eight short texts, the unique key and the tags; headers are counted apart.
_BESIDE_PAYLOAD_BYTES = (
    8 * MAX_IDENTIFIER_BYTES + MAX_UNIQUE_KEY_BYTES + MAX_TAGS * MAX_TAG_BYTES
)
MAX_ACKS = 1000
MAX_SWEEP = 1_000_000
MIN_ARCHIVE_MONTH = "202501"
MAX_ARCHIVE_MONTH = "203112"
_ARCHIVE_MONTH = re.compile(r"20(2[5-9]|3[01])(0[1-9]|1[0-2])", re.ASCII)


def check_written(given: Mapping[str, object]) -> None:
    """Refuse a 0 that somebody wrote where an envelope would read the default.

    Args:
        given: fields of a job by name.

    Raises:
        InvalidRequest: the text names the field.
    """
    for name in ("schema_version", "weight", "max_attempts"):
        if given.get(name) == 0:
            raise InvalidRequest(f"{name} must be >= 1")


def validate_enqueue(batch: Sequence[Envelope]) -> None:
    """Check the rules of a batch; pure, so it answers while the database is down.

    Raises:
        InvalidRequest: no sequence of envelopes, more than 1,000 jobs or 16 MiB, or a
            replacing or debouncing job that is not alone.
        IdConflict: an id stands twice.
    """
    check_sequence("batch", batch, Envelope)
    if len(batch) > MAX_BATCH_JOBS:
        raise InvalidRequest(
            f"batch has {len(batch)} jobs, the limit is {MAX_BATCH_JOBS}"
        )
    if not _is_surely_light(batch):
        total = sum(envelope.size_bytes for envelope in batch)
        if total > MAX_BATCH_BYTES:
            raise InvalidRequest(f"batch has more than {MAX_BATCH_BYTES} bytes")
    if len(batch) > 1:
        _check_many(batch)


def _is_surely_light(batch: Sequence[Envelope]) -> bool:
    """Whether the payloads leave room for all else that the jobs could carry at most.

    Adding up every text costs as much as all other checks; most batches are far from
    the limit.
    """
    most = len(batch) * _BESIDE_PAYLOAD_BYTES
    for envelope in batch:
        most += len(envelope.payload)
        if envelope.headers:
            most += MAX_HEADERS_BYTES
    return most <= MAX_BATCH_BYTES


def _check_many(batch: Sequence[Envelope]) -> None:
    """The rules that one job alone cannot break."""
    ids = [envelope.id for envelope in batch]
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        for job_id in ids:
            if job_id in seen:
                raise IdConflict(job_id)
            seen.add(job_id)
    if any(e.unique_replace or e.unique_debounce_ms for e in batch):
        raise InvalidRequest(
            "unique_replace and unique_debounce_ms need a batch of exactly one job"
        )


def check_sequence(name: str, values: object, kind: type) -> None:
    """Check that an argument is a sequence, and what it holds.

    Raises:
        InvalidRequest: the text names the argument and the type that came.
    """
    if not isinstance(values, Sequence):
        raise InvalidRequest(
            f"{name} must be a sequence of {kind.__name__}, got {type(values).__name__}"
        )
    if set(map(type, values)) <= {kind}:
        return
    for value in values:
        if not isinstance(value, kind):
            raise InvalidRequest(
                f"{name} must hold {kind.__name__}, got {type(value).__name__}"
            )


def listed(name: str, given: Iterable[T]) -> tuple[T, ...]:
    """The values of an argument that may come as any iterable but a text.

    Raises:
        InvalidRequest: the text names the argument and the type that came.
    """
    if isinstance(given, str | bytes):
        raise InvalidRequest(f"{name} must be a sequence, got one text")
    check_iterable(name, given)
    return tuple(given)


def check_iterable(name: str, given: object) -> None:
    """Check that an argument can be gone through.

    Raises:
        InvalidRequest: the text names the argument and the type that came.
    """
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"{name} must be a sequence, got {type(given).__name__}")


def check_limit(limit: int) -> None:
    """Check the bound of a sweep.

    Raises:
        InvalidRequest: not within 1 to 1,000,000.
    """
    check_int("limit", limit, 1, MAX_SWEEP)


def check_count(name: str, count: int, limit: int) -> None:
    """Check how many values a call brings.

    Raises:
        InvalidRequest: more than the limit; the text names both.
    """
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries, the limit is {limit}")


def check_name(field: str, value: str) -> None:
    """Check the name of a queue, a duty or a holder: 1 to 255 bytes of text.

    Raises:
        InvalidRequest: the text names the field.
    """
    check_identifier(field, check_text(field, value))
    if not value:
        raise InvalidRequest(f"{field} must not be empty")


def check_duty(name: str, holder: str, lease_ms: int) -> None:
    """Check the arguments of a duty's claim.

    Raises:
        InvalidRequest: the text names the argument.
    """
    check_name("name", name)
    check_name("holder", holder)
    check_lease_ms(lease_ms)


def check_archive_month(month: str) -> None:
    """Check the name of a month that the archive has a partition for.

    Raises:
        InvalidRequest: not `YYYYMM` from 202501 to 203112, in ASCII digits.
    """
    if not isinstance(month, str) or _ARCHIVE_MONTH.fullmatch(month) is None:
        raise InvalidRequest(
            f"month {month!r} is not YYYYMM from {MIN_ARCHIVE_MONTH} to "
            f"{MAX_ARCHIVE_MONTH}"
        )


def check_type(name: str, value: object, kind: type) -> None:
    """Check that an argument is what its method takes.

    Raises:
        InvalidRequest: the text names the argument and both types.
    """
    if not isinstance(value, kind):
        raise InvalidRequest(
            f"{name} must be {kind.__name__}, got {type(value).__name__}"
        )


def check_job_id(job_id: str) -> None:
    """Check an id that is looked up; one of no job is none of the faults.

    Raises:
        InvalidRequest: no text that a store can hold.
    """
    check_text("job_id", job_id)


def check_texts(name: str, values: Sequence[str]) -> None:
    """Check that an argument is a sequence of texts that a store can hold.

    Raises:
        InvalidRequest: the text names the argument.
    """
    if isinstance(values, str):
        raise InvalidRequest(f"{name} must be a sequence of str, got one str")
    check_sequence(name, values, str)
    for value in values:
        check_text(name, value)
