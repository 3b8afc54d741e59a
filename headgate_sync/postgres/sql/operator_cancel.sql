-- Cancel an unfinished job; the holder of a lease loses it.
-- Arguments: job_id text.
-- Rows:      the state in which the job was found; none without the job.
-- Locks:     the job row.
WITH found AS MATERIALIZED (
  SELECT job.seq, job.state
  FROM {schema}.headgate_job AS job
  WHERE job.id = %(job_id)s::text
  FOR UPDATE
),
clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms FROM (SELECT count(*) FROM found) AS locked
),
cancelled AS (
  UPDATE {schema}.headgate_job AS job
  SET state = {to_operator_cancel}, finalized_at_ms = clock.now_ms, reason_code = 'cancelled', gate_hold = NULL,
    lease_id = NULL, lease_expires_at_ms = NULL, claimed_by = NULL, claimed_at_ms = NULL, rate_charge = 0,
    settled_lease_id = NULL, settled_outcome = NULL
  FROM found, clock
  WHERE job.seq = found.seq AND found.state IN ({from_operator_cancel})
  RETURNING job.queue, job.partition_key, job.rate_class, found.state AS was
),
freed AS (
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class)
  SELECT cancelled.queue, 'f', cancelled.partition_key, cancelled.rate_class
  FROM cancelled
  WHERE cancelled.was = 'running'
),
tallied AS (
  INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
  SELECT cancelled.queue, cancelled.partition_key, clock.now_ms - mod(clock.now_ms, 60000), -1, 0, 0
  FROM cancelled
  CROSS JOIN clock
)
SELECT found.state FROM found
