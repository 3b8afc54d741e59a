"""What is known of a queue's backlog, and the arithmetic behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from headgate_sync.lifecycle import STORED, UNFINISHED, State
from headgate_sync.policy import is_noisy

MINUTE_MS = 60_000
HOUR_MS = 3_600_000

MAX_SAMPLE = 50_000
# What the queues of a page share, and what the partitions of a queue are counted by.
MAX_PAGE_SAMPLE = 10_000
MAX_WAITING_SAMPLE = 20_000
# Every state is counted so far, however long it takes; beyond, nobody waits longer than
# the time for all states together.
FIRST_SHARE = 500
COUNT_TIME_US = 20_000
MAX_QUEUES = 200
MAX_PARTITIONS = 1_000
MAX_HISTORY_BUCKETS = 10_000
MAX_MEMORY_JOBS = 1_000

# The states whose jobs are few come first into a sample: their figures are exact, and
# what is lacking is lacking from the many. The unfinished ones come before the others:
# of the last of them the counter tells how many there are.
SAMPLE_ORDER: tuple[str, ...] = tuple(
    state.value
    for state in (
        State.RUNNING,
        State.RETRYABLE,
        State.PENDING,
        State.SCHEDULED,
        State.AVAILABLE,
        State.QUARANTINED,
        State.ARCHIVED,
        State.UNDECODABLE,
        State.CANCELLED,
        State.COMPLETED,
    )
)
assert set(SAMPLE_ORDER) == STORED
UNFINISHED_ORDER = tuple(state for state in SAMPLE_ORDER if state in UNFINISHED)


@frozen(kw_only=True)
class StateCounts:
    """Jobs by state; states without a job are absent.

    Attributes:
        approximate: at least one figure is a lower bound.
    """

    counts: Mapping[str, int]
    approximate: bool


@frozen(kw_only=True)
class QuietGroups:
    """The backlog without the partitions whose arrivals stand out.

    Attributes:
        arrival_rate, drain_rate: jobs per second.
        time_to_drain_ms: None while the quiet backlog does not shrink.
        oldest_available_ms: how long the oldest quiet job has been available.
        noisy_partitions: how many partitions were left out.
        approximate: there were more than 1,000 partitions or too many jobs to look at.
    """

    arrival_rate: float
    drain_rate: float
    time_to_drain_ms: int | None
    oldest_available_ms: int | None
    noisy_partitions: int
    approximate: bool


@frozen(kw_only=True)
class QueueStats:
    """A queue at a glance.

    Attributes:
        weight: share of admissions.
        unfinished_jobs: jobs in no terminal state, exact, from the counters.
        max_unfinished_jobs: the enqueue limit; 0 is a closed intake, None no limit.
        by_state: from a sample, which the queues of a page share.
        arrival_rate, drain_rate: jobs per second that came and that succeeded, over the
            running minute and the one before.
        time_to_drain_ms: until the backlog is gone at these rates; None while it does
            not shrink.
        oldest_available_ms: since when the job that waited longest may run; None
            without one.
        memory_bytes: stored bytes by the last sample; None before the first.
    """

    queue: str
    weight: int
    paused: bool
    unfinished_jobs: int
    max_unfinished_jobs: int | None
    by_state: StateCounts
    arrival_rate: float
    drain_rate: float
    time_to_drain_ms: int | None
    oldest_available_ms: int | None
    quiet_groups: QuietGroups
    memory_bytes: int | None = None


@frozen(kw_only=True)
class HistoryBucket:
    """What happened to a queue's jobs in a stretch of time.

    Attributes:
        at_ms: start of the stretch, a multiple of its length.
        arrived, completed: jobs enqueued, and jobs that succeeded.
        failed: attempts that ended a job without success.
        retried: attempts that will be repeated.
        admission_rejections: jobs that a full ceiling sent away.
        latency_ms_sum, latency_count: over the attempts whose length was told.
    """

    at_ms: int
    arrived: int
    completed: int
    failed: int = 0
    retried: int = 0
    admission_rejections: int = 0
    latency_ms_sum: int = 0
    latency_count: int = 0


@frozen(kw_only=True)
class PartitionState:
    """A partition of a queue.

    Attributes:
        deficit: credit that the fairness of the gate holds for it.
        waiting: available jobs, among the 20,000 of the queue that came first.
        inflight: running jobs.
        noisy: more than twice as many arrivals as the others on average.
        quantum_override: its own share of a round; None for the usual one.
    """

    partition_key: str
    deficit: int
    waiting: int
    inflight: int
    noisy: bool
    quantum_override: int | None


def window_start_ms(now_ms: int) -> int:
    """Where the window of the rates begins: the whole minute before the running one."""
    return now_ms - now_ms % MINUTE_MS - MINUTE_MS


def rate(jobs: int, now_ms: int) -> float:
    """Jobs per second over the window, by its true length."""
    return jobs * 1000 / (now_ms - window_start_ms(now_ms))


def time_to_drain_ms(unfinished: int, arrived: int, completed: int, now_ms: int) -> (
    int | None
):  # fmt: skip
    """How long a backlog lasts when the rates stay; None while it does not shrink.

    Whole numbers throughout, so that every store rounds alike.
    """
    if unfinished == 0:
        return 0
    if completed <= arrived:
        return None
    return unfinished * (now_ms - window_start_ms(now_ms)) // (completed - arrived)


def noisy_partitions(arrived: Mapping[str, int]) -> frozenset[str]:
    """The noisy ones among the first 1,000 partitions, by key, that had any traffic."""
    seen = sorted(arrived, key=str.encode)[:MAX_PARTITIONS]
    total = sum(arrived[key] for key in seen)
    return frozenset(
        key for key in seen if is_noisy(arrived[key], total - arrived[key], len(seen))
    )


def sampled(counts: Mapping[str, int], most: int) -> StateCounts:
    """What a sample of `most` jobs shows of true counts.

    Each state is counted up to a first share, then to a tenth of the sample, then in
    turn as far as the sample goes. Once one alone of the unfinished states is not
    counted to its end, its figure follows from the counter of unfinished jobs.
    """
    share = most // len(SAMPLE_ORDER)
    limits = dict.fromkeys(SAMPLE_ORDER, min(FIRST_SHARE, share))
    jobs = {state: counts.get(state, 0) for state in SAMPLE_ORDER}
    left = most - sum(min(jobs[state], limits[state]) for state in SAMPLE_ORDER)
    exact: set[str] = set()
    for target in (share, most):
        for state in SAMPLE_ORDER:
            open_ = [s for s in UNFINISHED_ORDER if jobs[s] >= limits[s]]
            if len(open_) == 1 and not exact:
                exact = set(open_)
                left += limits[open_[0]]
            if state in exact or jobs[state] < limits[state]:
                continue
            before = limits[state]
            limits[state] += min(left, target - before if target == share else left)
            left -= min(jobs[state], limits[state]) - before
    return state_counts(
        (s, jobs[s], False)
        if s in exact
        else (s, min(jobs[s], limits[s]), jobs[s] >= limits[s])
        for s in SAMPLE_ORDER
    )


def state_counts(rows: Iterable[tuple[str, int, bool]]) -> StateCounts:
    """Counts by state, each with whether it may be more."""
    found = [(state, jobs, at_least) for state, jobs, at_least in rows if jobs]
    return StateCounts(
        counts={state: jobs for state, jobs, _ in found},
        approximate=any(at_least for *_, at_least in found),
    )


def count_arguments(most: int, queues: int = 1) -> dict[str, object]:
    """What the database is told about a sample for each of some queues."""
    return {
        "states": list(SAMPLE_ORDER),
        "unfinished": list(UNFINISHED_ORDER),
        "max_first": FIRST_SHARE,
        "max_sample": most,
        "time_us": COUNT_TIME_US // queues,
    }


def sample_of_page(queues: int) -> int:
    """How many jobs of each queue of a page of so many are looked at."""
    return MAX_SAMPLE if queues < 2 else MAX_PAGE_SAMPLE // queues


def sure_below(queues: int) -> int:
    """A count below this is exact on a page of so many queues, whatever else is not."""
    return min(FIRST_SHARE, sample_of_page(queues) // len(SAMPLE_ORDER))
