-- Forget sleepers of long ago: most of them belong to processes that have ended.
-- Arguments: max_age_ms bigint. A worker that lives records itself again at its next empty answer.
-- Rows:      one: how many were forgotten.
-- Locks:     the rows deleted; an admission deletes only rows of its own worker.
WITH forgotten AS (
  DELETE FROM {schema}.headgate_sleeper AS sleeper
  WHERE sleeper.slept_at_ms <= {schema}.headgate_now_ms() - %(max_age_ms)s::bigint
  RETURNING 1
)
SELECT count(*) FROM forgotten
