-- Decide which jobs a worker may run, claim and lease them.
-- Arguments: worker, lease_id text; queues text[], sorted; capacity, quantum integer; lease_ms bigint.
-- Rows:      the claims, numbered in the order of the decisions, then always one row with the facts of the call.
-- Locks:     queues, class rows, job rows skipping what is locked; see headgate_admit in 0006_admission.
SELECT ordinal, retry_after_ms, refused_rate_class, refused_concurrency_limit, refused_fairness, refused_quarantine,
  passed_over, id, kind, schema_version, payload, queue, partition_key, rate_class, weight, fingerprint, priority,
  attempt, crash_attempt, max_attempts, scheduled_at_ms, timeout_ms, deadline_ms, retention_ms, unique_key,
  unique_states, periodic_schedule_id, periodic_tick_ms, headers::text, tags, sticky_worker, fence,
  lease_expires_at_ms, claimed_at_ms, checkpoint::text, cursor_data, charge_weight
FROM {schema}.headgate_admit(
  %(worker)s::text, %(lease_id)s::text, %(queues)b::text[], %(capacity)s::integer, %(lease_ms)s::bigint,
  %(quantum)s::integer, {window_max}, {window_spare}, {window_draws}, {deficit_cap}, {ledger_lag}, {fold_max},
  {hold_max}, {lock_wait_ms}, {busy_ms}
)
