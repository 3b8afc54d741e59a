-- Nothing admits jobs without these functions; no row is touched.
DROP FUNCTION {schema}.headgate_mark_holds;
DROP FUNCTION {schema}.headgate_admit;
