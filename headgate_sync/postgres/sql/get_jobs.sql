-- Look at jobs by id, without payloads and with the newest line of their history only.
-- Arguments: job_ids text[].
-- Rows:      the fields of a summary in their order, in the order of the ids; none for a missing job.
-- Locks:     none.
SELECT job.id, job.kind, job.queue, job.state, job.schema_version, job.priority, job.attempt, job.crash_attempt,
  job.max_attempts, job.weight, job.partition_key, job.rate_class, job.fingerprint, job.sticky_worker,
  job.enqueued_at_ms, job.scheduled_at_ms, job.claimed_at_ms, job.finalized_at_ms, job.timeout_ms, job.deadline_ms,
  job.retention_ms, job.periodic_schedule_id, job.periodic_tick_ms, NULL::bytea, NULL::text,
  CASE WHEN jsonb_array_length(job.errors) > 0 THEN jsonb_build_array(job.errors -> -1) ELSE job.errors END::text,
  ARRAY (SELECT tag.tag FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = job.seq ORDER BY tag.tag),
  job.fence, job.lease_expires_at_ms, job.claimed_by, job.reason_code, job.error_code, job.latency_ms, job.replay_of
FROM unnest(%(job_ids)b::text[]) WITH ORDINALITY AS wanted (id, place)
CROSS JOIN LATERAL (
  SELECT found.seq, found.id, found.kind, found.queue, found.state, found.schema_version, found.priority, found.attempt,
    found.crash_attempt, found.max_attempts, found.weight, found.partition_key, found.rate_class, found.fingerprint,
    found.sticky_worker, found.enqueued_at_ms, found.scheduled_at_ms, found.claimed_at_ms, found.finalized_at_ms,
    found.timeout_ms, found.deadline_ms, found.retention_ms, found.periodic_schedule_id, found.periodic_tick_ms,
    found.errors, found.fence, found.lease_expires_at_ms, found.claimed_by, found.reason_code, found.error_code,
    found.latency_ms, found.replay_of
  FROM {schema}.headgate_job AS found
  WHERE found.id = wanted.id
  LIMIT 1
) AS job
ORDER BY wanted.place
