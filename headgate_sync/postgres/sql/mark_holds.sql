-- Set jobs aside that an admission had to pass over, so that later calls do not meet them again.
-- Arguments: seqs bigint[], lock_wait_ms integer.
-- Rows:      one: how many.
-- Locks:     the rows of the reasons, then job rows, skipping what is locked; see headgate_mark_holds in 0006_admission.
SELECT {schema}.headgate_mark_holds(%(seqs)b::bigint[], %(lock_wait_ms)s::integer)
