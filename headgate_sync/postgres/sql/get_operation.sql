-- Look at an operation.
-- Arguments: id text.
-- Rows:      status, affected, total_estimated, dry_run, error; none without it.
-- Locks:     none.
SELECT op.status, op.affected, op.total_estimated, op.dry_run, op.error
FROM {schema}.headgate_operation AS op
WHERE op.id = %(id)s::text
