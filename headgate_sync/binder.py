"""Joins a task and its handler to what a worker calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate_sync.binding import Binding
from headgate_sync.envelope import Envelope
from headgate_sync.errors import ConfigurationError, InvalidRequest
from headgate_sync.handlers import Handler
from headgate_sync.options import UNSET
from headgate_sync.parameters import LateNames
from headgate_sync.task import ClassTask, FunctionTask, PayloadTask, Task

if TYPE_CHECKING:
    from headgate_sync.worker.isolated import IsolatedProcess


def payload_name(task: Task, handler: Handler) -> str | None:
    """The parameter that takes the payload; None when the handler has none.

    Raises:
        LateNames: an annotation cannot be evaluated yet.
        InvalidRequest: a parameter that nothing fills.
    """
    wanted = task.payload_class if isinstance(task, ClassTask) else Envelope
    if handler.batch is not None:
        return _batch_name(task, handler)
    found = None
    for name, annotation in handler.parameters().annotations.items():
        if found is not None or annotation not in (wanted, inspect.Parameter.empty):
            raise InvalidRequest(
                f"{task.label}: nothing fills parameter {name} of {handler.name}"
            )
        found = name
    return found


def _batch_name(task: Task, handler: Handler) -> str:
    parameters = handler.parameters()
    names = [*parameters.annotations]
    if len(names) != 1 or parameters.injected:
        raise InvalidRequest(
            f"{task.label}: batch handler {handler.name} must take the list of jobs "
            "and nothing else"
        )
    return names[0]


def absent(task: Task) -> Handler:
    """Stands for the handler of a task that only another program handles."""

    def elsewhere() -> None:
        raise ConfigurationError(f"{task.label} has no handler in this process")

    retry = None if task.options.retry is UNSET else task.options.retry
    return Handler(task.label, elsewhere, retry=retry, version=task.version)


def bind(
    task: Task, handler: Handler, process: IsolatedProcess | None = None
) -> Binding:
    """Join a task and its handler.

    Raises:
        InvalidRequest: an annotation of the handler uses an unknown name.
    """
    try:
        parameters = handler.parameters()
        if isinstance(task, FunctionTask):
            decode = _arguments(task)
        else:
            decode = _single(task, payload_name(task, handler))
    except LateNames as late:
        raise InvalidRequest(
            f"{task.label}: {handler.name} uses {late}, which is not defined"
        ) from late
    if process is not None and parameters.declares_result:
        raise InvalidRequest(
            f"{task.label}: {handler.name} returns a result, which an isolated process "
            "cannot hand over"
        )
    return Binding(
        kind=task.kind,
        name=handler.name,
        version=task.version,
        retry=handler.retry,
        is_failure=handler.is_failure,
        declares_result=parameters.declares_result and handler.batch is None,
        async_cancel=handler.async_cancel,
        steps=handler.steps,
        batch=handler.batch,
        isolated=process,
        function=handler.function,
        decode=decode,
        injectors=parameters.injected,
        result=parameters.result,
        result_codec=handler.result_codec,
    )


def _arguments(task: PayloadTask) -> Callable[[Envelope], dict[str, Any]]:
    return lambda envelope: task.decode(envelope.schema_version, envelope.payload)


def _single(task: Task, name: str | None) -> Callable[[Envelope], dict[str, object]]:
    """Decode to at most one argument; the payload is read also when nobody wants it."""

    def decode(envelope: Envelope) -> dict[str, object]:
        value: object = envelope
        if isinstance(task, PayloadTask):
            value = task.decode(envelope.schema_version, envelope.payload)
        return {} if name is None else {name: value}

    return decode
