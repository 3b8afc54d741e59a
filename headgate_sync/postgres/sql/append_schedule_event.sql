-- Append an event to those of a schedule, and drop the ones beyond the newest.
-- Arguments: schedule_id text, tick_ms bigint, job_id, outcome, reason text; max_events integer.
-- Rows:      none.
-- Locks:     none of its own. The caller holds that of the schedule since an earlier statement: this one does not see
--            what was committed while it runs.
--
-- The range of one schedule leaves the order to the index of events by schedule, whatever the statistics say.
WITH dropped AS (
  DELETE FROM {schema}.headgate_schedule_event AS event
  WHERE event.event_id = ANY (ARRAY(
    SELECT older.event_id
    FROM {schema}.headgate_schedule_event AS older
    WHERE older.schedule_id BETWEEN %(schedule_id)s::text AND %(schedule_id)s::text
    ORDER BY older.schedule_id DESC, older.event_id DESC
    OFFSET %(max_events)s::integer - 1
    LIMIT 100))
)
INSERT INTO {schema}.headgate_schedule_event (schedule_id, tick_ms, job_id, outcome, reason, recorded_at_ms)
VALUES (
  %(schedule_id)s::text, %(tick_ms)s::bigint, %(job_id)s::text, %(outcome)s::text, %(reason)s::text,
  {schema}.headgate_now_ms())
