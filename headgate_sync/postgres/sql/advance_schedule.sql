-- Move the next tick of a schedule, if it is still the one that was read.
-- Arguments: schedule_id text; from_ms, to_ms bigint.
-- Rows:      its id; none when it is elsewhere by now, or gone.
-- Locks:     the schedule.
UPDATE {schema}.headgate_schedule AS schedule
SET next_run_ms = %(to_ms)s::bigint, last_enqueued_ms = {schema}.headgate_now_ms()
WHERE schedule.id = %(schedule_id)s::text AND schedule.next_run_ms = %(from_ms)s::bigint
RETURNING schedule.id
