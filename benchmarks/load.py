"""Envelopes for the benchmarks."""

from __future__ import annotations

from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.ids import UlidGenerator
from headgate_sync.store import Store

_next_id = UlidGenerator()


def envelopes(
    count: int,
    *,
    kind: str = "bench:noop",
    payload: bytes = b"{}",
    partitions: int = 1,
    retention_ms: int = 0,
) -> list[Envelope]:
    """Jobs for the queue `bench`, spread over the partitions in turn."""
    content = fingerprint(kind, payload)
    return [
        Envelope(
            id=_next_id(),
            kind=kind,
            payload=payload,
            queue="bench",
            partition_key=f"p{number % partitions}" if partitions > 1 else "",
            fingerprint=content,
            retention_ms=retention_ms,
        )
        for number in range(count)
    ]


def preload(store: Store, count: int, *, partitions: int = 1) -> None:
    """Enqueue jobs in batches of 1,000."""
    for start in range(0, count, 1000):
        store.enqueue(envelopes(min(1000, count - start), partitions=partitions))
