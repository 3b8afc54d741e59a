-- List the kinds of a sample of waiting jobs.
-- Arguments: max_sample integer, rows looked at; max_jobs integer, jobs taken of them;
--            queues text[], null for all.
-- Rows:      kind, sorted.
-- Locks:     none.
SELECT DISTINCT wanted.kind
FROM (
  SELECT sample.kind
  FROM (
    SELECT job.kind, job.queue
    FROM {schema}.headgate_job AS job
    WHERE job.state IN ({waiting}) AND (job.state <> 'running') IS TRUE
    LIMIT %(max_sample)s::integer
  ) AS sample
  WHERE %(queues)b::text[] IS NULL OR sample.queue = ANY (%(queues)b::text[])
  LIMIT %(max_jobs)s::integer
) AS wanted
ORDER BY wanted.kind
