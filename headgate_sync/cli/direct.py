"""`DirectControl`: the commands over a store."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from headgate_sync.backlog import MAX_QUEUES
from headgate_sync.cli import shapes
from headgate_sync.cli.control import Json
from headgate_sync.client.client import Client
from headgate_sync.envelope import Envelope, check_kind, fingerprint
from headgate_sync.errors import NotFound, Unsupported
from headgate_sync.ids import UlidGenerator
from headgate_sync.inspection import MAX_PAGE, Inspect, QuarantineEntry
from headgate_sync.operations import BulkRequest
from headgate_sync.policy import BudgetConfig, Ceiling, RateClassConfig
from headgate_sync.schedule import ScheduleDef
from headgate_sync.schedules import MAX_SCHEDULES
from headgate_sync.search import JobFilter, parse_query
from headgate_sync.store import Store
from headgate_sync.validation import check_written
from headgate_sync.workers import LATE_MS

# One step of an operation: long enough to get on, short enough to report in between.
STEP_JOBS = 1_000


class DirectControl:
    """`ControlClient` over a store with inspection.

    Raises:
        Unsupported: the store has none.
    """

    def __init__(self, store: Store) -> None:
        if store.inspect is None:
            raise Unsupported("inspect")
        self.store = store
        self._inspect: Inspect = store.inspect
        self._client = Client(store)
        self._new_id = UlidGenerator()

    def now_ms(self) -> int:
        return self._inspect.store_now_ms()

    def semantics(self) -> list[Json]:
        return shapes.semantics()

    # Queues.

    def queues(self) -> list[Json]:
        found: list[Json] = []
        cursor = None
        while True:
            page = self._inspect.queue_stats(MAX_QUEUES, cursor)
            found += map(shapes.queue, page)
            if len(page) < MAX_QUEUES:
                return found
            cursor = page[-1].queue

    def history(self, queue: str, since_ms: int, bucket_ms: int) -> list[Json]:
        return _all(self._inspect.history(queue, since_ms, bucket_ms))

    def partitions(self, queue: str) -> list[Json]:
        return _all(self._inspect.partitions(queue))

    def pause_queue(self, queue: str, paused: bool) -> None:
        self._inspect.set_queue_paused(queue, paused)

    def weigh_queue(self, queue: str, weight: int) -> None:
        self._inspect.set_queue_weight(queue, weight)

    def limit_queue(self, queue: str, most: int | None) -> None:
        self._inspect.set_enqueue_limit(queue, most)

    def delete_queue(self, queue: str, *, force: bool) -> str | None:
        return self._inspect.delete_queue(queue, force)

    def sample_memory(self, limit: int) -> int:
        return self._inspect.sample_queue_memory(limit)

    # Jobs.

    def counts(self, queue: str | None) -> Json:
        found = self._inspect.counts(queue)
        return {
            "counts": shapes.states(found),
            "count_is_approximate": found.approximate,
        }

    def jobs(
        self,
        query: str | None,
        *,
        fields: Mapping[str, Any],
        cursor: str | None,
        limit: int,
    ) -> Json:
        asked = parse_query(query or "", JobFilter(**fields))
        page = self._inspect.list_jobs(asked, cursor, limit)
        return {
            "jobs": [shapes.job(job) for job in page.jobs],
            "next_cursor": page.next_cursor,
            "count_is_approximate": False,
        }

    def job(self, job_id: str, *, payload: bool) -> Json:
        found = self._inspect.get_job(job_id, include_payload=payload)
        if found is None:
            raise NotFound.job(job_id)
        return shapes.job(found)

    def part(self, job_id: str, what: str) -> Json | None:
        store = self.store
        found: Any = None
        if what == "checkpoint":
            read = self._inspect.read_checkpoint(job_id)
            return None if read is None else shapes.checkpoint(read)
        if what == "result" and store.results is not None:
            found = store.results.read_result(job_id)
        elif what == "output" and store.outputs is not None:
            found = store.outputs.read_output(job_id)
        elif what == "progress" and store.progress is not None:
            found = store.progress.read_progress(job_id)
        if found is None:
            return None
        shape = _object(found)
        if "data" in shape:
            shape["bytes"] = shape.pop("data")
        return shape

    def explain(self, job_id: str) -> Json:
        job = self._inspect.get_job(job_id)
        found = self._inspect.explain_admission(job_id)
        if job is None or found is None:
            raise NotFound.job(job_id)
        # Nothing blocks a job whose queue nobody serves, and yet it never runs.
        workers = self._inspect.list_workers(LATE_MS)
        return _object(found) | {
            "job_id": job_id,
            "live_workers": sum(job.queue in worker.queues for worker in workers),
        }

    def steer(self, job_id: str, verb: str) -> None:
        inspect = self._inspect
        verbs = {
            "retry": inspect.operator_retry,
            "cancel": inspect.operator_cancel,
            "promote": inspect.promote_job,
            "delete": inspect.delete_job,
        }
        verbs[verb](job_id)

    def reschedule(self, job_id: str, at_ms: int) -> None:
        self._inspect.reschedule_job(job_id, at_ms)

    def replay(self, job_id: str, fields: Mapping[str, Any]) -> Json:
        made = self._inspect.replay_job(
            job_id,
            queue=fields.get("queue"),
            run_at_ms=fields.get("run_at_ms"),
            new_id=fields.get("id"),
        )
        return {"id": made, "replay_of": job_id}

    def enqueue(self, kind: str, payload: bytes, fields: Mapping[str, Any]) -> Json:
        check_kind(kind)  # before its fingerprint is made
        check_written(fields)
        job = Envelope(
            kind=kind,
            payload=payload,
            fingerprint=fingerprint(kind, payload),
            **{"id": self._new_id(), **fields},
        )
        return {"id": self._client.enqueue(job).id}

    # Operations.

    def start_operation(
        self, action: str, selector: Mapping[str, Any], *, dry_run: bool
    ) -> Json:
        request = BulkRequest(
            id=f"bulk-{self._new_id()}", action=action, dry_run=dry_run, **selector
        )
        self._inspect.create_operation(request)
        return self.operation(request.id)

    def operation(self, operation_id: str) -> Json:
        found = self._inspect.get_operation(operation_id)
        if found is None:
            raise NotFound(f"operation {operation_id} does not exist")
        return _object(found)

    def carry_on(self) -> int:
        return self._inspect.run_pending_operations(STEP_JOBS)

    # Limits.

    def rate_classes(self) -> list[Json]:
        return [shapes.rate_class(found) for found in self._inspect.rate_classes()]

    def set_rate_class(self, name: str, fields: Mapping[str, Any]) -> None:
        further = fields.get("further")
        budgets = None if further is None else [BudgetConfig(**one) for one in further]
        self._inspect.upsert_rate_class(
            RateClassConfig(
                name=name,
                limit=fields["limit"],
                window_ms=fields["window_ms"],
                burst=fields["burst"],
                paused=fields.get("paused", False),
                further=None if budgets is None else tuple(budgets),
            )
        )

    def pause_rate_class(self, name: str, delay_ms: int, reason: str) -> None:
        self._inspect.pause_rate_class(name, delay_ms, reason)

    def resume_rate_class(self, name: str) -> None:
        self._inspect.resume_rate_class(name)

    def delete_rate_class(self, name: str) -> int:
        waiting = self._inspect.delete_rate_class(name)
        if waiting is None:
            raise NotFound(f"rate class {name} does not exist")
        return waiting

    def ceilings(self) -> list[Json]:
        return _all(self._inspect.concurrency_limits())

    def set_ceiling(self, name: str, fields: Mapping[str, Any]) -> None:
        self._inspect.upsert_concurrency_limit(Ceiling(name=name, **fields))

    def delete_ceiling(self, name: str) -> None:
        if not self._inspect.delete_concurrency_limit(name):
            raise NotFound(f"concurrency limit {name} does not exist")

    def set_quantum(self, queue: str, partition_key: str, quantum: int | None) -> None:
        self._inspect.set_partition_quantum(queue, partition_key, quantum)

    def quarantine(self) -> list[Json]:
        found: list[QuarantineEntry] = []
        while True:
            cursor = found[-1].cursor if found else None
            page = self._inspect.quarantine_list(MAX_PAGE, cursor)
            found += page
            if len(page) < MAX_PAGE:
                return _all(found)

    def release(self, fingerprint: str) -> int:
        return self._inspect.quarantine_release(fingerprint)

    # Schedules.

    def schedules(self) -> list[Json]:
        found: list[Json] = []
        cursor = None
        while True:
            page = self._inspect.list_schedules(
                MAX_SCHEDULES, cursor, include_payload=False
            )
            found += map(_schedule, page)
            if len(page) < MAX_SCHEDULES:
                return found
            cursor = page[-1].id

    def set_schedule(
        self, schedule_id: str, payload: bytes, fields: Mapping[str, Any]
    ) -> None:
        others = dict(fields)
        paused = others.pop("paused", None)
        definition = ScheduleDef(payload=payload, **others)
        self._client.schedules.put(schedule_id, definition, paused=paused)

    def pause_schedule(self, schedule_id: str, paused: bool) -> None:
        self._inspect.set_schedule_paused(schedule_id, paused)

    def delete_schedule(self, schedule_id: str) -> None:
        self._inspect.delete_schedule(schedule_id)

    def run_schedule(self, schedule_id: str) -> Json:
        key = secrets.token_hex(16)
        made = self._client.schedules.run_now(schedule_id, idempotency_key=key)
        return {"id": made.id}

    def schedule_events(
        self, schedule_id: str, *, cursor: str | None, limit: int
    ) -> Json:
        page = self._client.schedules.events(schedule_id, limit=limit, cursor=cursor)
        return {"events": _all(page.items), "next_cursor": page.next_cursor}

    # Workers.

    def workers(self) -> list[Json]:
        return [shapes.worker(found) for found in self._inspect.list_workers()]

    def cluster(self) -> Json:
        return shapes.cluster(self._inspect.cluster())

    def signal(self, worker_id: str, command: str | None) -> None:
        self._inspect.signal_worker(worker_id, command)


def _object(value: object) -> Json:
    shape: Json = shapes.plain(value)
    return shape


def _all(values: Any) -> list[Json]:
    return [_object(value) for value in values]


def _schedule(found: object) -> Json:
    shape = _object(found)
    del shape["payload"], shape["headers"]  # no list shows them
    return shape
