-- Find schedules whose tick has come.
-- Arguments: max_schedules integer; after_ms bigint and after_id text of the last one seen, or null.
-- Rows:      now, then the fields of a schedule in their order; one row with nulls when none is due.
-- Locks:     none: firing compares what was read here.
WITH clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms
)
SELECT clock.now_ms, due.*
FROM clock
LEFT JOIN LATERAL (
  SELECT schedule.kind, schedule.spec, schedule.payload, schedule.schema_version, schedule.queue, schedule.partition_key,
  schedule.rate_class, schedule.weight, schedule.priority, schedule.max_attempts, schedule.timeout_ms,
  schedule.retention_ms, schedule.headers, schedule.tags, schedule.sticky_worker, schedule.on_missed,
  schedule.backfill_limit, schedule.id, schedule.next_run_ms, schedule.last_enqueued_ms, schedule.paused
  FROM {schema}.headgate_schedule AS schedule
  WHERE NOT schedule.paused
    AND schedule.next_run_ms <= clock.now_ms
    AND (%(after_id)s::text IS NULL
      OR (schedule.next_run_ms, schedule.id) > (%(after_ms)s::bigint, %(after_id)s::text))
  ORDER BY schedule.next_run_ms, schedule.id
  LIMIT %(max_schedules)s::integer
) AS due ON true
ORDER BY due.next_run_ms, due.id
