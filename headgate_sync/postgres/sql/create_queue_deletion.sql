-- Note the operation that removes a queue with its jobs, also with those that are still on their way.
-- Arguments: id, queue text; states text[]; total_estimated, for_ever bigint.
-- Rows:      none.
-- Locks:     none of jobs.
INSERT INTO {schema}.headgate_operation (id, action, status, states, queue, enqueued_until_ms, last_seq, empties,
  dry_run, total_estimated, created_at_ms)
VALUES (%(id)s::text, 'delete', 'pending', %(states)s::text[], %(queue)s::text, %(for_ever)s::bigint,
  %(for_ever)s::bigint, true, false, %(total_estimated)s::bigint, {schema}.headgate_now_ms())
ON CONFLICT (id) DO NOTHING
