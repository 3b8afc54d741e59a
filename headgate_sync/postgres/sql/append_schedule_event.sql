-- Append an event to those of a schedule, and drop the ones beyond the newest.
-- Arguments: schedule_id text, tick_ms bigint, job_id, outcome, reason text; max_events integer.
-- Rows:      none.
-- Locks:     none of its own. The caller holds that of the schedule since an earlier statement: this one does not see
--            what was committed while it runs.
WITH dropped AS (
  DELETE FROM {schema}.headgate_schedule_event AS event
  WHERE event.schedule_id = %(schedule_id)s::text
    AND event.event_id <= (
      SELECT kept.event_id
      FROM {schema}.headgate_schedule_event AS kept
      WHERE kept.schedule_id = %(schedule_id)s::text
      ORDER BY kept.event_id DESC
      OFFSET %(max_events)s::integer - 1
      LIMIT 1)
)
INSERT INTO {schema}.headgate_schedule_event (schedule_id, tick_ms, job_id, outcome, reason, recorded_at_ms)
VALUES (
  %(schedule_id)s::text, %(tick_ms)s::bigint, %(job_id)s::text, %(outcome)s::text, %(reason)s::text,
  {schema}.headgate_now_ms())
