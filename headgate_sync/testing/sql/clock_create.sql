-- Let store time come from a row, so that a test can step it; it runs until it is frozen.
-- The functions of the store forbid sequential scans: without the index each reading would
-- look so costly that the server compiled it, which takes 50 ms.
-- Arguments: none.
-- Rows:      none.
-- Locks:     none that last.
CREATE TABLE {schema}.headgate_test_clock (
  is_row boolean PRIMARY KEY CHECK (is_row),
  frozen_at_ms bigint
);
INSERT INTO {schema}.headgate_test_clock VALUES (true, NULL);
CREATE OR REPLACE FUNCTION {schema}.headgate_now_ms() RETURNS bigint
  LANGUAGE sql VOLATILE PARALLEL SAFE
  AS $$ SELECT COALESCE(
    (SELECT clock.frozen_at_ms FROM {schema}.headgate_test_clock AS clock
      WHERE clock.is_row),
    floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) $$
