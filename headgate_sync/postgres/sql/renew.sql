-- Extend the leases that are still held, waiting for no lock.
-- Arguments: job_ids text[], lease_ids text[], fences bigint[] of one length; lease_ms bigint.
-- Rows:      place (from 1) of each lease that is lost.
-- Locks:     job rows by seq, skipping what is locked, then extensions by seq; see headgate_renew
--            in 0004_settle.
SELECT lost.place
FROM {schema}.headgate_renew(
  %(job_ids)b::text[], %(lease_ids)b::text[], %(fences)b::bigint[], %(lease_ms)s::bigint
) AS lost
