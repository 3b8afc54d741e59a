-- Tell whether the server has a role.
-- Arguments: role text.
-- Rows:      one: whether it has.
-- Locks:     none.
SELECT EXISTS (SELECT FROM pg_catalog.pg_roles AS known WHERE known.rolname = %(role)s)
