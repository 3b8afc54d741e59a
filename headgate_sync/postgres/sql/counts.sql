-- Count jobs by state in a sample for each of some queues.
-- Arguments: queues text[], one null for all queues together; states text[] in the order of the sample; max_sample
--            bigint for each.
-- Rows:      place of the queue from 1, state and number; none for a state without a job.
-- Locks:     none.
SELECT wanted.place, counted.state, counted.jobs
FROM unnest(%(queues)s::text[]) WITH ORDINALITY AS wanted (queue, place)
CROSS JOIN LATERAL {schema}.headgate_counts(wanted.queue, %(states)s::text[], %(max_sample)s::bigint) AS counted
