-- Let one session at a time change the schema.
-- Arguments: none.
-- Rows:      none.
-- Locks:     the ledger, also against readers, so that whoever starts meanwhile sees the finished version.
LOCK TABLE {schema}.headgate_schema_migration IN ACCESS EXCLUSIVE MODE
