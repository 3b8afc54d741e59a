-- Record that a role was given what one of our roles needs.
-- Arguments: role text, as_role text.
-- Rows:      none.
-- Locks:     none.
INSERT INTO {schema}.headgate_grant (role, as_role)
VALUES (%(role)s, %(as_role)s)
ON CONFLICT (role, as_role) DO NOTHING
