-- Move a waiting job to another instant; its state stays.
-- Arguments: job_id text, at_ms bigint.
-- Rows:      the state in which the job was found; none without the job.
-- Locks:     the job row.
WITH found AS MATERIALIZED (
  SELECT job.seq, job.state
  FROM {schema}.headgate_job AS job
  WHERE job.id = %(job_id)s::text
  FOR UPDATE
),
moved AS (
  UPDATE {schema}.headgate_job AS job
  SET scheduled_at_ms = %(at_ms)s::bigint
  FROM found
  WHERE job.seq = found.seq AND found.state IN ({from_operator_reschedule})
)
SELECT found.state FROM found
