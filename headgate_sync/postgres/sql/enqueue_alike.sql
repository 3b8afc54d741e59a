-- Take in a batch, all or none, whose jobs differ in nothing but id, content and lane.
-- Arguments: ids in ascending order; kinds, payloads, queues, partition_keys, lane_keys and
--            fingerprints: one element where all jobs have the same, else one per job; all else
--            as enqueue_one.
-- Rows:      one: null when every job exists now, else the refusal as text[] (see enqueue).
-- Locks:     as headgate_enqueue in 0003_intake.
SELECT {schema}.headgate_enqueue_alike(
  %(ids)b::text[], %(kinds)b::text[], %(payloads)b::bytea[], %(queues)b::text[],
  %(partition_keys)b::text[], %(lane_keys)b::bigint[], %(fingerprints)b::text[],
  %(own)s::boolean, %(schema_version)s::integer, %(rate_class)s::text, %(sticky_worker)s::text,
  %(weight)s::integer, %(priority)s::integer, %(max_attempts)s::integer,
  %(scheduled_at_ms)s::bigint, %(delay_ms)s::bigint, %(timeout_ms)s::bigint,
  %(deadline_ms)s::bigint, %(deadline_in_ms)s::bigint, %(retention_ms)s::bigint,
  %(headers)s::text
)
