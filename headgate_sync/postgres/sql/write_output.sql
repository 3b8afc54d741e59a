-- Replace the output under the lease.
-- Arguments: job_id, lease_id text, fence bigint; schema_version integer, data bytea.
-- Rows:      one: the instant, null when it was not written, and whether the job exists.
-- Locks:     the job row; the clock is read again should the row be waited for.
WITH written AS (
  UPDATE {schema}.headgate_job AS job
  SET output_version = %(schema_version)s::integer, output = %(data)b::bytea, output_fence = job.fence,
    output_at_ms = {schema}.headgate_now_ms()
  WHERE job.id = %(job_id)s::text AND job.lease_id = %(lease_id)s::text AND job.fence = %(fence)s::bigint
  RETURNING job.output_at_ms
)
SELECT (SELECT written.output_at_ms FROM written),
  EXISTS (SELECT FROM {schema}.headgate_job AS job WHERE job.id = %(job_id)s::text)
