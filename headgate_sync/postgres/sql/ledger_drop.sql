-- Drop the ledger, as the last step of going down.
-- Arguments: none.
-- Rows:      none.
-- Locks:     the ledger.
DROP TABLE {schema}.headgate_schema_migration
