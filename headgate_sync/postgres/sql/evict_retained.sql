-- Delete finished jobs past their retention, the longest overdue first.
-- Arguments: max_jobs integer.
-- Rows:      one: how many.
-- Locks:     job rows, skipping what is locked; see headgate_evict in 0005_sweeps.
SELECT {schema}.headgate_evict(%(max_jobs)s::integer)
