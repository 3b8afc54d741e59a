-- Give a partition a share of its own, or take it away.
-- Arguments: queue, partition_key text; quantum integer, null for none.
-- Rows:      one without a value.
-- Locks:     the queue; see headgate_set_partition_quantum in 0007_policies.
SELECT {schema}.headgate_set_partition_quantum(%(queue)s::text, %(partition_key)s::text, %(quantum)s::integer)
