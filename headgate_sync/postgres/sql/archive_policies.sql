-- The queues that have an archive.
-- Arguments: none.
-- Rows:      queue, how long its copies are kept, in order.
-- Locks:     none.
SELECT policy.queue, policy.retention_ms
FROM {schema}.headgate_archive_policy AS policy
ORDER BY policy.queue
