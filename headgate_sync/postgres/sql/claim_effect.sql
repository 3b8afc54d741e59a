-- Claim the key of an effect once for ever.
-- Arguments: key text.
-- Rows:      one if the key is ours, none if a committed transaction, or this one, claimed it before.
-- Locks:     waits for an open transaction that claims the same key.
INSERT INTO {schema}.headgate_effect AS effect (key, claimed_at_ms)
VALUES (%(key)s::text, {schema}.headgate_now_ms())
ON CONFLICT (key) DO NOTHING
RETURNING effect.claimed_at_ms
