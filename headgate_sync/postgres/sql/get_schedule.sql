-- Read one schedule.
-- Arguments: schedule_id text.
-- Rows:      the fields of a schedule in their order; none without it.
-- Locks:     none.
SELECT schedule.kind, schedule.spec, schedule.payload, schedule.schema_version, schedule.queue, schedule.partition_key,
  schedule.rate_class, schedule.weight, schedule.priority, schedule.max_attempts, schedule.timeout_ms,
  schedule.retention_ms, schedule.headers, schedule.tags, schedule.sticky_worker, schedule.on_missed,
  schedule.backfill_limit, schedule.id, schedule.next_run_ms, schedule.last_enqueued_ms, schedule.paused
FROM {schema}.headgate_schedule AS schedule
WHERE schedule.id = %(schedule_id)s::text
