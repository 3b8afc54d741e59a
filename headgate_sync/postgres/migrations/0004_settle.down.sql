-- Destructive only for callers: without these functions no attempt can be settled.
DROP FUNCTION {schema}.headgate_renew(text[], text[], bigint[], bigint);
DROP FUNCTION {schema}.headgate_ack(
  text[], text[], bigint[], boolean[], text[], bigint[], bigint[], bigint[], text[], integer[], text[], text[],
  integer[], integer[], bytea[], bigint, bigint, integer, integer, integer);
DROP FUNCTION {schema}.headgate_settle_classes(tid[], integer[], bigint[]);
