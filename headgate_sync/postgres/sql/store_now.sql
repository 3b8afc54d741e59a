-- Read the store's clock.
-- Arguments: none.
-- Rows:      one.
-- Locks:     none.
SELECT {schema}.headgate_now_ms()
