-- Find the newest jobs that a filter asks for, before a row.
-- Arguments: path text, where to look: id, tags_all, tags_any, queue, state, running or seq; before bigint, max_jobs
--            integer; the filter, nulls and empty arrays asking nothing: id, queue, state, kind, kind_prefix,
--            partition_key, fingerprint, rate_class text, priority integer, tags_all, tags_any text[]; states text[] to
--            look through in a queue; plain boolean, whether state is all that is asked.
-- Rows:      seq and id, newest first.
-- Locks:     none. Each part walks an index in the order of the page and stops when the page is full; the parts of other
--            paths cost nothing. OFFSET 0 keeps the size of the page from the planner: where it expects many fitting rows
--            it would walk over all jobs by their primary key, and read the whole table where there are few.
WITH RECURSIVE known AS (
  (SELECT job.queue
  FROM {schema}.headgate_job AS job
  WHERE %(path)s::text = 'state' AND job.state = %(state)s::text AND (job.state <> 'running') IS TRUE
  ORDER BY job.queue
  LIMIT 1)
  UNION ALL
  SELECT (
    SELECT job.queue
    FROM {schema}.headgate_job AS job
    WHERE job.state = %(state)s::text AND (job.state <> 'running') IS TRUE AND job.queue > known.queue
    ORDER BY job.queue
    LIMIT 1)
  FROM known
  WHERE known.queue IS NOT NULL
),
heads AS MATERIALIZED (  -- a page of n rows comes from the n queues whose newest rows are the newest
  SELECT known.queue
  FROM known
  CROSS JOIN LATERAL (
    SELECT walk.seq
    FROM (
      SELECT job.seq
      FROM {schema}.headgate_job AS job
      WHERE job.state = %(state)s::text AND (job.state <> 'running') IS TRUE AND job.queue = known.queue
        AND job.seq < %(before)s::bigint
      ORDER BY job.seq DESC
      OFFSET 0
    ) AS walk
    ORDER BY walk.seq DESC
    LIMIT 1
  ) AS head
  ORDER BY head.seq DESC
  LIMIT CASE WHEN %(plain)s::boolean THEN %(max_jobs)s::integer END
),
rarest AS MATERIALIZED (  -- of the tags that must all be there; they are counted up to a thousand
  SELECT wanted.tag
  FROM unnest(%(tags_all)s::text[]) AS wanted (tag)
  CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
      SELECT
      FROM {schema}.headgate_job_tag AS carried
      WHERE carried.tag = wanted.tag
      LIMIT 1000
    ) AS sample
  ) AS counted
  WHERE %(path)s::text = 'tags_all'
  ORDER BY counted.jobs, wanted.tag
  LIMIT 1
)
SELECT DISTINCT page.seq, page.id
FROM (
  SELECT job.seq, job.id
  FROM {schema}.headgate_job AS job
  WHERE %(path)s::text = 'id' AND job.id = %(id)s::text AND job.seq < %(before)s::bigint
    AND {matches}
    AND NOT EXISTS (
      SELECT FROM unnest(%(tags_all)s::text[]) AS wanted (tag)
      WHERE NOT EXISTS (
        SELECT FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = job.seq AND tag.tag = wanted.tag))
    AND (cardinality(%(tags_any)s::text[]) = 0 OR EXISTS (
      SELECT FROM {schema}.headgate_job_tag AS tag
      WHERE tag.job_seq = job.seq AND tag.tag = ANY (%(tags_any)s::text[])))
  UNION ALL
  SELECT found.seq, found.id
  FROM rarest
  CROSS JOIN LATERAL (
    SELECT job.seq, job.id
    FROM (
      SELECT carried.job_seq
      FROM {schema}.headgate_job_tag AS carried
      WHERE carried.tag = rarest.tag AND carried.job_seq < %(before)s::bigint
      ORDER BY carried.tag, carried.job_seq DESC
      OFFSET 0  -- for all that carry the tag the look-up is the best, also where a page is filled sooner otherwise
    ) AS carried
    CROSS JOIN LATERAL (
      SELECT job.seq, job.id
      FROM {schema}.headgate_job AS job
      WHERE job.seq = carried.job_seq AND {matches}
        AND NOT EXISTS (
          SELECT FROM unnest(%(tags_all)s::text[]) AS wanted (tag)
          WHERE NOT EXISTS (
            SELECT FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = job.seq AND tag.tag = wanted.tag))
        AND (cardinality(%(tags_any)s::text[]) = 0 OR EXISTS (
          SELECT FROM {schema}.headgate_job_tag AS tag
          WHERE tag.job_seq = job.seq AND tag.tag = ANY (%(tags_any)s::text[])))
      LIMIT 1
    ) AS job
    ORDER BY carried.job_seq DESC
    LIMIT %(max_jobs)s::integer
  ) AS found
  UNION ALL
  SELECT found.seq, found.id
  FROM unnest(%(tags_any)s::text[]) AS wanted (tag)
  CROSS JOIN LATERAL (
    SELECT job.seq, job.id
    FROM (
      SELECT carried.job_seq
      FROM {schema}.headgate_job_tag AS carried
      WHERE carried.tag = wanted.tag AND carried.job_seq < %(before)s::bigint
      ORDER BY carried.tag, carried.job_seq DESC
      OFFSET 0
    ) AS carried
    CROSS JOIN LATERAL (
      SELECT job.seq, job.id
      FROM {schema}.headgate_job AS job
      WHERE job.seq = carried.job_seq AND {matches}
      LIMIT 1
    ) AS job
    ORDER BY carried.job_seq DESC
    LIMIT %(max_jobs)s::integer
  ) AS found
  WHERE %(path)s::text = 'tags_any'
  UNION ALL
  SELECT found.seq, found.id
  FROM unnest(%(states)s::text[]) AS wanted (state)
  CROSS JOIN LATERAL (
    SELECT walk.seq, walk.id
    FROM (
      SELECT job.seq, job.id
      FROM {schema}.headgate_job AS job
      WHERE job.state = wanted.state AND (job.state <> 'running') IS TRUE AND job.queue = %(queue)s::text
        AND job.seq < %(before)s::bigint AND {matches}
      ORDER BY job.seq DESC
      OFFSET 0
    ) AS walk
    ORDER BY walk.seq DESC
    LIMIT %(max_jobs)s::integer
  ) AS found
  WHERE %(path)s::text = 'queue'
  UNION ALL
  SELECT found.seq, found.id
  FROM heads
  CROSS JOIN LATERAL (
    SELECT walk.seq, walk.id
    FROM (
      SELECT job.seq, job.id
      FROM {schema}.headgate_job AS job
      WHERE job.state = %(state)s::text AND (job.state <> 'running') IS TRUE AND job.queue = heads.queue
        AND job.seq < %(before)s::bigint AND {matches}
      ORDER BY job.seq DESC
      OFFSET 0
    ) AS walk
    ORDER BY walk.seq DESC
    LIMIT %(max_jobs)s::integer
  ) AS found
  WHERE %(path)s::text = 'state'
  UNION ALL
  (SELECT running.seq, running.id
  FROM (
    SELECT job.seq, job.id
    FROM {schema}.headgate_job AS job
    WHERE 'running' = ANY (%(states)s::text[]) AND job.state = 'running'
      AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
      AND job.seq < %(before)s::bigint AND {matches}
    OFFSET 0  -- else the order invites a walk over all jobs
  ) AS running
  WHERE %(path)s::text IN ('queue', 'running')
  ORDER BY running.seq DESC
  LIMIT %(max_jobs)s::integer)
  UNION ALL
  (SELECT job.seq, job.id
  FROM {schema}.headgate_job AS job
  WHERE %(path)s::text = 'seq' AND job.seq < %(before)s::bigint AND {matches}
  ORDER BY job.seq DESC
  LIMIT %(max_jobs)s::integer)
) AS page
ORDER BY page.seq DESC
LIMIT %(max_jobs)s::integer
