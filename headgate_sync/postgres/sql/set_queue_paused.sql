-- Let admission skip a queue, or not.
-- Arguments: queue text, paused boolean.
-- Rows:      one without a value.
-- Locks:     the queue; see headgate_set_queue_paused in 0007_policies.
SELECT {schema}.headgate_set_queue_paused(%(queue)s::text, %(paused)s::boolean)
