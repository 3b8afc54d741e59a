-- Give a finished job one more run, now; the whole weight is charged again.
-- Arguments: job_id text.
-- Rows:      the state in which the job was found, and who else holds its lifecycle key by now, null for nobody; none
--            without the job.
-- Locks:     the job row.
-- Fails:     unique_violation, when the key is taken at this very moment.
WITH found AS MATERIALIZED (
  SELECT job.seq, job.state, job.unique_key
  FROM {schema}.headgate_job AS job
  WHERE job.id = %(job_id)s::text
  FOR UPDATE
),
clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms FROM (SELECT count(*) FROM found) AS locked
),
holder AS MATERIALIZED (
  SELECT job.id
  FROM found
  JOIN {schema}.headgate_job AS job ON job.unique_key = found.unique_key
  WHERE found.state IN ({from_operator_retry}) AND job.state IN ({unfinished})
),
revived AS (
  UPDATE {schema}.headgate_job AS job
  SET state = {to_operator_retry}, scheduled_at_ms = clock.now_ms, finalized_at_ms = NULL, reason_code = '',
    charge_weight = NULL
  FROM found, clock
  WHERE job.seq = found.seq AND found.state IN ({from_operator_retry}) AND NOT EXISTS (SELECT FROM holder)
  RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
),
listed AS (
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key)
  SELECT revived.queue, 'r', revived.partition_key, revived.rate_class, revived.sticky_worker, revived.lane_key
  FROM revived
),
tallied AS (
  INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
  SELECT revived.queue, revived.partition_key, clock.now_ms - mod(clock.now_ms, 60000), 1, 0, 0
  FROM revived
  CROSS JOIN clock
)
SELECT found.state, (SELECT holder.id FROM holder) FROM found
