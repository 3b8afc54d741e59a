"""A store in which there is one of everything, and what an operator types there."""

from __future__ import annotations

from collections.abc import Mapping

from headgate_sync.lifecycle import STORED, State
from headgate_sync.policy import Ceiling, RateClassConfig
from headgate_sync.schedule import Schedule
from headgate_sync.store import Store
from tests.backends import Clock
from tests.builders import beat, bring_to, enqueue, steer

ADDRESSES = (
    "/", "/queues", "/queue?name=q", "/queue?name=idle", "/jobs?queue=q",
    "/rate-classes", "/limits", "/partitions?queue=q", "/periodic", "/workers",
    "/quarantine", *(f"/job?id={state}" for state in sorted(STORED)),
)  # fmt: skip
# What is claimed on the way must be alone; steps of the clock come first.
STATES = (
    State.QUARANTINED, State.ARCHIVED, State.CANCELLED, State.COMPLETED,
    State.UNDECODABLE, State.RETRYABLE, State.RUNNING, State.PENDING, State.SCHEDULED,
    State.AVAILABLE,
)  # fmt: skip
# A queue that is not empty, as the button says; content that is in quarantine.
REFUSED = {"DELETE /queues/q", "POST /jobs/quarantined/replay"}
MADE = "made"
_TYPED = {"int": "3", "minutes": "1", "base64": "ok"}


def furnish(store: Store, clock: Clock) -> None:
    """Put one of everything into an empty store."""
    for state in STATES:
        bring_to(store, clock, state.value, state, payload=state.value.encode())
    enqueue(store, "waiting", partition_key="p", rate_class="c")
    inspect = steer(store)
    inspect.set_queue_weight("idle", 2)
    inspect.set_queue_paused("idle", True)
    for name, paused in (("c", False), ("stopped", True), ("resting", False)):
        inspect.upsert_rate_class(
            RateClassConfig(name=name, limit=1, window_ms=1, burst=1, paused=paused)
        )
    inspect.pause_rate_class("resting", 60_000, "")
    inspect.upsert_concurrency_limit(Ceiling(name="l", queue="q", max_concurrent=1))
    for name, stopped in (("on", False), ("off", True)):
        inspect.upsert_schedule(
            Schedule(id=name, kind="k", spec="@daily", next_run_ms=1, paused=stopped)
        )
    for name in ("w", "asked"):
        beat(store, name)
    inspect.signal_worker("asked", "quiet")


def typed(field: Mapping[str, str | None], *, whole: bool) -> str | None:
    """What an operator types into a field of a form; None leaves it as it is.

    Args:
        field: the attributes of the element.
        whole: also what may be left empty is filled in, if it is a number.
    """
    kind = field.get("data-type") or ""
    if "data-part" in field:
        return MADE
    if kind == "minutes":
        return _TYPED[kind]
    if field.get("value"):
        return None
    if "required" in field or (whole and kind):
        return _TYPED[kind]
    # Of the texts that may be left out a form for a ceiling needs one.
    return "q" if field.get("name") == "queue" else None
