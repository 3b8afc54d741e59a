-- Count jobs by state in a bounded sample.
-- Arguments: queue text, null for all; max_sample integer.
-- Rows:      state and number.
-- Locks:     none.
SELECT sample.state, count(*)
FROM (
  SELECT job.state
  FROM {schema}.headgate_job AS job
  WHERE %(queue)s::text IS NULL OR job.queue = %(queue)s::text
  LIMIT %(max_sample)s::integer
) AS sample
GROUP BY sample.state
