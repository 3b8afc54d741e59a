"""Where the API reads and writes: a store of its own, or one that it was given."""

from __future__ import annotations

import os
import threading
from typing import Any

from headgate_sync.api.config import ApiConfig
from headgate_sync.app import Headgate
from headgate_sync.client.client import Client
from headgate_sync.errors import Unsupported
from headgate_sync.idempotency import Idempotency
from headgate_sync.inspection import Inspect
from headgate_sync.registry import Registry
from headgate_sync.store import Store


class Source:
    """Finds the store, which is opened at the first request.

    Beside a `Headgate` that owns its pool the API has a small pool of its own, so that
    looking never takes a connection from a web request or a worker. A `Store` that the
    caller made, and a `Headgate` over one, are used as they are.
    """

    def __init__(self, given: Store | Headgate, config: ApiConfig) -> None:
        self._given = given
        self._config = config
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._pid = os.getpid()
        self._opened: Any = None
        self._store: Store | None = None
        self._client: Client | None = None

    @property
    def store(self) -> Store:
        """The store."""
        return self._found()[0]

    @property
    def client(self) -> Client:
        """The client whose jobs come over HTTP."""
        return self._found()[1]

    @property
    def registry(self) -> Registry | None:
        """The tasks of the application; None where only a store was given."""
        return self._given.registry if isinstance(self._given, Headgate) else None

    @property
    def inspect(self) -> Inspect:
        """The inspection of the store.

        Raises:
            Unsupported: it has none.
        """
        inspect = self.store.inspect
        if inspect is None:
            raise Unsupported("inspect")
        return inspect

    @property
    def idempotency(self) -> Idempotency:
        """The keys of the store.

        Raises:
            Unsupported: it has none.
        """
        keys = self.store.idempotency
        if keys is None:
            raise Unsupported("idempotency")
        return keys

    def _found(self) -> tuple[Store, Client]:
        if self._pid != os.getpid():
            self._start_afresh()  # in a forked child there is one thread yet
        opened = self._given._runtime.open() if isinstance(self._given, Headgate) else 0
        with self._lock:
            if (
                self._store is None
                or self._client is None
                or self._opened is not opened
            ):
                self._store, self._client = self._open(opened)
                self._opened = opened
            return self._store, self._client

    def _open(self, opened: Any) -> tuple[Store, Client]:
        parts = self._config.parts()
        if not isinstance(self._given, Headgate):
            return self._given, Client(self._given, **parts).as_source("http")
        store: Store = opened.store
        located = opened.settings
        if located is not None:
            store = self._given._runtime.own_store(
                located,
                pool_size=self._config.pool_size,
                listen=located.listen_url or located.url,
            )
        if parts:
            client = Client(store, registry=self._given.registry, **parts)
        else:
            client = self._given._runtime._client(store)
        return store, client.as_source("http")
