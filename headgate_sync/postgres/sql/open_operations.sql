-- Name the oldest operations that are not at their end.
-- Arguments: max_operations integer.
-- Rows:      id, oldest first.
-- Locks:     none.
SELECT op.id
FROM {schema}.headgate_operation AS op
WHERE op.status IN ('pending', 'running')
ORDER BY op.entry
LIMIT %(max_operations)s::integer
