-- Take a version off the ledger.
-- Arguments: version integer.
-- Rows:      none.
-- Locks:     none beyond the ledger's own, which the caller holds.
DELETE FROM {schema}.headgate_schema_migration AS ledger
WHERE ledger.line = 'main' AND ledger.version = %(version)s
