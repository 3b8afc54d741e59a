-- Lift the bound of a queue.
-- Arguments: queue text.
-- Rows:      none.
-- Locks:     the limit of the queue.
DELETE FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue = %(queue)s::text
