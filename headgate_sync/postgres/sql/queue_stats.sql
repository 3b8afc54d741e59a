-- Look at queues and their backlog.
-- Arguments: queues text[]; max_partitions, max_sample integer per queue.
-- Rows:      per queue, in the order given: queue, weight, paused, unfinished, enqueue limit, arrived and completed in the
--            window, since when its oldest job may run, the facts of headgate_quiet_groups, bytes by the last sample,
--            and store time.
-- Locks:     none.
WITH clock AS MATERIALIZED (
  SELECT reading.now_ms, reading.now_ms - mod(reading.now_ms, 60000) - 60000 AS since_ms
  FROM (SELECT {schema}.headgate_now_ms() AS now_ms) AS reading
)
SELECT wanted.queue, coalesce(setting.weight, 1), coalesce(setting.paused, false),
  greatest(0,
    coalesce((SELECT depth.jobs FROM {schema}.headgate_unfinished AS depth WHERE depth.queue = wanted.queue), 0)
    + tallied.unfinished)::bigint,
  (SELECT policy.max_unfinished_jobs FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue = wanted.queue),
  (recent.arrived + tallied.arrived)::bigint,
  (recent.completed + tallied.completed)::bigint,
  (SELECT job.scheduled_at_ms
  FROM {schema}.headgate_job AS job
  WHERE job.state = 'available' AND job.queue = wanted.queue
  ORDER BY job.scheduled_at_ms, job.seq
  LIMIT 1),
  cardinality(quiet.noisy), quiet.arrived, quiet.completed, quiet.has_more, quiet.backlog, quiet.oldest_at_ms,
  quiet.is_cut,
  (SELECT memory.bytes FROM {schema}.headgate_queue_memory AS memory WHERE memory.queue = wanted.queue),
  clock.now_ms
FROM clock
CROSS JOIN LATERAL {schema}.headgate_quiet_groups(
  %(queues)s::text[], clock.since_ms, %(max_partitions)s::integer, %(max_sample)s::integer) AS quiet
CROSS JOIN LATERAL (SELECT (%(queues)s::text[])[quiet.place] AS queue OFFSET 0) AS wanted
LEFT JOIN LATERAL (
  SELECT known.weight, known.paused FROM {schema}.headgate_queue AS known WHERE known.queue = wanted.queue OFFSET 0
) AS setting ON true
CROSS JOIN LATERAL (
  SELECT coalesce(sum(counter.arrived), 0) AS arrived, coalesce(sum(counter.completed), 0) AS completed
  FROM {schema}.headgate_queue_minute AS counter
  WHERE counter.queue = wanted.queue AND counter.minute_at_ms >= clock.since_ms
) AS recent
CROSS JOIN LATERAL (
  SELECT coalesce(sum(tally.unfinished), 0) AS unfinished,
    coalesce(sum(tally.arrived) FILTER (WHERE tally.minute_at_ms >= clock.since_ms), 0) AS arrived,
    coalesce(sum(tally.completed) FILTER (WHERE tally.minute_at_ms >= clock.since_ms), 0) AS completed
  FROM {schema}.headgate_tally AS tally
  WHERE tally.queue = wanted.queue
) AS tallied
ORDER BY quiet.place
