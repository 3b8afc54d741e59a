-- The same for a schedule that is gone, whose events are kept.
-- Arguments: schema_name, schedule_id text.
-- Rows:      one.
-- Locks:     an advisory lock of the name, to the end of the transaction.
SELECT pg_catalog.pg_advisory_xact_lock(
  pg_catalog.hashtextextended('schedule of headgate ' || %(schema_name)s::text || ' ' || %(schedule_id)s::text, 0))
