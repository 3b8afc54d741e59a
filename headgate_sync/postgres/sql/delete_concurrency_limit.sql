-- Remove a ceiling.
-- Arguments: name text.
-- Rows:      one: whether there was one.
-- Locks:     its queue; see headgate_delete_ceiling in 0007_policies.
SELECT {schema}.headgate_delete_ceiling(%(name)s::text)
