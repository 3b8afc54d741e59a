-- Create the record of which roles were given what, so that later versions give them what is new.
-- Arguments: none.
-- Rows:      none; fails when the table exists.
-- Locks:     the catalogue.
CREATE TABLE {schema}.headgate_grant (
  role text NOT NULL,
  as_role text NOT NULL,
  PRIMARY KEY (role, as_role)
)
