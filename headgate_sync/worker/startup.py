"""What a worker looks at before it takes work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches

from headgate_sync.errors import ConfigurationError, StoreError
from headgate_sync.loggers import guarded
from headgate_sync.policy import LATE_BEATS
from headgate_sync.registry import Registry
from headgate_sync.store import Store
from headgate_sync.worker.config import WorkerConfig
from headgate_sync.worker.presence import host_name
from headgate_sync.workers import WorkerState

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


def warn_of_a_namesake(store: Store, worker_id: str) -> None:
    """Log another live worker of this name; an outage, too.

    Commands and sticky jobs would reach either of the two. A predecessor that is on its
    way out, or was killed on this machine, is none.
    """
    if store.inspect is None:
        return
    try:
        other = store.inspect.get_worker(worker_id)
        now_ms = store.inspect.store_now_ms()
    except StoreError as error:
        logger.warning("workers of the same name not looked at: %s", error)
        return
    if other is None or other.status not in ("running", "quiet"):
        return
    silent_ms = now_ms - other.heartbeat_at_ms
    if silent_ms <= LATE_BEATS * other.beat_ms and not _has_ended(other):
        logger.warning(
            "worker %s has beaten %d ms ago in process %d of host %s: unless that one "
            "has just ended, give each its own worker_id",
            *(worker_id, silent_ms, other.pid, other.host),
        )


def _has_ended(other: WorkerState) -> bool:
    """Whether that is certain, which it can be for processes of this machine only."""
    if other.host != host_name():
        return False
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's
        return False
    return other.pid == os.getpid()  # its number was given out anew


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
