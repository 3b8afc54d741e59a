DROP FUNCTION {schema}.headgate_explain;
DROP FUNCTION {schema}.headgate_explain_ahead;
DROP FUNCTION {schema}.headgate_ready_before;
