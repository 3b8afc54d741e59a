-- Make a pending job available now.
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
promoted AS (
  UPDATE {schema}.headgate_job AS job
  SET state = {to_operator_promote}, scheduled_at_ms = clock.now_ms
  FROM found, clock
  WHERE job.seq = found.seq AND found.state IN ({from_operator_promote})
  RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
),
listed AS (
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key)
  SELECT promoted.queue, 'r', promoted.partition_key, promoted.rate_class, promoted.sticky_worker, promoted.lane_key
  FROM promoted
)
SELECT found.state FROM found
