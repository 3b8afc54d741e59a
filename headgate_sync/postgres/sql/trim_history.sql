-- Forget the attempts of successful jobs that ended before an instant.
-- Arguments: cutoff_ms bigint, max_jobs integer.
-- Rows:      one: entries removed.
-- Locks:     the job rows, skipping what is locked.
SELECT {schema}.headgate_trim_history(%(cutoff_ms)s::bigint, %(max_jobs)s::integer)
