-- Name what a schema has that rights can be given on.
-- Arguments: schema_name text.
-- Rows:      table or sequence and its columns, or function and null.
-- Locks:     none.
SELECT class.relname::text,
  ARRAY (
    SELECT col.attname::text
    FROM pg_catalog.pg_attribute AS col
    WHERE col.attrelid = class.oid AND col.attnum > 0 AND NOT col.attisdropped)
FROM pg_catalog.pg_class AS class
JOIN pg_catalog.pg_namespace AS space ON space.oid = class.relnamespace
WHERE space.nspname = %(schema_name)s AND class.relkind IN ('r', 'p', 'S') AND starts_with(class.relname::text, 'headgate_')
UNION ALL
SELECT code.proname::text, NULL
FROM pg_catalog.pg_proc AS code
JOIN pg_catalog.pg_namespace AS space ON space.oid = code.pronamespace
WHERE space.nspname = %(schema_name)s AND starts_with(code.proname::text, 'headgate_')
