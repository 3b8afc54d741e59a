-- Let a schedule fire or not.
-- Arguments: schedule_id text, paused boolean.
-- Rows:      its id; none without it.
-- Locks:     the schedule.
UPDATE {schema}.headgate_schedule AS schedule
SET paused = %(paused)s::boolean
WHERE schedule.id = %(schedule_id)s::text
RETURNING schedule.id
