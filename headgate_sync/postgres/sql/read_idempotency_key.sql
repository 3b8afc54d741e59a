-- Read what a key stands for.
-- Arguments: route text, key text.
-- Rows:      the request's hash, and status, headers and body of its answer, which are null while it runs.
-- Locks:     none.
SELECT kept.request_sha256, kept.status, kept.headers, kept.body
FROM {schema}.headgate_idempotency AS kept
WHERE kept.route = %(route)s::text AND kept.key = %(key)s::text
