-- List registered fingerprints, newest first.
-- Arguments: before_ms bigint and after text, the instant and the fingerprint of the last one seen; max_entries integer.
-- Rows:      fingerprint, kind, crash_count, quarantined_at_ms, reason.
-- Locks:     none.
SELECT entry.fingerprint, entry.kind, entry.crash_count, entry.quarantined_at_ms, entry.reason
FROM (
  (SELECT same.fingerprint, same.kind, same.crash_count, same.quarantined_at_ms, same.reason
  FROM {schema}.headgate_quarantine AS same
  WHERE same.quarantined_at_ms = %(before_ms)s::bigint AND same.fingerprint > %(after)s::text
  ORDER BY same.fingerprint
  LIMIT %(max_entries)s::integer)
  UNION ALL
  (SELECT older.fingerprint, older.kind, older.crash_count, older.quarantined_at_ms, older.reason
  FROM {schema}.headgate_quarantine AS older
  WHERE older.quarantined_at_ms < %(before_ms)s::bigint
  ORDER BY older.quarantined_at_ms DESC, older.fingerprint
  LIMIT %(max_entries)s::integer)
) AS entry
ORDER BY entry.quarantined_at_ms DESC, entry.fingerprint
LIMIT %(max_entries)s::integer
