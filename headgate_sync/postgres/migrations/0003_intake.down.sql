-- Destructive only for callers: without these functions nothing can be enqueued.
DROP TRIGGER headgate_queue_wake ON {schema}.headgate_queue;
DROP TRIGGER headgate_inbox_wake ON {schema}.headgate_inbox;
DROP FUNCTION {schema}.headgate_wake();
DROP FUNCTION {schema}.headgate_enqueue_plain(text, text, bytea, text, text, bigint, text, boolean);
DROP FUNCTION {schema}.headgate_enqueue_alike(
  text[], text[], bytea[], text[], text[], bigint[], text[], boolean, integer, text, text, integer, integer, integer,
  bigint, bigint, bigint, bigint, bigint, bigint, text);
DROP FUNCTION {schema}.headgate_enqueue_one(
  text, text, bytea, text, text, bigint, text, boolean, integer, text, text, integer, integer, integer, bigint, bigint,
  bigint, bigint, bigint, bigint, bytea, text, text[]);
DROP FUNCTION {schema}.headgate_enqueue(
  text[], text[], integer[], bytea[], text[], text[], text[], text[], bigint[], integer[], text[], integer[],
  integer[], bigint[], bigint[], boolean[], bigint[], bigint[], bigint[], bigint[], bytea[], integer[], text[],
  bigint[], text[], integer[], text[], bigint[], integer, bigint, boolean);
DROP FUNCTION {schema}.headgate_full_queue(text[], bigint[], boolean);
DROP FUNCTION {schema}.headgate_replace_holder(
  text, boolean, integer, bigint, bigint, bigint, integer, bytea, text, integer, integer, text[]);
