-- Estimate what the jobs of queues take, of those that were sampled longest ago.
-- Arguments: max_queues, max_jobs integer; states, unfinished text[], max_first, max_sample, time_us bigint
--            for counting the jobs of a queue.
-- Rows:      queue, bytes, and how many jobs were looked at.
-- Locks:     none.
WITH picked AS MATERIALIZED (
  SELECT known.queue
  FROM (
    SELECT setting.queue FROM {schema}.headgate_queue AS setting
    UNION
    SELECT policy.queue FROM {schema}.headgate_enqueue_policy AS policy
    UNION
    SELECT depth.queue FROM {schema}.headgate_unfinished AS depth
    UNION
    SELECT tally.queue FROM {schema}.headgate_tally AS tally
  ) AS known
  LEFT JOIN {schema}.headgate_queue_memory AS memory ON memory.queue = known.queue
  ORDER BY memory.sampled_at_ms NULLS FIRST, known.queue
  LIMIT %(max_queues)s::integer
)
SELECT picked.queue,
  CASE WHEN sample.jobs = 0 THEN 0 ELSE round(sample.bytes::numeric * counted.jobs / sample.jobs) END::bigint,
  sample.jobs
FROM picked
CROSS JOIN LATERAL (
  SELECT count(*)::integer AS jobs, coalesce(sum(found.bytes), 0) AS bytes
  FROM (
    SELECT taken.bytes
    FROM unnest(%(states)s::text[]) AS wanted (state)
    CROSS JOIN LATERAL (
      SELECT pg_catalog.pg_column_size(job.*) AS bytes
      FROM {schema}.headgate_job AS job
      WHERE job.state = wanted.state AND (job.state <> 'running') IS TRUE AND job.queue = picked.queue
      LIMIT %(max_jobs)s::integer
    ) AS taken
    UNION ALL
    SELECT pg_catalog.pg_column_size(job.*)
    FROM {schema}.headgate_job AS job
    WHERE job.state = 'running' AND job.queue = picked.queue
    LIMIT %(max_jobs)s::integer
  ) AS found
) AS sample
CROSS JOIN LATERAL (
  SELECT coalesce(sum(counts.jobs), 0) AS jobs
  FROM {schema}.headgate_counts(
    ARRAY[picked.queue], %(states)s::text[], %(unfinished)s::text[], %(max_first)s::bigint, %(max_sample)s::bigint,
    %(time_us)s::bigint) AS counts
) AS counted
