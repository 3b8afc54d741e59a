-- Set or clear what a worker is asked to do.
-- Arguments: worker_id text; command text or null.
-- Rows:      one with the worker's id, if there is such a worker.
-- Locks:     the worker's row.
UPDATE {schema}.headgate_worker AS worker
SET command = %(command)s::text
WHERE worker.worker_id = %(worker_id)s::text
RETURNING worker.worker_id
