"""What a worker looks at before it takes work."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from headgate_sync.errors import ConfigurationError, StoreError
from headgate_sync.loggers import guarded
from headgate_sync.registry import Registry
from headgate_sync.store import Store
from headgate_sync.worker.config import WorkerConfig

logger = guarded(__name__)

KINDS_LOOKED_AT = 1_000


def check_set_up(store: Store, registry: Registry, config: WorkerConfig) -> None:
    """Refuse what could not work; asks the store nothing.

    Raises:
        InvalidRequest: faults of the registry, all at once.
        ConfigurationError: schedules are declared, or results, and the store cannot
            keep any.
    """
    registry.check()
    scheduling = config.run_duties and config.sync_schedules and registry.declared()
    if scheduling and store.inspect is None:
        raise ConfigurationError(
            "schedules are declared, and this store cannot keep any"
        )
    declaring = []
    for kind in sorted(registry.kinds()):
        binding = registry.resolve(kind)
        if binding is None:
            continue
        if binding.batch is not None and binding.batch.max_size > config.capacity:
            logger.warning(
                "kind %s: batches of %d do not fit into %d threads and are smaller",
                *(kind, binding.batch.max_size, config.capacity),
            )
        if binding.declares_result:
            declaring.append(kind)
    if declaring and store.results is None:
        raise ConfigurationError(
            f"handlers of {', '.join(declaring)} return a result, "
            "and this store keeps no results"
        )


def warn_of_unknown_kinds(
    store: Store, registry: Registry, queues: Sequence[str]
) -> None:
    """Log each kind of waiting jobs that no handler is here for; an outage, too."""
    if store.inspect is None:
        return
    try:
        kinds = store.inspect.distinct_kinds(KINDS_LOOKED_AT, queues=queues)
    except StoreError as error:
        logger.warning("waiting kinds not looked at: %s", error)
        return
    for kind in kinds:
        if registry.resolve(kind) is None:
            logger.warning("jobs of kind %s wait, and this worker has no handler", kind)


def warn_of_no_tasks(registry: Registry) -> None:
    """Log that nothing is declared: modules with tasks are not imported by magic."""
    if not registry.kinds():
        logger.warning(
            "no task is declared, so that no job can run here: "
            "import the modules with tasks where the application is made"
        )


def warn_of_mistyped_queues(registry: Registry, queues: Sequence[str]) -> None:
    """Log each queue that no task names while nearly the same one is not served."""
    declared = registry.queues()
    left_out = [queue for queue in declared if queue not in queues]
    for queue in queues:
        if queue not in declared and (near := get_close_matches(queue, left_out, n=1)):
            logger.warning(
                "no task names queue %s, and this worker leaves out queue %s: "
                "is one the other?",
                *(queue, near[0]),
            )
