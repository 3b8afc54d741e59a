"""`JobClient`: the client of one attempt, for its follow-up jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import evolve

from headgate_sync.client.client import Client
from headgate_sync.envelope import Envelope
from headgate_sync.request import JobHandle
from headgate_sync.tracing import inherited


class JobClient:
    """Enqueues from inside a handler, as `Client` does, while the attempt goes on.

    Children that carry no trace of their own get the parent's. Once the attempt should
    stop, every call raises what `JobContext.check` raises.

    Args:
        client: sends the jobs.
        check: raises when the attempt should stop.
        headers: of the job that runs.
    """

    def __init__(
        self, client: Client, *, check: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        self._client = client
        self._check = check
        self._headers = headers
        self._open = True

    def enqueue(self, job: Any, /, *, tx: Any = None, **options: Any) -> JobHandle:
        """See `Client.enqueue`.

        Raises:
            RuntimeError: the attempt is over.
        """
        return self._client.enqueue(self._child(job, options), tx=tx)

    def enqueue_or_join(
        self, job: Any, /, *, tx: Any = None, **options: Any
    ) -> JobHandle:
        """See `Client.enqueue_or_join`."""
        return self._client.enqueue_or_join(self._child(job, options), tx=tx)

    def enqueue_many(self, jobs: Iterable[Any], *, tx: Any = None) -> list[JobHandle]:
        """See `Client.enqueue_many`."""
        return self._client.enqueue_many([self._child(job, {}) for job in jobs], tx=tx)

    def close(self) -> None:
        """End with the attempt; later calls raise `RuntimeError`."""
        self._open = False

    def _child(self, job: Any, options: Mapping[str, Any]) -> Envelope:
        if not self._open:
            raise RuntimeError("the client of an attempt ends with the attempt")
        self._check()
        envelope = self._client.envelope(job, **options)
        headers = inherited(envelope.headers, self._headers)
        return evolve(envelope, headers=headers)
