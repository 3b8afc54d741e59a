-- Set a queue's share of admissions; its position is kept.
-- Arguments: queue text, weight bigint.
-- Rows:      one without a value.
-- Locks:     the queue; see headgate_set_queue_weight in 0007_policies.
SELECT {schema}.headgate_set_queue_weight(%(queue)s::text, %(weight)s::bigint)
