-- Remove a rate class.
-- Arguments: name text; max_waiting integer, how far waiting jobs are counted.
-- Rows:      one: waiting jobs that name it; null without such a class.
-- Locks:     the class; see headgate_delete_rate_class in 0007_policies.
SELECT {schema}.headgate_delete_rate_class(%(name)s::text, %(max_waiting)s::integer)
