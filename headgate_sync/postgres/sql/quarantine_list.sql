-- List registered fingerprints, newest first.
-- Arguments: cursor text, the last one seen or null; max_entries integer.
-- Rows:      fingerprint, kind, crash_count, quarantined_at_ms, reason.
-- Locks:     none.
SELECT entry.fingerprint, entry.kind, entry.crash_count, entry.quarantined_at_ms, entry.reason
FROM {schema}.headgate_quarantine AS entry
LEFT JOIN {schema}.headgate_quarantine AS seen ON seen.fingerprint = %(cursor)s::text
WHERE %(cursor)s::text IS NULL
  OR entry.quarantined_at_ms < seen.quarantined_at_ms
  OR (entry.quarantined_at_ms = seen.quarantined_at_ms AND entry.fingerprint > seen.fingerprint)
ORDER BY entry.quarantined_at_ms DESC, entry.fingerprint
LIMIT %(max_entries)s::integer
