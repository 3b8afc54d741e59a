"""Envelopes for the benchmarks, and deep backlogs made in the database."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from benchmarks.bare import PAYLOAD
from benchmarks.database import SCHEMA
from headgate_sync.envelope import Envelope, fingerprint
from headgate_sync.ids import UlidGenerator
from headgate_sync.store import Store

_next_id = UlidGenerator()

# Each round copies every template once, so that partitions take turns in the backlog.
# Ids ascend with the rows, as those of a producer do: else each claim would touch as
# many pages of their index as it has jobs.
_MULTIPLY = """
INSERT INTO {schema}.headgate_job (id, {columns})
SELECT left((%(ids)s::text[])[1], 14)
  || lpad((round.number * cardinality(%(ids)s::text[]) + known.place)::text, 12, '0'),
  {columns}
FROM generate_series(1, %(rounds)s) AS round (number)
CROSS JOIN unnest(%(ids)s::text[]) WITH ORDINALITY AS known (id, place)
JOIN {schema}.headgate_job AS job ON job.id = known.id
ORDER BY round.number, known.place
"""
_TALLY = """
INSERT INTO {schema}.headgate_tally
  (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
SELECT job.queue, job.partition_key, 0, count(*) * %(rounds)s, 0, 0
FROM {schema}.headgate_job AS job
WHERE job.id = ANY (%(ids)s)
GROUP BY job.queue, job.partition_key
"""
_COLUMNS = """
SELECT attname FROM pg_catalog.pg_attribute
WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
  AND attname NOT IN ('seq', 'id')
"""


def envelopes(
    count: int,
    *,
    kind: str = "bench:noop",
    payload: bytes = b"{}",
    partitions: int = 1,
    retention_ms: int = 0,
    rate_class: str = "",
) -> list[Envelope]:
    """Jobs for the queue `bench`, spread over the partitions in turn."""
    content = fingerprint(kind, payload)
    return [
        Envelope(
            id=_next_id(),
            kind=kind,
            payload=payload,
            queue="bench",
            partition_key=f"p{number % partitions}" if partitions > 1 else "",
            fingerprint=content,
            retention_ms=retention_ms,
            rate_class=rate_class,
        )
        for number in range(count)
    ]


def enqueue_all(store: Store, jobs: Sequence[Envelope]) -> None:
    """Enqueue jobs in batches of 1,000."""
    for start in range(0, len(jobs), 1000):
        store.enqueue(jobs[start : start + 1000])


def preload(
    store: Store, count: int, *, partitions: int = 1, rate_class: str = ""
) -> None:
    """Enqueue jobs in batches of 1,000."""
    enqueue_all(store, envelopes(count, partitions=partitions, rate_class=rate_class))


def multiply(url: str, templates: Sequence[Envelope], rows: int) -> int:
    """Copy waiting jobs within the database until there are about so many rows.

    The templates must have been enqueued, so that the gate knows their lanes; nothing
    is vacuumed or analysed. Returns how many rows there are now.
    """
    rounds = max(0, rows // len(templates) - 1)
    params = {"rounds": rounds, "ids": [job.id for job in templates]}
    with psycopg.connect(url, autocommit=True) as connection:
        names = connection.execute(_COLUMNS, [f"{SCHEMA}.headgate_job"]).fetchall()
        names_sql = sql.SQL(", ").join(sql.Identifier(name) for (name,) in names)
        for statement in (_MULTIPLY, _TALLY):
            connection.execute(
                sql.SQL(statement).format(
                    schema=sql.Identifier(SCHEMA), columns=names_sql
                ),
                params,
            )
    return len(templates) * (rounds + 1)


def at_rest(url: str) -> None:
    """Vacuum, analyse and write down what a load left to whoever comes first."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def backlog(url: str, store: Store, rows: int, *, partitions: int = 1) -> None:
    """A backlog of that depth; only one job per partition goes in by a call."""
    templates = envelopes(min(rows, partitions), partitions=partitions, payload=PAYLOAD)
    enqueue_all(store, templates)
    multiply(url, templates, rows)
