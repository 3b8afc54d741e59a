-- Look at one job.
-- Arguments: job_id text.
-- Rows:      the fields of a summary in their order, payload and headers null; none without the job.
-- Locks:     none.
SELECT job.id, job.kind, job.queue, job.state, job.schema_version, job.priority, job.attempt, job.crash_attempt,
  job.max_attempts, job.weight, job.partition_key, job.rate_class, job.fingerprint, job.sticky_worker,
  job.enqueued_at_ms, job.scheduled_at_ms, job.claimed_at_ms, job.finalized_at_ms, job.timeout_ms, job.deadline_ms,
  job.retention_ms, job.periodic_schedule_id, job.periodic_tick_ms,
  NULL::bytea, NULL::text, job.errors::text,
  ARRAY (SELECT tag.tag FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = job.seq ORDER BY tag.tag),
  job.fence, job.lease_expires_at_ms, job.claimed_by, job.reason_code, job.error_code, job.latency_ms, job.replay_of
FROM {schema}.headgate_job AS job
WHERE job.id = %(job_id)s::text
