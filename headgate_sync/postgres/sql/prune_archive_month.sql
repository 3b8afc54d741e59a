-- Empty a month of the archive that is over.
-- Arguments: month text, YYYYMM; lock_wait_ms integer.
-- Rows:      one: how many rows it held, null when it stays; until when.
-- Locks:     the partition of the month.
SELECT cleared.pruned, cleared.not_before_ms
FROM {schema}.headgate_prune_archive(%(month)s::text, %(lock_wait_ms)s::integer) AS cleared
