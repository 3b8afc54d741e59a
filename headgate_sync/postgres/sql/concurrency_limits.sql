-- All ceilings.
-- Arguments: none.
-- Rows:      name, scope, queue, rate class, most running jobs, what happens to a job that finds no room.
-- Locks:     none.
SELECT ceiling.name, ceiling.scope, ceiling.queue, ceiling.rate_class, ceiling.max_concurrent, ceiling.on_saturated
FROM {schema}.headgate_ceiling AS ceiling
ORDER BY ceiling.name
