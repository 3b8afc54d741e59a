-- Cancel those of some jobs that are unfinished; the holders of their leases lose them.
-- Arguments: job_ids text[].
-- Rows:      how many were cancelled.
-- Locks:     the job rows, in seq order.
WITH found AS MATERIALIZED (
  SELECT job.ctid AS tid
  FROM {schema}.headgate_job AS job
  WHERE job.id = ANY (%(job_ids)b::text[])
    AND job.state IN ({from_operator_cancel})
  ORDER BY job.seq + 0
  FOR UPDATE
),
locked AS MATERIALIZED (
  SELECT array_agg(found.tid) AS tids, count(*) AS total FROM found
)
SELECT locked.total, {schema}.headgate_touch_jobs('cancel', locked.tids)
FROM locked
