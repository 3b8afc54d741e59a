-- Look at what is there, without failing on what is not.
-- Arguments: schema_name text.
-- Rows:      one: the schema exists, it has a ledger, a job table, a record of grants, number of the server's version, its encoding.
-- Locks:     none.
SELECT
  EXISTS (SELECT FROM pg_catalog.pg_namespace AS space WHERE space.nspname = %(schema_name)s),
  EXISTS (
    SELECT FROM pg_catalog.pg_class AS class
    JOIN pg_catalog.pg_namespace AS space ON space.oid = class.relnamespace
    WHERE space.nspname = %(schema_name)s AND class.relname = 'headgate_schema_migration'),
  EXISTS (
    SELECT FROM pg_catalog.pg_class AS class
    JOIN pg_catalog.pg_namespace AS space ON space.oid = class.relnamespace
    WHERE space.nspname = %(schema_name)s AND class.relname = 'headgate_job'),
  EXISTS (
    SELECT FROM pg_catalog.pg_class AS class
    JOIN pg_catalog.pg_namespace AS space ON space.oid = class.relnamespace
    WHERE space.nspname = %(schema_name)s AND class.relname = 'headgate_grant'),
  current_setting('server_version_num')::integer,
  current_setting('server_encoding')
