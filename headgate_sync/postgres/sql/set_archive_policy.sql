-- Keep copies of the jobs of a queue that are deleted because of their age, or none.
-- Arguments: queue text; retention_ms bigint, null for none; lock_wait_ms integer.
-- Rows:      one, without meaning.
-- Locks:     the table of policies, against sweeps.
SELECT {schema}.headgate_set_archive_policy(
  %(queue)s::text, %(retention_ms)s::bigint, %(lock_wait_ms)s::integer)
