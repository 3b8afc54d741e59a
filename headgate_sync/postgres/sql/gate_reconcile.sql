-- Recompute counters of the gate from the job rows, the longest unverified first.
-- Arguments: max_partitions, lock_wait_ms integer; idle_ms bigint, after which a partition without work is dropped.
-- Rows:      one: how many were wrong.
-- Locks:     queues; see headgate_gate_reconcile in 0008_upkeep.
SELECT {schema}.headgate_gate_reconcile(
  %(max_partitions)s::integer, %(idle_ms)s::bigint, %(lock_wait_ms)s::integer)
