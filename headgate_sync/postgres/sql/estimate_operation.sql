-- Count the jobs that an operation would touch now, up to a limit.
-- Arguments: states text[]; queue, kind, partition_key text, null for any; older_than_ms bigint; max_sample integer.
-- Rows:      one.
-- Locks:     none.
SELECT count(*)
FROM (
  SELECT
  FROM (
    SELECT job.kind, job.partition_key, job.enqueued_at_ms
    FROM unnest(%(states)s::text[]) AS wanted (state)
    CROSS JOIN LATERAL (
      SELECT listed.kind, listed.partition_key, listed.enqueued_at_ms
      FROM {schema}.headgate_job AS listed
      WHERE listed.state = wanted.state AND (listed.state <> 'running') IS TRUE
        AND (%(queue)s::text IS NULL OR listed.queue = %(queue)s::text)
      OFFSET 0
    ) AS job
    UNION ALL
    SELECT job.kind, job.partition_key, job.enqueued_at_ms
    FROM {schema}.headgate_job AS job
    WHERE job.state = 'running' AND 'running' = ANY (%(states)s::text[])
      AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
  ) AS found
  CROSS JOIN (SELECT {schema}.headgate_now_ms() - %(older_than_ms)s::bigint AS until_ms) AS clock
  WHERE (%(kind)s::text IS NULL OR found.kind = %(kind)s::text)
    AND (%(partition_key)s::text IS NULL OR found.partition_key = %(partition_key)s::text)
    AND found.enqueued_at_ms <= clock.until_ms
  LIMIT %(max_sample)s::integer
) AS sample
