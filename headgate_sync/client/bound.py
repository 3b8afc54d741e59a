"""`JobClient`: the client of one attempt, for its follow-up jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import evolve

from headgate_sync.client.client import Client
from headgate_sync.envelope import Envelope
from headgate_sync.identity import Identity
from headgate_sync.request import JobHandle, JobRequest, identity_of
from headgate_sync.tracing import inherited

if TYPE_CHECKING:
    from headgate_sync.client.waiting import Completion


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

    def enqueue(
        self,
        job: Any,
        /,
        *,
        identity: Identity | None = None,
        tx: Any = None,
        **options: Any,
    ) -> JobHandle:
        """See `Client.enqueue`.

        Raises:
            RuntimeError: the attempt is over.
        """
        return self._client.enqueue(
            self._child(job, options), identity=identity or identity_of(job), tx=tx
        )

    def enqueue_or_join(
        self,
        job: Any,
        /,
        *,
        identity: Identity | None = None,
        tx: Any = None,
        **options: Any,
    ) -> JobHandle:
        """See `Client.enqueue_or_join`."""
        return self._client.enqueue_or_join(
            self._child(job, options), identity=identity or identity_of(job), tx=tx
        )

    def enqueue_and_wait(
        self,
        job: Any,
        /,
        *,
        timeout: timedelta | str,
        identity: Identity | None = None,
        **options: Any,
    ) -> Completion[Any]:
        """See `Client.enqueue_and_wait`; the wait ends when the attempt should stop."""
        child = self._child(job, options)
        return self._client.follow(
            lambda: self._client.enqueue(child, identity=identity or identity_of(job)),
            timeout=timeout,
            task=job.task if isinstance(job, JobRequest) else None,
            check=self._check,
        )

    def enqueue_many(
        self,
        jobs: Iterable[Any],
        *,
        identity: Identity | None = None,
        tx: Any = None,
    ) -> list[JobHandle]:
        """See `Client.enqueue_many`."""
        self._go_on()
        batch, identity = self._client.batch_of(jobs, identity)
        children = [self._inheriting(envelope) for envelope in batch]
        return self._client.enqueue_many(children, identity=identity, tx=tx)

    def close(self) -> None:
        """End with the attempt; later calls raise `RuntimeError`."""
        self._open = False

    def _child(self, job: Any, options: Mapping[str, Any]) -> Envelope:
        self._go_on()
        return self._inheriting(self._client.envelope(job, **options))

    def _go_on(self) -> None:
        if not self._open:
            raise RuntimeError("the client of an attempt ends with the attempt")
        self._check()

    def _inheriting(self, envelope: Envelope) -> Envelope:
        headers = inherited(envelope.headers, self._headers)
        return evolve(envelope, headers=headers)
