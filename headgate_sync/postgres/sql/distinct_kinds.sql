-- List the kinds of a sample of waiting jobs.
-- Arguments: max_sample integer.
-- Rows:      kind, sorted.
-- Locks:     none.
SELECT DISTINCT sample.kind
FROM (
  SELECT job.kind
  FROM {schema}.headgate_job AS job
  WHERE job.state IN ({waiting})
  LIMIT %(max_sample)s::integer
) AS sample
ORDER BY sample.kind
