"""What a batch tells: its items, how it stands and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from headgate_sync.client.waiting import Completion


@frozen(kw_only=True)
class BatchItem:
    """A job of a batch that is over.

    Attributes:
        index: place in the order in which the jobs were added, from 0.
        key: the caller's, or the index as text.
        job_id: of the job; of the holder of its unique key, when it joined one.
        completion: how it ended; its result is read when it is asked for.
    """

    index: int
    key: str
    job_id: str
    completion: Completion[Any]


@frozen(kw_only=True)
class BatchSummary:
    """How a batch went.

    Attributes:
        total: jobs that were sent, those of an earlier run of the script included.
        by_state: how many ended in each state.
        seconds: from the first job sent to the last seen to end.
        rate: ended jobs per second.
    """

    total: int
    by_state: Mapping[str, int]
    seconds: float
    rate: float


@frozen(kw_only=True)
class BatchProgress:
    """A batch at one moment.

    Attributes:
        sent, done, failed: jobs in the store, those of them that are over, and those
            of these that did not succeed.
        buffered: jobs that wait to be sent.
        rate: ended jobs per second since the first was sent.
        left_seconds: until all that were sent are done, at this rate; None without one.
        waiting_for: what keeps the next chunk from being sent; "" is nothing.
        resting: nobody works on the batch for now; the last call before a pause.
    """

    batch_id: str
    sent: int
    done: int
    failed: int
    buffered: int
    rate: float
    left_seconds: float | None
    waiting_for: str
    resting: bool
