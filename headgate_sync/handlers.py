"""A handler function with what belongs to it rather than to the job."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

from headgate_sync.binding import BatchPlan, FailureTest, RetryPolicy
from headgate_sync.codec import JSON, Codec, check_codec
from headgate_sync.errors import InvalidRequest
from headgate_sync.parameters import (
    Parameters,
    check_function,
    declaring_frame,
    read_parameters,
)
from headgate_sync.steps import StepPlan

HANDLER_OPTIONS = (
    "is_failure",
    "result_codec",
    "async_cancel",
    "steps",
    "step_map",
)


StepNames = Sequence[str] | Mapping[str, int]
StepMap = Mapping[int, Mapping[str, str]]


def _plan(
    label: str, version: int, steps: StepNames, step_map: StepMap | None
) -> StepPlan:
    if not steps and not step_map:
        return StepPlan(version=version)
    try:
        return StepPlan(
            version=version,
            names=steps,
            weights=dict(steps) if isinstance(steps, Mapping) else None,
            renames=step_map or {},
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"{label}: {error.message}") from error


def place_of(declared: Any) -> str:
    """Module, name and line of a function or class; no line where there is no file."""
    name = f"{declared.__module__}.{declared.__qualname__}"
    try:
        line = inspect.getsourcelines(inspect.unwrap(declared))[1]
    except (OSError, TypeError):
        return name
    return f"{name}, line {line}"


class Handler:
    """A handler function, whose annotations may have to wait for their names."""

    def __init__(
        self,
        label: str,
        function: object,
        *,
        retry: RetryPolicy | None = None,
        is_failure: FailureTest | None = None,
        result_codec: Codec = JSON,
        async_cancel: bool | None = None,
        steps: StepNames = (),
        step_map: StepMap | None = None,
        version: int = 1,
        payload_types: bool = True,
        batch: BatchPlan | None = None,
    ) -> None:
        for name, value in (("retry", retry), ("is_failure", is_failure)):
            if value is not None and not callable(value):
                raise InvalidRequest(
                    f"{label}: {name} must be callable, got {type(value).__name__}"
                )
        check_codec(f"{label}: result_codec", result_codec)
        if async_cancel is not None and not isinstance(async_cancel, bool):
            raise InvalidRequest(f"{label}: async_cancel must be True, False or None")
        self.steps = _plan(label, version, steps, step_map)
        self.async_cancel = async_cancel
        self.batch = batch
        self.label = label
        self.function: FunctionType = check_function(label, function)
        self.retry = retry
        self.is_failure = is_failure
        self.result_codec = result_codec
        self._payload_types = payload_types
        self._lock = threading.Lock()  # guards the two fields below
        # Kept only while a name is missing, for it keeps all local variables there.
        self._frame: FrameType | None = declaring_frame()
        self._parameters: Parameters | None = None

    @property
    def name(self) -> str:
        """The full name of the function."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def parameters(self) -> Parameters:
        """The parameters, read once.

        Raises:
            LateNames: an annotation cannot be evaluated yet.
            InvalidRequest: a parameter that nothing can carry or fill.
        """
        if self._parameters is None:
            with self._lock:
                if self._parameters is None:
                    self._parameters = read_parameters(
                        self.label,
                        self.function,
                        self._frame,
                        payload_types=self._payload_types,
                        result_type=self.batch is None,
                    )
                    self._frame = None
        return self._parameters
