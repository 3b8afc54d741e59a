-- Read the result of a job.
-- Arguments: job_id text.
-- Rows:      version and bytes; none without a job or a result.
-- Locks:     none.
SELECT job.result_version, job.result
FROM {schema}.headgate_job AS job
WHERE job.id = %(job_id)s::text AND job.result_version IS NOT NULL
