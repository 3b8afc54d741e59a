-- Create or change a ceiling.
-- Arguments: name, scope, queue, rate_class text; max_concurrent integer; on_saturated text.
-- Rows:      one: false when the stored one counts something else; nothing was changed then.
-- Locks:     its queue, or the queues of its class and then the class; see headgate_upsert_ceiling in 0007_policies.
SELECT {schema}.headgate_upsert_ceiling(
  %(name)s::text, %(scope)s::text, %(queue)s::text, %(rate_class)s::text, %(max_concurrent)s::integer,
  %(on_saturated)s::text)
