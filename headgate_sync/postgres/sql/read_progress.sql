-- Read the newest progress of a job.
-- Arguments: job_id text.
-- Rows:      current, total, message, fence and instant; none without a job or a progress.
-- Locks:     none.
SELECT job.progress_current, job.progress_total, job.progress_message, job.progress_fence, job.progress_at_ms
FROM {schema}.headgate_job AS job
WHERE job.id = %(job_id)s::text AND job.progress_total IS NOT NULL
