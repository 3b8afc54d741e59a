"""Progress of one attempt: written seldom, in order, and the newest value always."""

from __future__ import annotations

import threading

from headgate_sync.attempt import LiveAttempt
from headgate_sync.errors import LeaseRejected
from headgate_sync.lease import ProgressUpdate

PROGRESS_INTERVAL_S = 0.5


class ProgressReports:
    """Holds values back that come too soon; any thread of the attempt may use it."""

    __slots__ = ("_attempt", "_lock", "_newest", "_tried_s", "_written")

    def __init__(self, attempt: LiveAttempt) -> None:
        self._attempt = attempt
        # Held across a write, so that an older value never overtakes a newer one. The
        # newest value is noted without it: nobody waits for the store to hold one back.
        self._lock = threading.Lock()
        self._tried_s = float("-inf")
        self._newest: ProgressUpdate | None = None
        self._written: ProgressUpdate | None = None

    @property
    def waits(self) -> bool:
        """The newest value was not written yet."""
        return self._newest is not self._written

    def report(self, update: ProgressUpdate, *, at_once: bool) -> None:
        """Write a value, or hold it back when one was written just before.

        Raises:
            LeaseLost: the job is not held any more.
            StoreUnavailable: held back.
        """
        now_s = self._attempt.now_s()
        self._newest = update
        if at_once or now_s - self._tried_s >= PROGRESS_INTERVAL_S:
            self._tried_s = now_s
            self.flush()

    def flush(self) -> None:
        """Write the newest value, unless that was done; errors as of `report`."""
        progress = self._attempt.store.progress
        assert progress is not None
        with self._attempt.shielded(), self._lock:
            update = self._newest
            if update is None or update is self._written:
                return
            try:
                progress.write_job_progress(self._attempt.lease, update)
            except LeaseRejected as error:
                raise self._attempt.lose() from error
            self._written = update
