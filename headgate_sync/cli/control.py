"""`ControlClient`: what commands ask for, of a database or of an HTTP API alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Json = dict[str, Any]


class ControlClient(Protocol):
    """Looking and steering; answers are JSON objects in the shapes of the HTTP API.

    Whatever is missing raises `NotFound` or its answer of the API; the errors of both
    kinds become exit codes in `headgate_sync.cli.errors`.
    """

    def now_ms(self) -> int:
        """The store's clock."""
        ...

    def semantics(self) -> list[Json]:
        """What is guaranteed, what depends on the store, what is not promised."""
        ...

    # Queues.

    def queues(self) -> list[Json]:
        """All queues with their backlog, by name."""
        ...

    def history(self, queue: str, since_ms: int, bucket_ms: int) -> list[Json]:
        """What happened to a queue since an instant, by stretches of time."""
        ...

    def partitions(self, queue: str) -> list[Json]:
        """The partitions of a queue, the most waiting jobs first."""
        ...

    def pause_queue(self, queue: str, paused: bool) -> None:
        """Let admission skip the queue, or not."""
        ...

    def weigh_queue(self, queue: str, weight: int) -> None:
        """Set the queue's share of admissions."""
        ...

    def limit_queue(self, queue: str, most: int | None) -> None:
        """Bound the unfinished jobs of a queue; None lifts the bound."""
        ...

    def delete_queue(self, queue: str, *, force: bool) -> str | None:
        """Remove a queue; the id of the operation that empties it first, if any."""
        ...

    def sample_memory(self, limit: int) -> int:
        """Estimate the stored bytes of queues; how many were sampled."""
        ...

    # Jobs.

    def counts(self, queue: str | None) -> Json:
        """Jobs by state."""
        ...

    def jobs(
        self,
        query: str | None,
        *,
        fields: Mapping[str, Any],
        cursor: str | None,
        limit: int,
    ) -> Json:
        """A page: `jobs` and `next_cursor`.

        Args:
            query: the search grammar.
            fields: queue, state, kind, partition_key, tags_all, tags_any.
            cursor: of the page before.
            limit: 1 to 200.
        """
        ...

    def job(self, job_id: str, *, payload: bool) -> Json:
        """One job with its history."""
        ...

    def part(self, job_id: str, what: str) -> Json | None:
        """The `result`, `output`, `progress` or `checkpoint` of a job, if any."""
        ...

    def explain(self, job_id: str) -> Json:
        """Why a job runs or waits."""
        ...

    def steer(self, job_id: str, verb: str) -> None:
        """Carry out `retry`, `cancel`, `promote` or `delete`."""
        ...

    def reschedule(self, job_id: str, at_ms: int) -> None:
        """Move a waiting job to another instant."""
        ...

    def replay(self, job_id: str, fields: Mapping[str, Any]) -> Json:
        """Enqueue a job like this one: `id` and `replay_of`.

        Args:
            job_id: of the one to copy.
            fields: queue, run_at_ms and id of the new one, where they are given.
        """
        ...

    def enqueue(self, kind: str, payload: bytes, fields: Mapping[str, Any]) -> Json:
        """Put one job in: `id`."""
        ...

    # Operations.

    def start_operation(
        self, action: str, selector: Mapping[str, Any], *, dry_run: bool
    ) -> Json:
        """Note a verb for many jobs, or estimate how many they are."""
        ...

    def operation(self, operation_id: str) -> Json:
        """How far an operation has come."""
        ...

    def carry_on(self) -> int:
        """Do a part of the open operations, where this can; jobs that were touched."""
        ...

    # Limits.

    def rate_classes(self) -> list[Json]:
        """All rate classes, by name."""
        ...

    def set_rate_class(self, name: str, fields: Mapping[str, Any]) -> None:
        """Create or change one: limit, window_ms, burst, paused and `further`."""
        ...

    def pause_rate_class(self, name: str, delay_ms: int, reason: str) -> None:
        """Let nothing of it pass for a time."""
        ...

    def resume_rate_class(self, name: str) -> None:
        """End such a pause."""
        ...

    def delete_rate_class(self, name: str) -> int:
        """Remove one; the waiting jobs that name it."""
        ...

    def ceilings(self) -> list[Json]:
        """All concurrency limits, by name."""
        ...

    def set_ceiling(self, name: str, fields: Mapping[str, Any]) -> None:
        """Create or change one."""
        ...

    def delete_ceiling(self, name: str) -> None:
        """Remove one."""
        ...

    def set_quantum(self, queue: str, partition_key: str, quantum: int | None) -> None:
        """Give a partition a share of its own; None takes it away."""
        ...

    def quarantine(self) -> list[Json]:
        """Registered fingerprints, newest first."""
        ...

    def release(self, fingerprint: str) -> int:
        """Unregister a fingerprint; the jobs that were released."""
        ...

    # Schedules.

    def schedules(self) -> list[Json]:
        """All schedules, by id."""
        ...

    def set_schedule(
        self, schedule_id: str, payload: bytes, fields: Mapping[str, Any]
    ) -> None:
        """Create or replace one: kind, spec and what its jobs shall be."""
        ...

    def pause_schedule(self, schedule_id: str, paused: bool) -> None:
        """Let it fire or not."""
        ...

    def delete_schedule(self, schedule_id: str) -> None:
        """Remove one; its events stay."""
        ...

    def run_schedule(self, schedule_id: str) -> Json:
        """Enqueue its job once more, now: `id`."""
        ...

    def schedule_events(
        self, schedule_id: str, *, cursor: str | None, limit: int
    ) -> Json:
        """A page: `events`, newest first, and `next_cursor`."""
        ...

    # Workers.

    def workers(self) -> list[Json]:
        """Workers that have beaten within 15 minutes."""
        ...

    def cluster(self) -> Json:
        """The fleet as a whole."""
        ...

    def signal(self, worker_id: str, command: str | None) -> None:
        """Ask a worker to do something."""
        ...
