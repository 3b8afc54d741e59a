"""One handler run alone, also from the middle of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import evolve

from headgate_sync.app import Headgate
from headgate_sync.client.client import Client
from headgate_sync.codec import JSON, Codec, check_codec
from headgate_sync.envelope import Envelope, check_int
from headgate_sync.errors import InvalidRequest
from headgate_sync.extensions import Extensions
from headgate_sync.lease import Checkpoint, step_set_hash
from headgate_sync.memory.store import MemStore
from headgate_sync.registry import Registry
from headgate_sync.steps import NO_PLAN, StepPlan
from headgate_sync.testing.clock import FakeClock
from headgate_sync.testing.running import Desk, Performed
from headgate_sync.testing.target import Target
from headgate_sync.validation import listed
from headgate_sync.worker import WorkerConfig


def run_handler(
    registry: Any,
    job: Any,
    *,
    attempt: int = 0,
    checkpoint: Checkpoint | None = None,
    data: Iterable[object] | Extensions = (),
    clock: FakeClock | None = None,
    config: WorkerConfig | None = None,
    reraise: bool = False,
) -> Performed:
    """Run the handler of a job that is in no store.

    The job lives in a `MemStore` for the time of the call: it is admitted, run and
    settled like any other, whatever its delay, its unique key and its pinned worker.

    Args:
        registry: a `Registry`, or a `Headgate`, whose client is then behind
            `ctx.client`; with a `Registry`, jobs that the handler enqueues through it
            are gone after the call.
        job: `task.job(...)`, an instance of a payload class, or an `Envelope`.
        attempt: failures before this attempt.
        checkpoint: where an earlier attempt stopped; see `resume_after`.
        data: what handlers get by type, beside the settings' `extensions`; an
            `Extensions` stands in the place of those.
        clock: the time of the attempt; a handler that steps it meets its timeout.
        config: settings of the worker that is played, but for its queues; None is what
            a facade's `configure_worker` says.
        reraise: raise the exception that failed the attempt.

    Raises:
        InvalidRequest: the job cannot be sent, or an argument does not fit it.
    """
    facade = registry if isinstance(registry, Headgate) else None
    known: Any = registry if facade is None else facade.registry
    if not isinstance(known, Registry):
        raise InvalidRequest(
            f"expected a Registry or a Headgate, got {type(registry).__name__}"
        )
    store = MemStore()
    if clock is not None:
        clock.drive(store)
    inner = Client(store, registry=known)
    envelope = _ready(inner.envelope(job))
    check_int("attempt", attempt, 0, envelope.max_attempts - 1)
    if config is None:
        config = WorkerConfig(**({} if facade is None else facade.worker_settings))
    settings = evolve(
        config,
        queues=(envelope.queue,),
        worker_id=envelope.sticky_worker or config.worker_id,
        extensions=_with_data(config.extensions, data),
    )
    binding = known.resolve(envelope.kind)
    if checkpoint is not None:
        plan = NO_PLAN if binding is None else binding.steps
        checkpoint = _as_stored(checkpoint, plan)
    store.enqueue([envelope])
    desk = Desk(
        Target(store, known, settings, inner),
        1,
        clock=clock,
        producer=None if facade is None else lambda: facade.client,
    )
    (live,) = desk.ask()
    counted = evolve(live.claim.envelope, attempt=attempt)
    live.claim = evolve(
        live.claim,
        envelope=counted,
        checkpoint=live.claim.checkpoint if checkpoint is None else checkpoint,
    )
    (performed,) = desk.work([live], reraise=reraise)
    return performed


def resume_after(*steps: str) -> Checkpoint:
    """The checkpoint of an attempt that completed these steps, in this order.

    Of a task that declares its steps, the last one is enough: the declared ones before
    it count as completed too.
    """
    if not steps:
        raise InvalidRequest("resume_after needs the name of a step")
    return Checkpoint(completed_steps=steps)


def resume_at_cursor(
    step: str, value: object, *, after: Iterable[str] = (), codec: Codec = JSON
) -> Checkpoint:
    """The checkpoint of an attempt that stopped inside of a step, at a position.

    Args:
        step: the name of a step with a position.
        value: the position that was saved last.
        after: the steps completed before; of a task that declares its steps, empty is
            all of them before `step`.
        codec: as the handler gives it to `iterate` or `step_cursor`.
    """
    check_codec("codec", codec)
    return Checkpoint(
        completed_steps=listed("after", after),
        in_progress_step=step,
        cursor_step=step,
        cursor=codec.encode(value),
    )


def _as_stored(checkpoint: Checkpoint, plan: StepPlan) -> Checkpoint:
    """The checkpoint as the present code would have written it; else it stays."""
    if checkpoint.step_set_hash:
        return checkpoint
    completed = checkpoint.completed_steps
    begun = checkpoint.in_progress_step
    for name in (*completed, *(() if begun is None else (begun,))):
        plan.check_declared(name)
    if plan.names and len(completed) == 1:
        completed = plan.names[: plan.names.index(completed[0]) + 1]
    elif plan.names and not completed and begun is not None:
        completed = plan.names[: plan.names.index(begun)]
    return evolve(
        checkpoint,
        completed_steps=completed,
        schema_version=checkpoint.schema_version or plan.version,
        step_set_hash=plan.hash if plan.names else step_set_hash(completed),
    )


def _ready(envelope: Envelope) -> Envelope:
    """The job without what would keep it from running now."""
    return evolve(
        envelope,
        pending=False,
        delay_ms=0,
        scheduled_at_ms=0,
        unique_key=None,
        unique_window_ms=0,
        unique_replace=0,
        unique_debounce_ms=0,
    )


def _with_data(own: Extensions, data: Iterable[object] | Extensions) -> Extensions:
    if isinstance(data, Extensions):
        return data
    joined = own.copy()
    for value in data:
        joined.set(value)
    return joined
