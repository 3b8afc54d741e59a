-- Fold what writers appended to the tallies.
-- Arguments: max_rows integer per queue; keep_ms, keep_partitions_ms bigint.
-- Rows:      one: how many.
-- Locks:     as the function says.
SELECT {schema}.headgate_fold_tally(
  %(max_rows)s::integer, %(keep_ms)s::bigint, %(keep_partitions_ms)s::bigint)
