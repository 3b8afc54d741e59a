"""Where a helper works: in a store with a registry, or in what a `Headgate` holds."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from headgate_sync.app import Headgate
from headgate_sync.client.client import Client
from headgate_sync.errors import InvalidRequest, Unsupported
from headgate_sync.inspection import Inspect
from headgate_sync.registry import Registry
from headgate_sync.store import Store
from headgate_sync.worker import WorkerConfig


@frozen
class Target:
    """Jobs with the handlers for them.

    Attributes:
        producer: behind `ctx.client`.
    """

    store: Store
    registry: Registry
    config: WorkerConfig
    producer: Client


def target_of(
    store_or_hg: Any, registry: Any = None, config: WorkerConfig | None = None
) -> Target:
    """What a helper was given, made whole.

    Args:
        store_or_hg: a `Headgate` brings its registry, its settings and its client.
        registry: a `Registry`, or a `Headgate` for its own; needed with a store.
        config: None is the facade's, or the queues that the registry's tasks name.

    Raises:
        InvalidRequest: a store without a registry, or something else.
    """
    if isinstance(registry, Headgate):
        registry = registry.registry
    if isinstance(store_or_hg, Headgate):
        config = config or store_or_hg.worker_config()
        return Target(
            store_or_hg.store,
            registry or store_or_hg.registry,
            config,
            config.producer or store_or_hg.client,
        )
    store = store_of(store_or_hg)
    if not isinstance(registry, Registry):
        raise InvalidRequest(
            "a store needs a registry beside it: pass one, or pass the Headgate alone"
        )
    config = config or WorkerConfig(queues=registry.queues())
    producer = config.producer or Client(store, registry=registry)
    return Target(store, registry, config, producer)


def store_of(store_or_hg: Any) -> Store:
    """The store that a helper was given.

    Raises:
        InvalidRequest: it is neither a store nor a `Headgate`.
    """
    if isinstance(store_or_hg, Headgate):
        return store_or_hg.store
    if not hasattr(store_or_hg, "admit"):
        raise InvalidRequest(
            f"expected a Store or a Headgate, got {type(store_or_hg).__name__}"
        )
    store: Store = store_or_hg
    return store


def inspect_of(store_or_hg: Any) -> Inspect:
    """Its inspection.

    Raises:
        Unsupported: the store has none.
    """
    inspect = store_of(store_or_hg).inspect
    if inspect is None:
        raise Unsupported("inspect")
    return inspect
