-- Read the newest checkpoint of a job.
-- Arguments: job_id text.
-- Rows:      JSON text, cursor and remaining weight, each null without; none without the job.
-- Locks:     none.
SELECT job.checkpoint::text, job.cursor_data, job.charge_weight
FROM {schema}.headgate_job AS job
WHERE job.id = %(job_id)s::text
