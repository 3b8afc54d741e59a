"""`Registry`: the set of tasks and handlers of a program, in one namespace of kinds."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from headgate_sync.binder import absent, bind, payload_name
from headgate_sync.binding import BatchPlan, Binding, FailureTest, RetryPolicy
from headgate_sync.codec import JSON, Codec
from headgate_sync.context import JobContext
from headgate_sync.declared import Declared, periodic_target
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import DEFAULT_QUEUE, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.handlers import (
    HANDLER_OPTIONS,
    Handler,
    StepMap,
    StepNames,
    place_of,
)
from headgate_sync.lease import MAX_CAPACITY
from headgate_sync.options import UNSET, TaskKeywords, TaskOptions, make_options
from headgate_sync.parameters import LateNames
from headgate_sync.request import Producer
from headgate_sync.task import (
    ClassTask,
    FunctionTask,
    PayloadTask,
    Task,
    declare_class,
    keep_class,
    task_of,
    upcaster,
)
from headgate_sync.validation import check_type

if TYPE_CHECKING:
    from headgate_sync.worker.isolated import IsolatedProcess

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
FT = TypeVar("FT", bound="FunctionTask[Any, Any]")


class FunctionKeywords(TaskKeywords, total=False):
    """What a task may declare; from `is_failure` on only a function's."""

    is_failure: FailureTest | None
    result_codec: Codec
    async_cancel: bool | None
    steps: StepNames
    step_map: StepMap | None
    isolated: IsolatedProcess | None


class DeclaredKeywords(FunctionKeywords, total=False):
    """All keywords of `Registry.task`."""

    version: int
    aliases: Sequence[str]
    codec: Codec


class TaskDecorator(Protocol):
    """A class stays itself, a function becomes a `FunctionTask`."""

    @overload
    def __call__(self, declared: type[T], /) -> type[T]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(
        self, declared: Callable[Concatenate[JobContext, P], R], /
    ) -> FunctionTask[P, R]: ...

    @overload
    def __call__(self, declared: Callable[P, R], /) -> FunctionTask[P, R]: ...


class Registry:
    """Tasks by kind, with at most one handler each.

    A declaration is checked as a whole before any of it is kept. Main kinds and aliases
    share one namespace. Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards every field below
        self._tasks: dict[str, Task] = {}  # by main kind
        self._main_kinds: dict[str, str] = {}  # main kinds and aliases to main kinds
        self._handlers: dict[str, Handler] = {}  # by main kind
        self._isolated: dict[str, IsolatedProcess] = {}  # by main kind
        self._bindings: dict[str, Binding] = {}  # by main kind, made at first use
        self._producers: list[Callable[[], Producer]] = []
        self._declared: dict[str, Declared] = {}  # schedules by id

    def task(
        self,
        kind: str,
        *,
        version: int = 1,
        aliases: Sequence[str] = (),
        codec: Codec = JSON,
        **options: Unpack[FunctionKeywords],
    ) -> TaskDecorator:
        """Declare a task: a handler function, or the class of a payload.

        Args:
            kind: name under which the jobs are stored.
            version: of the payload's shape, 1 or more.
            aliases: further kinds that the handler answers.
            codec: turns plain values into bytes.
            **options: those of `TaskOptions`; for a function also `is_failure`,
                `result_codec`, `async_cancel`, `steps`, `step_map` and `isolated`.

        Raises:
            InvalidRequest: a bad or taken kind, an unknown option, or a parameter that
                cannot be carried. Nothing is registered.
        """
        _check_called("task", kind, "mail:welcome", str)

        def decorate(declared: Any) -> Any:
            common: dict[str, Any] = {
                "version": version, "aliases": aliases, "codec": codec,
            }  # fmt: skip
            if inspect.isclass(declared):
                common["options"] = make_options(TaskOptions, f"task {kind}", options)
                with self._lock:
                    made = declare_class(declared, kind, **common)
                    self._check_free(made)
                    keep_class(made)
                    self._keep(made)
                return declared
            given: dict[str, Any] = {**options}
            process = given.get("isolated")
            _check_process(f"task {kind}", process)
            also = (*HANDLER_OPTIONS, "isolated")
            handler_options = {k: given[k] for k in HANDLER_OPTIONS if k in given}
            rest = {k: v for k, v in given.items() if k not in also}
            common["options"] = make_options(
                TaskOptions, f"task {kind}", rest, also=also
            )
            task: FunctionTask[Any, Any] = FunctionTask(
                declared, kind, handler_options=handler_options, **common
            )
            with self._lock:
                self._check_free(task)
                self._keep(task, task.handler)
                if process is not None:
                    self._isolated[task.kind] = process
            return task

        return decorate

    def handler(
        self,
        task: type,
        *,
        retry: RetryPolicy | None = None,
        is_failure: FailureTest | None = None,
        result_codec: Codec = JSON,
        async_cancel: bool | None = None,
        steps: StepNames = (),
        step_map: StepMap | None = None,
        isolated: IsolatedProcess | None = None,
    ) -> Callable[[F], F]:
        """Declare the handler of a payload class.

        Args:
            task: a class that was declared as a task, here or anywhere.
            retry: delay before the next attempt; wins over the task's.
            is_failure: whether an exception consumes an attempt.
            result_codec: turns a plain return value into bytes.
            async_cancel: whether an exception may strike the handler's thread when it
                ignores its cancellation; None is the worker's setting.
            steps: names of its steps, or names with weights; empty leaves them free.
            step_map: by older version of the task, new names of its steps.
            isolated: process that runs each attempt; see `isolated`.

        Raises:
            InvalidRequest: no task, a second handler, a parameter nothing fills, or a
                task that is isolated already.
        """
        return self._of_class(
            task,
            retry=retry,
            isolated=isolated,
            is_failure=is_failure,
            result_codec=result_codec,
            async_cancel=async_cancel,
            steps=steps,
            step_map=step_map,
        )

    def batch_handler(
        self,
        task: type,
        *,
        max_size: int,
        max_delay: timedelta | str,
        retry: RetryPolicy | None = None,
        is_failure: FailureTest | None = None,
        result_codec: Codec = JSON,
    ) -> Callable[[F], F]:
        """Declare a handler that takes many jobs of a payload class in one call.

        It gets a list of `BatchJob` and returns a list with one entry per job, in
        order: None or a value for a success, a signal or an exception for that outcome.
        No exception of `async_cancel` strikes it, which would hit all jobs of a call.

        Args:
            task: a class that was declared as a task, here or anywhere.
            max_size: the most jobs of one call, 1 or more; at most the worker's threads
                are used.
            max_delay: how long the first of them waits for others, 1 ms or more.
            retry, is_failure, result_codec: as for `handler`.

        Raises:
            InvalidRequest: no task, a task that is isolated, a second handler, or more
                than one parameter.
        """
        plan = BatchPlan(
            max_size=check_int("max_size", max_size, 1, MAX_CAPACITY),
            max_delay_ms=duration_ms("max_delay", max_delay),
        )
        return self._of_class(
            task,
            retry=retry,
            is_failure=is_failure,
            result_codec=result_codec,
            batch=plan,
        )

    def _of_class(
        self,
        task: type,
        *,
        retry: RetryPolicy | None,
        isolated: IsolatedProcess | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        known = task_of(task) if inspect.isclass(task) else None
        if known is None:
            raise InvalidRequest(f"{task!r} is no payload class of a task")
        _check_process(known.label, isolated)
        if retry is None and known.options.retry is not UNSET:
            retry = known.options.retry

        def decorate(function: F) -> F:
            made = Handler(
                known.label,
                function,
                retry=retry,
                version=known.version,
                payload_types=False,
                **options,
            )
            self._check_handler(known, made)
            with self._lock:
                if self._tasks.get(known.kind) is not known:
                    self._check_free(known)
                self._check_unhandled(known.kind, made)
                if known.kind in self._isolated:
                    _check_single(known, made)
                if isolated is not None:
                    self._check_not_isolated(known.kind)
                    self._isolated[known.kind] = isolated
                self._keep(known, made)
            return function

        return decorate

    def isolated(self, task: type | Task, process: IsolatedProcess) -> None:
        """Let the jobs of a task run in a process of their own, one for each attempt.

        A payload class needs no handler here: the command may be any program.

        Raises:
            InvalidRequest: no task, a task that is isolated already, or a handler that
                takes batches or returns a result, which a process cannot hand over.
        """
        known = task_of(task) if isinstance(task, type) else task
        if known is None or not isinstance(known, PayloadTask):
            raise InvalidRequest(f"{task!r} is no task with a payload")
        _check_process(known.label, process, needed=True)
        with self._lock:
            if self._tasks.get(known.kind) is not known:
                self._check_free(known)
            self._check_not_isolated(known.kind)
            handler = self._handlers.get(known.kind)
            if handler is not None:
                _check_single(known, handler)
            self._keep(known)
            self._isolated[known.kind] = process
            self._bindings.pop(known.kind, None)

    def raw_handler(
        self,
        kind: str,
        *,
        retry: RetryPolicy | None = None,
        is_failure: FailureTest | None = None,
        result_codec: Codec = JSON,
        async_cancel: bool | None = None,
        steps: StepNames = (),
        step_map: StepMap | None = None,
    ) -> Callable[[F], F]:
        """Declare a handler that receives the `Envelope` itself; nothing is decoded.

        Raises:
            InvalidRequest: a bad or taken kind, or a parameter that nothing fills.
        """
        _check_called("raw_handler", kind, "mail:welcome", str)

        def decorate(function: F) -> F:
            task = Task(kind)
            made = Handler(
                task.label,
                function,
                retry=retry,
                is_failure=is_failure,
                result_codec=result_codec,
                async_cancel=async_cancel,
                steps=steps,
                step_map=step_map,
                payload_types=False,
            )
            self._check_handler(task, made)
            with self._lock:
                self._check_free(task, made)
                self._keep(task, made)
            return function

        return decorate

    def upcaster(self, task: type | Task, from_version: int) -> Callable[[F], F]:
        """Declare how payloads of another version are read; see `task.upcaster`."""
        return upcaster(task, from_version)

    def periodic(
        self,
        spec: str | timedelta,
        *,
        id: str | None = None,
        args: Mapping[str, Any] | None = None,
        on_missed: str = "skip",
        backfill_limit: int = 0,
        **options: Any,
    ) -> Callable[[FT], FT]:
        """Declare a schedule of a function task; stands above `task`.

        Nothing is written here: workers with duties do at their start, and
        `headgate cron sync`.

        Args:
            spec: see `cron.validate`.
            id: of the schedule; the task's kind if left out. Several on one task need
                ids of their own.
            args: the payload of each job, by name.
            on_missed: "skip", "run_once" or "backfill".
            backfill_limit: most ticks that "backfill" fires at once.
            **options: those of `CallOptions` that a schedule can give to each job.

        Raises:
            SpecError: the spec cannot be used.
            InvalidRequest: arguments or options do not fit, or the id is declared.
            TypeError: below it stands no function task.
        """
        _check_called("periodic", spec, "0 9 * * *", str, timedelta)

        def decorate(declared: FT) -> FT:
            task = periodic_target(declared)
            self._declare(
                Declared(
                    id=task.kind if id is None else id,
                    target=task,
                    spec=spec,
                    args=dict(args or {}),
                    on_missed=on_missed,
                    backfill_limit=backfill_limit,
                    options=options,
                )
            )
            return declared

        return decorate

    def schedule(
        self,
        id: str,
        job: Any,
        spec: str | timedelta,
        *,
        on_missed: str = "skip",
        backfill_limit: int = 0,
        **options: Any,
    ) -> None:
        """Declare a schedule of any job; otherwise as `periodic`.

        Args:
            id: of the schedule.
            job: `task.job(...)`, an instance of a payload class, an `Envelope`, or the
                kind of a job without payload.
            spec: see `cron.validate`.
            on_missed: "skip", "run_once" or "backfill".
            backfill_limit: most ticks that "backfill" fires at once.
            **options: those of `CallOptions` that a schedule can give to each job.
        """
        self._declare(
            Declared(
                id=id,
                target=job,
                spec=spec,
                on_missed=on_missed,
                backfill_limit=backfill_limit,
                options=options,
            )
        )

    def declared(self) -> dict[str, Declared]:
        """The declared schedules by id."""
        with self._lock:
            return dict(self._declared)

    def include(self, other: Registry) -> None:
        """Take over everything that another registry holds now.

        A payload class may be known to both; it may have a handler in one only.

        Raises:
            InvalidRequest: a kind is registered, or a schedule is declared, in both.
                Nothing is taken over.
        """
        check_type("registry", other, Registry)
        with other._lock:
            tasks, handlers = dict(other._tasks), dict(other._handlers)
            declared = dict(other._declared)
            isolated = dict(other._isolated)
        with self._lock:
            for one in declared.values():
                self._check_undeclared(one)
            for kind, task in tasks.items():
                if self._tasks.get(kind) is not task:
                    self._check_free(task, handlers.get(kind))
                elif (
                    kind in handlers and self._handlers.get(kind) is not handlers[kind]
                ):
                    self._check_unhandled(kind, handlers[kind])
            for kind, task in tasks.items():
                self._keep(task, handlers.get(kind))
                if kind in isolated:
                    self._isolated[kind] = isolated[kind]
            self._declared |= declared

    def serve(self, producer: Callable[[], Producer]) -> None:
        """Let the function tasks of this registry enqueue through a producer."""
        with self._lock:
            self._producers.append(producer)
            for task in self._tasks.values():
                _connect(task, self._producers)

    def check(self) -> None:
        """Evaluate late annotations and check everything; workers call it at the start.

        Raises:
            InvalidRequest: the text lists every fault, one a line.
        """
        with self._lock:
            tasks = dict(self._tasks)
            declared = dict(self._declared)
        faults = []
        for kind, task in tasks.items():
            try:
                task.settle()
                self.resolve(kind)
            except InvalidRequest as error:
                faults.append(error.message)
        for one in declared.values() if not faults else ():
            try:
                one.check()
            except InvalidRequest as error:
                faults.append(f"{one.label}: {error.message}")
        if faults:
            raise InvalidRequest("\n".join(faults))

    def kinds(self) -> frozenset[str]:
        """All main kinds and aliases."""
        with self._lock:
            return frozenset(self._main_kinds)

    def queues(self) -> tuple[str, ...]:
        """The queues that tasks name, and the default one, sorted."""
        with self._lock:
            named = {task.options.queue for task in self._tasks.values()}
        texts = {queue for queue in named if isinstance(queue, str)}
        return tuple(sorted(texts | {DEFAULT_QUEUE}))

    def resolve(self, kind: str) -> Binding | None:
        """The task and handler of a kind or alias; None without a handler.

        Raises:
            InvalidRequest: an annotation of the handler uses an unknown name.
        """
        main = self._main_kinds.get(kind)
        if main is None:
            return None
        binding = self._bindings.get(main)
        if binding is None:
            with self._lock:
                handler = self._handlers.get(main)
                process = self._isolated.get(main)
                if handler is None and process is None:
                    return None
                task = self._tasks[main]
                binding = self._bindings[main] = bind(
                    task, handler or absent(task), process
                )
        return binding

    def reads_payload(self, kind: str) -> bool:
        """Whether a declared task of this kind or alias decodes what its jobs carry."""
        main = self._main_kinds.get(kind)
        return main is not None and isinstance(self._tasks[main], PayloadTask)

    # Keeping: every check comes before the first change.

    def _check_free(self, task: Task, handler: Handler | None = None) -> None:
        names = (task.kind, *task.aliases)
        for index, name in enumerate(names):
            kind = self._main_kinds.get(name)
            if kind is None and name not in names[:index]:
                continue
            places = [_place(task, handler)]
            if kind is not None:
                known = _place(self._tasks[kind], self._handlers.get(kind))
                places.insert(0, known)
            raise InvalidRequest(
                f"kind `{name}` is registered more than once: {' and '.join(places)}"
            )

    def _declare(self, declared: Declared) -> None:
        with self._lock:
            self._check_undeclared(declared)
            self._declared[declared.id] = declared

    def _check_undeclared(self, declared: Declared) -> None:
        if self._declared.get(declared.id, declared) is not declared:
            raise InvalidRequest(
                f"schedule `{declared.id}` is declared more than once; "
                "give each an id of its own"
            )

    def _check_unhandled(self, kind: str, handler: Handler) -> None:
        known = self._handlers.get(kind)
        if known is not None:
            raise InvalidRequest(
                f"kind `{kind}` has more than one handler: "
                f"{place_of(known.function)} and {place_of(handler.function)}"
            )

    def _check_not_isolated(self, kind: str) -> None:
        if kind in self._isolated:
            raise InvalidRequest(f"kind `{kind}` is isolated already")

    def _check_handler(self, task: Task, handler: Handler) -> None:
        try:
            payload_name(task, handler)
        except LateNames:
            return  # `check` looks again

    def _keep(self, task: Task, handler: Handler | None = None) -> None:
        self._tasks[task.kind] = task
        for name in (task.kind, *task.aliases):
            self._main_kinds[name] = task.kind
        if handler is not None:
            self._handlers[task.kind] = handler
        _connect(task, self._producers)


def _place(task: Task, handler: Handler | None) -> str:
    """Where a task is declared; one that is a kind alone stands where its handler is.

    A module that is imported under two names shows here with both.
    """
    if isinstance(task, ClassTask):
        return place_of(task.payload_class)
    if handler is None and isinstance(task, FunctionTask):
        handler = task.handler
    return task.label if handler is None else place_of(handler.function)


def _connect(task: Task, producers: Sequence[Callable[[], Producer]]) -> None:
    if isinstance(task, FunctionTask):
        task.producers.extend(p for p in producers if p not in task.producers)


def _check_process(label: str, process: object, *, needed: bool = False) -> None:
    if process is None and not needed:
        return
    from headgate_sync.worker.isolated import IsolatedProcess

    if not isinstance(process, IsolatedProcess):
        raise InvalidRequest(
            f"{label}: isolated must be IsolatedProcess, got {type(process).__name__}"
        )


def _check_single(task: Task, handler: Handler) -> None:
    """Refuse to isolate a handler of many jobs: a process runs one attempt."""
    if handler.batch is not None:
        raise InvalidRequest(f"{task.label}: a batch handler cannot be isolated")


def _check_called(name: str, given: object, example: str, *types: type) -> None:
    """Refuse a decorator without arguments, which would leave nothing declared."""
    if not isinstance(given, types):
        raise InvalidRequest(
            f'{name} gets {type(given).__name__}; it is used as @{name}("{example}")'
        )
