"""Why a job runs or waits: the checks of the gate for one job, over what a store read.

Both stores gather `GateFacts`; the answer is made here alone, with the arithmetic that
admits, so that neither two stores nor the gate and its explanation can disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen

from headgate_sync.lifecycle import TERMINAL, State
from headgate_sync.policy import LATE_BEATS, Budget, Ceiling, OnSaturated, is_noisy

MAX_AHEAD = 1_000
"""Rows ahead of a job that are looked at; what comes to more is told as this many."""

UNLIMITED = "unlimited (no such rate class)"
AUTOMATIC = "automatic"

_NEXT = {OnSaturated.DISCARD: "archived", OnSaturated.CANCEL_INCOMING: "cancelled"}


def _read_only(detail: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(detail))


@frozen(kw_only=True)
class AdmissionExplain:
    """What keeps a job from running, or that nothing does.

    Attributes:
        state: of the job.
        admissible: a call with room for it and for what comes before it admits the job,
            or has done so.
        blocked_by: `pending`, `schedule`, `quarantine`, `queue_paused`,
            `sticky_worker`, `rate_class`, `concurrency_limit`; None for a job that is
            admissible or finished.
        detail: the figures of the decision as text; which keys depends on the reason.
        estimated_admission_ms: milliseconds from now, 0 for an admissible job; None
            where time alone does not help or nobody can tell.
    """

    state: str
    admissible: bool
    blocked_by: str | None = None
    detail: Mapping[str, str] = field(factory=dict, converter=_read_only)
    estimated_admission_ms: int | None = None


@frozen(kw_only=True)
class ClassFacts:
    """A rate class as the gate sees it.

    Attributes:
        closed_until_ms: the gate leaves the class out until then, since a job of it did
            not fit; None when it does not, or for good with `closed`.
        budgets: by slot, as stored.
        weight_ahead: of jobs of the class and queue that come first.
        rows_ahead: how many rows were looked at for it.
    """

    paused: bool = False
    paused_until_ms: int | None = None
    pause_reason: str = ""
    closed: bool = False
    closed_until_ms: int | None = None
    budgets: tuple[Budget, ...] = ()
    weight_ahead: int = 0
    rows_ahead: int = 0


@frozen(kw_only=True)
class PartitionFacts:
    """A partition as the gate sees it.

    Attributes:
        position: jobs of the partition that come first, counted up to `MAX_AHEAD`.
        peers, peers_inflight: partitions with work that can be drawn, this one among
            them, and their running jobs.
    """

    deficit: int
    inflight: int
    last_round: int
    quantum_override: int | None
    position: int
    peers: int
    peers_inflight: int


@frozen(kw_only=True)
class WorkerFacts:
    """The worker that a job is pinned to, as its last beat told."""

    heartbeat_at_ms: int
    beat_ms: int


@frozen(kw_only=True)
class GateFacts:
    """What a store read about a job, in one look.

    Attributes:
        weight: what an admission would charge.
        hold: why the gate has set the job aside, if it has.
        crash_count: of the registered fingerprint, or None.
        crash_attempt: of the job.
        queue_paused, sticky_worker_facts, rate_class_facts, partition, ceilings: of an
            available job only.
        sticky_worker_facts: None also for a worker that is not known.
        ceilings: those that count the job, each with the running jobs under it.
    """

    now_ms: int
    state: State
    queue: str
    rate_class: str
    sticky_worker: str
    weight: int
    fingerprint: str
    scheduled_at_ms: int
    claimed_by: str | None
    lease_expires_at_ms: int | None
    crash_attempt: int
    crash_count: int | None
    hold: str | None = None
    queue_paused: bool = False
    sticky_worker_facts: WorkerFacts | None = None
    rate_class_facts: ClassFacts = ClassFacts()
    partition: PartitionFacts | None = None
    ceilings: tuple[tuple[Ceiling, int], ...] = ()


def explained(facts: GateFacts) -> AdmissionExplain:
    """Judge a job in the order of the gate; the first check that fails is the reason.

    Fairness alone never blocks: it decides who comes first.
    """
    if facts.state is State.AVAILABLE:
        for check in _CHECKS:
            found = check(facts)
            if found is not None:
                return found
        return _admissible(facts)
    if facts.state is State.RUNNING:
        return AdmissionExplain(
            state=facts.state.value,
            admissible=True,
            detail={
                "state": facts.state.value,
                "claimed_by": facts.claimed_by or "",
                "lease_expires_at_ms": str(facts.lease_expires_at_ms),
            },
            estimated_admission_ms=0,
        )
    if facts.state is State.QUARANTINED:
        return _quarantined(facts)
    if facts.state in TERMINAL:
        return AdmissionExplain(
            state=facts.state.value,
            admissible=False,
            detail={"state": facts.state.value},
        )
    if facts.state is State.PENDING:
        return _blocked(facts, "pending", {"state": facts.state.value})
    return _blocked(
        facts,
        "schedule",
        {"scheduled_at_ms": str(facts.scheduled_at_ms)},
        max(0, facts.scheduled_at_ms - facts.now_ms),
    )


def _blocked(
    facts: GateFacts,
    reason: str,
    detail: Mapping[str, str],
    estimate_ms: int | None = None,
) -> AdmissionExplain:
    return AdmissionExplain(
        state=facts.state.value,
        admissible=False,
        blocked_by=reason,
        detail=detail,
        estimated_admission_ms=estimate_ms,
    )


def _queue(facts: GateFacts) -> AdmissionExplain | None:
    if not facts.queue_paused:
        return None
    return _blocked(facts, "queue_paused", {"queue": facts.queue})


def _quarantined(facts: GateFacts) -> AdmissionExplain:
    known = facts.crash_count
    count = facts.crash_attempt if known is None else known
    detail = {"fingerprint": facts.fingerprint, "crash_count": str(count)}
    return _blocked(facts, "quarantine", detail)


def _quarantine(facts: GateFacts) -> AdmissionExplain | None:
    if facts.crash_count is None and facts.hold != "quarantine":
        return None
    return _quarantined(facts)


def _sticky(facts: GateFacts) -> AdmissionExplain | None:
    """Whether the worker that the job is pinned to may still come for it."""
    if not facts.sticky_worker:
        return None
    worker = facts.sticky_worker_facts
    seen_ms = None if worker is None else worker.heartbeat_at_ms
    if worker is not None and facts.now_ms - worker.heartbeat_at_ms <= (
        LATE_BEATS * worker.beat_ms
    ):
        return None
    return _blocked(
        facts,
        "sticky_worker",
        {
            "sticky_worker": facts.sticky_worker,
            "last_seen_ms": "" if seen_ms is None else str(seen_ms),
        },
    )


def _class_pause(facts: GateFacts) -> AdmissionExplain | None:
    known = facts.rate_class_facts
    if known.paused:
        detail = {"rate_class": facts.rate_class, "paused": "true"}
        return _blocked(facts, "rate_class", detail)
    until_ms = known.paused_until_ms
    if until_ms is None or until_ms <= facts.now_ms:
        return None
    return _blocked(
        facts,
        "rate_class",
        {
            "rate_class": facts.rate_class,
            "paused_until_ms": str(until_ms),
            "reason": known.pause_reason,
        },
        until_ms - facts.now_ms,
    )


def _oversize(facts: GateFacts) -> AdmissionExplain | None:
    burst = min((b.burst for b in facts.rate_class_facts.budgets), default=None)
    fits = burst is None or facts.weight <= burst
    if fits and facts.hold != "oversize":
        return None
    return _blocked(
        facts,
        "rate_class",
        {
            "rate_class": facts.rate_class,
            "weight": str(facts.weight),
            "burst": "" if burst is None else str(burst),
            "oversize": "true",
        },
    )


def _class_detail(facts: GateFacts, budget: Budget) -> dict[str, str]:
    return {
        "rate_class": facts.rate_class,
        "weight": str(facts.weight),
        "tokens_ahead_in_class": str(facts.rate_class_facts.weight_ahead),
        "tokens_available": str(budget.tokens),
    }


def _tokens(facts: GateFacts) -> AdmissionExplain | None:
    """Whether the class has tokens for the jobs ahead and this one.

    Jobs of the class in other queues may come first too and are not counted, so that an
    estimate is a lower bound.
    """
    known = facts.rate_class_facts
    budgets = [budget.at(facts.now_ms) for budget in known.budgets]
    required = known.weight_ahead + facts.weight
    failing = [
        (budget.wait_ms(required), slot, budget)
        for slot, budget in enumerate(budgets)
        if not budget.fits(required)
    ]
    # The gate closed the class for a job that stood first then; it looks again later.
    closed_ms: int | None = 0
    if known.closed:
        until_ms = known.closed_until_ms
        closed_ms = None if until_ms is None else until_ms - facts.now_ms
    is_closed = closed_ms is None or closed_ms > 0
    if not failing and not is_closed:
        return None
    slowest = _slowest(failing)
    wait_ms = slowest[0] if slowest is not None else 0
    detail = {"rate_class": facts.rate_class, "weight": str(facts.weight)}
    if slowest is not None:
        _, slot, budget = slowest
        detail = _class_detail(facts, budget) | {"slot": str(slot)}
    if is_closed and (slowest is None or _is_later(closed_ms, wait_ms)):
        detail["closed_until_ms"] = str(known.closed_until_ms)
        wait_ms = closed_ms
    return _blocked(facts, "rate_class", detail, wait_ms)


def _is_later(one_ms: int | None, other_ms: int | None) -> bool:
    """Whether one wait is longer than the other; None is for ever."""
    return other_ms is not None and (one_ms is None or one_ms > other_ms)


def _slowest(
    waits: list[tuple[int | None, int, Budget]],
) -> tuple[int | None, int, Budget] | None:
    slowest = None
    for wait in waits:
        if slowest is None or _is_later(wait[0], slowest[0]):
            slowest = wait
    return slowest


def _ceiling_detail(ceiling: Ceiling, running: int) -> dict[str, str]:
    return {
        "ceiling": ceiling.name,
        "scope": ceiling.scope.value,
        "max_concurrent": str(ceiling.max_concurrent),
        "inflight": str(running),
        "on_saturated": ceiling.on_saturated.value,
    }


def _ceiling(facts: GateFacts) -> AdmissionExplain | None:
    """The full ceiling whose strategy decides; of several alike the first by name."""
    full = [
        (ceiling, running)
        for ceiling, running in facts.ceilings
        if running >= ceiling.max_concurrent
        and ceiling.on_saturated is not OnSaturated.CANCEL_RUNNING
    ]
    if not full:
        return None
    ceiling, running = min(full, key=lambda f: (-f[0].on_saturated.strength, f[0].name))
    detail = _ceiling_detail(ceiling, running)
    if ceiling.on_saturated in _NEXT:
        detail["next"] = _NEXT[ceiling.on_saturated]
    return _blocked(facts, "concurrency_limit", detail)


_CHECKS = (_queue, _quarantine, _sticky, _class_pause, _oversize, _tokens, _ceiling)


def _admissible(facts: GateFacts) -> AdmissionExplain:
    partition, known = facts.partition, facts.rate_class_facts
    assert partition is not None
    detail = {
        "position_in_partition": str(partition.position),
        "partition_deficit": str(partition.deficit),
    }
    quantum = partition.quantum_override
    if partition.position >= partition.deficit + (quantum or 1):
        others = partition.peers_inflight - partition.inflight
        noisy = is_noisy(partition.inflight, others, partition.peers)
        detail |= {
            "quantum": AUTOMATIC if quantum is None else str(quantum),
            "last_round": str(partition.last_round),
            "noisy": "true" if noisy else "false",
        }
    if known.budgets:
        budgets = [budget.at(facts.now_ms) for budget in known.budgets]
        detail |= _class_detail(facts, min(budgets, key=lambda budget: budget.tokens))
    elif facts.rate_class:
        detail |= {"rate_class": facts.rate_class, "tokens_available": UNLIMITED}
    if facts.ceilings:
        # The one with the least room tells how soon the next may fill.
        nearest = min(
            facts.ceilings, key=lambda c: (c[0].max_concurrent - c[1], c[0].name)
        )
        detail |= _ceiling_detail(*nearest)
    if facts.sticky_worker:
        detail["sticky_worker"] = facts.sticky_worker
    return AdmissionExplain(
        state=facts.state.value,
        admissible=True,
        detail=detail,
        estimated_admission_ms=0,
    )
