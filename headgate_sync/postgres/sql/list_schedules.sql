-- List schedules by id.
-- Arguments: cursor text, the last id seen or null; max_schedules integer.
-- Rows:      the fields of a schedule in their order, payload and headers empty.
-- Locks:     none.
SELECT schedule.kind, schedule.spec, ''::bytea, schedule.schema_version, schedule.queue, schedule.partition_key,
  schedule.rate_class, schedule.weight, schedule.priority, schedule.max_attempts, schedule.timeout_ms,
  schedule.retention_ms, jsonb_build_object(), schedule.tags, schedule.sticky_worker, schedule.on_missed,
  schedule.backfill_limit, schedule.id, schedule.next_run_ms, schedule.last_enqueued_ms, schedule.paused
FROM {schema}.headgate_schedule AS schedule
WHERE %(cursor)s::text IS NULL OR schedule.id > %(cursor)s::text
ORDER BY schedule.id
LIMIT %(max_schedules)s::integer
