-- Give a duty up, if it is held.
-- Arguments: name, holder text.
-- Rows:      none.
-- Locks:     the duty row.
UPDATE {schema}.headgate_duty AS duty
SET expires_at_ms = {schema}.headgate_now_ms()
WHERE duty.name = %(name)s::text AND duty.holder = %(holder)s::text
