-- Carry an operation on by one step.
-- Arguments: id text; batch integer, jobs touched at most; window integer, rows looked at at most.
-- Rows:      one: jobs touched.
-- Locks:     the operation, then the job rows; see headgate_run_operation.
SELECT {schema}.headgate_run_operation(%(id)s::text, %(batch)s::integer, %(window)s::integer)
