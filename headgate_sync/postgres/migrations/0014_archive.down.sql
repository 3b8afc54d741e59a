-- Destructive: drops the archive with all copies in it, and its policies. Without these functions no job is evicted.
DROP FUNCTION {schema}.headgate_prune_archive;
DROP FUNCTION {schema}.headgate_delete_ended;
DROP FUNCTION {schema}.headgate_evict;
DROP FUNCTION {schema}.headgate_archive_jobs;
DROP FUNCTION {schema}.headgate_set_archive_policy;
DROP TABLE {schema}.headgate_job_archive;
DROP TABLE {schema}.headgate_archive_policy;
