"""Jobs on their way in: from what a producer names to what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.errors import InvalidRequest
from headgate_sync.options import (
    CallOptions,
    TaskOptions,
    envelope_fields,
    make_options,
    merged,
    unique_of,
)
from headgate_sync.request import JobRequest, with_options
from headgate_sync.task import task_of


def request_of(job: Any, options: Mapping[str, Any]) -> JobRequest:
    """The request for a job that is no `Envelope`, with further options.

    Raises:
        InvalidRequest: no job, an unknown option or a bad value.
    """
    if isinstance(job, JobRequest):
        return with_options(job, make_options(CallOptions, job.task.label, options))
    task = task_of(type(job))
    if task is None:
        raise InvalidRequest(
            f"{type(job).__name__} is no job: expected an instance of a payload "
            "class, task.job(...) or an Envelope"
        )
    made = make_options(CallOptions, task.label, options)
    task.check_templates(made)
    return task.request(job, made)


def build(
    request: JobRequest,
    defaults: TaskOptions,
    new_id: Callable[[], str],
    *,
    id: str | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Envelope:
    """What is stored for a request.

    Args:
        defaults: options where call and task set none.
        new_id: names a job that has no id of its own.
        id: in the place of any other.
        change: may change the fields before they are checked.

    Raises:
        InvalidRequest: the text names task and option.
    """
    task = request.task
    values = merged((request.options, task.options, defaults))
    try:
        fields = envelope_fields(values)
        for option, name in (("partition", "partition_key"), ("rate_class",) * 2):
            if values.get(option) is not None:
                fields[name] = request.render(option, values[option])
        unique = unique_of(values.get("unique"))
        if unique is not None:
            fields |= unique.fields()
            fields["unique_key"] = (
                request.digest()
                if unique.key is True
                else request.render("unique", unique.key).encode()
            )
        if change is not None:
            change(fields)
        return Envelope(
            id=id or values.get("id") or new_id(),
            kind=task.kind,
            schema_version=task.version,
            payload=request.data,
            fingerprint=fingerprint(task.kind, request.data),
            **fields,
        )
    except InvalidRequest as error:
        if error.message.startswith(task.label):
            raise
        raise InvalidRequest(f"{task.label}: {error.message}") from error
