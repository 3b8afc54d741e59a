"""Whole snapshots of either store in one comparable form.

Two uses: a refused call leaves the snapshot as it was, and two stores that were driven
alike show equal snapshots. Counters are taken with the appended rows that no sweep has
folded yet, so that folding never shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
from attrs import evolve, fields, frozen
from psycopg import sql
from psycopg.rows import dict_row

from headgate_sync.inspection import AttemptEntry
from headgate_sync.lease import (
    MAX_HISTORY,
    Checkpoint,
    JobOutput,
    JobProgress,
    JobResult,
)
from headgate_sync.lifecycle import TERMINAL, UNFINISHED, State
from headgate_sync.memory.store import MemStore
from headgate_sync.policy import Budget, Ceiling, OnSaturated, Scope

# Columns that number or address a row and say nothing about the job.
_INTERNAL = ("seq", "lane_key")
_FOLDED = (
    "checkpoint", "cursor_data", "charge_weight", "errors", "result_version", "result",
    "output_version", "output", "output_fence", "output_at_ms", "progress_current",
    "progress_total", "progress_message", "progress_fence", "progress_at_ms",
)  # fmt: skip
# A mark is set behind the decision as a best effort, so that only the cost of later
# calls depends on it.
_UNCOMPARED = ("gate_hold",)
_PLAIN_CLASS = (False, None, "")
_PLAIN_QUEUE = (False, 1, 0, 0)
_PLAIN_PARTITION = (0, 0, 0, None)

Row = dict[str, Any]


@frozen
class Snapshot:
    """Everything that a caller can see, and what decides later calls.

    Attributes:
        jobs: by id, in the order of insertion, each with all that belongs to it.
        throttle: holder and expiry by key.
        quarantine: registered fingerprints.
        duties: holder and expiry by name.
        enqueue_limits: by queue.
        unfinished: jobs in no terminal state by queue, from the counters.
        minutes: (arrived, completed) by (queue, partition, minute).
        queues: (paused, weight, dispatch count, round) by queue.
        partitions: (deficit, in flight, last round, quantum override).
        rate_classes: (paused, paused until, reason) of each class that is paused.
        budgets: by class and slot.
        ceilings: by name.
    """

    jobs: Mapping[str, Row]
    throttle: Mapping[bytes, tuple[str, int]]
    quarantine: Mapping[str, tuple[Any, ...]]
    duties: Mapping[str, tuple[str, int]]
    enqueue_limits: Mapping[str, int]
    unfinished: Mapping[str, int]
    minutes: Mapping[tuple[str, str, int], tuple[int, int]]
    queues: Mapping[str, tuple[Any, ...]]
    partitions: Mapping[tuple[str, str], tuple[Any, ...]]
    rate_classes: Mapping[str, tuple[Any, ...]]
    budgets: Mapping[tuple[str, int], Budget]
    ceilings: Mapping[str, Ceiling]


def differences(left: Snapshot, right: Snapshot) -> list[str]:
    """What two snapshots disagree in, one line per fact; empty when they are equal."""
    found = []
    for attribute in fields(Snapshot):
        one, other = getattr(left, attribute.name), getattr(right, attribute.name)
        if attribute.name == "jobs" and list(one) != list(other):
            found.append(f"order of jobs: {list(one)} | {list(other)}")
        for key in dict.fromkeys([*one, *other]):
            if attribute.name == "jobs" and key in one and key in other:
                mine, theirs = one[key], other[key]
                found += [
                    f"job {key} {name}: {mine.get(name)!r} | {theirs.get(name)!r}"
                    for name in dict.fromkeys([*mine, *theirs])
                    if mine.get(name) != theirs.get(name)
                ]
            elif one.get(key) != other.get(key):
                found.append(
                    f"{attribute.name}[{key!r}]: {one.get(key)!r} | {other.get(key)!r}"
                )
    return found


def _comparable(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if name not in _UNCOMPARED}


def of_memory(store: MemStore) -> Snapshot:
    """The snapshot of a MemStore."""
    taken = store.snapshot()
    taken["rate_classes"] = _leave_out(_PLAIN_CLASS, taken["rate_classes"].items())
    return Snapshot(
        **{
            attribute.name: taken[attribute.name]
            for attribute in fields(Snapshot)
            if attribute.name != "jobs"
        },
        jobs={row["id"]: _comparable(row) for row in taken["jobs"]},
    )


def of_postgres(connection: psycopg.Connection[Any], schema: str) -> Snapshot:
    """The snapshot of a schema, read in one transaction."""
    with connection.transaction():
        # One snapshot of the database for all tables, whatever runs beside it.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        texts = [
            _QUERIES[name].format(schema=sql.Identifier(schema)) for name in _QUERIES
        ]
        rows = dict(zip(_QUERIES, _fetch(connection, texts), strict=True))
    return Snapshot(
        jobs=_jobs(rows["jobs"], rows["tags"]),
        throttle={
            row["unique_key"]: (row["job_id"], row["expires_at_ms"])
            for row in rows["throttle"]
        },
        quarantine={
            row.pop("fingerprint"): tuple(row.values()) for row in rows["quarantine"]
        },
        duties={
            row["name"]: (row["holder"], row["expires_at_ms"]) for row in rows["duties"]
        },
        enqueue_limits={
            row["queue"]: row["max_unfinished_jobs"] for row in rows["enqueue_limits"]
        },
        unfinished=_leave_out(
            0, ((row["queue"], row["jobs"]) for row in rows["unfinished"])
        ),
        minutes=_leave_out((0, 0), (_keyed(row, 3) for row in rows["minutes"])),
        queues=_leave_out(
            _PLAIN_QUEUE,
            ((row.pop("queue"), tuple(row.values())) for row in rows["queues"]),
        ),
        partitions=_leave_out(
            _PLAIN_PARTITION, (_keyed(row, 2) for row in rows["partitions"])
        ),
        rate_classes=_leave_out(
            _PLAIN_CLASS,
            ((row.pop("name"), tuple(row.values())) for row in rows["rate_classes"]),
        ),
        budgets={
            (row.pop("rate_class"), row.pop("slot")): Budget(**row)
            for row in rows["budgets"]
        },
        ceilings={
            row["name"]: Ceiling(
                **row
                | {
                    "scope": Scope(row["scope"]),
                    "on_saturated": OnSaturated(row["on_saturated"]),
                }
            )
            for row in rows["ceilings"]
        },
    )


def _fetch(
    connection: psycopg.Connection[Any], texts: Iterable[sql.Composed]
) -> list[list[Row]]:
    """Run several queries in one round trip."""
    with connection.pipeline():
        cursors = [
            connection.cursor(row_factory=dict_row).execute(text) for text in texts
        ]
        return [cursor.fetchall() for cursor in cursors]


def _keyed(row: Row, columns: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = tuple(row.values())
    return values[:columns], values[columns:]


def _jobs(jobs: list[Row], tags: list[Row]) -> dict[str, Row]:
    by_job: dict[int, list[str]] = {}
    for row in tags:
        by_job.setdefault(row["job_seq"], []).append(row["tag"])
    found = {row["id"]: _job(row, tuple(by_job.pop(row["seq"], ()))) for row in jobs}
    assert not by_job, f"tags outlived their jobs: {by_job}"
    return found


def _job(row: Row, tags: tuple[str, ...]) -> Row:
    left_out = {*_INTERNAL, *_FOLDED, *_UNCOMPARED}
    job = {name: value for name, value in row.items() if name not in left_out}
    job["tags"] = tags
    job["errors"] = [AttemptEntry.from_dict(entry) for entry in row["errors"]]
    job["checkpoint"] = Checkpoint.from_json(
        None if row["checkpoint"] is None else json.dumps(row["checkpoint"]),
        cursor=row["cursor_data"],
        remaining_weight=row["charge_weight"],
    )
    job["result"] = (
        None
        if row["result_version"] is None
        else JobResult(row["result_version"], row["result"])
    )
    job["output"] = (
        None
        if row["output_version"] is None
        else JobOutput(
            row["output_version"],
            row["output"],
            row["output_fence"],
            row["output_at_ms"],
        )
    )
    job["progress"] = (
        None
        if row["progress_total"] is None
        else JobProgress(
            row["progress_current"],
            row["progress_total"],
            row["progress_message"],
            row["progress_fence"],
            row["progress_at_ms"],
        )
    )
    return job


def _leave_out(plain: Any, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Rows that say nothing else than their absence would."""
    return {key: value for key, value in entries if value != plain}


def dump(connection: psycopg.Connection[Any], schema: str) -> dict[str, list[Row]]:
    """Every row of every table of a schema as it is stored.

    A call that was refused leaves no row version behind that a reader could tell.
    """
    tables = [
        table
        for (table,) in connection.execute(
            "SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n"
            " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind = 'r'"
            " AND NOT (c.relispartition AND pg_relation_size(c.oid) = 0)"
            " ORDER BY c.relname",
            [schema],
        ).fetchall()
    ]
    whole = sql.SQL("SELECT ctid, * FROM {} ORDER BY ctid")
    rows = _fetch(
        connection, [whole.format(sql.Identifier(schema, table)) for table in tables]
    )
    return dict(zip(tables, rows, strict=True))


_QUERIES = {
    name: sql.SQL(text)
    for name, text in {
        "jobs": "SELECT * FROM {schema}.headgate_job ORDER BY seq",
        "tags": "SELECT * FROM {schema}.headgate_job_tag ORDER BY job_seq, tag",
        "throttle": "SELECT * FROM {schema}.headgate_throttle",
        "quarantine": """
            SELECT fingerprint, kind, crash_count, quarantined_at_ms, sample_payload,
              reason
            FROM {schema}.headgate_quarantine
        """,
        "duties": "SELECT * FROM {schema}.headgate_duty",
        "enqueue_limits": """
            SELECT queue, max_unfinished_jobs FROM {schema}.headgate_enqueue_policy
        """,
        "unfinished": """
            SELECT part.queue, sum(part.jobs)::bigint AS jobs
            FROM (
              SELECT queue, jobs FROM {schema}.headgate_unfinished
              UNION ALL
              SELECT queue, unfinished FROM {schema}.headgate_tally
            ) AS part
            GROUP BY part.queue
        """,
        "minutes": """
            SELECT part.queue, part.partition_key, part.minute_at_ms,
              sum(part.arrived)::bigint AS arrived,
              sum(part.completed)::bigint AS completed
            FROM (
              SELECT queue, partition_key, minute_at_ms, arrived, completed
              FROM {schema}.headgate_minute_counter
              UNION ALL
              SELECT queue, partition_key, minute_at_ms, arrived, completed
              FROM {schema}.headgate_tally
            ) AS part
            GROUP BY part.queue, part.partition_key, part.minute_at_ms
        """,
        "queues": """
            SELECT queue, paused, weight, dispatch_count, round
            FROM {schema}.headgate_queue
        """,
        # Rows of kind f are jobs that left running since the last fold.
        "partitions": """
            SELECT COALESCE(kept.queue, freed.queue) AS queue,
              COALESCE(kept.partition_key, freed.partition_key) AS partition_key,
              COALESCE(kept.deficit, 0) AS deficit,
              COALESCE(kept.inflight, 0) - COALESCE(freed.jobs, 0) AS inflight,
              COALESCE(kept.last_round, 0) AS last_round,
              kept.quantum_override
            FROM {schema}.headgate_partition AS kept
            FULL JOIN (
              SELECT queue, partition_key, sum(n)::bigint AS jobs
              FROM {schema}.headgate_inbox
              WHERE kind = 'f'
              GROUP BY queue, partition_key
            ) AS freed
            ON freed.queue = kept.queue AND freed.partition_key = kept.partition_key
        """,
        "rate_classes": """
            SELECT name, paused, paused_until_ms, pause_reason
            FROM {schema}.headgate_rate_class
        """,
        "budgets": """
            SELECT rate_class, slot, limit_tokens AS limit, window_ms, burst, units,
              refilled_at_ms
            FROM {schema}.headgate_budget
        """,
        "ceilings": "SELECT * FROM {schema}.headgate_ceiling",
    }.items()
}


def check(snapshot: Snapshot) -> None:
    """Check what must hold of the stored rows at any moment.

    The counters are conserved: what they say is what the rows say.
    """
    unfinished: dict[str, int] = {}
    running: dict[tuple[str, str], int] = {}
    keys: dict[bytes, str] = {}
    for id, row in snapshot.jobs.items():
        state = State(row["state"])
        if state in UNFINISHED:
            unfinished[row["queue"]] = unfinished.get(row["queue"], 0) + 1
            key = row["unique_key"]
            assert key is None or keys.setdefault(key, id) == id, f"{id} shares its key"
        if state is State.RUNNING:
            lane = (row["queue"], row["partition_key"])
            running[lane] = running.get(lane, 0) + 1
        _check_row(id, row)
    assert dict(snapshot.unfinished) == unfinished, "unfinished counter and rows differ"
    inflight = {key: value[1] for key, value in snapshot.partitions.items() if value[1]}
    assert inflight == running, "in-flight counter and rows differ"


def _check_row(id: str, row: Row) -> None:
    lease = [
        row[name]
        for name in ("lease_id", "lease_expires_at_ms", "claimed_by", "claimed_at_ms")
    ]
    if row["state"] == State.RUNNING:
        assert None not in lease, f"{id} runs without {lease}"
    else:
        assert lease == [None] * 4, f"{id} is {row['state']} with {lease}"
        assert row["rate_charge"] == 0, f"{id} is {row['state']} with a rate charge"
    terminal = row["state"] in TERMINAL
    assert terminal == (row["finalized_at_ms"] is not None), f"{id}: finalized_at_ms"
    assert row["tags"] == tuple(sorted(set(row["tags"]))), f"{id}: tags {row['tags']}"
    assert row["queue"], f"{id} has no queue"
    assert min(row["weight"], row["schema_version"], row["max_attempts"]) >= 1, id
    assert row["result"] is None or row["state"] == State.COMPLETED, f"{id}: result"
    for name in ("output", "progress"):
        assert row[name] is None or row[name].fence <= row["fence"], f"{id}: {name}"
    ends = [entry.at_ms for entry in row["errors"]]
    assert len(ends) <= MAX_HISTORY, f"{id}: {len(ends)} entries of history"
    assert ends == sorted(ends), f"{id}: history out of order {ends}"


def without_lapsed(snapshot: Snapshot, now_ms: int) -> Snapshot:
    """Leave out what is over by now, and refill budgets up to now.

    A store may keep what has lapsed or drop it, and may refill whenever it likes.
    """
    return evolve(
        snapshot,
        throttle={k: v for k, v in snapshot.throttle.items() if v[1] > now_ms},
        duties={k: v for k, v in snapshot.duties.items() if v[1] > now_ms},
        rate_classes=_leave_out(
            _PLAIN_CLASS,
            (
                (name, (paused, *((until_ms, reason) if on else (None, ""))))
                for name, (paused, until_ms, reason) in snapshot.rate_classes.items()
                for on in (until_ms is not None and until_ms > now_ms,)
            ),
        ),
        budgets={key: budget.at(now_ms) for key, budget in snapshot.budgets.items()},
    )
