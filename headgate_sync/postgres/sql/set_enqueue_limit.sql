-- Bound the unfinished jobs of a queue.
-- Arguments: queue text, max_unfinished_jobs bigint.
-- Rows:      none.
-- Locks:     the limit of the queue.
INSERT INTO {schema}.headgate_enqueue_policy AS policy (queue, max_unfinished_jobs)
VALUES (%(queue)s::text, %(max_unfinished_jobs)s::bigint)
ON CONFLICT (queue) DO UPDATE SET max_unfinished_jobs = excluded.max_unfinished_jobs
