-- Remove a job that is not running, with all that belongs to it.
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
removed AS (
  DELETE FROM {schema}.headgate_job AS job
  USING found
  WHERE job.seq = found.seq AND found.state IN ({from_operator_delete})
  RETURNING job.seq, job.queue, job.partition_key, found.state AS was
),
untagged AS (
  DELETE FROM {schema}.headgate_job_tag AS tag
  WHERE tag.job_seq = ANY (ARRAY (SELECT removed.seq FROM removed))
),
tallied AS (
  INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
  SELECT removed.queue, removed.partition_key, clock.now_ms - mod(clock.now_ms, 60000), -1, 0, 0
  FROM removed
  CROSS JOIN clock
  WHERE removed.was IN ({unfinished})
)
SELECT found.state FROM found
