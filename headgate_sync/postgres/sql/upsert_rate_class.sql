-- Create or change a rate class.
-- Arguments: name text; limits, windows_ms, bursts bigint[] of slot 0 and up; paused boolean; replace_all boolean, whether
--            further slots go; never_ms bigint, the instant at which budgets of a paused class stand.
-- Rows:      one without a value.
-- Locks:     the class, for a new one its queues before; see headgate_upsert_rate_class in 0007_policies.
SELECT {schema}.headgate_upsert_rate_class(
  %(name)s::text, %(limits)b::bigint[], %(windows_ms)b::bigint[], %(bursts)b::bigint[], %(paused)s::boolean,
  %(replace_all)s::boolean, %(never_ms)s::bigint)
