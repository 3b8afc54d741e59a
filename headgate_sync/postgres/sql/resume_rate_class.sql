-- End a pause that was to last until an instant.
-- Arguments: name text.
-- Rows:      one: whether there is such a class.
-- Locks:     the class; see headgate_resume_rate_class in 0007_policies.
SELECT {schema}.headgate_resume_rate_class(%(name)s::text)
