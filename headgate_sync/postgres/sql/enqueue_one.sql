-- Take in one job with neither throttle key, replacement, debounce, periodic origin nor pending.
-- Arguments: the fields of the job; unique_key in its stored form; headers and tags null without any;
--            own: the transaction is the store's own and commits with this statement.
-- Rows:      one: null when the job exists now, else the refusal as text[] (see enqueue).
-- Locks:     as headgate_enqueue in 0003_intake.
SELECT {schema}.headgate_enqueue_one(
  %(id)s::text, %(kind)s::text, %(payload)b::bytea, %(queue)s::text, %(partition_key)s::text,
  %(lane_key)s::bigint, %(fingerprint)s::text, %(own)s::boolean, %(schema_version)s::integer,
  %(rate_class)s::text, %(sticky_worker)s::text, %(weight)s::integer, %(priority)s::integer,
  %(max_attempts)s::integer, %(scheduled_at_ms)s::bigint, %(delay_ms)s::bigint,
  %(timeout_ms)s::bigint, %(deadline_ms)s::bigint, %(deadline_in_ms)s::bigint,
  %(retention_ms)s::bigint, %(unique_key)b::bytea, %(headers)s::text, %(tags)s::text[]
)
