-- Create the ledger of the schema's versions.
-- Arguments: none.
-- Rows:      none; fails when the table exists.
-- Locks:     the catalogue.
CREATE TABLE {schema}.headgate_schema_migration (
  line text NOT NULL,
  version integer NOT NULL CHECK (version > 0),
  name text NOT NULL,
  checksum text NOT NULL,
  applied_at_ms bigint NOT NULL,
  PRIMARY KEY (line, version)
)
