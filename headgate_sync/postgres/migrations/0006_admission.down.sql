-- Nothing admits jobs without these functions; no row is touched.
DROP FUNCTION {schema}.headgate_mark_holds;
DROP FUNCTION {schema}.headgate_admit;
DROP FUNCTION {schema}.headgate_admit_under_policies;
DROP FUNCTION {schema}.headgate_reopens_in;
DROP FUNCTION {schema}.headgate_bounds_follow;
