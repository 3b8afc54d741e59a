-- Look at the partitions of a queue: those with waiting jobs in a sample, with running jobs, credit or a share of their
-- own.
-- Arguments: queue text; max_sample, max_traffic, max_partitions integer.
-- Rows:      key, deficit, waiting, in flight, noisy, own quantum; most waiting first.
-- Locks:     none.
WITH clock AS MATERIALIZED (
  SELECT reading.now_ms - mod(reading.now_ms, 60000) - 60000 AS since_ms
  FROM (SELECT {schema}.headgate_now_ms() AS now_ms) AS reading
),
waiting AS (
  SELECT sample.partition_key, count(*) AS jobs
  FROM (
    SELECT walk.partition_key
    FROM (
      SELECT job.partition_key, job.seq
      FROM {schema}.headgate_job AS job
      WHERE job.state = 'available' AND (job.state <> 'running') IS TRUE AND job.queue = %(queue)s::text
      ORDER BY job.seq
      OFFSET 0
    ) AS walk
    ORDER BY walk.seq
    LIMIT %(max_sample)s::integer
  ) AS sample
  GROUP BY sample.partition_key
),
exits AS (
  SELECT inbox.partition_key, sum(inbox.n) AS jobs
  FROM {schema}.headgate_inbox AS inbox
  WHERE inbox.queue = %(queue)s::text AND inbox.kind = 'f'
  GROUP BY inbox.partition_key
),
kept AS (
  SELECT part.partition_key, part.deficit, greatest(0, part.inflight - coalesce(exits.jobs, 0)) AS inflight,
    part.quantum_override
  FROM (
    SELECT found.*
    FROM {schema}.headgate_partition AS found
    WHERE found.queue = %(queue)s::text
    ORDER BY found.partition_key
    LIMIT %(max_sample)s::integer
  ) AS part
  LEFT JOIN exits ON exits.partition_key = part.partition_key
),
shown AS MATERIALIZED (
  SELECT coalesce(waiting.partition_key, kept.partition_key) AS partition_key, coalesce(kept.deficit, 0) AS deficit,
    coalesce(waiting.jobs, 0) AS waiting, coalesce(kept.inflight, 0)::bigint AS inflight, kept.quantum_override
  FROM waiting
  FULL JOIN kept ON kept.partition_key = waiting.partition_key
  WHERE waiting.jobs > 0 OR kept.deficit > 0 OR kept.inflight > 0 OR kept.quantum_override IS NOT NULL
  ORDER BY 3 DESC, 1
  LIMIT %(max_partitions)s::integer
),
quiet AS MATERIALIZED (
  SELECT groups.noisy
  FROM clock
  CROSS JOIN LATERAL {schema}.headgate_quiet_groups(
    ARRAY[%(queue)s::text], clock.since_ms, %(max_traffic)s::integer, 1) AS groups
)
SELECT shown.partition_key, shown.deficit, shown.waiting, shown.inflight, shown.partition_key = ANY (quiet.noisy),
  shown.quantum_override
FROM shown
CROSS JOIN quiet
ORDER BY shown.waiting DESC, shown.partition_key
