-- Forget a request that came to nothing and is still the claimant's.
-- Arguments: route text, key text, claimed_at_ms bigint.
-- Rows:      the key; none when somebody took the request over.
-- Locks:     the key.
DELETE FROM {schema}.headgate_idempotency AS kept
WHERE kept.route = %(route)s::text
  AND kept.key = %(key)s::text
  AND kept.claimed_at_ms = %(claimed_at_ms)s::bigint
  AND kept.status IS NULL
RETURNING kept.key
