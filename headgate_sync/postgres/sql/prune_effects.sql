-- Forget keys of effects that are older than a limit and whose job is gone.
-- Arguments: older_than_ms bigint; max_keys integer.
-- Rows:      one: how many keys were forgotten.
-- Locks:     the keys, skipping what is locked, so that it waits for no open claim.
-- A key is the id of its job, for a step followed by / and the step's name.
WITH old AS MATERIALIZED (
  SELECT effect.key
  FROM {schema}.headgate_effect AS effect
  WHERE effect.claimed_at_ms <= {schema}.headgate_now_ms() - %(older_than_ms)s::bigint
    AND NOT EXISTS (
      SELECT FROM {schema}.headgate_job AS job
      WHERE job.id = ANY (ARRAY[effect.key, split_part(effect.key, '/', 1)])
    )
  ORDER BY effect.claimed_at_ms
  LIMIT %(max_keys)s::integer
  FOR UPDATE SKIP LOCKED
),
forgotten AS (
  DELETE FROM {schema}.headgate_effect AS effect
  WHERE effect.key = ANY (ARRAY (SELECT old.key FROM old))
  RETURNING 1
)
SELECT count(*) FROM forgotten
