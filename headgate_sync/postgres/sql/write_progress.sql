-- Replace the progress under the lease.
-- Arguments: job_id, lease_id text, fence bigint; current, total bigint, message text or null.
-- Rows:      one: the instant, null when it was not written, and whether the job exists.
-- Locks:     the job row; the clock is read again should the row be waited for.
WITH written AS (
  UPDATE {schema}.headgate_job AS job
  SET progress_current = %(current)s::bigint, progress_total = %(total)s::bigint,
    progress_message = %(message)s::text, progress_fence = job.fence,
    progress_at_ms = {schema}.headgate_now_ms()
  WHERE job.id = %(job_id)s::text AND job.lease_id = %(lease_id)s::text AND job.fence = %(fence)s::bigint
  RETURNING job.progress_at_ms
)
SELECT (SELECT written.progress_at_ms FROM written),
  EXISTS (SELECT FROM {schema}.headgate_job AS job WHERE job.id = %(job_id)s::text)
