-- Keep a job from being deleted until the end of the transaction.
-- Arguments: job_id text.
-- Rows:      its id; none without the job.
-- Locks:     the job row, so weakly that its holder and its verbs do not notice.
SELECT job.id
FROM {schema}.headgate_job AS job
WHERE job.id = %(job_id)s::text
FOR KEY SHARE
