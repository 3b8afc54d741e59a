-- Turn a pending job into one that becomes available at an instant.
-- Arguments: job_id text, at_ms bigint.
-- Rows:      the state in which the job was found; none without the job.
-- Locks:     the job row.
WITH found AS MATERIALIZED (
  SELECT job.seq, job.state
  FROM {schema}.headgate_job AS job
  WHERE job.id = %(job_id)s::text
  FOR UPDATE
),
scheduled AS (
  UPDATE {schema}.headgate_job AS job
  SET state = {to_schedule_pending}, scheduled_at_ms = %(at_ms)s::bigint
  FROM found
  WHERE job.seq = found.seq AND found.state IN ({from_schedule_pending})
)
SELECT found.state FROM found
