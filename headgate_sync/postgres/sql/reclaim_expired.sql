-- Take back leases that ran out, oldest first.
-- Arguments: max_jobs, crash_limit, max_doublings, max_history integer; retry_base_ms, retry_cap_ms, apart_ms bigint;
--            error, code, reason text.
-- Rows:      id, fingerprint, crashes and whether it is quarantined now, kind, queue and worker, of each job, in order.
-- Locks:     job rows, skipping what is locked, then registry rows by fingerprint; see headgate_reclaim in 0005_sweeps.
SELECT taken.job_id, taken.fingerprint, taken.crash_attempt, taken.quarantined, taken.kind,
  taken.queue, taken.worker
FROM {schema}.headgate_reclaim(
  %(max_jobs)s::integer, %(crash_limit)s::integer, %(retry_base_ms)s::bigint, %(retry_cap_ms)s::bigint,
  %(max_doublings)s::integer, %(apart_ms)s::bigint, %(max_history)s::integer, %(error)s::text, %(code)s::text,
  %(reason)s::text
) AS taken
