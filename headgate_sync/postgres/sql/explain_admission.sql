-- What the gate knows about one job.
-- Arguments: job_id text; how many rows ahead, appended rows and lanes are looked at, integers.
-- Rows:      one: the facts as an object, null without the job.
-- Locks:     none; it reads only.
SELECT {schema}.headgate_explain(
  %(job_id)s::text, %(max_ahead)s::integer, %(fold_max)s::integer, %(max_lanes)s::integer)::text
