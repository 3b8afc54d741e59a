-- Online-safe: adds functions.
--
-- What is done to many jobs at a time, by duties and operators, as functions; the settings on them as in 0004_settle.
--
-- A sweep skips rows that are locked, so that it waits for nobody, and goes on behind them. It locks in the order of its
-- index, which cannot deadlock, since it never waits for a job row.
--
-- Names of states stand here literally; a test compares them with the table of transitions.

-- When the first lease runs out by what the rows say; null when nothing runs. A function for the sake of its settings: where
-- statistics were taken while everything ran, a plain statement would walk the whole table for what runs.
CREATE FUNCTION {schema}.headgate_soonest_lapse() RETURNS bigint
  LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
  AS $$ SELECT min(job.lease_expires_at_ms) FROM {schema}.headgate_job AS job WHERE job.state = 'running' $$;

-- Take back leases that ran out, oldest first; each counts as a crash.
--
-- Before its last chance each job that one worker loses together with others gets a moment of its own, in the order of the
-- leases: the one that ends its worker must not take the others into quarantine.
--
-- Arguments: limit; the limit of crashes, the backoff, how far such jobs are kept apart, the cap of the history; text
--            and code for the history, text for the registry.
-- Rows:      id, fingerprint, crashes and whether it is quarantined now, kind, queue and worker, of each job taken back, in
--            order.
-- Locks:     the job rows, skipping what is locked, then registry rows by fingerprint.
CREATE FUNCTION {schema}.headgate_reclaim(
  p_limit integer, p_crash_limit integer, p_retry_base_ms bigint, p_retry_cap_ms bigint, p_max_doublings integer,
  p_apart_ms bigint, p_max_history integer, p_error text, p_code text, p_reason text)
  RETURNS TABLE (
    job_id text, fingerprint text, crash_attempt integer, quarantined boolean, kind text, queue text, worker text)
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
#variable_conflict use_column
DECLARE
  v_now bigint := {schema}.headgate_now_ms();
  v_tids tid[];
  v_seqs bigint[];
  v_before bigint[];
  v_workers text[];
BEGIN
  SELECT array_agg(expired.tid), array_agg(expired.seq), array_agg(expired.before), array_agg(expired.claimed_by)
  INTO v_tids, v_seqs, v_before, v_workers
  FROM (
    SELECT locked.tid, locked.seq, locked.claimed_by,
      count(*) FILTER (WHERE locked.crash_attempt + 2 = p_crash_limit) OVER (
        PARTITION BY locked.claimed_by ORDER BY locked.lease_expires_at_ms, locked.seq
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
      SELECT job.ctid AS tid, job.seq, job.crash_attempt, job.claimed_by, job.lease_expires_at_ms
      FROM {schema}.headgate_job AS job
      WHERE job.state = 'running' AND job.lease_expires_at_ms <= v_now
        -- A renewal that met the row locked went beside it; see headgate_renew.
        AND NOT EXISTS (
          SELECT FROM {schema}.headgate_extension AS extension
          WHERE extension.job_seq = job.seq + 0 AND extension.lease_id = job.lease_id AND extension.expires_at_ms > v_now)
      ORDER BY job.lease_expires_at_ms, job.seq
      LIMIT p_limit
      FOR UPDATE SKIP LOCKED
    ) AS locked
    ORDER BY locked.lease_expires_at_ms, locked.seq
  ) AS expired;
  -- Of these, none belongs to a lease that a renewal could still extend.
  DELETE FROM {schema}.headgate_extension AS extension WHERE extension.expires_at_ms <= v_now;
  IF v_tids IS NULL THEN
    RETURN;
  END IF;

  RETURN QUERY
  WITH reclaimed AS (
    UPDATE {schema}.headgate_job AS job
    SET state = CASE WHEN crash_attempt + 1 < p_crash_limit THEN 'retryable' ELSE 'quarantined' END,
      crash_attempt = job.crash_attempt + 1,
      scheduled_at_ms = CASE
        WHEN job.crash_attempt + 1 < p_crash_limit
          THEN v_now + least(p_retry_cap_ms, (p_retry_base_ms << least(job.crash_attempt, p_max_doublings))
            + CASE WHEN job.crash_attempt + 2 = p_crash_limit
              THEN v_before[array_position(v_seqs, job.seq)] * p_apart_ms ELSE 0 END)
        ELSE job.scheduled_at_ms
      END,
      finalized_at_ms = CASE WHEN job.crash_attempt + 1 < p_crash_limit THEN NULL ELSE v_now END,
      reason_code = CASE WHEN job.crash_attempt + 1 < p_crash_limit THEN job.reason_code ELSE 'crash_limit' END,
      error_code = p_code, latency_ms = least(greatest(0, v_now - job.claimed_at_ms), 2147483647),
      lease_id = NULL, lease_expires_at_ms = NULL, claimed_by = NULL, claimed_at_ms = NULL, rate_charge = 0,
      settled_lease_id = NULL, settled_outcome = NULL,
      checkpoint = CASE
        WHEN job.checkpoint ->> 'in_progress' IS NULL THEN job.checkpoint
        ELSE job.checkpoint || jsonb_build_object('crashes',
          coalesce(job.checkpoint -> 'crashes', jsonb_build_object()) || jsonb_build_object(
            job.checkpoint ->> 'in_progress',
            -- A handler may have written any count, and whoever broke a row by hand anything; neither must stop the reclaimer.
            least(
              CASE jsonb_typeof(job.checkpoint -> 'crashes' -> (job.checkpoint ->> 'in_progress'))
                WHEN 'number' THEN trunc((job.checkpoint -> 'crashes' -> (job.checkpoint ->> 'in_progress'))::numeric)
                ELSE 0
              END + 1,
              2147483647)))
      END,
      errors = CASE
          WHEN jsonb_typeof(job.errors) <> 'array' THEN jsonb_build_array()
          WHEN jsonb_array_length(job.errors) < p_max_history THEN job.errors
          ELSE job.errors - 0
        END
        || jsonb_build_array(jsonb_build_object(
          'at_ms', v_now, 'outcome', 'lease_lost', 'error', p_error, 'crash_attempt', job.crash_attempt + 1,
          'latency_ms', least(greatest(0, v_now - job.claimed_at_ms), 2147483647), 'error_code', p_code,
          'worker', job.claimed_by, 'fence', job.fence))
    WHERE job.ctid = ANY (v_tids)
    RETURNING job.seq, job.id, job.fingerprint, job.crash_attempt, job.state = 'quarantined' AS quarantined, job.kind,
      CASE WHEN job.state = 'quarantined' THEN job.payload END AS payload,
      job.queue, job.partition_key, job.rate_class
  ),
  ordered AS MATERIALIZED (
    SELECT reclaimed.*, expired.place
    FROM reclaimed
    JOIN unnest(v_seqs) WITH ORDINALITY AS expired (seq, place) ON expired.seq = reclaimed.seq
  ),
  registered AS (
    INSERT INTO {schema}.headgate_quarantine AS known
      (fingerprint, kind, crash_count, quarantined_at_ms, sample_payload, reason)
    SELECT ordered.fingerprint, (array_agg(ordered.kind ORDER BY ordered.place))[1], max(ordered.crash_attempt), v_now,
      (array_agg(ordered.payload ORDER BY ordered.place))[1], p_reason
    FROM ordered
    WHERE ordered.quarantined AND ordered.fingerprint <> ''
    GROUP BY ordered.fingerprint
    ORDER BY ordered.fingerprint
    ON CONFLICT (fingerprint) DO UPDATE SET crash_count = greatest(known.crash_count, excluded.crash_count)
  ),
  freed AS (
    INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, n)
    SELECT ordered.queue, 'f', ordered.partition_key, ordered.rate_class, count(*)
    FROM ordered
    GROUP BY ordered.queue, ordered.partition_key, ordered.rate_class
  ),
  tallied AS (
    INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
    SELECT ordered.queue, ordered.partition_key, v_now - mod(v_now, 60000), -count(*), 0, 0
    FROM ordered
    WHERE ordered.quarantined
    GROUP BY ordered.queue, ordered.partition_key
  )
  SELECT ordered.id, ordered.fingerprint, ordered.crash_attempt, ordered.quarantined, ordered.kind, ordered.queue,
    v_workers[ordered.place]
  FROM ordered
  ORDER BY ordered.place;
END $$;

-- Make due jobs available, earliest first.
--
-- Arguments: limit.
-- Rows:      one: how many.
-- Locks:     the job rows, skipping what is locked.
CREATE FUNCTION {schema}.headgate_promote(p_limit integer) RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_now bigint := {schema}.headgate_now_ms();
  v_tids tid[];
BEGIN
  v_tids := ARRAY (
    SELECT job.ctid
    FROM {schema}.headgate_job AS job
    WHERE job.state IN ('scheduled', 'retryable') AND job.scheduled_at_ms <= v_now
    ORDER BY job.scheduled_at_ms, job.seq
    LIMIT p_limit
    FOR UPDATE SKIP LOCKED);

  WITH promoted AS (
    UPDATE {schema}.headgate_job AS job
    SET state = 'available'
    WHERE job.ctid = ANY (v_tids)
    RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
  )
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
  SELECT promoted.queue, 'r', promoted.partition_key, promoted.rate_class, promoted.sticky_worker, promoted.lane_key,
    count(*)
  FROM promoted
  GROUP BY promoted.queue, promoted.partition_key, promoted.rate_class, promoted.sticky_worker, promoted.lane_key;
  RETURN cardinality(v_tids);
END $$;

-- Park waiting jobs of registered fingerprints where operators see them, first come first.
--
-- Arguments: limit.
-- Rows:      one: how many.
-- Locks:     registry rows shared, so that no release crosses, then job rows; what is locked is skipped.
CREATE FUNCTION {schema}.headgate_sweep_quarantine(p_limit integer) RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_fingerprints text[];
  v_tids tid[];
  v_now bigint;
BEGIN
  v_fingerprints := ARRAY (
    SELECT registered.fingerprint
    FROM {schema}.headgate_quarantine AS registered
    CROSS JOIN LATERAL (
      SELECT job.seq
      FROM {schema}.headgate_job AS job
      WHERE job.fingerprint = registered.fingerprint
        AND job.state IN ('pending', 'scheduled', 'available', 'retryable')
      ORDER BY job.state, job.seq
      LIMIT 1
    ) AS suspect
    FOR SHARE OF registered SKIP LOCKED);

  v_tids := ARRAY (
    SELECT suspect.tid
    FROM unnest(v_fingerprints) AS registered (fingerprint)
    CROSS JOIN unnest(ARRAY['pending', 'scheduled', 'available', 'retryable']) AS waiting (state)
    CROSS JOIN LATERAL (
      SELECT job.ctid AS tid, job.seq
      FROM {schema}.headgate_job AS job
      WHERE job.fingerprint = registered.fingerprint AND job.state = waiting.state
        AND job.state IN ('pending', 'scheduled', 'available', 'retryable')
      ORDER BY job.seq
      LIMIT p_limit
      FOR UPDATE SKIP LOCKED
    ) AS suspect
    ORDER BY suspect.seq
    LIMIT p_limit);
  v_now := {schema}.headgate_now_ms();

  WITH parked AS (
    UPDATE {schema}.headgate_job AS job
    SET state = 'quarantined', finalized_at_ms = v_now, reason_code = 'quarantine_sweep', gate_hold = NULL
    WHERE job.ctid = ANY (v_tids)
    RETURNING job.queue, job.partition_key
  )
  INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
  SELECT parked.queue, parked.partition_key, v_now - mod(v_now, 60000), -count(*), 0, 0
  FROM parked
  GROUP BY parked.queue, parked.partition_key;
  RETURN cardinality(v_tids);
END $$;

-- Unregister a fingerprint, give its quarantined jobs one more run, and clear the gate's marks on its waiting ones.
--
-- Arguments: fingerprint; empty for the quarantined jobs that have none.
-- Rows:      one: how many jobs moved; null when there is neither a registry row nor a quarantined job. A lifecycle key
--            that is taken by another live job keeps its job quarantined.
-- Locks:     the registry row, then the job rows in seq order. The marks are cleared in a later statement than the one
--            that takes the registry row, so that a mark written meanwhile is seen.
-- Fails:     unique_violation, when a key is taken at this very moment; the caller tries again.
CREATE FUNCTION {schema}.headgate_release_quarantine(p_fingerprint text) RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_registered boolean;
  v_tids tid[];
  v_marked tid[];
  v_free tid[];
  v_now bigint;
BEGIN
  DELETE FROM {schema}.headgate_quarantine AS registered WHERE registered.fingerprint = p_fingerprint;
  v_registered := FOUND;

  SELECT array_agg(locked.tid) FILTER (WHERE locked.state = 'quarantined'),
    array_agg(locked.tid) FILTER (WHERE locked.gate_hold = 'quarantine')
  INTO v_tids, v_marked
  FROM (
    SELECT job.ctid AS tid, job.state, job.gate_hold
    FROM {schema}.headgate_job AS job
    WHERE job.fingerprint = p_fingerprint AND job.state IN ('quarantined', 'available')
      AND (job.state = 'quarantined' OR job.gate_hold = 'quarantine')
    ORDER BY job.seq + 0  -- in order, and not by a walk over all jobs in that order
    FOR UPDATE
  ) AS locked;
  IF v_tids IS NULL AND NOT v_registered THEN
    RETURN NULL;
  END IF;
  v_now := {schema}.headgate_now_ms();

  v_free := ARRAY (
    SELECT parked.tid
    FROM (
      SELECT job.ctid AS tid, job.unique_key,
        row_number() OVER (PARTITION BY job.unique_key ORDER BY job.seq) AS turn
      FROM {schema}.headgate_job AS job
      WHERE job.ctid = ANY (v_tids)
    ) AS parked
    WHERE parked.unique_key IS NULL OR (parked.turn = 1 AND NOT EXISTS (
      SELECT FROM {schema}.headgate_job AS holder
      WHERE holder.unique_key = parked.unique_key
        AND holder.state IN ('pending', 'scheduled', 'available', 'running', 'retryable'))));

  WITH moved AS (
    UPDATE {schema}.headgate_job AS job
    SET state = 'available', finalized_at_ms = NULL, reason_code = '', scheduled_at_ms = v_now
    WHERE job.ctid = ANY (v_free)
    RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
  ),
  unmarked AS (
    UPDATE {schema}.headgate_job AS job
    SET gate_hold = NULL
    WHERE job.ctid = ANY (v_marked)
    RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
  ),
  tallied AS (
    INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
    SELECT moved.queue, moved.partition_key, v_now - mod(v_now, 60000), count(*), 0, 0
    FROM moved
    GROUP BY moved.queue, moved.partition_key
  )
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
  SELECT listed.queue, 'r', listed.partition_key, listed.rate_class, listed.sticky_worker, listed.lane_key, count(*)
  FROM (SELECT * FROM moved UNION ALL SELECT * FROM unmarked) AS listed
  GROUP BY listed.queue, listed.partition_key, listed.rate_class, listed.sticky_worker, listed.lane_key;

  RETURN cardinality(v_free);
END $$;

-- Fold appended counts into the counters, oldest first, and drop counters of long ago of the queues met.
--
-- Arguments: rows per queue at most; how long a counter of a queue's minute is kept, and one of a partition's minute.
-- Rows:      one: how many rows were folded.
-- Locks:     tally rows, skipping what is locked, then counters by their keys.
CREATE FUNCTION {schema}.headgate_fold_tally(p_limit integer, p_keep_ms bigint, p_keep_partitions_ms bigint)
  RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_tids tid[];
  v_now bigint;
BEGIN
  v_tids := ARRAY (
    WITH RECURSIVE named AS (
      (SELECT tally.queue FROM {schema}.headgate_tally AS tally ORDER BY tally.queue LIMIT 1)
      UNION ALL
      SELECT (
        SELECT tally.queue
        FROM {schema}.headgate_tally AS tally
        WHERE tally.queue > named.queue
        ORDER BY tally.queue
        LIMIT 1)
      FROM named
      WHERE named.queue IS NOT NULL
    )
    SELECT entry.tid
    FROM named
    CROSS JOIN LATERAL (
      SELECT tally.ctid AS tid
      FROM {schema}.headgate_tally AS tally
      WHERE tally.queue = named.queue
      ORDER BY tally.entry
      LIMIT p_limit
      FOR UPDATE SKIP LOCKED
    ) AS entry);
  v_now := {schema}.headgate_now_ms();

  WITH gone AS (
    DELETE FROM {schema}.headgate_tally AS tally
    WHERE tally.ctid = ANY (v_tids)
    RETURNING tally.*
  ),
  depths AS (
    INSERT INTO {schema}.headgate_unfinished AS depth (queue, jobs)
    SELECT gone.queue, sum(gone.unfinished)
    FROM gone
    GROUP BY gone.queue
    ORDER BY gone.queue
    ON CONFLICT (queue) DO UPDATE SET jobs = depth.jobs + excluded.jobs WHERE excluded.jobs <> 0
  ),
  outdated AS (
    DELETE FROM {schema}.headgate_queue_minute AS counter
    WHERE counter.ctid = ANY (ARRAY (
      SELECT old.tid
      FROM (SELECT DISTINCT gone.queue FROM gone) AS touched
      CROSS JOIN LATERAL (
        SELECT found.ctid AS tid
        FROM {schema}.headgate_queue_minute AS found
        WHERE found.queue = touched.queue AND found.minute_at_ms < v_now - p_keep_ms
        ORDER BY found.minute_at_ms
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
      ) AS old))
  ),
  outdated_partitions AS (
    DELETE FROM {schema}.headgate_minute_counter AS counter
    WHERE counter.ctid = ANY (ARRAY (
      SELECT old.tid
      FROM (SELECT DISTINCT gone.queue FROM gone) AS touched
      CROSS JOIN LATERAL (
        SELECT found.ctid AS tid
        FROM {schema}.headgate_minute_counter AS found
        WHERE found.queue = touched.queue AND found.minute_at_ms < v_now - p_keep_partitions_ms
        ORDER BY found.minute_at_ms, found.partition_key
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
      ) AS old))
  ),
  minutes AS (
    INSERT INTO {schema}.headgate_queue_minute AS counter
      (queue, minute_at_ms, arrived, completed, failed, retried, rejected, latency_ms_sum, latency_count)
    SELECT gone.queue, gone.minute_at_ms, sum(gone.arrived), sum(gone.completed), sum(gone.failed), sum(gone.retried),
      sum(gone.rejected), sum(gone.latency_ms_sum), sum(gone.latency_count)
    FROM gone
    WHERE gone.arrived <> 0 OR gone.completed <> 0 OR gone.failed <> 0 OR gone.retried <> 0 OR gone.rejected <> 0
      OR gone.latency_count <> 0
    GROUP BY gone.queue, gone.minute_at_ms
    ORDER BY gone.queue, gone.minute_at_ms
    ON CONFLICT (queue, minute_at_ms) DO UPDATE
    SET arrived = counter.arrived + excluded.arrived, completed = counter.completed + excluded.completed,
      failed = counter.failed + excluded.failed, retried = counter.retried + excluded.retried,
      rejected = counter.rejected + excluded.rejected,
      latency_ms_sum = counter.latency_ms_sum + excluded.latency_ms_sum,
      latency_count = counter.latency_count + excluded.latency_count
  )
  INSERT INTO {schema}.headgate_minute_counter AS counter
    (queue, partition_key, minute_at_ms, arrived, completed)
  SELECT gone.queue, gone.partition_key, gone.minute_at_ms, sum(gone.arrived), sum(gone.completed)
  FROM gone
  WHERE gone.arrived <> 0 OR gone.completed <> 0
  GROUP BY gone.queue, gone.partition_key, gone.minute_at_ms
  ORDER BY gone.queue, gone.minute_at_ms, gone.partition_key
  ON CONFLICT (queue, minute_at_ms, partition_key)
    DO UPDATE SET arrived = counter.arrived + excluded.arrived, completed = counter.completed + excluded.completed;
  RETURN cardinality(v_tids);
END $$;
