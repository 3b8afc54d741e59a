-- Remove what is kept of a queue beside its jobs.
-- Arguments: queue text.
-- Rows:      one: false when it has jobs and nothing was removed.
-- Locks:     the queue and the folds; see headgate_forget_queue.
SELECT {schema}.headgate_forget_queue(%(queue)s::text)
