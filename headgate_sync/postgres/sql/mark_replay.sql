-- Write down which job a new one was made from, unless another call at this moment did.
-- Arguments: job_id, replay_of text.
-- Rows:      what it was made from, and its queue.
-- Locks:     the job row.
UPDATE {schema}.headgate_job AS job
SET replay_of = CASE WHEN job.replay_of = '' THEN %(replay_of)s::text ELSE job.replay_of END
WHERE job.id = %(job_id)s::text
RETURNING job.replay_of, job.queue
