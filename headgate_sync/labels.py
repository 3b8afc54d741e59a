"""Values of metric labels: cleaned, and bounded in number."""

from __future__ import annotations

import logging
import threading

from headgate_sync.envelope import MAX_IDENTIFIER_BYTES, check_int
from headgate_sync.lease import cut_text, storable_text

logger = logging.getLogger(__name__)

DEFAULT_LABEL_SETS = 500
MAX_LABEL_SETS = 10_000
OTHER = "_other"


def clean(value: str) -> str:
    """A value that every exporter can write, at most 255 bytes."""
    return cut_text(storable_text(value), MAX_IDENTIFIER_BYTES)


class LabelSets:
    """The sets of label values that one metric may have.

    Names of queues and kinds come with the jobs, so that their number is anybody's. The
    first `limit` sets are kept; every other becomes one whose values are all `_other`.

    Args:
        metric: for the log line that says so, once.
        limit: 1 to 10,000.

    Raises:
        InvalidRequest: the limit is out of range.
    """

    def __init__(self, metric: str, limit: int) -> None:
        check_int("max_label_sets", limit, 1, MAX_LABEL_SETS)
        self._metric = metric
        self._limit = limit
        self._lock = threading.Lock()  # guards the two fields below
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._full = False

    def of(self, *values: str) -> tuple[str, ...]:
        """The values to use for these."""
        return self._known.get(values) or self._learn(values)

    def _learn(self, values: tuple[str, ...]) -> tuple[str, ...]:
        with self._lock:
            if values in self._known or len(self._known) < self._limit:
                made = tuple(clean(value) for value in values)
                return self._known.setdefault(values, made)
            first, self._full = not self._full, True
        if first:
            logger.warning(
                "metric %s has %d sets of labels; further ones count as %s",
                self._metric,
                self._limit,
                OTHER,
            )
        return (OTHER,) * len(values)
