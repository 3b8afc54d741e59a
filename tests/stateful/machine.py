"""Drives one store, or two side by side, and asks the model what had to happen.

Few rules, each over a family of calls: a generated run leaves out some rules
altogether, and with a rule per call most runs would never claim anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headgate_sync.envelope import UNIQUE_REPLACE_ALL, Envelope
from headgate_sync.errors import DuplicateJob, StoreError
from headgate_sync.inspection import Inspect
from headgate_sync.lease import Ack, AdmitRequest, JobResult, LeaseRef
from headgate_sync.lifecycle import STORED, WAITING, Event, Outcome, State, sources_of
from headgate_sync.policy import (
    BudgetConfig,
    Ceiling,
    OnSaturated,
    RateClassConfig,
    Scope,
)
from headgate_sync.store import Store
from tests import observe, strategies
from tests.backends import Backend
from tests.builders import START_MS
from tests.stateful.model import Model

# Upkeep forgets partitions that were idle for a day, which memory has no reason to.
HOUR_MS = 3_600_000

picks = st.integers(0, 10_000)
queues = st.sampled_from(strategies.QUEUES)

BORN = frozenset({State.PENDING, State.SCHEDULED, State.AVAILABLE})
WAYS = {
    State.RETRYABLE: Outcome.RETRY,
    State.COMPLETED: Outcome.SUCCESS,
    State.ARCHIVED: Outcome.SKIP,
    State.UNDECODABLE: Outcome.UNDECODABLE,
}
SWEEPS = {
    "promote_due": "due_instants",
    "reclaim_expired": "lease_instants",
    "evict_retained": "retention_instants",
}
VERBS = {
    Event.OPERATOR_PROMOTE: "promote_job",
    Event.OPERATOR_RETRY: "operator_retry",
    Event.OPERATOR_CANCEL: "operator_cancel",
    Event.OPERATOR_DELETE: "delete_job",
    Event.OPERATOR_RESCHEDULE: "reschedule_job",
    Event.SCHEDULE_PENDING: "schedule_pending",
    Event.EDIT_PAYLOAD: "edit_payload",
    Event.OPERATOR_RELEASE: "quarantine_release",
    Event.QUARANTINE_SWEEP: "quarantine_sweep",
}
VERBS_ORDER = {event: n for n, event in enumerate(VERBS)}
POLICIES = (
    ("set_enqueue_limit", None),
    ("set_enqueue_limit", None),
    ("set_enqueue_limit", 0),
    ("set_enqueue_limit", 6),
    ("set_queue_paused", True),
    ("set_queue_paused", False),
    ("set_queue_paused", False),
    ("set_queue_weight", 1),
    ("set_queue_weight", 3),
    ("set_queue_weight", 1_000_000),
)
GATE_POLICIES = (
    *(
        ("upsert_rate_class", config)
        for config in (
            RateClassConfig(name="c", limit=0, window_ms=60_000, burst=2),
            RateClassConfig(name="c", limit=2, window_ms=1_000, burst=3),
            RateClassConfig(name="c", limit=5, window_ms=700, burst=4),
            RateClassConfig(name="c", limit=2, window_ms=1_000, burst=3, paused=True),
            RateClassConfig(name="c", limit=2, window_ms=1_000, burst=1, further=()),
            RateClassConfig(
                name="c",
                limit=3,
                window_ms=1_000,
                burst=3,
                further=(BudgetConfig(1, 30_000, 5),),
            ),
        )
    ),
    ("delete_rate_class", "c"),
    ("delete_rate_class", "c"),
    ("pause_rate_class", "c", 1_500, "busy"),
    ("resume_rate_class", "c"),
    *(
        ("upsert_concurrency_limit", ceiling)
        for strategy in OnSaturated
        for ceiling in (
            Ceiling(name="part", queue="q", max_concurrent=1, on_saturated=strategy),
            Ceiling(
                name="whole",
                scope=Scope.QUEUE,
                queue="r",
                max_concurrent=2,
                on_saturated=strategy,
            ),
            Ceiling(
                name="class",
                scope=Scope.CLASS,
                rate_class="c",
                max_concurrent=1,
                on_saturated=strategy,
            ),
        )
    ),
    # Raised above what runs, and lowered below it.
    ("upsert_concurrency_limit", Ceiling(name="part", queue="q", max_concurrent=3)),
    ("upsert_concurrency_limit", Ceiling(name="part", queue="q", max_concurrent=2)),
    # What a ceiling counts cannot be changed.
    ("upsert_concurrency_limit", Ceiling(name="part", queue="r", max_concurrent=1)),
    ("delete_concurrency_limit", "part"),
    ("delete_concurrency_limit", "whole"),
    ("delete_concurrency_limit", "class"),
    ("set_partition_quantum", "q", "p", 2),
    ("set_partition_quantum", "q", "p", None),
)
# Without the promoter: a database also wants it now and then for its own upkeep.
DUTIES = ("reclaimer", "retention", "quarantine", "other")


@frozen
class Answer:
    """What a call came to, in a form in which two stores can be compared."""

    value: Any = None
    error: tuple[type, str, tuple[Any, ...]] | None = None

    @property
    def changed_nothing(self) -> bool:
        """Whether it is a refusal; the one that changes the holder of a key is none."""
        if self.error is None:
            return False
        kind, _, args = self.error
        return not (kind is DuplicateJob and args[1])


def answer_of(call: Callable[[], Any]) -> Answer:
    """Make a call and take down how it ended."""
    try:
        return Answer(value=call())
    except StoreError as error:
        return Answer(error=(type(error), str(error), error.args))


@frozen
class Side:
    """A store under test."""

    backend: Backend
    store: Store

    @property
    def inspect(self) -> Inspect:
        assert self.store.inspect is not None
        return self.store.inspect


class StoreMachine(RuleBasedStateMachine):
    """Every call of the port in any order, on all sides and on the model.

    A refused call is compared down to the rows: nothing of it may stay.
    """

    def __init__(self, backends: list[Backend]) -> None:
        super().__init__()
        self._backends = backends
        self.sides: list[Side] = []
        self.model = Model()
        self.refs: list[LeaseRef] = []
        self.acked: list[Ack] = []
        self._claims = 0
        self._journeys = 0

    @initialize(
        crash_limit=st.sampled_from([1, 1, 2, 3]),
        envelopes=st.lists(strategies.small_envelopes(), max_size=6),
        states=st.lists(st.sampled_from(sorted(STORED)), max_size=5),
    )
    def start(
        self, crash_limit: int, envelopes: list[Envelope], states: list[State]
    ) -> None:
        """Begin with a few jobs: a run may be one that never enqueues again."""
        self.sides = [
            Side(backend, backend.make_store(crash_limit=crash_limit))
            for backend in self._backends
        ]
        self.model = Model(crash_limit=crash_limit, now_ms=START_MS)
        for envelope in envelopes:
            self._enqueue([envelope])
        for state in states:
            self._lead_into(state, fingerprint="f1", unique_key=None)

    # How a step is judged

    def on_all(
        self, call: Callable[[Side], Any], expected: Callable[[], Any]
    ) -> Answer:
        """Make a call on every side; each has to end as the model says."""
        wanted = answer_of(expected)
        before = [side.backend.image() for side in self.sides if wanted.changed_nothing]
        answers = [answer_of(lambda side=side: call(side)) for side in self.sides]
        for side, answer in zip(self.sides, answers, strict=True):
            assert answer == wanted, f"{side.backend.name}: {answer} is not {wanted}"
        for side, image in zip(self.sides, before, strict=False):
            assert side.backend.image() == image, f"{side.backend.name} was changed"
        return wanted

    @invariant()
    def the_stores_hold_what_the_model_holds(self) -> None:
        snapshots = [
            observe.without_lapsed(side.backend.snapshot(), self.model.now_ms)
            for side in self.sides
        ]
        for side, snapshot in zip(self.sides, snapshots, strict=True):
            observe.check(snapshot)
            found = self._mistakes(snapshot)
            assert not found, "\n".join(
                f"{side.backend.name}: {text}" for text in found
            )
        for other in snapshots[1:]:
            found = observe.differences(snapshots[0], other)
            assert not found, "\n".join(found)

    def _mistakes(self, held: observe.Snapshot) -> list[str]:
        """What a store holds that the model does not, and the other way round."""
        model = self.model
        rows = {id: job.row() for id, job in model.jobs.items()}
        found = [
            f"job {id} {name} is {held.jobs[id].get(name)!r}, not {value!r}"
            for id, row in rows.items()
            if id in held.jobs
            for name, value in row.items()
            if held.jobs[id].get(name) != value
        ]
        minutes = {
            (*key, what): count
            for key, counted in held.minutes.items()
            for what, count in zip(("arrived", "completed"), counted, strict=True)
            if count
        }
        policies = {queue: policy[:2] for queue, policy in held.queues.items()}
        plain = (False, 1)
        for name, one, other in (
            ("order", list(held.jobs), list(rows)),
            ("throttle", held.throttle, _unlapsed(model.throttle, model.now_ms)),
            ("duties", held.duties, _unlapsed(model.duties, model.now_ms)),
            ("quarantine", held.quarantine, model.quarantine),
            ("enqueue_limits", held.enqueue_limits, model.limits),
            ("minutes", minutes, dict(model.minutes)),
            (
                "budgets",
                held.budgets,
                {
                    (name, slot): budget.at(model.now_ms)
                    for name, budgets in model.budgets.items()
                    for slot, budget in enumerate(budgets)
                },
            ),
            ("rate_classes", held.rate_classes, model.rate_classes()),
            ("ceilings", held.ceilings, model.ceilings),
            (
                "policies",
                {
                    queue: policy
                    for queue, policy in policies.items()
                    if policy != plain
                },
                model.policies(),
            ),
        ):
            if one != other:
                found.append(f"{name}: {one!r}, not {other!r}")
        return found

    def _pick_ref(self, pick: int) -> LeaseRef:
        """A ref of a running job, now and then any that was ever given out."""
        if not self.model.where(State.RUNNING):
            self._admit(worker="w1", queues=("q", "r"), capacity=3, lease_ms=1_000)
        running = [job.lease_ref for job in self.model.where(State.RUNNING)]
        choice = self.refs if pick % 4 == 0 or not running else running
        return choice[pick % len(choice)] if choice else LeaseRef("nobody", "none", 1)

    def _pick_id(self, pick: int, event: Event) -> str:
        """A job that the event can meet, now and then any job or none at all."""
        fitting = [job.id for job in self.model.where(*sources_of(event))]
        if pick % 5 == 0 or not fitting:
            fitting = [*self.model.jobs, "nobody"]
        return fitting[pick % len(fitting)]

    # Intake and admission

    @rule(
        batch=strategies.small_envelopes().map(lambda envelope: [envelope])
        | strategies.batches()
        | strategies.replacing_envelopes().map(lambda envelope: [envelope])
    )
    def enqueue(self, batch: list[Envelope]) -> None:
        self._enqueue(batch)

    def _enqueue(self, batch: list[Envelope]) -> None:
        self.on_all(
            lambda side: side.store.enqueue(batch), lambda: self.model.enqueue(batch)
        )

    @rule(
        worker=st.sampled_from(strategies.WORKERS),
        asked=st.sampled_from([("q",), ("r",), ("q", "r"), ("r", "q", "q")]),
        capacity=st.sampled_from([0, 1, 2, 10]),
        quantum=st.sampled_from([0, 0, 1, 2]),
        lease_ms=st.sampled_from(strategies.LEASES_MS),
    )
    def admit(
        self,
        worker: str,
        asked: tuple[str, ...],
        capacity: int,
        quantum: int,
        lease_ms: int,
    ) -> None:
        self._admit(
            worker=worker,
            queues=asked,
            capacity=capacity,
            lease_ms=lease_ms,
            quantum=quantum,
        )

    def _admit(self, **request_fields: Any) -> list[LeaseRef]:
        self._claims += 1
        # Few lease ids, so that only the fence tells an old claim from a new one.
        request = AdmitRequest(lease_id=f"lease-{self._claims % 3}", **request_fields)
        batches = [side.store.admit(request) for side in self.sides]
        first = batches[0]
        for side, batch in zip(self.sides, batches, strict=True):
            name = side.backend.name
            assert batch.claims == first.claims, f"{name} decided otherwise"
            assert batch.retry_after_ms == first.retry_after_ms, name
            assert dict(batch.refused) == dict(first.refused), name
            assert batch.sent_away == first.sent_away, name
        states = {
            id: row["state"]
            for id, row in self.sides[0].backend.snapshot().jobs.items()
        }
        self.model.take_over(request, first, states)
        refs = [claim.lease_ref for claim in first.claims]
        self.refs += refs
        return refs

    @rule(
        state=st.sampled_from([*sorted(STORED), State.QUARANTINED, State.COMPLETED]),
        key=st.sampled_from([None, None, b"k1"]),
        fingerprint=st.sampled_from(["", "f1", "f2", "f4", "f5", "f6"]),
        retention_ms=st.sampled_from([0, 1_000]),
        siblings=st.lists(st.sampled_from(sorted(WAITING)), max_size=3),
        swept=st.booleans(),
    )
    def lead_a_job_into(
        self,
        state: State,
        key: bytes | None,
        fingerprint: str,
        retention_ms: int,
        siblings: list[State],
        swept: bool,
    ) -> None:
        """Take the short way into a state that random calls seldom reach."""
        for sibling in siblings:
            self._lead_into(sibling, fingerprint=fingerprint, unique_key=None)
        self._lead_into(
            state, fingerprint=fingerprint, unique_key=key, retention_ms=retention_ms
        )
        if swept and state is State.QUARANTINED:
            self.on_all(
                lambda side: side.inspect.quarantine_sweep(100),
                lambda: self.model.quarantine_sweep(100),
            )

    def _lead_into(
        self, state: State, retention_ms: int = 1_000, **fields: Any
    ) -> None:
        self._journeys += 1
        id = f"x{self._journeys}"
        exhausted = state is State.ARCHIVED and self._journeys % 2 == 1
        envelope = Envelope(
            id=id,
            kind="k",
            queue="x",
            sticky_worker=id,
            retention_ms=1_000 if state is State.COMPLETED else retention_ms,
            pending=state is State.PENDING,
            delay_ms=30_000 if state is State.SCHEDULED else 0,
            max_attempts=1 if exhausted else 0,
            **fields,
        )
        self._enqueue([envelope])
        if id not in self.model.jobs or state in BORN:
            return
        refs = self._admit(worker=id, queues=("x",), capacity=1, lease_ms=1)
        if state is State.QUARANTINED:
            self._step_to(self.model.now_ms + 1)
            self.on_all(
                lambda side: side.store.reclaim_expired(100),
                lambda: self.model.reclaim_expired(100),
            )
        elif state is State.CANCELLED:
            self.on_all(
                lambda side: side.inspect.operator_cancel(id),
                lambda: self.model.operator_cancel(id),
            )
        elif state in WAYS and refs:
            delay_ms = 1_000 if state is State.RETRYABLE else None
            outcome = Outcome.RETRY if exhausted else WAYS[state]
            self._settle(Ack(lease=refs[0], outcome=outcome, delay_ms=delay_ms))

    @rule(
        strategy=st.sampled_from(OnSaturated), scope=st.sampled_from(["part", "whole"])
    )
    def meet_a_full_ceiling(self, strategy: OnSaturated, scope: str) -> None:
        """Let a job meet a ceiling of a queue of its own while another one runs."""
        self._journeys += 1
        queue = f"y{self._journeys}"
        ceiling = Ceiling(
            name=queue,
            queue=queue,
            scope=Scope.PARTITION if scope == "part" else Scope.QUEUE,
            max_concurrent=1,
            on_saturated=strategy,
        )
        self._configure("upsert_concurrency_limit", ceiling)
        for n in (1, 2):
            job = Envelope(id=f"{queue}-{n}", kind="k", queue=queue, retention_ms=1)
            self._enqueue([job])
            self._admit(worker="", queues=(queue,), capacity=2, lease_ms=1_000)

    @rule(
        state=st.sampled_from([State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]),
        replace=st.integers(0, UNIQUE_REPLACE_ALL),
    )
    def postpone_a_holder(self, state: State, replace: int) -> None:
        """Debounce a job that holds a key of its own."""
        key = f"postponed-{self._journeys}".encode()
        self._lead_into(state, fingerprint="", unique_key=key)
        late = Envelope(
            id=f"z{self._journeys}",
            kind="k",
            unique_key=key,
            unique_debounce_ms=500,
            unique_replace=replace,
            priority=4,
            max_attempts=3,
        )
        self._enqueue([late])

    # The holder

    @rule(
        data=st.data(),
        way=st.sampled_from(
            ["ack", "ack", "ack", "batch", "batch", "result", "stale steps", "again"]
        ),
        pick=picks,
    )
    def end_an_attempt(self, data: Any, way: str, pick: int) -> None:
        lease = self._pick_ref(pick)
        if way == "batch":
            self._settle_batch(data)
        elif way == "result":
            self._succeed(Ack(lease=lease, outcome=Outcome.SUCCESS, result=_RESULT))
        elif way == "stale steps":
            held = lease in {j.lease_ref for j in self.model.where(State.RUNNING)}
            self._settle(
                Ack(lease=lease, outcome=Outcome.UNDECODABLE, error="other steps"),
                taken_as=Event.CHECKPOINT_STALE if held else None,
            )
        elif way == "again" and self.acked:
            ack = self.acked[-1 - pick % min(3, len(self.acked))]
            if ack.result is None:
                self._settle(ack)
            else:
                self._succeed(ack)
        else:
            self._settle(data.draw(strategies.acks(lease, results=False)))

    def _settle(self, ack: Ack, taken_as: Event | None = None) -> None:
        self.acked.append(ack)
        self.on_all(
            lambda side: side.store.ack(
                ack.lease,
                ack.outcome,
                error=ack.error,
                delay_ms=ack.delay_ms,
                logs=ack.logs,
                latency_ms=ack.latency_ms,
                error_code=ack.error_code,
                reason_code=ack.reason_code,
                actual_weight=ack.actual_weight,
            ),
            lambda: self.model.ack(ack, taken_as=taken_as),
        )

    def _succeed(self, ack: Ack) -> None:
        self.acked.append(ack)
        self.on_all(
            lambda side: side.store.results.ack_success_with_result(
                ack.lease, ack.result
            ),
            lambda: self.model.ack(
                Ack(lease=ack.lease, outcome=Outcome.SUCCESS, result=ack.result)
            ),
        )

    def _settle_batch(self, data: Any) -> None:
        chosen = data.draw(st.lists(picks, max_size=5))
        batch = [data.draw(strategies.acks(self._pick_ref(pick))) for pick in chosen]
        self.acked += batch
        self.on_all(
            lambda side: _told(side.store.ack_batch(batch)),
            lambda: _told(self.model.ack_batch(batch)),
        )

    @rule(
        data=st.data(),
        way=st.sampled_from(["renew", "checkpoint", "output", "progress"]),
        chosen=st.lists(picks, min_size=1, max_size=4),
    )
    def hold(self, data: Any, way: str, chosen: list[int]) -> None:
        refs = [self._pick_ref(pick) for pick in chosen]
        lease, model = refs[0], self.model
        if way == "renew":
            lease_ms = data.draw(st.sampled_from(strategies.LEASES_MS))
            self.on_all(
                lambda side: side.store.renew(refs, lease_ms=lease_ms),
                lambda: model.renew(refs, lease_ms),
            )
        elif way == "checkpoint":
            checkpoint = data.draw(strategies.checkpoints())
            self.on_all(
                lambda side: side.store.checkpoint(lease, checkpoint),
                lambda: model.checkpoint(lease, checkpoint),
            )
        elif way == "output":
            self.on_all(
                lambda side: side.store.outputs.write_job_output(lease, _RESULT),
                lambda: model.output(lease, _RESULT),
            )
        else:
            update = data.draw(strategies.progress_updates())
            self.on_all(
                lambda side: side.store.progress.write_job_progress(lease, update),
                lambda: model.progress(lease, update),
            )

    # Time and sweeps

    def _step_to(self, at_ms: int) -> None:
        self.model.now_ms = at_ms
        for side in self.sides:
            side.backend.clock.freeze_at(at_ms)

    @rule(
        sweep=st.sampled_from(sorted(SWEEPS)),
        step=st.sampled_from(["stay", "just before", "exact", "exact", "1000"]),
        pick=st.integers(0, 3),
        limit=st.sampled_from([1, 2, 100, 100]),
    )
    def sweep(self, sweep: str, step: str, pick: int, limit: int) -> None:
        """Sweep now, at an instant at which there is work, or 1 ms before it."""
        now_ms = self.model.now_ms
        instants = sorted(
            ms
            for ms in getattr(self.model, SWEEPS[sweep])()
            if now_ms < ms < now_ms + HOUR_MS
        )
        if step == "1000":
            self._step_to(now_ms + 1_000)
        elif step != "stay" and instants:
            at_ms = instants[min(pick, len(instants) - 1)]
            self._step_to(at_ms - (step == "just before"))
        self.on_all(
            lambda side: getattr(side.store, sweep)(limit),
            lambda: getattr(self.model, sweep)(limit),
        )

    # The operator

    @rule(
        event=st.sampled_from(sorted(VERBS)),
        pick=picks,
        at_ms=st.sampled_from([0, START_MS, START_MS + 70_000]),
        fingerprint=st.sampled_from(strategies.FINGERPRINTS),
    )
    def steer(self, event: Event, pick: int, at_ms: int, fingerprint: str) -> None:
        if pick % 4:  # mostly an event that some job can meet
            able = [each for each in VERBS if self.model.where(*sources_of(each))]
            event = (
                able[(pick // 4 + VERBS_ORDER[event]) % len(able)] if able else event
            )
        id = self._pick_id(pick, event)
        arguments: tuple[Any, ...] = (id,)
        options: dict[str, Any] = {}
        if event in {Event.OPERATOR_RESCHEDULE, Event.SCHEDULE_PENDING}:
            arguments = (id, at_ms)
        elif event is Event.EDIT_PAYLOAD:
            arguments = (id, b"edited")
            options = {"schema_version": 9, "fingerprint": fingerprint}
        elif event is Event.OPERATOR_RELEASE:
            known = sorted({job.fingerprint for job in self.model.where(*STORED)})
            choice = [fingerprint, *known]
            arguments = (choice[pick % len(choice)],)
        elif event is Event.QUARANTINE_SWEEP:
            arguments = (1 + pick % 3 * 50,)
        self.on_all(
            lambda side: getattr(side.inspect, VERBS[event])(*arguments, **options),
            lambda: getattr(self.model, VERBS[event])(*arguments, **options),
        )

    # What moves no job

    @rule(call=st.sampled_from(GATE_POLICIES))
    def configure_the_gate(self, call: tuple[Any, ...]) -> None:
        self._configure(*call)

    def _configure(self, verb: str, *arguments: Any) -> None:
        self.on_all(
            lambda side: getattr(side.inspect, verb)(*arguments),
            lambda: getattr(self.model, verb)(*arguments),
        )

    @rule(
        way=st.sampled_from(["policy", "duty", "look", "keep house"]),
        queue=queues,
        policy=st.sampled_from(POLICIES),
        pick=picks,
    )
    def look_after(
        self, way: str, queue: str, policy: tuple[str, Any], pick: int
    ) -> None:
        if way == "policy":
            verb, value = policy
            self.on_all(
                lambda side: getattr(side.inspect, verb)(queue, value),
                lambda: getattr(self.model, verb)(queue, value),
            )
        elif way == "duty":
            self._ask_for_a_duty(pick)
        elif way == "look":
            self._look(pick, queue)
        else:
            for side in self.sides:
                if side.store.maintenance is not None:
                    side.store.maintenance.gate_fold(1 if pick % 2 else 1_000)
                    assert side.store.maintenance.gate_reconcile(100) == 0

    def _ask_for_a_duty(self, pick: int) -> None:
        call = ("claim", "claim", "release", "tick")[pick % 4]
        holder = ("h1", "h2")[pick // 4 % 2]
        name = ("promoter", "other")[pick // 8 % 2]
        lease_ms = strategies.LEASES_MS[pick // 16 % 3]

        def ask(store: Any) -> Any:
            if call == "claim":
                return store.claim_duty(name, holder, lease_ms)
            if call == "release":
                return store.release_duty(name, holder)
            return store.duty_tick(holder, DUTIES, lease_ms)

        self.on_all(lambda side: ask(side.store), lambda: ask(self.model))

    def _look(self, pick: int, queue: str) -> None:
        model = self.model
        id = [*model.jobs, "nobody"][pick % (len(model.jobs) + 1)]
        job = model.jobs.get(id)
        self._check_explanations()
        states: dict[str, int] = {}
        for each in model.jobs.values():
            states[each.state.value] = states.get(each.state.value, 0) + 1
        for side in self.sides:
            summary = side.inspect.get_job(id, include_payload=True)
            assert (summary is None) == (job is None)
            if summary is not None and job is not None:
                assert summary.errors == tuple(job.errors)
                assert (summary.state, summary.payload) == (job.state, job.payload)
                assert summary.orphaned == (job.crash_attempt > 0)
            assert dict(side.inspect.counts().counts) == states
            assert side.inspect.unfinished(queue) == model.unfinished(queue)
            assert side.inspect.store_now_ms() == model.now_ms
            assert side.inspect.read_checkpoint(id) == (job.checkpoint if job else None)
            fingerprints = {e.fingerprint for e in side.inspect.quarantine_list()}
            assert fingerprints == set(model.quarantine)

    def _check_explanations(self) -> None:
        """Every job is explained alike, by a reason that the model knows of."""
        for id in [*self.model.jobs, "nobody"]:
            told = [side.inspect.explain_admission(id) for side in self.sides]
            assert all(answer == told[0] for answer in told), f"{id}: {told}"
            reasons = self.model.reasons(id)
            assert (told[0] is None) == (reasons is None), id
            if told[0] is not None and reasons is not None:
                assert told[0].blocked_by in reasons, f"{id}: {told[0]}, not {reasons}"


_RESULT = JobResult(3, b"\x00\xff")


def _unlapsed(held: dict[Any, tuple[str, int]], now_ms: int) -> dict[Any, Any]:
    return {key: value for key, value in held.items() if value[1] > now_ms}


def _told(answers: Any) -> list[tuple[str, str] | None]:
    return [
        None if error is None else (type(error).__name__, str(error))
        for error in answers
    ]
