-- Keep what samples of queues gave.
-- Arguments: queues text[], sizes bigint[], jobs integer[] of one length.
-- Rows:      none.
-- Locks:     rows by queue.
INSERT INTO {schema}.headgate_queue_memory AS memory (queue, bytes, sampled_jobs, sampled_at_ms)
SELECT given.queue, given.bytes, given.jobs, {schema}.headgate_now_ms()
FROM unnest(%(queues)s::text[], %(sizes)s::bigint[], %(jobs)s::integer[]) AS given (queue, bytes, jobs)
ORDER BY given.queue
ON CONFLICT (queue) DO UPDATE
SET bytes = excluded.bytes, sampled_jobs = excluded.sampled_jobs, sampled_at_ms = excluded.sampled_at_ms
