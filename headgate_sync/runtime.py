"""What a facade opens at its first use, and its fate at a fork and at the end."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from attrs import evolve, frozen

from headgate_sync.client.client import Client
from headgate_sync.errors import (
    ConfigurationError,
    InvalidRequest,
    StoreUnavailable,
)
from headgate_sync.events import EventBus
from headgate_sync.options import TaskOptions, check_defaults
from headgate_sync.settings import DATABASE_URL, EMBEDDED, FALLBACK_URL, Settings
from headgate_sync.store import Store

if TYPE_CHECKING:
    from headgate_sync.client.client import PipelineParts
    from headgate_sync.client.pipeline import Pipeline
    from headgate_sync.registry import Registry

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class Opened:
    """A store in use, with its client.

    Attributes:
        settings: with the address; None for a store or pool that the caller made.
    """

    store: Store
    client: Client
    settings: Settings | None = None


@frozen
class Borrowed:
    """A store or a pool that the caller made, in the process that it belongs to."""

    source: Any
    schema: str
    pid: int


class Runtime:
    """A source that is bound once, opened at the first use and closed at most once."""

    def __init__(
        self,
        defaults: TaskOptions,
        registry: Registry,
        parts: PipelineParts,
    ) -> None:
        check_defaults(defaults)
        self.defaults = defaults
        self._registry = registry
        self._pipeline: Pipeline | None = None
        if parts:
            from headgate_sync.client.pipeline import Pipeline

            self._pipeline = Pipeline(**parts)
        self.source: Settings | Borrowed | None = None
        self._closed = False
        self._exiting = False
        self._override: Opened | None = None
        self._start_afresh()
        _runtimes.add(self)

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()  # guards every field of this class
        self._opened: Opened | None = None
        self.event_bus = EventBus()  # the parent's, if any, is heard in the parent
        self._owned: list[Any] = []  # closed in reverse order
        self._pid = os.getpid()  # last: it says that the rest is of this process

    def bind(self, source: Settings | Borrowed) -> None:
        """Say what to open.

        Raises:
            ConfigurationError: said before, or closed.
        """
        with self._lock:
            if self._closed:
                raise ConfigurationError("headgate is closed")
            if self.source is not None:
                raise ConfigurationError("this Headgate is bound to a database already")
            self.source = source

    def open(self) -> Opened:
        """The store in use; the first call opens it.

        Raises:
            ConfigurationError: nothing is bound, it is closed, or the database has not
                the tables of this release.
            StoreUnavailable: the database does not answer.
            RuntimeError: the caller's store or pool belongs to the parent process.
        """
        self._notice_fork()
        opened = self._override or self._opened
        if opened is None:
            with self._lock:
                opened = self._override or self._opened
                if opened is None:
                    opened = self._opened = self._open()
        return opened

    def _open(self) -> Opened:
        if self._closed:
            raise ConfigurationError("headgate is closed")
        if self.source is None:
            raise ConfigurationError(
                "this Headgate has no database yet: give it one with connect(url) or "
                f"init_app(app), or make it with Headgate.from_env() and {DATABASE_URL}"
            )
        if isinstance(self.source, Settings):
            settings = self._located(self.source)
            store: Store = self.own_store(settings, pool_size=settings.pool_size)
        else:
            settings = None
            store = self._borrowed(self.source)
        return Opened(store=store, client=self._client(store), settings=settings)

    def _client(
        self, store: Store, *, tx: Literal["refuse", "immediate"] = "refuse"
    ) -> Client:
        return Client(
            store,
            defaults=self.defaults,
            registry=self._registry,
            tx=tx,
            pipeline=self._pipeline,
            event_bus=self.event_bus,
        )

    def use_bus(self, bus: EventBus) -> None:
        """Let workers tell this bus, and clients listen to it."""
        with self._lock:
            self.event_bus = bus
            for opened in (self._opened, self._override):
                if opened is not None:
                    opened.client.event_bus = bus

    def ask(self, within_ms: int) -> None:
        """Make one call, which also checks that the tables are those of this release.

        A store of its own address is asked on a connection of its own: the pool would
        wait for as long as it always does, and say less about what is wrong.

        Raises:
            StoreUnavailable: the database does not answer in this time.
            ConfigurationError: as in `open`.
        """
        opened = self.open()
        store = opened.store
        if opened.settings is not None:
            from headgate_sync.postgres.store import PgStore
            from headgate_sync.postgres.unpooled import Unpooled

            assert opened.settings.url is not None
            store = PgStore(
                Unpooled(opened.settings.url),
                schema=opened.settings.schema,
                pool_timeout_ms=within_ms,
            )
        if store.inspect is not None:
            store.inspect.store_now_ms()

    def _borrowed(self, borrowed: Borrowed) -> Store:
        if borrowed.pid != os.getpid():
            raise RuntimeError(
                "client used after fork: its store or pool belongs to the parent "
                "process; make it in the child, or give the Headgate a URL"
            )
        if hasattr(borrowed.source, "admit"):
            store: Store = borrowed.source
            return store
        from headgate_sync.postgres.store import PgStore

        return PgStore(borrowed.source, schema=borrowed.schema)

    def _located(self, settings: Settings) -> Settings:
        """Settings with an address; starts the development server when asked for."""
        if settings.url is not None:
            return settings
        if not settings.embedded:
            raise ConfigurationError(
                f"no database: set {DATABASE_URL} or {FALLBACK_URL}, "
                f"or {EMBEDDED}=1 for a private development server"
            )
        from headgate_sync.embedded import EmbeddedServer
        from headgate_sync.postgres.migrate import migrate_up

        server = EmbeddedServer.start(settings.data_dir)
        self._owned.append(server)
        migrate_up(server.url, settings.schema)
        return evolve(settings, url=server.url)

    def own_store(
        self, settings: Settings, *, pool_size: int, listen: str | None = None
    ) -> Store:
        """Open a store that is closed together with this object."""
        from headgate_sync.postgres.store import PgStore

        assert settings.url is not None
        with self._lock:
            if not self._exiting:
                try:
                    store = PgStore.connect(
                        settings.url,
                        schema=settings.schema,
                        pool_size=pool_size,
                        listen=listen,
                    )
                except RuntimeError as error:
                    if threading.main_thread().is_alive():
                        raise StoreUnavailable(
                            f"no connection pool: {error}"
                        ) from error
                    # The interpreter shuts down, and no thread can be started.
                    logger.debug("no pool: %s", error)
                else:
                    self._owned.append(store)
                    return store
            from headgate_sync.postgres.unpooled import Unpooled

            return PgStore(Unpooled(settings.url), schema=settings.schema)

    @contextmanager
    def override(
        self, store: Store, *, tx: Literal["refuse", "immediate"]
    ) -> Iterator[Store]:
        """Use another store, in all threads, until the end of the block.

        Raises:
            InvalidRequest: another override is active.
        """
        client = self._client(store, tx=tx)
        with self._lock:
            if self._override is not None:
                raise InvalidRequest("another override is active")
            self._override = Opened(store=store, client=client)
        try:
            yield store
        finally:
            self._override = None

    def close(self) -> None:
        """Close what was opened here; later uses raise, a second call does nothing."""
        self._notice_fork()
        with self._lock:
            self._closed = True
            self._close_owned()

    def _close_owned(self) -> None:
        self._opened = None
        while self._owned:
            self._owned.pop().close()

    def _at_exit(self) -> None:
        """Close the pool; later exit handlers may still enqueue, without one."""
        self._notice_fork()
        with self._lock:
            self._exiting = True
            self._close_owned()

    def _notice_fork(self) -> None:
        """See that this is a child also where Python was not told of the fork.

        In the workers of uWSGI no hook has run, unless `py-call-osafterfork` is set.
        """
        if self._pid != os.getpid():
            with _noticing:
                if self._pid != os.getpid():
                    self._after_fork()

    def _after_fork(self) -> None:
        """Forget, in a child, what belongs to the parent.

        Closing one of these connections, or letting the collector finalise it, would
        end the parent's session, so each object keeps one reference for ever.
        """
        for inherited in self._owned:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
        self._start_afresh()


_runtimes: WeakSet[Runtime] = WeakSet()
_noticing = threading.Lock()  # held for moments of a child's first use only


def _close_all() -> None:
    with ExitStack() as stack:  # one that fails does not keep the others open
        for runtime in list(_runtimes):
            stack.callback(runtime._at_exit)


def _forget_all() -> None:
    for runtime in list(_runtimes):
        runtime._after_fork()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
