-- Keep the answer of a request that is still the claimant's.
-- Arguments: route text, key text, claimed_at_ms bigint, status integer, headers text, body bytea.
-- Rows:      the key; none when somebody took the request over.
-- Locks:     the key.
UPDATE {schema}.headgate_idempotency AS kept
SET status = %(status)s::integer, headers = %(headers)s::text, body = %(body)s::bytea
WHERE kept.route = %(route)s::text
  AND kept.key = %(key)s::text
  AND kept.claimed_at_ms = %(claimed_at_ms)s::bigint
  AND kept.status IS NULL
RETURNING kept.key
