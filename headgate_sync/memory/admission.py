"""The gate of MemStore: one admission over the rows, decided as the database does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, merge
from operator import attrgetter
from typing import Any

from headgate_sync.lease import (
    AdmissionBatch,
    AdmissionUnit,
    AdmitRequest,
    Claim,
    SentAway,
)
from headgate_sync.lifecycle import Event
from headgate_sync.memory.lanes import (
    Desk,
    Group,
    GroupKey,
    RateClass,
    Runner,
    Share,
    place,
)
from headgate_sync.memory.rows import claim_of
from headgate_sync.memory.state import (
    HOLD_OVERSIZE,
    HOLD_QUARANTINE,
    Job,
    Lane,
    LeaseStamp,
    Partition,
    Queue,
    Rows,
)
from headgate_sync.policy import (
    HOLD_MAX,
    WINDOW_DRAWS,
    Budget,
    BudgetConfig,
    Ceiling,
    OnSaturated,
    Scope,
    Service,
    automatic_quantum,
    is_noisy,
    reweighted,
    settled_deficit,
    window_size,
    with_lag,
)

RATE_CLASS = "rate_class"
CONCURRENCY_LIMIT = "concurrency_limit"
FAIRNESS = "fairness"
QUARANTINE = "quarantine"
_ENDS = {
    OnSaturated.DISCARD: Event.SATURATION_DISCARD,
    OnSaturated.CANCEL_INCOMING: Event.SATURATION_CANCEL,
}


class Gate:
    """Decides who may run, and keeps the policies it reads.

    The caller holds the lock of the rows. Occupancy is kept by the rows.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.classes: dict[str, RateClass] = {}
        self.ceilings: dict[str, Ceiling] = {}
        # (queue, class) -> when it opens again by itself; None is never.
        self.closed: dict[tuple[str, str], int | None] = {}
        self.groups: dict[str, dict[GroupKey, Group]] = {}
        self._siblings: dict[Partition, list[Lane]] = {}
        rows.lane_filled = self._lane_filled

    def _lane_filled(self, lane: Lane) -> None:
        groups = self.groups.setdefault(lane.queue.name, {})
        key = (lane.rate_class, lane.sticky_worker)
        if key not in groups:
            groups[key] = Group()
        groups[key].list(lane)
        siblings = self._siblings.setdefault(lane.partition, [])
        if lane not in siblings:
            siblings.append(lane)

    def groups_of(self, queue: Queue) -> list[tuple[GroupKey, Group]]:
        """The groups of a queue, by rate class and sticky worker."""
        return list(self.groups.get(queue.name, {}).items())

    def open_due(self, now_ms: int) -> None:
        """Reopen the classes whose instant has come."""
        for key, open_at_ms in list(self.closed.items()):
            if open_at_ms is not None and open_at_ms <= now_ms:
                del self.closed[key]

    def has_work(self, partition: Partition) -> bool:
        """Whether the partition has an available job that is not held."""
        return any(len(lane.ready) for lane in self._siblings.get(partition, ()))

    def admit(self, request: AdmitRequest) -> AdmissionBatch:
        """Decide, claim and lease; see `Store.admit`."""
        if request.capacity == 0 or not request.queues:
            return AdmissionBatch()
        return Call(self, request).run()

    # Policy

    def set_queue_weight(self, queue: str, weight: int) -> None:
        """Set the queue's share of admissions; its place in the order is kept."""
        row = self.rows.queue(queue)
        row.dispatch_count = reweighted(row.dispatch_count, row.weight, weight)
        row.weight = weight

    def settle(self, job: Job, actual_weight: int, now_ms: int) -> None:
        """Correct what the admission of a running job took from its class."""
        row = self.classes.get(job.rate_class)
        if not job.rate_charge or row is None or not row.budgets:
            return
        row.budgets = [
            budget.at(now_ms).settled(job.rate_charge, actual_weight)
            for budget in row.budgets
        ]
        if actual_weight < job.rate_charge:
            self.reopen(job.rate_class)
        job.rate_charge = 0

    def pause(self, name: str, delay_ms: int, reason: str = "") -> None:
        """Let nothing of the class pass for a time; a longer pause is kept."""
        row = self.classes.setdefault(name, RateClass())
        until_ms = self.rows.clock.now_ms() + delay_ms
        if row.paused_until_ms is None or until_ms > row.paused_until_ms:
            row.paused_until_ms = until_ms
            row.pause_reason = reason

    def resume_rate_class(self, name: str) -> bool:
        """End a pause that was to last until an instant; false for an unknown class."""
        row = self.classes.get(name)
        if row is None:
            return False
        row.paused_until_ms, row.pause_reason = None, ""
        self.reopen(name)
        return True

    def upsert_rate_class(
        self,
        name: str,
        limits: Sequence[BudgetConfig],
        *,
        paused: bool,
        replace_all: bool,
    ) -> None:
        """Configure a class; budgets that exist keep what they hold, but never grow.

        Args:
            name: not empty.
            limits: of slot 0 and up.
            paused: nothing passes and nothing refills while it is set.
            replace_all: further slots are removed; otherwise they stay.
        """
        now_ms = self.rows.clock.now_ms()
        row = self.classes.setdefault(name, RateClass())
        kept = len(limits) if replace_all else None
        budgets = [budget.at(now_ms) for budget in row.budgets[:kept]]
        for slot, limit in enumerate(limits):
            if slot < len(budgets):
                budgets[slot] = budgets[slot].resized(limit)
            else:
                budgets.append(limit.full(now_ms))
        row.paused = paused
        row.budgets = [budget.steered(now_ms, paused=paused) for budget in budgets]
        self.reopen(name)
        self._unhold_oversize(name)

    def delete_rate_class(self, name: str) -> bool:
        """Remove a class: jobs that name it become unlimited."""
        if self.classes.pop(name, None) is None:
            return False
        if any(ceiling.rate_class == name for ceiling in self.ceilings.values()):
            self.classes[name] = RateClass()
        self.reopen(name)
        self._unhold_oversize(name)
        return True

    def _unhold_oversize(self, name: str) -> None:
        for job in list(self.rows.held.values()):
            if job.gate_hold == HOLD_OVERSIZE and job.rate_class == name:
                self.rows.unhold(job)

    def upsert_ceiling(self, ceiling: Ceiling) -> bool:
        """Create or change a ceiling; false when the stored one counts other jobs."""
        stored = self.ceilings.get(ceiling.name, ceiling)
        if stored.key != ceiling.key:
            return False
        if ceiling.rate_class:
            self.classes.setdefault(ceiling.rate_class, RateClass())
        self.ceilings[ceiling.name] = ceiling
        return True

    def delete_ceiling(self, name: str) -> bool:
        """Remove a ceiling; false when there is none of that name."""
        return self.ceilings.pop(name, None) is not None

    def set_partition_quantum(
        self, queue: str, partition_key: str, quantum: int | None
    ) -> None:
        """Give a partition a share of its own, or take it away."""
        partition = self.rows.partition(self.rows.queue(queue), partition_key)
        partition.quantum_override = quantum

    def forget_queue(self, queue: str) -> None:
        """Drop what is kept of a queue that has no jobs."""
        known = self.rows.queues.get(queue)
        for partition in () if known is None else known.partitions.values():
            self._siblings.pop(partition, None)
        self.groups.pop(queue, None)
        for key in [key for key in self.closed if key[0] == queue]:
            del self.closed[key]

    def reopen(self, name: str) -> None:
        """Let the next admission of every queue look at the class again."""
        for key in [key for key in self.closed if key[1] == name]:
            del self.closed[key]

    def close(self, queues: Sequence[Queue], name: str, open_at_ms: int | None) -> None:
        """Leave a class out of the windows of these queues until an instant."""
        for queue in queues:
            known = self.groups.get(queue.name, {})
            if any(key[0] == name for key in known):
                self.closed.setdefault((queue.name, name), open_at_ms)

    def snapshot(self) -> dict[str, Any]:
        """Copies of the policies, as comparable values."""
        return {
            "rate_classes": {
                name: (row.paused, row.paused_until_ms, row.pause_reason)
                for name, row in self.classes.items()
            },
            "budgets": {
                (name, slot): budget
                for name, row in self.classes.items()
                for slot, budget in enumerate(row.budgets)
            },
            "ceilings": dict(self.ceilings),
        }


class Call:
    """One admission."""

    def __init__(self, gate: Gate, request: AdmitRequest) -> None:
        self.gate = gate
        self.rows = gate.rows
        self.request = request
        self.now_ms = gate.rows.clock.now_ms()
        known = [gate.rows.queues.get(name) for name in request.queues]
        self.queues = [q for q in known if q is not None and not q.paused]
        lagged = with_lag([Service(q.dispatch_count, q.weight) for q in self.queues])
        self.desks = [
            Desk(queue, decisions, request.quantum)
            for queue, decisions in zip(self.queues, lagged, strict=True)
        ]
        self.shares: dict[Partition, Share] = {}
        self.window = window_size(request.capacity, request.quantum)
        self.stamp = LeaseStamp(
            lease_id=request.lease_id,
            worker=request.worker,
            expires_at_ms=self.now_ms + request.lease_ms,
        )
        self.claims: list[Claim] = []
        self.decided = 0
        self.passed = 0
        self.closed_classes: set[str] = set()
        self.blocked = False
        self.unlimited = False
        self.refused: Counter[str] = Counter()
        self.sent_away: Counter[tuple[str, str]] = Counter()
        self.displaced: Counter[Partition] = Counter()
        # Ceilings of queues and classes under which nobody is left to displace.
        self.settled: set[str] = set()

    def run(self) -> AdmissionBatch:
        """Decide until the capacity is used or no candidate is left."""
        self.gate.open_due(self.now_ms)
        for desk in self.desks:
            self._draw(desk, self.window)
            self._measure(desk)
            self._offer_all(desk)
        draws = self._decide(1)
        if self.request.quantum == 0 and self.decided < self.request.capacity:
            # Automatic fairness leaves no slot idle: once more, without shares.
            self.unlimited = True
            for share in self.shares.values():
                share.closed = False
            self._decide(draws)
        self._account()
        return AdmissionBatch(
            tuple(AdmissionUnit((claim,)) for claim in self.claims),
            self._retry_after_ms(),
            dict(self.refused),
            tuple(
                SentAway(queue, policy, count)
                for (queue, policy), count in sorted(self.sent_away.items())
            ),
        )

    # The window

    def _draw(self, desk: Desk, lanes: int) -> list[Runner]:
        """Add up to so many open lanes that the call has not seen yet."""
        drawn: list[Runner] = []
        if lanes <= 0 or self._is_queue_full(desk.queue):
            return drawn
        groups = [
            group
            for (rate_class, sticky), group in self.gate.groups_of(desk.queue)
            if sticky in ("", self.request.worker) and self._is_open(desk, rate_class)
        ]
        for lane in merge(*groups, key=place):
            if len(drawn) == lanes:
                break
            partition = lane.partition
            share = self.shares.get(partition)
            # A slot that a displacement freed is seen by the window it happened in.
            freed = self.displaced[partition] if share is None else 0
            if lane in desk.runners or self._is_full(lane, freed):
                continue
            if share is None:
                override = partition.quantum_override
                quantum = desk.quantum if override is None else override
                share = Share(partition, partition.last_round, quantum)
                self.shares[partition] = share
            runner = desk.runners[lane] = Runner(lane, share)
            drawn.append(runner)
        return drawn

    def _is_queue_full(self, queue: Queue) -> bool:
        """Whether the whole queue waits for a ceiling."""
        return any(
            ceiling.scope is Scope.QUEUE
            and self._on_saturated(ceiling) is OnSaturated.QUEUE
            and ceiling.queue == queue.name
            and queue.inflight >= ceiling.max_concurrent
            for ceiling in self.gate.ceilings.values()
        )

    def _is_open(self, desk: Desk, rate_class: str) -> bool:
        """Whether a rate class may be drawn in a queue."""
        if (desk.queue.name, rate_class) in self.gate.closed:
            return False
        row = self.gate.classes.get(rate_class)
        if row is not None and row.is_paused(self.now_ms):
            until_ms = None if row.paused else row.paused_until_ms
            self.gate.close([desk.queue], rate_class, until_ms)
            return False
        return True

    def _is_full(self, lane: Lane, freed: int = 0, *scopes: Scope) -> bool:
        """Whether a ceiling that lets jobs wait (of these scopes) bars the lane.

        Slots of its partition that were freed in this call can be left out of account.
        """
        return bool(self.gate.ceilings) and any(
            self._on_saturated(ceiling) is OnSaturated.QUEUE
            and (not scopes or ceiling.scope in scopes)
            for ceiling in self._full_ceilings(lane, freed)
        )

    def _measure(self, desk: Desk) -> None:
        """Take the shares of automatic fairness from the first window of a queue."""
        if self.request.quantum:
            return
        shares = list(dict.fromkeys(runner.share for runner in desk.runners.values()))
        running = sum(share.partition.inflight for share in shares)
        desk.quantum = automatic_quantum(self.request.capacity, len(shares))
        for share in shares:
            if share.partition.quantum_override is None:
                share.quantum = desk.quantum
            inflight = share.partition.inflight
            share.noisy = is_noisy(inflight, running - inflight, len(shares))

    def _offer_all(self, desk: Desk) -> None:
        desk.heap.clear()
        for runner in desk.runners.values():
            if not runner.closed:
                desk.offer(runner)

    # The decisions

    def _decide(self, draws: int) -> int:
        """Decide on candidates, drawing further windows while more gets blocked.

        Returns:
            The number of windows drawn by now.
        """
        if self.unlimited:
            for desk in self.desks:
                self._offer_all(desk)
        while True:
            self._decide_in_order()
            if self.decided >= self.request.capacity or not self.blocked:
                return draws
            if draws >= WINDOW_DRAWS:
                return draws
            self.blocked = False
            draws += 1
            for desk in self.desks:
                for runner in self._draw(desk, self.window - self._open_lanes(desk)):
                    desk.offer(runner)

    def _open_lanes(self, desk: Desk) -> int:
        """Lanes of the window that still belong to it."""
        return sum(
            len(runner.lane.ready) > 0
            and not runner.full
            and runner.lane.rate_class not in self.closed_classes
            for runner in desk.runners.values()
        )

    def _decide_in_order(self) -> None:
        """One pass: the queue with the least service first, its candidates in order."""
        while self.decided < self.request.capacity:
            desk = None
            for other in self.desks:
                if other.heap and (
                    desk is None or other.service.is_behind(desk.service)
                ):
                    desk = other
            if desk is None:
                return
            *_, runner, job = heappop(desk.heap)
            if runner.closed or runner.share.closed:
                continue
            if runner.lane.rate_class in self.closed_classes:
                continue
            if self._is_settled(desk, runner, job):
                desk.offer(runner)

    def _is_settled(self, desk: Desk, runner: Runner, job: Job) -> bool:
        """Decide on a candidate; false when its lane, partition or class closed."""
        reason = self._hold_reason(job)
        if reason is not None:
            return self._pass_over(runner, job, reason)
        if not self.unlimited and runner.share.is_used_up:
            runner.share.closed = True
            self.refused[FAIRNESS] += 1
            return False
        weight = job.effective_weight
        budgets = self._budgets(job.rate_class)
        waits = [
            budget.wait_ms(weight) for budget in budgets if not budget.fits(weight)
        ]
        if waits:
            self._close_class(job.rate_class, waits)
            return False
        action = self._action(job.lane)
        if action is OnSaturated.QUEUE or (
            action is OnSaturated.CANCEL_RUNNING and not self._displace(job.lane)
        ):
            runner.closed = runner.full = self.blocked = True
            self.refused[CONCURRENCY_LIMIT] += 1
            return False
        if action in _ENDS:
            self.rows.move(job, _ENDS[action], self.now_ms)
            self.sent_away[desk.queue.name, action.value] += 1
        else:
            self._claim(job, budgets, weight)
        self.decided += 1
        runner.served = True
        runner.share.taken += 1
        desk.decisions += 1
        desk.served += 1
        return True

    def _hold_reason(self, job: Job) -> str | None:
        """Why a job cannot pass, however long it waits."""
        if job.fingerprint in self.rows.quarantine:
            return HOLD_QUARANTINE
        row = self.gate.classes.get(job.rate_class)
        if row is not None:
            weight = job.effective_weight
            if any(weight > budget.burst for budget in row.budgets):
                return HOLD_OVERSIZE
        return None

    def _pass_over(self, runner: Runner, job: Job, reason: str) -> bool:
        if self.passed >= HOLD_MAX:
            runner.closed = True
            return False
        self.passed += 1
        self.blocked = True  # what it hid may stand behind the window
        self.rows.hold(job, reason)
        self.refused[QUARANTINE if reason == HOLD_QUARANTINE else RATE_CLASS] += 1
        return True

    def _budgets(self, rate_class: str) -> list[Budget]:
        row = self.gate.classes.get(rate_class)
        if row is None:
            return []
        return [budget.at(self.now_ms) for budget in row.budgets]

    def _close_class(self, rate_class: str, waits: Sequence[int | None]) -> None:
        """Close a class at the first job that does not fit: none may overtake it."""
        self.closed_classes.add(rate_class)
        self.blocked = True
        self.refused[RATE_CLASS] += 1
        longest = None
        known = [wait for wait in waits if wait is not None]
        if len(known) == len(waits):
            longest = self.now_ms + max(known)
        self.gate.close(self.queues, rate_class, longest)

    def _claim(self, job: Job, budgets: list[Budget], weight: int) -> None:
        if budgets:
            row = self.gate.classes[job.rate_class]
            row.budgets = [budget.charged(weight) for budget in budgets]
        charge = weight if budgets else 0
        self.rows.move(
            job, Event.ADMITTED, self.now_ms, stamp=self.stamp, rate_charge=charge
        )
        self.claims.append(claim_of(job))

    # Ceilings

    def _full_ceilings(self, lane: Lane, freed: int = 0) -> Iterator[Ceiling]:
        for ceiling in self.gate.ceilings.values():
            if ceiling.scope is Scope.CLASS:
                applies = ceiling.rate_class == lane.rate_class
                running = self.rows.class_inflight.get(lane.rate_class, 0)
            else:
                applies = ceiling.queue == lane.queue.name
                running = lane.queue.inflight
                if ceiling.scope is Scope.PARTITION:
                    running = lane.partition.inflight + freed
            if applies and running >= ceiling.max_concurrent:
                yield ceiling

    def _action(self, lane: Lane) -> OnSaturated | None:
        """What the strongest full ceiling asks for."""
        if not self.gate.ceilings:
            return None
        asked = [self._on_saturated(ceiling) for ceiling in self._full_ceilings(lane)]
        return max(asked, key=lambda action: action.strength, default=None)

    def _on_saturated(self, ceiling: Ceiling) -> OnSaturated:
        """The strategy of a ceiling; jobs wait where nobody is left to displace."""
        if ceiling.name in self.settled:
            return OnSaturated.QUEUE
        return ceiling.on_saturated

    def _displace(self, lane: Lane) -> bool:
        """Cancel the oldest running job under each full ceiling, or none at all."""
        victims: list[Job] = []
        for ceiling in sorted(self._full_ceilings(lane), key=attrgetter("breadth")):
            under = [
                job
                for job in self.rows.leases.jobs()
                if _counts(ceiling, lane, job) and job.lease_id is not None
            ]
            relieved = sum(_counts(ceiling, lane, job) for job in victims)
            if len(under) - relieved < ceiling.max_concurrent:
                continue
            claimed = {claim.envelope.id for claim in self.claims}
            oldest = min(
                (job for job in under if job.id not in claimed and job not in victims),
                key=lambda job: (job.claimed_at_ms, job.seq),
                default=None,
            )
            if oldest is None:
                if ceiling.scope is not Scope.PARTITION and not relieved:
                    self.settled.add(ceiling.name)
                return False
            victims.append(oldest)
        for job in victims:
            self.displaced[job.lane.partition] += 1
            self.rows.move(job, Event.DISPLACED, self.now_ms)
        return True

    # Accounting

    def _account(self) -> None:
        for desk in self.desks:
            if desk.served:
                desk.queue.dispatch_count = desk.decisions
                desk.queue.round += 1
            for runner in desk.runners.values():
                if runner.served:
                    runner.lane.served_round = desk.queue.round
        for partition, share in self.shares.items():
            partition.deficit = settled_deficit(
                partition.deficit,
                share.quantum,
                share.taken,
                emptied=not self.gate.has_work(partition),
            )
            if share.taken:
                partition.last_round = partition.queue.round

    def _is_barred(self, lane: Lane) -> bool:
        """Whether the lane's partition was full all through the call."""
        return self._is_full(lane, self.displaced[lane.partition], Scope.PARTITION)

    def _opens_at_ms(self, queue: Queue, rate_class: str) -> int | None:
        """When a closed class opens by itself; None for an open one, or never."""
        open_at_ms = self.gate.closed.get((queue.name, rate_class))
        row = self.gate.classes.get(rate_class)
        if open_at_ms is None or row is None:
            return open_at_ms
        return None if row.paused else max(open_at_ms, row.paused_until_ms or 0)

    def _retry_after_ms(self) -> int | None:
        """Until the first class reopens whose waiting work this worker could take."""
        soonest = None
        for queue in self.queues:
            for (rate_class, sticky), group in self.gate.groups_of(queue):
                open_at_ms = self._opens_at_ms(queue, rate_class)
                if open_at_ms is None or sticky not in ("", self.request.worker):
                    continue
                if soonest is not None and open_at_ms >= soonest:
                    continue
                if any(not self._is_barred(lane) for lane in group):
                    soonest = open_at_ms
        return None if soonest is None else max(0, soonest - self.now_ms)


def _counts(ceiling: Ceiling, lane: Lane, job: Job) -> bool:
    """Whether a running job takes a slot of the ceiling that the lane meets."""
    if ceiling.scope is Scope.CLASS:
        return job.rate_class == lane.rate_class
    if ceiling.scope is Scope.QUEUE:
        return job.lane.queue is lane.queue
    return job.lane.partition is lane.partition
