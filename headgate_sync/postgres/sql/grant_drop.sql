-- Drop the record of grants, as the last step of going down.
-- Arguments: none.
-- Rows:      none.
-- Locks:     the record.
DROP TABLE {schema}.headgate_grant
