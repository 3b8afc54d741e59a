-- Destructive: drops every job with all that belongs to it.
DROP TABLE {schema}.headgate_minute_counter;
DROP TABLE {schema}.headgate_queue_minute;
DROP TABLE {schema}.headgate_unfinished;
DROP TABLE {schema}.headgate_tally;
DROP TABLE {schema}.headgate_enqueue_policy;
DROP TABLE {schema}.headgate_duty;
DROP TABLE {schema}.headgate_effect;
DROP TABLE {schema}.headgate_extension;
DROP TABLE {schema}.headgate_throttle;
DROP TABLE {schema}.headgate_job_tag;
ALTER TABLE {schema}.headgate_job DROP CONSTRAINT headgate_job_sound;
DROP FUNCTION {schema}.headgate_job_is_sound({schema}.headgate_job);
DROP TABLE {schema}.headgate_job;
DROP FUNCTION {schema}.headgate_now_ms();
