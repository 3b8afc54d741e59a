-- Replace payload, version and fingerprint of a job that is not running; the whole weight is charged again.
-- Arguments: job_id text, payload bytea, schema_version integer, fingerprint text.
-- Rows:      the state in which the job was found; none without the job.
-- Locks:     the job row. A mark of the gate goes with what was its reason, and the lane is listed again.
WITH found AS MATERIALIZED (
  SELECT job.seq, job.state, job.gate_hold
  FROM {schema}.headgate_job AS job
  WHERE job.id = %(job_id)s::text
  FOR UPDATE
),
edited AS (
  UPDATE {schema}.headgate_job AS job
  SET payload = %(payload)b::bytea, schema_version = %(schema_version)s::integer,
    fingerprint = %(fingerprint)s::text, charge_weight = NULL, gate_hold = NULL
  FROM found
  WHERE job.seq = found.seq AND found.state IN ({from_edit_payload})
  RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key, found.gate_hold AS was_held
),
listed AS (
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key)
  SELECT edited.queue, 'r', edited.partition_key, edited.rate_class, edited.sticky_worker, edited.lane_key
  FROM edited
  WHERE edited.was_held IS NOT NULL
)
SELECT found.state FROM found
