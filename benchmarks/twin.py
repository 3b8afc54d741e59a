"""A claim from a copy of the queue's own rows and indexes, by one statement.

The plain table of `bare` has narrow rows and one index. Beside this copy an admission
shows what the gate itself costs: who is next is told to the statement, no limit is
looked at, and nothing but the jobs is written.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.database import SCHEMA

# All but the check of the whole row, which names the type of the other table.
_COPY = """
DROP TABLE IF EXISTS {schema}.twin_job;
CREATE TABLE {schema}.twin_job (
  LIKE {schema}.headgate_job INCLUDING ALL EXCLUDING CONSTRAINTS
) WITH ({options});
INSERT INTO {schema}.twin_job OVERRIDING SYSTEM VALUE
SELECT * FROM {schema}.headgate_job ORDER BY seq;
"""
_OPTIONS = "SELECT unnest(reloptions) FROM pg_catalog.pg_class WHERE oid = %s::regclass"
_LANES = """
SELECT DISTINCT lane_key FROM {schema}.twin_job WHERE state = 'available' ORDER BY 1
"""
_CLAIM = """
UPDATE {schema}.twin_job AS job
SET state = 'running', lease_id = 'twin', claimed_by = 'bench', fence = job.fence + 1,
  claimed_at_ms = {schema}.headgate_now_ms(),
  lease_expires_at_ms = {schema}.headgate_now_ms() + 600000,
  settled_lease_id = NULL, settled_outcome = NULL
FROM (
  SELECT next.tid
  FROM unnest(%b::bigint[]) AS lane (key)
  CROSS JOIN LATERAL (
    SELECT ready.ctid AS tid FROM {schema}.twin_job AS ready
    WHERE ready.lane_key = lane.key
      AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
    ORDER BY ready.priority DESC, ready.scheduled_at_ms, ready.seq
    LIMIT %b FOR UPDATE SKIP LOCKED
  ) AS next
  OFFSET 0
) AS held
WHERE job.ctid = held.tid
RETURNING job.seq, job.id, job.kind, job.schema_version, job.payload, job.queue,
  job.partition_key, job.rate_class, job.weight, job.fingerprint, job.priority,
  job.attempt, job.crash_attempt, job.max_attempts, job.scheduled_at_ms, job.timeout_ms,
  job.deadline_ms, job.retention_ms, job.unique_key, job.unique_states,
  job.periodic_schedule_id, job.periodic_tick_ms, job.headers, job.sticky_worker,
  job.fence, job.lease_expires_at_ms, job.claimed_at_ms, job.checkpoint,
  job.cursor_data, job.charge_weight
"""
_ACK = "DELETE FROM {schema}.twin_job WHERE seq = ANY (%b::bigint[])"


class Twin:
    """One connection and the copy; lanes take turns, as the gate's do."""

    def __init__(self, url: str) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True)
        found = self.connection.execute(_OPTIONS, [f"{SCHEMA}.headgate_job"]).fetchall()
        # As the catalogue has them: "fillfactor=85".
        options = sql.SQL(", ").join(sql.SQL(option) for (option,) in found)
        self.connection.execute(_in_schema(_COPY, options=options))
        lanes = self.connection.execute(_in_schema(_LANES)).fetchall()
        self._width = len(lanes)
        self._turns = itertools.cycle([key for (key,) in lanes])
        self._claim, self._ack = _in_schema(_CLAIM), _in_schema(_ACK)

    def claims(self, calls: int, capacity: int) -> list[float]:
        """Milliseconds of each claim; what it took is deleted outside the timed part.

        Raises:
            RuntimeError: the copy ran out of jobs.
        """
        times = []
        each = max(1, capacity // self._width)
        for _ in range(calls):
            lanes = list(itertools.islice(self._turns, min(self._width, capacity)))
            started = time.perf_counter()
            rows = self.connection.execute(self._claim, [lanes, each]).fetchall()
            times.append((time.perf_counter() - started) * 1e3)
            if not rows:
                raise RuntimeError("the copy of the rows has no job left")
            self.connection.execute(self._ack, [[row[0] for row in rows]])
        return times


def _in_schema(text: str, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(text).format(schema=sql.Identifier(SCHEMA), **parts)


@contextlib.contextmanager
def twin(url: str) -> Iterator[Twin]:
    """A copy of what the queue holds now, for the length of the block."""
    made = Twin(url)
    try:
        yield made
    finally:
        made.connection.close()
