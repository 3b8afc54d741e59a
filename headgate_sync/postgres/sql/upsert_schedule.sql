-- Create or replace a schedule; what is equal already is not written.
-- Arguments: the fields of a schedule but last_enqueued_ms; paused boolean or null to keep it.
-- Rows:      none.
-- Locks:     the schedule.
INSERT INTO {schema}.headgate_schedule AS schedule (
  id, kind, spec, payload, schema_version, queue, partition_key, rate_class, weight, priority, max_attempts, timeout_ms,
  retention_ms, headers, tags, sticky_worker, on_missed, backfill_limit, next_run_ms, last_enqueued_ms, paused)
VALUES (
  %(id)s::text, %(kind)s::text, %(spec)s::text, %(payload)b::bytea, %(schema_version)s::integer, %(queue)s::text,
  %(partition_key)s::text, %(rate_class)s::text, %(weight)s::integer, %(priority)s::integer,
  %(max_attempts)s::integer, %(timeout_ms)s::bigint, %(retention_ms)s::bigint, %(headers)s::jsonb, %(tags)s::text[],
  %(sticky_worker)s::text, %(on_missed)s::text, %(backfill_limit)s::integer, %(next_run_ms)s::bigint, NULL,
  coalesce(%(paused)s::boolean, false))
ON CONFLICT (id) DO UPDATE
SET kind = excluded.kind, spec = excluded.spec, payload = excluded.payload, schema_version = excluded.schema_version,
  queue = excluded.queue, partition_key = excluded.partition_key, rate_class = excluded.rate_class,
  weight = excluded.weight, priority = excluded.priority, max_attempts = excluded.max_attempts,
  timeout_ms = excluded.timeout_ms, retention_ms = excluded.retention_ms, headers = excluded.headers,
  tags = excluded.tags, sticky_worker = excluded.sticky_worker, on_missed = excluded.on_missed,
  backfill_limit = excluded.backfill_limit,
  next_run_ms = CASE WHEN schedule.spec = excluded.spec THEN schedule.next_run_ms ELSE excluded.next_run_ms END,
  paused = coalesce(%(paused)s::boolean, schedule.paused)
WHERE (schedule.kind, schedule.spec, schedule.payload, schedule.schema_version, schedule.queue,
    schedule.partition_key, schedule.rate_class, schedule.weight, schedule.priority, schedule.max_attempts,
    schedule.timeout_ms, schedule.retention_ms, schedule.headers, schedule.tags, schedule.sticky_worker,
    schedule.on_missed, schedule.backfill_limit, schedule.paused)
  IS DISTINCT FROM (excluded.kind, excluded.spec, excluded.payload, excluded.schema_version, excluded.queue,
    excluded.partition_key, excluded.rate_class, excluded.weight, excluded.priority, excluded.max_attempts,
    excluded.timeout_ms, excluded.retention_ms, excluded.headers, excluded.tags, excluded.sticky_worker,
    excluded.on_missed, excluded.backfill_limit, coalesce(%(paused)s::boolean, schedule.paused))
