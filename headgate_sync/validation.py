"""Checks that need more than one value: rules of a batch and limits of calls."""

from __future__ import annotations

from collections.abc import Sequence

from headgate_sync.envelope import Envelope, check_identifier, check_int, check_text
from headgate_sync.errors import IdConflict, InvalidRequest
from headgate_sync.lease import check_lease_ms

MAX_BATCH_JOBS = 1000
MAX_BATCH_BYTES = 16_777_216
MAX_ACKS = 1000
MAX_SWEEP = 1_000_000


def validate_enqueue(batch: Sequence[Envelope]) -> None:
    """Check the rules of a batch; pure, so it answers while the database is down.

    Raises:
        InvalidRequest: more than 1,000 jobs or 16 MiB, or a replacing or debouncing job
            that is not alone.
        IdConflict: an id stands twice.
    """
    if len(batch) > MAX_BATCH_JOBS:
        raise InvalidRequest(
            f"batch has {len(batch)} jobs, the limit is {MAX_BATCH_JOBS}"
        )
    seen: set[str] = set()
    total = 0
    for envelope in batch:
        if not isinstance(envelope, Envelope):
            raise InvalidRequest(
                f"batch must hold Envelope, got {type(envelope).__name__}"
            )
        total += envelope.size_bytes
        if total > MAX_BATCH_BYTES:
            raise InvalidRequest(f"batch has more than {MAX_BATCH_BYTES} bytes")
        if envelope.id in seen:
            raise IdConflict(envelope.id)
        seen.add(envelope.id)
    if len(batch) > 1 and any(e.unique_replace or e.unique_debounce_ms for e in batch):
        raise InvalidRequest(
            "unique_replace and unique_debounce_ms need a batch of exactly one job"
        )


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
