-- Sum up what happened to a queue by stretches of time.
-- Arguments: queue text; since_ms, bucket_ms bigint; max_buckets integer.
-- Rows:      start of the stretch, arrived, completed, failed, retried, rejected, sum and count of latencies; ascending.
-- Locks:     none.
SELECT part.minute_at_ms - mod(part.minute_at_ms, %(bucket_ms)s::bigint) AS at_ms,
  sum(part.arrived)::bigint, sum(part.completed)::bigint, sum(part.failed)::bigint, sum(part.retried)::bigint,
  sum(part.rejected)::bigint, sum(part.latency_ms_sum)::bigint, sum(part.latency_count)::bigint
FROM (
  SELECT counter.minute_at_ms, counter.arrived, counter.completed, counter.failed, counter.retried, counter.rejected,
    counter.latency_ms_sum, counter.latency_count
  FROM {schema}.headgate_queue_minute AS counter
  WHERE counter.queue = %(queue)s::text AND counter.minute_at_ms >= %(since_ms)s::bigint
  UNION ALL
  SELECT tally.minute_at_ms, tally.arrived, tally.completed, tally.failed, tally.retried, tally.rejected,
    tally.latency_ms_sum, tally.latency_count
  FROM {schema}.headgate_tally AS tally
  WHERE tally.queue = %(queue)s::text AND tally.minute_at_ms >= %(since_ms)s::bigint
    AND (tally.arrived <> 0 OR tally.completed <> 0 OR tally.failed <> 0 OR tally.retried <> 0 OR tally.rejected <> 0
      OR tally.latency_count <> 0)
) AS part
GROUP BY 1
ORDER BY 1
LIMIT %(max_buckets)s::integer
