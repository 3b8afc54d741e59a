"""`Headgate`: the one object that most programs hold: store, registry and client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from attrs import evolve, fields

from headgate_sync.envelope import check_int
from headgate_sync.errors import ConfigurationError, InvalidRequest, Unsupported
from headgate_sync.identity import Identity
from headgate_sync.inspection import Inspect, JobSummary
from headgate_sync.lease import MAX_CAPACITY
from headgate_sync.options import NO_DEFAULTS, TaskOptions
from headgate_sync.registry import DeclaredKeywords, Registry, TaskDecorator
from headgate_sync.request import JobHandle
from headgate_sync.runtime import Borrowed, Runtime
from headgate_sync.settings import (
    DEFAULT_POOL_SIZE,
    DEFAULT_SCHEMA,
    VARIABLES,
    Settings,
    normal_url,
)
from headgate_sync.store import Store
from headgate_sync.task import BoundTask, FunctionTask, Task

if TYPE_CHECKING:
    from headgate_sync.client.batch import Batch
    from headgate_sync.client.batch_values import BatchProgress
    from headgate_sync.client.client import Client, PipelineParts
    from headgate_sync.client.schedules import Schedules, SyncReport
    from headgate_sync.client.waiting import Completion
    from headgate_sync.worker import Worker, WorkerConfig
    from headgate_sync.worker.isolated import IsolatedProcess

DEFAULT_CHUNK_SIZE = 500
DEFAULT_KEEP = "1h"
DEFAULT_PATIENCE = "1m"

F = TypeVar("F", bound=Callable[..., Any])
FT = TypeVar("FT", bound=FunctionTask[Any, Any])


class Headgate:
    """Declares tasks, enqueues jobs and makes workers, over one database.

    Making one does no I/O and starts no thread: the pool opens at the first use. It may
    be used from any thread, and goes on working in a forked child, with connections of
    its own. There is no default instance: others import it from where it is made.

    Args:
        source: a database URL or conninfo (the facade owns its pool), a psycopg pool or
            a `Store` (both stay the caller's), or None before `connect` or `init_app`.
        schema: where the tables are; ignored with a `Store`.
        listen_url: direct URL for wake-ups when `source` leads through a pooler in
            transaction mode.
        pool_size: most connections of this process.
        defaults: options of jobs whose call and task set none.
        **parts: what stands between an enqueue and the store; see `Client`.

    Raises:
        ConfigurationError: a source of another type.
        InvalidRequest: a part that is none.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        schema: str = DEFAULT_SCHEMA,
        listen_url: str | None = None,
        pool_size: int = DEFAULT_POOL_SIZE,
        defaults: TaskOptions = NO_DEFAULTS,
        **parts: Unpack[PipelineParts],
    ) -> None:
        self.registry = Registry()
        self._runtime = Runtime(defaults, self.registry, parts)
        self._worker_config: dict[str, Any] = {}
        self._configured = False  # whether the source was read, not given in code
        # What goes with a source that is named later.
        self._given = Settings(
            schema=schema, listen_url=normal_url(listen_url), pool_size=pool_size
        )
        self.registry.serve(lambda: self.client)
        if source is not None:
            self.connect(source)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] = os.environ,
        *,
        schema: str | None = None,
        listen_url: str | None = None,
        pool_size: int | None = None,
        defaults: TaskOptions = NO_DEFAULTS,
        **parts: Unpack[PipelineParts],
    ) -> Self:
        """Take the database from the environment; arguments win over variables.

        `HEADGATE_DATABASE_URL`, else `DATABASE_URL`; `HEADGATE_SCHEMA`,
        `HEADGATE_LISTEN_URL`, `HEADGATE_POOL_SIZE`. Without a URL, and without
        `HEADGATE_EMBEDDED=1` for the development server, the first use raises
        `ConfigurationError`.

        Raises:
            ConfigurationError: a variable cannot be read.
        """
        arguments: dict[str, Any] = {
            "schema": schema,
            "listen_url": normal_url(listen_url),
            "pool_size": pool_size,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        made = cls(defaults=defaults, **parts)
        made._runtime.bind(evolve(Settings.read(environ.get), **given))
        made._configured = not given
        return made

    @classmethod
    def embedded(
        cls,
        data_dir: str | PathLike[str] | None = None,
        *,
        schema: str = DEFAULT_SCHEMA,
        pool_size: int = DEFAULT_POOL_SIZE,
        defaults: TaskOptions = NO_DEFAULTS,
        **parts: Unpack[PipelineParts],
    ) -> Self:
        """Use a private development server, found or started at the first use.

        It is migrated by itself, and stops after the last process that uses it.
        """
        made = cls(defaults=defaults, **parts)
        made._runtime.bind(
            Settings(
                schema=schema,
                pool_size=pool_size,
                embedded=True,
                data_dir=None if data_dir is None else os.fspath(data_dir),
            )
        )
        return made

    def connect(self, source: Any) -> None:
        """Bind a facade that was made without a source.

        Args:
            source: as for the constructor.

        Raises:
            ConfigurationError: it is bound already, closed, or the source is none.
        """
        if isinstance(source, str):
            self._runtime.bind(evolve(self._given, url=normal_url(source)))
        elif hasattr(source, "admit") or hasattr(source, "getconn"):
            self._runtime.bind(Borrowed(source, self._given.schema, os.getpid()))
        else:
            raise ConfigurationError(
                "expected a database URL, a psycopg ConnectionPool or a Store, "
                f"got {type(source).__name__}"
            )

    def init_app(self, app: Any) -> None:
        """Bind to a Flask application's configuration, and register as its extension.

        The keys are those of the environment, which also answers for absent ones. Any
        number of applications may share the facade, and so its pool, with one database.

        Raises:
            ConfigurationError: the facade is bound to another database, or a key cannot
                be read.
        """
        config = getattr(app, "config", None)
        if not isinstance(config, Mapping):
            raise ConfigurationError(
                f"init_app takes a Flask application, got {type(app).__name__}"
            )
        settings = Settings.read(
            lambda name: config[name] if name in config else os.environ.get(name)
        )
        bound = self._runtime.source
        if bound is None:
            self._runtime.bind(settings)
            self._configured = True
        elif bound != settings and (
            self._configured or _conflicts(bound, settings, config)
        ):
            raise ConfigurationError(
                "this Headgate is bound to another database, or in another way, than "
                "the application says; such an application needs a Headgate of its own"
            )
        app.extensions["headgate"] = self

    # Declaring.

    def task(self, kind: str, **options: Unpack[DeclaredKeywords]) -> TaskDecorator:
        """Declare a task; see `Registry.task`."""
        return self.registry.task(kind, **options)

    def handler(self, task: type, **options: Any) -> Callable[[F], F]:
        """Declare the handler of a payload class; see `Registry.handler`."""
        return self.registry.handler(task, **options)

    def batch_handler(self, task: type, **options: Any) -> Callable[[F], F]:
        """Declare a handler of many jobs per call; see `Registry.batch_handler`."""
        return self.registry.batch_handler(task, **options)

    def isolated(self, task: type | Task, process: IsolatedProcess) -> None:
        """Run a task's jobs in processes; see `Registry.isolated`."""
        self.registry.isolated(task, process)

    def raw_handler(self, kind: str, **options: Any) -> Callable[[F], F]:
        """Declare a handler of undecoded envelopes; see `Registry.raw_handler`."""
        return self.registry.raw_handler(kind, **options)

    def upcaster(self, task: type | Task, from_version: int) -> Callable[[F], F]:
        """Declare how payloads of another version are read; see `Registry.upcaster`."""
        return self.registry.upcaster(task, from_version)

    def periodic(self, spec: str | timedelta, **arguments: Any) -> Callable[[FT], FT]:
        """Declare a schedule of a function task; see `Registry.periodic`."""
        return self.registry.periodic(spec, **arguments)

    def schedule(
        self, id: str, job: Any, spec: str | timedelta, **arguments: Any
    ) -> None:
        """Declare a schedule of any job; see `Registry.schedule`."""
        self.registry.schedule(id, job, spec, **arguments)

    def include(self, registry: Registry) -> None:
        """Take over the tasks of a registry; see `Registry.include`."""
        self.registry.include(registry)

    # Enqueueing.

    def enqueue(
        self, job: Any, /, *args: Any, tx: Any = None, **keywords: Any
    ) -> JobHandle:
        """Put one job in; see `Client.enqueue` for the errors.

        Args:
            job: a function task, followed by its payload, or a job as for `Client`,
                followed by options.
            *args: payload of a function task.
            tx: the caller's transaction.
            **keywords: payload of a function task, else options.
        """
        job, options = _job_of(job, args, keywords)
        return self.client.enqueue(job, tx=tx, **options)

    def enqueue_or_join(
        self, job: Any, /, *args: Any, tx: Any = None, **keywords: Any
    ) -> JobHandle:
        """`enqueue`, or the handle of the job that holds the unique key."""
        job, options = _job_of(job, args, keywords)
        return self.client.enqueue_or_join(job, tx=tx, **options)

    def enqueue_and_wait(
        self, job: Any, /, *args: Any, timeout: timedelta | str, **keywords: Any
    ) -> Completion[Any]:
        """Put one job in and wait for its end; see `Client.enqueue_and_wait`.

        Args:
            job: as for `enqueue`.
            *args: as for `enqueue`.
            timeout: from the call; the job goes on after it.
            **keywords: as for `enqueue`.
        """
        if "tx" in keywords:
            return self.client.enqueue_and_wait(job, timeout=timeout, **keywords)
        job, options = _job_of(job, args, keywords)
        return self.client.enqueue_and_wait(job, timeout=timeout, **options)

    def enqueue_many(
        self,
        jobs: Iterable[Any],
        *,
        identity: Identity | None = None,
        tx: Any = None,
    ) -> list[JobHandle]:
        """Put up to 1,000 jobs in, all or none; see `Client.enqueue_many`."""
        return self.client.enqueue_many(jobs, identity=identity, tx=tx)

    def enqueue_chunks(
        self,
        jobs: Iterable[Any],
        *,
        size: int = 500,
        identity: Identity | None = None,
    ) -> Iterator[list[JobHandle]]:
        """Put any number of jobs in, chunk by chunk; see `Client.enqueue_chunks`."""
        return self.client.enqueue_chunks(jobs, size=size, identity=identity)

    def batch(
        self,
        id: str | None = None,
        *,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        progress: bool | Callable[[BatchProgress], object] = False,
        keep: timedelta | str = DEFAULT_KEEP,
        patience: timedelta | str = DEFAULT_PATIENCE,
        window: int | None = None,
        **options: Any,
    ) -> Batch:
        """A batch of jobs that a script sends, follows and reads; see `Batch`.

        Args:
            id: makes the script restartable: jobs that exist are not sent again. 1 to
                58 bytes of `[A-Za-z0-9_.:-]`; None is a fresh one.
            chunk_size: jobs per call of the store, 1 to 1,000.
            progress: True shows a bar on a terminal and else a line every 5 s, on
                stderr; a callable gets each `BatchProgress`.
            keep: how long finished jobs are kept at least, so that the script can see
                how they ended; "0ms" leaves it to their own retention.
            patience: how long an outage is waited out before `StoreUnavailable`.
            window: most jobs of this batch that are unfinished at any time.
            **options: of jobs whose call sets none; they win over the task's.

        Raises:
            InvalidRequest: an argument is out of range.
            Unsupported: the store cannot be inspected.
        """
        from headgate_sync.client.batch import Batch

        if progress is True:
            from headgate_sync.progress import batch_display

            progress = batch_display()
        return Batch(
            self.client,
            id,
            chunk_size=chunk_size,
            progress=progress or None,
            keep=keep,
            patience=patience,
            window=window,
            options=options,
        )

    # Looking and steering.

    def get(self, job_id: str) -> JobSummary | None:
        """One job with its history, or None."""
        return self.inspect.get_job(job_id)

    def result(self, job_id: str) -> object:
        """What the handler of a job returned; None without a result.

        Read as the handler of its kind says; bytes as stored, where none is declared
        here or the job is gone.

        Raises:
            Unsupported: the store keeps no results.
            MalformedPayload: the stored bytes are none of the handler's results.
        """
        store = self.store
        if store.results is None:
            raise Unsupported("results")
        result = store.results.read_result(job_id)
        if result is None:
            return None
        job = None if store.inspect is None else store.inspect.get_job(job_id)
        binding = None if job is None else self.registry.resolve(job.kind)
        return result.data if binding is None else binding.decode_result(result)

    def cancel(self, job_id: str) -> None:
        """Cancel an unfinished job; the worker that runs it loses its lease.

        Raises:
            NotFound: no such job.
            InvalidRequest: the job is finished.
        """
        self.inspect.operator_cancel(job_id)

    def sync_schedules(
        self, *, delete_missing: bool = False, prefix: str | None = None
    ) -> SyncReport:
        """Write the declared schedules, as a worker does at its start.

        Args:
            delete_missing: also delete schedules below `prefix` that are not declared.
            prefix: beginning of ids; needed for `delete_missing`.

        Raises:
            InvalidRequest: a declaration does not fit its task, or the prefix is
                missing; nothing was written.
        """
        self.registry.check()
        return self.schedules.apply(
            self.registry.declared(), delete_missing=delete_missing, prefix=prefix
        )

    # Running.

    def configure_worker(self, **config: Any) -> None:
        """Settings for every worker made here, those of the command line too.

        For what has no option there, such as `telemetry` and `around`. A later call
        adds to an earlier one and replaces a setting that both name; what `worker` or
        the command line is given wins.

        Args:
            **config: settings of `WorkerConfig`, and `threads` as for `worker`.

        Raises:
            InvalidRequest: there is no such setting, or it is out of range.
        """
        from headgate_sync.worker import WorkerConfig

        config = _worker_settings(config)
        WorkerConfig(**config)
        self._worker_config |= config
        if config.get("event_bus") is not None:
            self._runtime.use_bus(config["event_bus"])

    @property
    def worker_settings(self) -> dict[str, Any]:
        """What `configure_worker` was given so far."""
        return dict(self._worker_config)

    def worker(
        self,
        *,
        queues: Sequence[str] | None = None,
        threads: int | None = None,
        **config: Any,
    ) -> Worker:
        """Make a worker over this facade's tasks, with a pool of its own.

        Args:
            queues: None is every queue that a declared task names, and the default one.
            threads: jobs that run at the same time; None is 16.
            **config: further settings of `WorkerConfig`.

        Raises:
            InvalidRequest: there is no such setting, or it is out of range.
            ConfigurationError: no database, or one without the tables.
        """
        opened = self._runtime.open()
        from headgate_sync.worker import Worker

        settings = self.worker_config(queues=queues, threads=threads, **config)
        store, located = opened.store, opened.settings
        if located is not None:
            store = self._runtime.own_store(
                located,
                pool_size=settings.capacity + 2,
                listen=located.listen_url or located.url,
            )
        return Worker(store, self.registry, settings)

    def worker_config(
        self,
        *,
        queues: Sequence[str] | None = None,
        threads: int | None = None,
        **config: Any,
    ) -> WorkerConfig:
        """The settings that `worker` would use; takes and raises the same."""
        from headgate_sync.worker import WorkerConfig

        config = {
            "producer": self.client,
            "retry": self._runtime.defaults.given.get("retry"),
            **self._worker_config,
            "event_bus": self._runtime.event_bus,
            **config,
        }
        if threads is not None:
            config["threads"] = threads
        config = _worker_settings(config)
        if queues is not None:
            config["queues"] = queues
        elif "queues" not in config:
            named = set(self.registry.queues())
            if isinstance(self._runtime.defaults.queue, str):
                named.add(self._runtime.defaults.queue)
            config["queues"] = sorted(named)
        return WorkerConfig(**config)

    def override(
        self, store: Store, *, tx: Literal["refuse", "immediate"] = "refuse"
    ) -> AbstractContextManager[Store]:
        """Use another store, in all threads, until the end of the block; for tests.

        Args:
            store: usually a `MemStore`; it is not closed.
            tx: "immediate" sends a job with `tx` to it at once, blind to the caller's
                rollback; "refuse" raises `Unsupported` where it cannot join.

        Raises:
            InvalidRequest: another override is active.
        """
        return self._runtime.override(store, tx=tx)

    # What it holds.

    @property
    def store(self) -> Store:
        """The store; the first use opens it."""
        return self._runtime.open().store

    @property
    def client(self) -> Client:
        """The client; the first use opens the store."""
        return self._runtime.open().client

    @property
    def schedules(self) -> Schedules:
        """Jobs that come again; see `Client.schedules`."""
        return self.client.schedules

    @property
    def inspect(self) -> Inspect:
        """The store's inspection.

        Raises:
            Unsupported: this store has none.
        """
        inspect = self.store.inspect
        if inspect is None:
            raise Unsupported("inspect")
        return inspect

    def close(self) -> None:
        """Close what this facade opened, and nothing else; twice is fine.

        Later uses raise `ConfigurationError`.
        """
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _conflicts(
    bound: Settings | Borrowed, settings: Settings, config: Mapping[str, Any]
) -> bool:
    """Whether an application names something else than what was given in code."""
    return any(
        config.get(key) and getattr(bound, name, None) != getattr(settings, name)
        for key, name in VARIABLES.items()
    )


def _job_of(
    job: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What a client takes for it: a job, and options."""
    if isinstance(job, FunctionTask | BoundTask):
        return job.job(*args, **keywords), {}
    if args:
        raise InvalidRequest(
            "positional arguments after the job belong to a function task only"
        )
    return job, keywords


def _worker_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their own names, of which `threads` is the one of `capacity`."""
    from headgate_sync.worker import WorkerConfig

    known = {field.name for field in fields(WorkerConfig)} | {"threads"}
    unknown = sorted(set(config) - known)
    if unknown:
        raise InvalidRequest(
            f"a worker has no setting {', '.join(unknown)}; "
            f"there are {', '.join(sorted(known))}"
        )
    settings = dict(config)
    if "threads" in settings:
        threads = settings.pop("threads")
        settings["capacity"] = check_int("threads", threads, 1, MAX_CAPACITY)
    return settings
