"""Jobs that run while they are enqueued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from headgate_sync.app import Headgate
from headgate_sync.client.client import Client
from headgate_sync.envelope import Envelope
from headgate_sync.errors import InvalidRequest
from headgate_sync.store import Store
from headgate_sync.testing.running import MAX_ROUNDS, drained
from headgate_sync.testing.target import target_of
from headgate_sync.worker import WorkerConfig


@contextmanager
def enqueue_inline(
    client: Any,
    registry: Any = None,
    config: WorkerConfig | None = None,
    *,
    reraise: bool = False,
) -> Iterator[None]:
    """A block in which an enqueue runs what may run in the job's queue, at once.

    The handlers run on the thread that enqueues, before the enqueue returns, through
    the real gate: a delayed job, or one that a limit holds back, stays where it is, and
    a failed one waits for its retry. A job with `tx` runs only where the client sends
    it past the transaction; after a real commit, `drain` runs it.

    Args:
        client: a `Headgate` or a `Client`, for all of its threads. An override of the
            facade's store has to surround the block.
        registry: the handlers; not needed with a `Headgate`.
        config: settings of the worker that is played, but for its queues.
        reraise: as for `drain`, out of the enqueue.

    Raises:
        InvalidRequest: neither a `Headgate` nor a `Client`, or a client without a
            registry.
    """
    if isinstance(client, Headgate):
        target, sender = target_of(client, registry, config), client.client
    elif isinstance(client, Client):
        known = client.registry if registry is None else registry
        target, sender = target_of(client.store, known, config), client
    else:
        raise InvalidRequest(
            f"expected a Headgate or a Client, got {type(client).__name__}"
        )

    def run(batch: Sequence[Envelope]) -> None:
        queues = tuple(dict.fromkeys(envelope.queue for envelope in batch))
        played = evolve(target, config=evolve(target.config, queues=queues))
        drained(played, len(batch), rounds=MAX_ROUNDS, reraise=reraise, clock=None)

    before = sender.store
    sender.store = _as_store(_Inline(before, run))
    try:
        yield
    finally:
        sender.store = before


class _Inline:
    """A store, but for what follows an enqueue."""

    def __init__(self, store: Store, run: Callable[[Sequence[Envelope]], None]) -> None:
        self._store = store
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def enqueue(self, batch: Sequence[Envelope]) -> None:
        """Take jobs in and run them."""
        self._store.enqueue(batch)
        if batch:
            self._run(batch)


def _as_store(store: Any) -> Store:
    found: Store = store
    return found
