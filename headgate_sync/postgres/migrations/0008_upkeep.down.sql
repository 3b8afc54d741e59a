-- Counters and marks stay as they are; only the functions that check them go.
DROP FUNCTION {schema}.headgate_gate_reconcile;
DROP FUNCTION {schema}.headgate_reconcile_holds;
DROP FUNCTION {schema}.headgate_reconcile_classes;
DROP FUNCTION {schema}.headgate_reconcile_lanes;
DROP FUNCTION {schema}.headgate_reconcile_queue;
DROP FUNCTION {schema}.headgate_reconcile_slice;
DROP FUNCTION {schema}.headgate_gate_fold;
DROP FUNCTION {schema}.headgate_apply_freed;
