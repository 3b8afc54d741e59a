-- Workers that have beaten within a time, by id, and the store's clock, also without any.
-- Arguments: stale_after_ms bigint, max_workers integer.
-- Rows:      now; the columns of a worker, null in the one row without any.
-- Locks:     none.
WITH clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms
),
found AS (
  SELECT worker.*
  FROM {schema}.headgate_worker AS worker
  CROSS JOIN clock
  WHERE clock.now_ms - worker.heartbeat_at_ms < %(stale_after_ms)s::bigint
  ORDER BY worker.worker_id
  LIMIT %(max_workers)s::integer
)
SELECT clock.now_ms, found.worker_id, found.host, found.pid, found.queues, found.concurrency, found.started_at_ms,
  found.heartbeat_at_ms, found.inflight, found.polls, found.empty_polls, found.status, found.duties_active,
  found.beat_ms, found.command
FROM clock
LEFT JOIN found ON true
ORDER BY found.worker_id
