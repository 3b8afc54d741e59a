-- Take in a batch of jobs, all or none.
-- Arguments: one array per field over the batch; a field that is the same in all jobs may have
--            one element. unique_keys in their stored form, null without any; unique_windows_ms
--            null without a throttle key; tag_places and tags: pairs, null without any;
--            unique_replace and debounce_ms: of a batch of one;
--            own: the transaction is the store's own and commits with this statement.
-- Rows:      one: null when every job exists now, else the refusal as text[]: id_conflict,
--            quarantine, backpressure, duplicate or unsettled, and its facts.
-- Locks:     as headgate_enqueue in 0003_intake.
SELECT {schema}.headgate_enqueue(
  %(ids)b::text[], %(kinds)b::text[], %(schema_versions)b::integer[], %(payloads)b::bytea[],
  %(queues)b::text[], %(partition_keys)b::text[], %(rate_classes)b::text[],
  %(sticky_workers)b::text[], %(lane_keys)b::bigint[], %(weights)b::integer[],
  %(fingerprints)b::text[], %(priorities)b::integer[], %(max_attempts)b::integer[],
  %(scheduled_at_ms)b::bigint[], %(delay_ms)b::bigint[], %(pending)b::boolean[],
  %(timeout_ms)b::bigint[], %(deadline_ms)b::bigint[], %(deadline_in_ms)b::bigint[],
  %(retention_ms)b::bigint[], %(unique_keys)b::bytea[], %(unique_states)b::integer[],
  %(periodic_schedule_ids)b::text[], %(periodic_ticks_ms)b::bigint[], %(headers)b::text[],
  %(tag_places)b::integer[], %(tags)b::text[], %(unique_windows_ms)b::bigint[],
  %(unique_replace)s::integer, %(debounce_ms)s::bigint, %(own)s::boolean
)
