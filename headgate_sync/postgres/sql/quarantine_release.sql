-- Unregister a fingerprint and give its quarantined jobs one more run.
-- Arguments: fingerprint text, empty for the jobs without one.
-- Rows:      one: how many moved, null when there was nothing of that name.
-- Locks:     the registry row, then job rows by seq; see headgate_release_quarantine in 0005_sweeps.
SELECT {schema}.headgate_release_quarantine(%(fingerprint)s::text)
