-- Let store time stand still at an instant, or run again.
-- Arguments: frozen_at_ms bigint, NULL to run.
-- Rows:      none.
-- Locks:     the one row of the clock.
UPDATE {schema}.headgate_test_clock
SET frozen_at_ms = %(frozen_at_ms)s::bigint
