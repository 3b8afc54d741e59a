-- Create the schema.
-- Arguments: none.
-- Rows:      none; fails when the schema exists.
-- Locks:     the catalogue.
CREATE SCHEMA {schema}
