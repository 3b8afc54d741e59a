-- Settle attempts, each under its own fence.
-- Arguments: arrays of one length, one entry per ack; null for what no ack of the batch brings. firsts: false where an
--            earlier ack shows the same lease. details: history entries as JSON objects, null for none; pauses_ms: for the rate class of the job.
--            lock_wait_ms: 0 leaves rows alone that are locked elsewhere, else waits so long for each.
-- Rows:      place (from 1) of each ack that was not settled; whether the job is gone; whether its row was locked.
-- Locks:     job rows by seq, then class rows by name; see headgate_ack in 0004_settle.
SELECT refused.place, refused.missing, refused.busy
FROM {schema}.headgate_ack(
  %(job_ids)b::text[], %(lease_ids)b::text[], %(fences)b::bigint[], %(firsts)b::boolean[],
  %(outcomes)b::text[],
  %(delays_ms)b::bigint[], %(jitters_ms)b::bigint[], %(pauses_ms)b::bigint[], %(details)b::text[],
  %(latencies_ms)b::integer[], %(error_codes)b::text[], %(reason_codes)b::text[],
  %(actual_weights)b::integer[], %(result_versions)b::integer[], %(results)b::bytea[],
  %(retry_base_ms)s::bigint, %(retry_cap_ms)s::bigint, %(max_doublings)s::integer,
  %(max_history)s::integer, %(lock_wait_ms)s::integer
) AS refused
