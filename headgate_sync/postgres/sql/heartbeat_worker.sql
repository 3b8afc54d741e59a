-- Note that a worker lives and how it is doing; the first beat of a new name forgets workers that were silent for long.
-- Arguments: worker_id, host, status text; pid, concurrency, inflight, polls, empty_polls, max_forgotten integer;
--            queues text[]; started_at_ms, beat_ms, forgotten_ms bigint; duties_active boolean; applied text or null.
-- Rows:      one: the command that waits for the worker, or null.
-- Locks:     the worker's row, then silent ones by name, skipping what is locked.
WITH clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms
),
known AS MATERIALIZED (
  SELECT worker.worker_id
  FROM {schema}.headgate_worker AS worker
  WHERE worker.worker_id = %(worker_id)s::text
),
beat AS (
  INSERT INTO {schema}.headgate_worker AS worker (worker_id, host, pid, queues, concurrency, started_at_ms,
    heartbeat_at_ms, inflight, polls, empty_polls, status, duties_active, beat_ms)
  SELECT %(worker_id)s::text, %(host)s::text, %(pid)s::integer, %(queues)s::text[], %(concurrency)s::integer,
    %(started_at_ms)s::bigint, clock.now_ms, %(inflight)s::integer, %(polls)s::integer, %(empty_polls)s::integer,
    %(status)s::text, %(duties_active)s::boolean, %(beat_ms)s::bigint
  FROM clock
  ON CONFLICT (worker_id) DO UPDATE
  SET host = excluded.host, pid = excluded.pid, queues = excluded.queues, concurrency = excluded.concurrency,
    started_at_ms = excluded.started_at_ms, heartbeat_at_ms = excluded.heartbeat_at_ms, inflight = excluded.inflight,
    polls = excluded.polls, empty_polls = excluded.empty_polls, status = excluded.status,
    duties_active = excluded.duties_active, beat_ms = excluded.beat_ms,
    -- What a predecessor of this name was asked for, and what is applied, is over.
    command = CASE
      WHEN worker.started_at_ms = excluded.started_at_ms AND worker.pid = excluded.pid
        AND worker.command IS DISTINCT FROM %(applied)s::text THEN worker.command
    END
  RETURNING worker.command
),
silent AS MATERIALIZED (
  SELECT worker.worker_id
  FROM {schema}.headgate_worker AS worker
  CROSS JOIN clock
  WHERE NOT EXISTS (SELECT FROM known) AND clock.now_ms - worker.heartbeat_at_ms >= %(forgotten_ms)s::bigint
  ORDER BY worker.worker_id
  LIMIT %(max_forgotten)s::integer
  FOR UPDATE OF worker SKIP LOCKED
),
forgotten AS (
  DELETE FROM {schema}.headgate_worker AS worker
  WHERE worker.worker_id = ANY (ARRAY (SELECT silent.worker_id FROM silent))
)
SELECT beat.command
FROM beat
