-- Look at indexes as the server counts them.
-- Arguments: schema_name text, names text[].
-- Rows:      name, bytes, scans, live and dead rows of its table, by name.
-- Locks:     none.
SELECT stat.indexrelname::text, pg_catalog.pg_relation_size(stat.indexrelid), stat.idx_scan, of_table.n_live_tup,
  of_table.n_dead_tup
FROM pg_catalog.pg_stat_user_indexes AS stat
JOIN pg_catalog.pg_stat_user_tables AS of_table ON of_table.relid = stat.relid
WHERE stat.schemaname = %(schema_name)s AND stat.indexrelname = ANY (%(names)s::text[])
ORDER BY stat.indexrelname::text COLLATE "C"
