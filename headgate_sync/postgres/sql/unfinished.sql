-- Read how many jobs of a queue are unfinished, from the counters.
-- Arguments: queue text.
-- Rows:      one.
-- Locks:     none; one snapshot for both parts, so that a fold at this moment is not counted twice.
SELECT greatest(0,
  coalesce((SELECT folded.jobs FROM {schema}.headgate_unfinished AS folded WHERE folded.queue = %(queue)s::text), 0)
  + coalesce((SELECT sum(tally.unfinished) FROM {schema}.headgate_tally AS tally WHERE tally.queue = %(queue)s::text), 0)
)::bigint
