"""What the tests of steps share: jobs of one kind, and how they come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from headgate_sync.context import JobContext
from headgate_sync.errors import InvalidRequest
from headgate_sync.lease import Checkpoint, step_set_hash
from headgate_sync.registry import Registry
from tests.builders import claim_one, envelope, job, steer
from tests.worker.rig import Bench


def put(store: Any, id: str = "a", **fields: Any) -> None:
    store.enqueue([envelope(id, **{"kind": "k", "payload": b"{}", **fields})])


def running(store: Any, handler: Callable[..., Any], **options: Any) -> Bench:
    """A bench with one task of kind `k`, whose failures come back after 1 ms."""
    registry = Registry()
    made: Any = registry.task("k", **{"retry": lambda info: "1ms", **options})(handler)
    if made.version > 1:  # the payload is the same in all versions
        registry.upcaster(made, 1)(lambda data: {})
    return Bench(store, registry)


def come_back(store: Any, clock: Any) -> None:
    """Let what waits for its backoff become available."""
    clock.advance_ms(10_000)
    store.promote_due(10)


def run_twice(store: Any, clock: Any, handler: Callable[..., Any]) -> None:
    """Run a job whose first attempt fails, and its second attempt."""
    put(store)
    bench = running(store, handler)
    bench.run_next()
    come_back(store, clock)
    bench.run_next()


def saved(store: Any, id: str = "a") -> Checkpoint:
    found = steer(store).read_checkpoint(id)
    assert found is not None
    return found


def first_line(store: Any, id: str = "a") -> str:
    return (job(store, id).errors[-1].error or "").partition("\n")[0]


def refused(ctx: JobContext, match: str, *args: Any) -> None:
    """Expect that a step with these arguments is refused with such a text."""
    with pytest.raises(InvalidRequest, match=match):
        ctx.step(*args)


def leave_checkpoint(store: Any, **fields: Any) -> Any:
    """Claim `a`, and save a checkpoint of these fields as an attempt of before."""
    put(store)
    claim = claim_one(store)
    names = fields.get("completed_steps", ())
    checkpoint = Checkpoint(
        **{"schema_version": 1, "step_set_hash": step_set_hash(names), **fields}
    )
    store.checkpoint(claim.lease_ref, checkpoint)
    return attrs.evolve(claim, checkpoint=checkpoint)


class Died(BaseException):
    """The process is gone: nothing after this runs, and nothing is acked."""
