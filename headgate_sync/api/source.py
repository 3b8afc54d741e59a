"""Where the API reads and writes: a store of its own, or one that it was given."""

from __future__ import annotations

import threading
from typing import Any

from headgate_sync.api.config import ApiConfig
from headgate_sync.api.forks import afresh_in_child
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
        self.start_afresh()
        afresh_in_child(self)

    def start_afresh(self) -> None:
        """Forget the store of a parent process."""
        self._lock = threading.Lock()  # guards the fields below
        # What a facade has opened, and what was made for it here: beside its own store
        # there may be an override of tests, for a while.
        self._made: dict[bool, tuple[Any, Store, Client]] = {}

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
        given = self._given
        opened: Any = given._runtime.open() if isinstance(given, Headgate) else None
        overridden = opened is not None and opened.settings is None
        with self._lock:
            made = self._made.get(overridden)
            if made is None or made[0] is not opened:
                made = self._made[overridden] = (opened, *self._open(opened))
            return made[1:]

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
