-- Destructive: drops the operations, the memory samples, and which job was made from which. Jobs stay.
DROP FUNCTION {schema}.headgate_trim_history;
DROP FUNCTION {schema}.headgate_run_operation;
DROP FUNCTION {schema}.headgate_touch_jobs;
DROP FUNCTION {schema}.headgate_forget_queue;
DROP FUNCTION {schema}.headgate_quiet_groups;
DROP FUNCTION {schema}.headgate_counts;
DROP FUNCTION {schema}.headgate_unfinished_jobs;
DROP FUNCTION {schema}.headgate_count_states;
DROP FUNCTION {schema}.headgate_job_matches;
DROP TABLE {schema}.headgate_queue_memory;
DROP TABLE {schema}.headgate_operation;
DROP INDEX {schema}.headgate_job_class;
DROP INDEX {schema}.headgate_job_ended;
DROP INDEX {schema}.headgate_job_oldest;
DROP INDEX {schema}.headgate_job_listing;
ALTER TABLE {schema}.headgate_job DROP COLUMN replay_of;
