-- Count jobs by state in a sample for each of some queues.
-- Arguments: queues text[], one null for all queues together; states text[] in the order of the sample, unfinished
--            text[]; max_first, max_sample bigint for each state and each queue; time_us bigint for each queue.
-- Rows:      place of the queue from 1, state, number, and whether there may be more; none for a state without a job.
-- Locks:     none.
SELECT counted.place, counted.state, counted.jobs, counted.at_least
FROM {schema}.headgate_counts(
  %(queues)s::text[], %(states)s::text[], %(unfinished)s::text[], %(max_first)s::bigint, %(max_sample)s::bigint,
  %(time_us)s::bigint) AS counted
