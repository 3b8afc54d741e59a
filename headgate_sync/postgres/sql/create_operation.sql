-- Note an operation; the jobs enqueued later are not its business.
-- Arguments: id, action text; states text[]; queue, kind, partition_key text, null for any; older_than_ms bigint;
--            dry_run boolean; total_estimated bigint.
-- Rows:      its id; none when there is one of this id.
-- Locks:     none of jobs.
INSERT INTO {schema}.headgate_operation (id, action, status, states, queue, kind, partition_key, enqueued_until_ms,
  last_seq, empties, dry_run, total_estimated, created_at_ms)
SELECT %(id)s::text, %(action)s::text, CASE WHEN %(dry_run)s::boolean THEN 'completed' ELSE 'pending' END,
  %(states)s::text[], %(queue)s::text, %(kind)s::text, %(partition_key)s::text,
  clock.now_ms - %(older_than_ms)s::bigint,
  coalesce((SELECT job.seq FROM {schema}.headgate_job AS job ORDER BY job.seq DESC LIMIT 1), 0),
  false, %(dry_run)s::boolean, %(total_estimated)s::bigint, clock.now_ms
FROM (SELECT {schema}.headgate_now_ms() AS now_ms) AS clock
ON CONFLICT (id) DO NOTHING
RETURNING id
