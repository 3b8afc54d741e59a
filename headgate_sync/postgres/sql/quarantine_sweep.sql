-- Park waiting jobs of registered fingerprints.
-- Arguments: max_jobs integer.
-- Rows:      one: how many.
-- Locks:     registry rows shared, then job rows, skipping what is locked; see headgate_sweep_quarantine in 0005_sweeps.
SELECT {schema}.headgate_sweep_quarantine(%(max_jobs)s::integer)
