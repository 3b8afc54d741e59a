-- Delete finished jobs past their retention, the longest overdue first, and keep copies where a queue's policy says so.
-- Arguments: max_jobs integer.
-- Rows:      one: how many.
-- Locks:     job rows, skipping what is locked; see 0014_archive.
SELECT {schema}.headgate_evict(%(max_jobs)s::integer)
