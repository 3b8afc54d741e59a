"""`Declared`: a schedule that a program names beside its tasks, not written yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from headgate_sync.cron import validate
from headgate_sync.envelope import Envelope, check_kind
from headgate_sync.errors import InvalidRequest
from headgate_sync.options import CallOptions, JobOptions, make_options, merged
from headgate_sync.parameters import LateNames
from headgate_sync.request import JobRequest
from headgate_sync.schedule import ScheduleDef, check_no_zone, check_schedule_id
from headgate_sync.task import FunctionTask, PayloadTask, task_of

_SINGLE = ("id", "unique", "deadline", "delay", "run_at", "pending")


@frozen(kw_only=True)
class Declared:
    """A declared schedule, checked as far as that needs no store.

    Attributes:
        target: a function task, whose payload is `args`, or a job as for
            `Schedules.upsert`.
        options: of each job, as in `CallOptions`.
    """

    id: str
    target: Any
    spec: str = field(converter=validate)
    args: Mapping[str, Any] = field(factory=dict)
    on_missed: str = "skip"
    backfill_limit: int = 0
    options: Mapping[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        check_schedule_id(self.id)
        # The rest of a definition stands in for what is known later.
        ScheduleDef(
            kind="sample",
            spec=self.spec,
            on_missed=self.on_missed,
            backfill_limit=self.backfill_limit,
        )
        self._check_options()
        try:
            self.check()
        except LateNames:
            return  # `Registry.check` looks again

    @property
    def task(self) -> PayloadTask | None:
        """The task of the job; None for one that is named by its kind alone."""
        if isinstance(self.target, FunctionTask):
            return self.target
        if isinstance(self.target, JobRequest):
            return self.target.task
        return task_of(type(self.target))

    @property
    def label(self) -> str:
        """How error texts call it."""
        return f"schedule {self.id}"

    def job(self) -> Any:
        """What `Schedules.upsert` takes."""
        if isinstance(self.target, FunctionTask):
            return self.target.job(**self.args)
        return self.target

    def check(self) -> None:
        """Check the payload against the task.

        Raises:
            LateNames: an annotation of the task uses a name that comes later.
            InvalidRequest: the payload does not fit, or there is no such job.
        """
        task = self.task
        if task is None:
            if isinstance(self.target, str):
                check_kind(self.target)
            elif not isinstance(self.target, Envelope):
                raise InvalidRequest(
                    f"{self.label}: {type(self.target).__name__} is no job"
                )
            return
        task.parts()
        job = self.job()
        if not isinstance(job, JobRequest):
            job = task.request(job, CallOptions())  # type: ignore[attr-defined]
        task.check_templates(make_options(CallOptions, self.label, self.options))

    def _check_options(self) -> None:
        check_no_zone(self.options)
        layers: list[JobOptions] = [make_options(CallOptions, self.label, self.options)]
        if isinstance(self.target, JobRequest):
            layers.append(self.target.options)
        if self.task is not None:
            layers.append(self.task.options)
        values = merged(layers)
        for name in _SINGLE:
            if values.get(name) not in (None, False):
                raise InvalidRequest(
                    f"{self.label}: a schedule cannot carry the option {name}; "
                    "switch it off for its jobs with None"
                )


def periodic_target(declared: Any) -> FunctionTask[Any, Any]:
    """The function task that `periodic` stands above.

    Raises:
        TypeError: it is none.
    """
    if isinstance(declared, FunctionTask):
        return declared
    name = getattr(declared, "__qualname__", type(declared).__name__)
    raise TypeError(
        f"periodic stands above task: {name} is no task yet; for a payload class use "
        "schedule(id, job, spec)"
    )
