"""Jobs that only one worker may run, and whether there ever was such a worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headgate_sync.envelope import Envelope
from headgate_sync.errors import StoreError
from headgate_sync.store import Store

logger = logging.getLogger(__name__)

MAX_PINNED = 1_000


class PinnedJobs:
    """Warns of jobs pinned to a worker that the store never saw, once for each name.

    Not for jobs of a caller's transaction: the look would need a second connection of
    what may be one pool.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: set[str] = set()  # names that were looked up

    def look_at(self, stored: Sequence[Envelope]) -> None:
        """Look the workers of jobs up that are in the store by now."""
        for job in stored:
            if job.sticky_worker and job.sticky_worker not in self._known:
                self._look_up(job)

    def _look_up(self, job: Envelope) -> None:
        inspect, worker_id = self._store.inspect, job.sticky_worker
        if inspect is None:
            return
        try:
            found = inspect.get_worker(worker_id)
        except StoreError as error:  # the job is stored; the next one may look
            logger.debug("worker %s was not looked up: %s", worker_id, error)
            return
        if len(self._known) >= MAX_PINNED:
            self._known.clear()
        self._known.add(worker_id)
        if found is None:
            logger.warning(
                "job %s in queue %s is pinned to worker %s, which was never seen: "
                "it waits until a worker of this id comes",
                *(job.id, job.queue, worker_id),
            )
