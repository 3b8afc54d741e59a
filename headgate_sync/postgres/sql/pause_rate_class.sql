-- Let nothing of a rate class pass for a time.
-- Arguments: name text, delay_ms bigint, reason text.
-- Rows:      one without a value.
-- Locks:     the class, for a new one its queues before; see headgate_pause_rate_class in 0007_policies.
SELECT {schema}.headgate_pause_rate_class(%(name)s::text, %(delay_ms)s::bigint, %(reason)s::text)
