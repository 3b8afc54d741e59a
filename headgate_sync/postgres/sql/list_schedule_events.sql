-- List events of a schedule, newest first.
-- Arguments: schedule_id text; before_event_id bigint, the last one seen or null; max_events integer.
-- Rows:      event_id, tick_ms, job_id, outcome, reason, recorded_at_ms.
-- Locks:     none.
--
-- The range of one schedule leaves the order to the index of events by schedule, whatever the statistics say.
SELECT event.event_id, event.tick_ms, event.job_id, event.outcome, event.reason, event.recorded_at_ms
FROM {schema}.headgate_schedule_event AS event
WHERE event.schedule_id BETWEEN %(schedule_id)s::text AND %(schedule_id)s::text
  AND (%(before_event_id)s::bigint IS NULL OR event.event_id < %(before_event_id)s::bigint)
ORDER BY event.schedule_id DESC, event.event_id DESC
LIMIT %(max_events)s::integer
