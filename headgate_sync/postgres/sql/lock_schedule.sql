-- Let one writer at a time append to the events of a schedule.
-- Arguments: schedule_id text.
-- Rows:      its id; none without the schedule.
-- Locks:     the schedule, as the call that fires it does.
SELECT schedule.id
FROM {schema}.headgate_schedule AS schedule
WHERE schedule.id = %(schedule_id)s::text
FOR UPDATE
