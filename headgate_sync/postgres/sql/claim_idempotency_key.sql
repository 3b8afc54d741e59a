-- Begin a request under a key, unless it ran, runs, or is another request.
-- Arguments: route text, key text, request_sha256 text, ttl_ms bigint, abandoned_ms bigint.
-- Rows:      when the key was first seen and when it was claimed now; none when it was not, and then its row is locked.
-- Locks:     the key.
WITH clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms
)
INSERT INTO {schema}.headgate_idempotency AS kept (route, key, request_sha256, created_at_ms, claimed_at_ms, expires_at_ms)
SELECT %(route)s::text, %(key)s::text, %(request_sha256)s::text, clock.now_ms, clock.now_ms,
  clock.now_ms + %(ttl_ms)s::bigint
FROM clock
ON CONFLICT (route, key) DO UPDATE
SET request_sha256 = EXCLUDED.request_sha256,
  status = NULL,
  headers = NULL,
  body = NULL,
  -- Whoever takes over a request that was cut off gives its job the same id.
  created_at_ms = CASE
    WHEN kept.expires_at_ms <= EXCLUDED.claimed_at_ms THEN EXCLUDED.created_at_ms ELSE kept.created_at_ms
  END,
  expires_at_ms = CASE
    WHEN kept.expires_at_ms <= EXCLUDED.claimed_at_ms THEN EXCLUDED.expires_at_ms ELSE kept.expires_at_ms
  END,
  claimed_at_ms = EXCLUDED.claimed_at_ms
WHERE kept.expires_at_ms <= EXCLUDED.claimed_at_ms
  OR (
    kept.status IS NULL
    AND kept.request_sha256 = EXCLUDED.request_sha256
    AND EXCLUDED.claimed_at_ms - kept.claimed_at_ms > %(abandoned_ms)s::bigint
  )
RETURNING kept.created_at_ms, kept.claimed_at_ms
