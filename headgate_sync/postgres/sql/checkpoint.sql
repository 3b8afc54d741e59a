-- Replace the checkpoint under the lease.
-- Arguments: job_id, lease_id text, fence bigint; checkpoint text (JSON) or null, cursor_data bytea or null,
--            charge_weight integer or null.
-- Rows:      one: whether it was written, and whether the job exists.
-- Locks:     the job row.
WITH written AS (
  UPDATE {schema}.headgate_job AS job
  SET checkpoint = %(checkpoint)s::jsonb, cursor_data = %(cursor_data)b::bytea,
    charge_weight = %(charge_weight)s::integer
  WHERE job.id = %(job_id)s::text AND job.lease_id = %(lease_id)s::text AND job.fence = %(fence)s::bigint
  RETURNING job.id
)
SELECT EXISTS (SELECT FROM written),
  EXISTS (SELECT FROM {schema}.headgate_job AS job WHERE job.id = %(job_id)s::text)
