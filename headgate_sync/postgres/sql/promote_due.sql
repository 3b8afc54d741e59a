-- Make due jobs available, earliest first.
-- Arguments: max_jobs integer.
-- Rows:      one: how many.
-- Locks:     job rows, skipping what is locked; see headgate_promote in 0005_sweeps.
SELECT {schema}.headgate_promote(%(max_jobs)s::integer)
