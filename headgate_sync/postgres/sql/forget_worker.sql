-- Take a worker that ends out of the list, but for a successor of its name.
-- Arguments: worker_id text, started_at_ms bigint.
-- Rows:      none.
-- Locks:     the worker's row.
DELETE FROM {schema}.headgate_worker AS worker
WHERE worker.worker_id = %(worker_id)s::text AND worker.started_at_ms = %(started_at_ms)s::bigint
