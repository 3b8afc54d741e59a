"""Renders `docs/lifecycle.md` from the table: `python -m tests.lifecycle_page`."""

from __future__ import annotations

from pathlib import Path

from headgate_sync import lifecycle
from headgate_sync.lifecycle import (
    EVICTABLE,
    STORED,
    TERMINAL,
    TRANSITIONS,
    UNFINISHED,
    Event,
    Guard,
    State,
)

PAGE = Path(__file__).parents[1] / "docs" / "lifecycle.md"

ABOUT = {
    State.PENDING: "durable, waits for an operator",
    State.SCHEDULED: "waits for its instant",
    State.AVAILABLE: "may be admitted",
    State.RUNNING: "somebody holds its lease",
    State.RETRYABLE: "failed or crashed, waits for its backoff",
    State.COMPLETED: "succeeded and is kept for its retention",
    State.ARCHIVED: "gave up: attempts used up, or skipped",
    State.CANCELLED: "stopped by an operator, or by a full ceiling",
    State.QUARANTINED: "killed workers, or looks like a job that did; stays",
    State.UNDECODABLE: "its payload or its steps are not those of the present code",
}
BY_CALL = {
    Event.ADMITTED: "`admit`",
    Event.SUCCESS: "ack `success`",
    Event.RETRY: "ack `retry`",
    Event.SKIP: "ack `skip`",
    Event.REVOKE: "ack `revoke`",
    Event.SNOOZE: "ack `snooze`",
    Event.UNDECODABLE: "ack `undecodable`",
    Event.RATE_LIMITED: "ack `rate_limited`",
    Event.LEASE_LOST: "`reclaim_expired`",
    Event.CHECKPOINT_STALE: "ack `undecodable` on meeting other steps",
    Event.SCHEDULE_DUE: "`promote_due`",
    Event.BACKOFF_DUE: "`promote_due`",
    Event.RETENTION_LAPSED: "`evict_retained`",
    Event.QUARANTINE_SWEEP: "`quarantine_sweep`",
    Event.SATURATION_DISCARD: "`admit` at a full ceiling that discards",
    Event.SATURATION_CANCEL: "`admit` at a full ceiling that cancels arrivals",
    Event.DISPLACED: "`admit` at a full ceiling, cancels the oldest",
    Event.DEBOUNCED: "`enqueue` with `unique_debounce_ms`",
    Event.OPERATOR_PROMOTE: "`promote_job`",
    Event.OPERATOR_RETRY: "`operator_retry`",
    Event.OPERATOR_RELEASE: "`quarantine_release`",
    Event.OPERATOR_CANCEL: "`operator_cancel`",
    Event.OPERATOR_DELETE: "`delete_job`",
    Event.OPERATOR_RESCHEDULE: "`reschedule_job`",
    Event.SCHEDULE_PENDING: "`schedule_pending`",
    Event.EDIT_PAYLOAD: "`edit_payload`",
}
HEAD = """\
# Lifecycle of a job

Generated from `headgate_sync.lifecycle` by `python -m tests.lifecycle_page`; a test
fails when it is stale.

A state says who may act on the job next. Every edge that a statement takes is a row of
the second table; anything else is refused with `InvalidRequest` (calls about a job) or
`LeaseRejected` (calls of a holder).

## States

| state | meaning | unfinished | terminal | evicted |
|---|---|---|---|---|
"""
MIDDLE = """
*Unfinished* jobs hold their lifecycle key and count against the limit of their queue.
*Evicted* jobs are deleted when their retention is over; without a retention they stay
until an operator deletes them. `deleted` below means that the row goes.

## Transitions

A condition names columns of the job; `crash_limit` is an option of the store. The first
row that fits is taken.

| from | event | to | when | taken by |
|---|---|---|---|---|
"""
TAIL = """
## What always holds

"""


def _mark(yes: bool) -> str:
    return "yes" if yes else ""


def _guard(guard: Guard | None) -> str:
    return "" if guard is None else f"`{guard.sql()}`"


def _invariants() -> str:
    """The list in the module's docstring, which is where the invariants live."""
    text = (lifecycle.__doc__ or "").split("keeps:")[1].split("\n\n")[1]
    return text.strip().replace("* ", "- ").replace("<=>", "⇔")


def render() -> str:
    """The whole page."""
    states = "".join(
        f"| `{state}` | {ABOUT[state]} | {_mark(state in UNFINISHED)} |"
        f" {_mark(state in TERMINAL)} | {_mark(state in EVICTABLE)} |\n"
        for state in State
        if state in STORED
    )
    rows = "".join(
        f"| `{row.source}` | `{row.event}` | `{row.target}` | {_guard(row.when)} |"
        f" {BY_CALL[row.event]} |\n"
        for row in TRANSITIONS
    )
    return HEAD + states + MIDDLE + rows + TAIL + _invariants() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
