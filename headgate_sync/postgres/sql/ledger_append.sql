-- Book a version as applied.
-- Arguments: version integer, name text, checksum text.
-- Rows:      none.
-- Locks:     none beyond the ledger's own, which the caller holds.
INSERT INTO {schema}.headgate_schema_migration (line, version, name, checksum, applied_at_ms)
VALUES ('main', %(version)s, %(name)s, %(checksum)s, {schema}.headgate_now_ms())
