-- Policies stay as they are; only the functions that change them go.
DROP FUNCTION {schema}.headgate_delete_ceiling;
DROP FUNCTION {schema}.headgate_upsert_ceiling;
DROP FUNCTION {schema}.headgate_repark;
DROP FUNCTION {schema}.headgate_resume_rate_class;
DROP FUNCTION {schema}.headgate_pause_rate_class;
DROP FUNCTION {schema}.headgate_delete_rate_class;
DROP FUNCTION {schema}.headgate_upsert_rate_class;
DROP FUNCTION {schema}.headgate_own_class;
DROP FUNCTION {schema}.headgate_unhold_oversize;
DROP FUNCTION {schema}.headgate_announce_open;
DROP FUNCTION {schema}.headgate_set_partition_quantum;
DROP FUNCTION {schema}.headgate_set_queue_weight;
DROP FUNCTION {schema}.headgate_set_queue_paused;
