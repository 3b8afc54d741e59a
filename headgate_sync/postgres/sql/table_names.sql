-- Name the tables of this package, a partitioned one for all its parts.
-- Arguments: schema_name text.
-- Rows:      name, in order.
-- Locks:     none.
SELECT class.relname::text
FROM pg_catalog.pg_class AS class
JOIN pg_catalog.pg_namespace AS space ON space.oid = class.relnamespace
WHERE space.nspname = %(schema_name)s AND class.relkind IN ('r', 'p') AND NOT class.relispartition
  AND pg_catalog.starts_with(class.relname::text, 'headgate_')
ORDER BY class.relname::text COLLATE "C"
