-- Destructive only for callers: without these functions no job is promoted or reclaimed.
DROP FUNCTION {schema}.headgate_fold_tally(integer, bigint, bigint);
DROP FUNCTION {schema}.headgate_release_quarantine(text);
DROP FUNCTION {schema}.headgate_sweep_quarantine(integer);
DROP FUNCTION {schema}.headgate_promote(integer);
DROP FUNCTION {schema}.headgate_reclaim(integer, integer, bigint, bigint, integer, bigint, integer, text, text, text);
DROP FUNCTION {schema}.headgate_soonest_lapse();
