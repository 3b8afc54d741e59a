-- Read which versions were applied.
-- Arguments: none.
-- Rows:      version, name, checksum and instant of each, in order.
-- Locks:     none.
SELECT ledger.version, ledger.name, ledger.checksum, ledger.applied_at_ms
FROM {schema}.headgate_schema_migration AS ledger
WHERE ledger.line = 'main'
ORDER BY ledger.version
