-- Take or renew duties, and look whether there is work for them.
-- Arguments: names text[] without repeats, holder text, lease_ms bigint.
-- Rows:      name of each duty held now, whether work is due (null for a duty this statement knows nothing of), now.
-- Locks:     duty rows by name, skipping what is locked: another holder is writing them.
WITH clock AS MATERIALIZED (
  SELECT {schema}.headgate_now_ms() AS now_ms
),
free AS MATERIALIZED (
  SELECT duty.name
  FROM {schema}.headgate_duty AS duty
  CROSS JOIN clock
  WHERE duty.name = ANY (%(names)b::text[]) AND (duty.holder = %(holder)s::text OR duty.expires_at_ms <= clock.now_ms)
  ORDER BY duty.name
  FOR UPDATE OF duty SKIP LOCKED
),
renewed AS (
  UPDATE {schema}.headgate_duty AS duty
  SET holder = %(holder)s::text, expires_at_ms = clock.now_ms + %(lease_ms)s::bigint
  FROM clock
  WHERE duty.name = ANY (ARRAY (SELECT free.name FROM free))
  RETURNING duty.name
),
added AS (
  INSERT INTO {schema}.headgate_duty (name, holder, expires_at_ms)
  SELECT wanted.name, %(holder)s::text, clock.now_ms + %(lease_ms)s::bigint
  FROM unnest(%(names)b::text[]) AS wanted (name)
  CROSS JOIN clock
  WHERE NOT EXISTS (SELECT FROM {schema}.headgate_duty AS duty WHERE duty.name = wanted.name)
  ORDER BY wanted.name
  ON CONFLICT DO NOTHING
  RETURNING name
)
SELECT held.name,
  -- Each probe of jobs asks for the first row in the order of its index, under a condition that no other index answers: no
  -- statistics can make the planner look for any row, or sort what another index finds. The one of leases is a function.
  CASE held.name
    WHEN 'reclaimer' THEN coalesce(clock.now_ms >= {schema}.headgate_soonest_lapse(), false)
    WHEN 'promoter' THEN coalesce(clock.now_ms >= (
      SELECT job.scheduled_at_ms
      FROM {schema}.headgate_job AS job
      WHERE job.state IN ('scheduled', 'retryable')
      ORDER BY job.scheduled_at_ms, job.seq
      LIMIT 1), false)
    WHEN 'retention' THEN coalesce(clock.now_ms >= (
      SELECT job.finalized_at_ms + job.retention_ms
      FROM {schema}.headgate_job AS job
      WHERE job.retention_ms > 0 AND job.state IN ({evictable})
      ORDER BY job.finalized_at_ms + job.retention_ms, job.seq
      LIMIT 1), false)
    WHEN 'scheduler' THEN coalesce(clock.now_ms >= (
      SELECT schedule.next_run_ms
      FROM {schema}.headgate_schedule AS schedule
      WHERE NOT schedule.paused
      ORDER BY schedule.next_run_ms, schedule.id
      LIMIT 1), false)
    WHEN 'quarantine' THEN EXISTS (
      SELECT FROM {schema}.headgate_quarantine AS registered
      CROSS JOIN LATERAL (
        SELECT job.seq
        FROM {schema}.headgate_job AS job
        WHERE job.fingerprint = registered.fingerprint AND job.state IN ({waiting})
        ORDER BY job.state, job.seq
        LIMIT 1
      ) AS suspect)
    WHEN 'operations' THEN EXISTS (
      SELECT FROM {schema}.headgate_operation AS op WHERE op.status IN ('pending', 'running'))
  END,
  clock.now_ms
FROM (SELECT renewed.name FROM renewed UNION ALL SELECT added.name FROM added) AS held
CROSS JOIN clock
