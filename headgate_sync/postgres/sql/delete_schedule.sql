-- Remove a schedule; its events stay.
-- Arguments: schedule_id text.
-- Rows:      its id; none without it.
-- Locks:     the schedule.
DELETE FROM {schema}.headgate_schedule AS schedule
WHERE schedule.id = %(schedule_id)s::text
RETURNING schedule.id
