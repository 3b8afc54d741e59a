-- Remove answers that have lapsed.
-- Arguments: max_keys integer.
-- Rows:      none.
-- Locks:     the keys, leaving out those that are locked: two callers do not wait for each other.
DELETE FROM {schema}.headgate_idempotency AS kept
WHERE kept.ctid = ANY (ARRAY (
  SELECT lapsed.ctid
  FROM {schema}.headgate_idempotency AS lapsed
  WHERE lapsed.expires_at_ms <= (SELECT {schema}.headgate_now_ms())
  ORDER BY lapsed.expires_at_ms
  LIMIT %(max_keys)s::integer
  FOR UPDATE SKIP LOCKED
))
