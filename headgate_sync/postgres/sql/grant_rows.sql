-- Read which roles were given what; roles that are gone by now are left out.
-- Arguments: none.
-- Rows:      role and as_role, in order.
-- Locks:     none.
SELECT given.role, given.as_role
FROM {schema}.headgate_grant AS given
JOIN pg_catalog.pg_roles AS known ON known.rolname = given.role
ORDER BY given.role COLLATE "C", given.as_role COLLATE "C"
