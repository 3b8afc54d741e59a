-- Read the newest output of a job.
-- Arguments: job_id text.
-- Rows:      version, bytes, fence and instant; none without a job or an output.
-- Locks:     none.
SELECT job.output_version, job.output, job.output_fence, job.output_at_ms
FROM {schema}.headgate_job AS job
WHERE job.id = %(job_id)s::text AND job.output_version IS NOT NULL
