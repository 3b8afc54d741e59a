-- Delete finished jobs that ended before an instant.
-- Arguments: states text[], cutoff_ms bigint, max_jobs integer.
-- Rows:      one: how many.
-- Locks:     the job rows, skipping what is locked.
SELECT {schema}.headgate_delete_ended(%(states)s::text[], %(cutoff_ms)s::bigint, %(max_jobs)s::integer)
