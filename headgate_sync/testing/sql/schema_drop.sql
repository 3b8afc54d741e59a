-- Remove the schema of one test with everything in it.
-- Arguments: none.
-- Rows:      none.
-- Locks:     every relation of the schema, exclusively.
DROP SCHEMA {schema} CASCADE
