-- Fold appended counts into the counters of queues and minutes.
-- Arguments: max_rows integer, per queue; keep_ms bigint, how long the counter of a minute is kept.
-- Rows:      one: how many rows were folded.
-- Locks:     tally rows, skipping what is locked, then counters by key; see headgate_fold_tally in 0005_sweeps.
SELECT {schema}.headgate_fold_tally(%(max_rows)s::integer, %(keep_ms)s::bigint)
