-- Take a schedule for firing, unless somebody else has it or it has moved on.
-- Arguments: schedule_id text, from_ms bigint.
-- Rows:      its id; none when there is nothing to fire.
-- Locks:     the schedule, without waiting for it.
SELECT schedule.id
FROM {schema}.headgate_schedule AS schedule
WHERE schedule.id = %(schedule_id)s::text AND schedule.next_run_ms = %(from_ms)s::bigint AND NOT schedule.paused
FOR UPDATE SKIP LOCKED
