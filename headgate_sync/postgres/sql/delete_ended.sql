-- Delete finished jobs that ended before an instant.
-- Arguments: states text[], cutoff_ms bigint, max_jobs integer; is_archived boolean, whether the archive gets copies.
-- Rows:      one: how many.
-- Locks:     job rows, skipping what is locked; see 0014_archive.
SELECT {schema}.headgate_delete_ended(
  %(states)s::text[], %(cutoff_ms)s::bigint, %(max_jobs)s::integer, %(is_archived)s::boolean)
