-- End an operation whose step cannot be carried out.
-- Arguments: id, error text.
-- Rows:      none.
-- Locks:     the operation.
UPDATE {schema}.headgate_operation AS op
SET status = 'failed', error = %(error)s::text
WHERE op.id = %(id)s::text AND op.status IN ('pending', 'running')
