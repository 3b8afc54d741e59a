"""What the gate in the database knows about one job."""

from __future__ import annotations

import json
from typing import Any

from headgate_sync.explanation import (
    MAX_AHEAD,
    ClassFacts,
    GateFacts,
    PartitionFacts,
    WorkerFacts,
)
from headgate_sync.lifecycle import State
from headgate_sync.policy import FOLD_MAX, WINDOW_MAX, Budget, Ceiling
from headgate_sync.postgres.database import Database


def facts_of(db: Database, job_id: str) -> GateFacts | None:
    """Look at a job in one read-only statement; None without the job."""
    [(text,)] = db.look(
        "explain_admission",
        job_id=job_id,
        max_ahead=MAX_AHEAD,
        fold_max=FOLD_MAX,
        max_lanes=WINDOW_MAX,
    )
    return None if text is None else read_facts(json.loads(text))


def read_facts(told: dict[str, Any]) -> GateFacts:
    """The facts from the stored object."""
    values = dict(told)
    values["state"] = State(values["state"])
    if values["state"] is State.AVAILABLE:
        stored = values.pop("rate_class_facts")
        if stored is not None:
            budgets = tuple(Budget(**budget) for budget in stored.pop("budgets"))
            values["rate_class_facts"] = ClassFacts(**stored, budgets=budgets)
        worker = values["sticky_worker_facts"]
        if worker is not None:
            values["sticky_worker_facts"] = WorkerFacts(**worker)
        values["partition"] = PartitionFacts(**values["partition"])
        values["ceilings"] = tuple(
            (Ceiling(**ceiling), running)
            for ceiling in values["ceilings"]
            for running in [ceiling.pop("inflight")]
        )
    return GateFacts(**values)
