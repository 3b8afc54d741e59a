"""What a test expects to find in a store, and says when it is not there."""

from __future__ import annotations

import inspect as introspection
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import field, fields, frozen

from headgate_sync.errors import HeadgateError, InvalidRequest
from headgate_sync.inspection import Inspect, JobSummary
from headgate_sync.scalars import Mismatch
from headgate_sync.search import JobFilter
from headgate_sync.task import BoundTask, FunctionTask, PayloadTask, Task, task_of
from headgate_sync.testing.target import inspect_of

SHOWN_JOBS = 20
SHOWN_PAYLOAD = 100
PAGE = 200

Where = Callable[[JobSummary], object]


def _kind(what: Any) -> str | None:
    if what is None or isinstance(what, str):
        return what
    return _task(what).kind


@frozen(kw_only=True)
class Enqueued:
    """What a job must be; only what is set is compared.

    Attributes:
        kind: or a task, or a payload class.
        payload: bytes as they are stored, or the plain value that they are as JSON.
        count: how many there must be; None is at least one.
    """

    kind: str | None = field(default=None, converter=_kind, kw_only=False)
    queue: str | None = None
    payload: object = None
    scheduled_at_ms: int | None = None
    partition_key: str | None = None
    count: int | None = None

    def matches(self, job: JobSummary) -> bool:
        """Whether a job, read with its payload, is one of these."""
        for name in ("kind", "queue", "scheduled_at_ms", "partition_key"):
            wanted = getattr(self, name)
            if wanted is not None and getattr(job, name) != wanted:
                return False
        if self.payload is None:
            return True
        if isinstance(self.payload, bytes):
            return job.payload == self.payload
        return _plain(job) == self.payload

    def __str__(self) -> str:
        named = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(Enqueued)
            if each.name not in ("kind", "count")
            and getattr(self, each.name) is not None
        ]
        return ", ".join([f"kind {self.kind}" if self.kind else "any kind", *named])


def find_enqueued(
    store_or_hg: Any,
    what: Any,
    *,
    queue: str | None = None,
    args: Mapping[str, object] | None = None,
    where: Where | None = None,
) -> list[JobSummary]:
    """The jobs in a store that are what a test means, with payloads, oldest first.

    Every job that exists counts, in whatever state: `where` asks for more. A job that
    succeeded and keeps no record exists no longer.

    Args:
        store_or_hg: where to look.
        what: a task, a payload class, a kind, or an `Enqueued`.
        queue: where it must be.
        args: part of its payload, by name; with a task or payload class they are values
            of Python, defaults included, with a kind those of the stored JSON.
        where: must be true of it.

    Raises:
        InvalidRequest: `what` is none of these.
        Unsupported: the store cannot be inspected.
    """
    inspect = inspect_of(store_or_hg)
    wanted = what if isinstance(what, Enqueued) else Enqueued(what)
    task = None if isinstance(what, Enqueued | str) else _task(what)
    found = [
        job
        for job in _jobs(inspect, wanted, queue)
        if wanted.matches(job)
        and (args is None or _has(task, job, args))
        and (where is None or where(job))
    ]
    return found[::-1]


def assert_enqueued(
    store_or_hg: Any,
    what: Any,
    *,
    count: int | None = None,
    queue: str | None = None,
    args: Mapping[str, object] | None = None,
    where: Where | None = None,
) -> list[JobSummary]:
    """Assert that there are such jobs, and return them; see `find_enqueued`.

    Args:
        store_or_hg: where to look.
        what: as for `find_enqueued`.
        count: how many; None is at least one, or what the `Enqueued` says.
        queue, args, where: as for `find_enqueued`.

    Raises:
        AssertionError: the text says what there is instead, 20 jobs at most.
    """
    __tracebackhide__ = True
    if count is None and isinstance(what, Enqueued):
        count = what.count
    found = find_enqueued(store_or_hg, what, queue=queue, args=args, where=where)
    if found if count is None else len(found) == count:
        return found
    raise AssertionError(
        f"expected {'a job' if count is None else _jobs_text(count)} of "
        f"{_described(what, queue, args, where)}, found {len(found) or 'none'}; "
        + _contents(inspect_of(store_or_hg))
    )


def refute_enqueued(
    store_or_hg: Any,
    what: Any,
    *,
    queue: str | None = None,
    args: Mapping[str, object] | None = None,
    where: Where | None = None,
) -> None:
    """Assert that there is no such job; see `find_enqueued`.

    Raises:
        AssertionError: the text says what there is, 20 jobs at most.
    """
    __tracebackhide__ = True
    found = find_enqueued(store_or_hg, what, queue=queue, args=args, where=where)
    if found:
        raise AssertionError(
            f"expected no job of {_described(what, queue, args, where)}, "
            f"found {len(found)}; " + _contents(inspect_of(store_or_hg))
        )


def _task(what: Any) -> Task:
    if isinstance(what, BoundTask):
        return what.task
    if isinstance(what, Task):
        return what
    known = task_of(what) if introspection.isclass(what) else None
    if known is None:
        raise InvalidRequest(
            f"expected a task, a payload class, a kind or Enqueued(...), got {what!r}"
        )
    return known


def _jobs(
    inspect: Inspect, wanted: Enqueued, queue: str | None
) -> Iterator[JobSummary]:
    """Jobs that may match, newest first, each read with its payload."""
    if None not in (queue, wanted.queue) and queue != wanted.queue:
        return
    asked = JobFilter(
        kind=wanted.kind,
        queue=queue or wanted.queue,
        partition_key=wanted.partition_key,
    )
    cursor: str | None = None
    while True:
        page = inspect.list_jobs(asked, cursor, PAGE)
        for listed in page.jobs:
            job = inspect.get_job(listed.id, include_payload=True)
            if job is not None:
                yield job
        cursor = page.next_cursor
        if cursor is None:
            return


def _plain(job: JobSummary) -> object:
    try:
        return json.loads(job.payload or b"")
    except ValueError:
        return None


def _has(task: Task | None, job: JobSummary, args: Mapping[str, object]) -> bool:
    """Whether a payload holds these values, each equal as a whole."""
    value: Any
    if isinstance(task, PayloadTask):
        try:
            value = task.decode(job.schema_version, job.payload or b"")
        except (HeadgateError, Mismatch):
            return False
        if isinstance(task, FunctionTask):
            value = {**task.handler.parameters().defaults, **value}
    else:
        value = _plain(job)
    missing = object()
    if isinstance(value, Mapping):
        return all(value.get(name, missing) == args[name] for name in args)
    return all(getattr(value, name, missing) == args[name] for name in args)


def _described(
    what: Any,
    queue: str | None,
    args: Mapping[str, object] | None,
    where: Where | None,
) -> str:
    wanted = what if isinstance(what, Enqueued) else Enqueued(what)
    text = str(wanted)
    if queue is not None:
        text += f", queue={queue!r}"
    if args is not None:
        text += f", args={dict(args)!r}"
    return text if where is None else f"{text}, where {where!r}"


def _jobs_text(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _contents(inspect: Inspect) -> str:
    page = inspect.list_jobs(limit=SHOWN_JOBS + 1)
    if not page.jobs:
        return "the store is empty"
    lines = ["the store holds:"]
    for listed in page.jobs[:SHOWN_JOBS]:
        job = inspect.get_job(listed.id, include_payload=True) or listed
        lines.append(
            f"  {job.kind} queue={job.queue!r} state={job.state} id={job.id} "
            f"partition_key={job.partition_key!r} "
            f"scheduled_at_ms={job.scheduled_at_ms} payload={_shown(job.payload)}"
        )
    if len(page.jobs) > SHOWN_JOBS:
        lines.append(f"  and more; these are the newest {SHOWN_JOBS}")
    return "\n".join(lines)


def _shown(payload: bytes | None) -> str:
    if payload is None:
        return "?"
    text = payload[:SHOWN_PAYLOAD].decode("utf-8", "backslashreplace")
    return text + "..." if len(payload) > SHOWN_PAYLOAD else text
