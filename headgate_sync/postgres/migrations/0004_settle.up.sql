-- Online-safe: adds functions.
--
-- Ending attempts and renewing leases, as functions.
--
-- Functions and not plain statements, because a plan that was cached while the table was small or never analysed must not
-- scan it later: the settings hold for every call, on whatever connection. What a function has locked it finds again by
-- ctid, in a later statement: under READ COMMITTED that one sees the row as it is locked, and no plan can turn a look-up
-- by ctid into a scan.
--
-- Names of states stand here literally; a test compares them with the table of transitions.

-- Charge what attempts really cost, and pause the classes that told a handler to come back later.
--
-- Arguments: job rows that the caller holds locked, still running, with what their acks bring: the real weight, and how
--            long the class shall pause; null where an ack brings none.
-- Locks:     the rate classes by name.
--
-- Several weights of one class are applied in the order of the acks, and after each the balance is cut to the cap. That
-- comes to: the smaller of (balance + all), and (cap + the least sum over a tail of them, the empty tail included).
CREATE FUNCTION {schema}.headgate_settle_classes(p_tids tid[], p_actual_weights integer[], p_pauses_ms bigint[])
  RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_names text[];
  v_totals bigint[];
  v_tails bigint[];
  v_refunded boolean[];
  v_paused text[];
  v_pauses bigint[];
  v_now bigint;
BEGIN
  WITH charged AS (
    SELECT job.rate_class, job.rate_charge::bigint - given.actual_weight AS change, given.place
    FROM unnest(p_tids, p_actual_weights) WITH ORDINALITY AS given (tid, actual_weight, place)
    JOIN {schema}.headgate_job AS job ON job.ctid = given.tid
    WHERE given.actual_weight IS NOT NULL AND job.rate_charge > 0
  ),
  behind AS (
    SELECT charged.rate_class, charged.change,
      coalesce(sum(charged.change) OVER (
        PARTITION BY charged.rate_class ORDER BY charged.place DESC
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS later
    FROM charged
  ),
  by_class AS (
    SELECT behind.rate_class, sum(behind.change)::bigint AS total, min(behind.later)::bigint AS tail,
      bool_or(behind.change > 0) AS refunded
    FROM behind
    GROUP BY behind.rate_class
  )
  SELECT array_agg(by_class.rate_class), array_agg(by_class.total), array_agg(by_class.tail),
    array_agg(by_class.refunded)
  INTO v_names, v_totals, v_tails, v_refunded
  FROM by_class;

  SELECT array_agg(pausing.rate_class), array_agg(pausing.pause_ms)
  INTO v_paused, v_pauses
  FROM (
    SELECT job.rate_class, max(given.pause_ms) AS pause_ms
    FROM unnest(p_tids, p_pauses_ms) AS given (tid, pause_ms)
    JOIN {schema}.headgate_job AS job ON job.ctid = given.tid
    WHERE given.pause_ms > 0 AND job.rate_class <> ''
    GROUP BY job.rate_class
    ORDER BY job.rate_class
  ) AS pausing;

  PERFORM {schema}.headgate_mark_class(pausing.name)
  FROM unnest(v_paused) AS pausing (name);

  PERFORM
  FROM {schema}.headgate_rate_class AS class
  WHERE class.name = ANY (v_names || v_paused)
  ORDER BY class.name
  FOR UPDATE;
  v_now := {schema}.headgate_now_ms();

  UPDATE {schema}.headgate_budget AS budget
  SET units = greatest(-4611686018427387904::numeric, least(
      budget.burst::numeric * budget.window_ms + change.tail::numeric * budget.window_ms,
      {schema}.headgate_units_at(
        budget.units, budget.limit_tokens, budget.window_ms, budget.burst, budget.refilled_at_ms, v_now)
      + change.total::numeric * budget.window_ms)),
    refilled_at_ms = greatest(budget.refilled_at_ms, v_now)
  FROM unnest(v_names, v_totals, v_tails) AS change (name, total, tail)
  WHERE budget.rate_class = change.name;

  UPDATE {schema}.headgate_rate_class AS class
  SET paused_until_ms = v_now + pausing.pause_ms, pause_reason = ''
  FROM unnest(v_paused, v_pauses) AS pausing (name, pause_ms)
  WHERE class.name = pausing.name
    AND (class.paused_until_ms IS NULL OR class.paused_until_ms < v_now + pausing.pause_ms);

  INSERT INTO {schema}.headgate_inbox (queue, kind, rate_class)
  SELECT DISTINCT lane_group.queue, 'o', lane_group.rate_class
  FROM unnest(v_names, v_refunded) AS change (name, refunded)
  JOIN {schema}.headgate_lane_group AS lane_group ON lane_group.rate_class = change.name
  WHERE change.refunded;
END $$;

-- Settle attempts, each under its own fence.
--
-- Arguments: per ack its lease, outcome and what goes with it; arrays of one length, or null where no ack brings that.
--            firsts: false where an earlier ack shows the same lease; null when none does. delays_ms: as asked for, null for the default backoff, to which jitters_ms is added; pauses_ms:
--            for the class of a rate-limited job. details: the history entry as far as the caller knows it, null for none.
--            lock_wait_ms: 0 leaves rows alone that are locked elsewhere; else how long to wait for each of them.
-- Rows:      place (from 1) of each ack that was not settled; whether the job is gone; whether its row was locked
--            elsewhere, which decides nothing.
-- Locks:     the job rows in seq order, then the rate classes by name.
CREATE FUNCTION {schema}.headgate_ack(
  p_job_ids text[], p_lease_ids text[], p_fences bigint[], p_firsts boolean[], p_outcomes text[],
  p_delays_ms bigint[], p_jitters_ms bigint[], p_pauses_ms bigint[], p_details text[], p_latencies_ms integer[],
  p_error_codes text[], p_reason_codes text[], p_actual_weights integer[], p_result_versions integer[],
  p_results bytea[], p_retry_base_ms bigint, p_retry_cap_ms bigint, p_max_doublings integer, p_max_history integer,
  p_lock_wait_ms integer)
  RETURNS TABLE (place bigint, missing boolean, busy boolean)
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  SET lock_timeout = 0
  AS $$
#variable_conflict use_column
DECLARE
  v_tids tid[];
  v_held_tids tid[];
  v_held_weights integer[];
  v_held_pauses bigint[];
  v_held bigint[];
  v_now bigint;
BEGIN
  -- Neither the state nor the bare seq: with statistics of another load the planner would walk the index of all running
  -- jobs, or of all jobs in this order, instead of looking up the ids.
  IF p_lock_wait_ms > 0 THEN
    BEGIN
      PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
      v_tids := ARRAY (
        SELECT job.ctid
        FROM {schema}.headgate_job AS job
        WHERE job.id = ANY (p_job_ids) AND job.lease_id IS NOT NULL
        ORDER BY job.seq + 0
        FOR UPDATE);
      PERFORM set_config('lock_timeout', '0', true);
    EXCEPTION WHEN lock_not_available THEN
      v_tids := NULL;
    END;
  END IF;
  -- Who waits for one row must not hold others that its holder may want next: either all are waited for in one order, or
  -- none is, and what is locked is left for a later call.
  IF v_tids IS NULL THEN
    v_tids := ARRAY (
      SELECT job.ctid
      FROM {schema}.headgate_job AS job
      WHERE job.id = ANY (p_job_ids) AND job.lease_id IS NOT NULL
      ORDER BY job.seq + 0
      FOR UPDATE SKIP LOCKED);
  END IF;

  IF p_actual_weights IS NOT NULL OR p_pauses_ms IS NOT NULL THEN
    SELECT array_agg(held.tid), array_agg(held.actual_weight), array_agg(held.pause_ms)
    INTO v_held_tids, v_held_weights, v_held_pauses
    FROM (
      SELECT job.ctid AS tid, given.actual_weight, given.pause_ms
      FROM unnest(p_job_ids, p_lease_ids, p_fences, p_firsts, p_actual_weights, p_pauses_ms) WITH ORDINALITY
        AS given (job_id, lease_id, fence, is_first, actual_weight, pause_ms, place)
      JOIN {schema}.headgate_job AS job
        ON job.id || '' = given.job_id AND job.lease_id = given.lease_id AND job.fence = given.fence
      WHERE job.ctid = ANY (v_tids) AND given.is_first IS NOT FALSE
      ORDER BY given.place
    ) AS held;
    PERFORM {schema}.headgate_settle_classes(v_held_tids, v_held_weights, v_held_pauses);
  END IF;
  v_now := {schema}.headgate_now_ms();

  WITH held AS MATERIALIZED (
    SELECT given.*, job.ctid AS tid, job.seq, job.queue, job.partition_key, job.rate_class, job.sticky_worker,
      job.lane_key,
      CASE given.outcome
        WHEN 'success' THEN CASE WHEN retention_ms > 0 THEN 'completed' ELSE 'deleted' END
        WHEN 'retry' THEN CASE WHEN attempt + 1 < max_attempts THEN 'retryable' ELSE 'archived' END
        WHEN 'skip' THEN 'archived'
        WHEN 'revoke' THEN 'deleted'
        WHEN 'snooze' THEN 'scheduled'
        WHEN 'undecodable' THEN 'undecodable'
        WHEN 'rate_limited' THEN 'available'
      END AS target
    FROM unnest(p_job_ids, p_lease_ids, p_fences, p_firsts, p_outcomes, p_delays_ms, p_jitters_ms, p_details,
        p_latencies_ms, p_error_codes, p_reason_codes, p_result_versions, p_results) WITH ORDINALITY
      AS given (job_id, given_lease_id, given_fence, is_first, outcome, delay_ms, jitter_ms, detail, latency_ms,
        error_code, reason_code, result_version, result, place)
    -- Not the bare id: the locked rows alone are joined, not what a walk over the index of all ids brings.
    JOIN {schema}.headgate_job AS job
      ON job.id || '' = given.job_id AND job.lease_id = given.given_lease_id AND job.fence = given.given_fence
    WHERE job.ctid = ANY (v_tids) AND given.is_first IS NOT FALSE
  ),
  settled AS (
    UPDATE {schema}.headgate_job AS job
    SET state = held.target,
      attempt = CASE WHEN held.outcome = 'retry' THEN job.attempt + 1 ELSE job.attempt END,
      scheduled_at_ms = CASE
        WHEN held.target = 'scheduled' THEN v_now + held.delay_ms
        WHEN held.target = 'retryable' THEN v_now + coalesce(
          held.delay_ms,
          least(p_retry_cap_ms, p_retry_base_ms << least(job.attempt, p_max_doublings)) + held.jitter_ms)
        ELSE job.scheduled_at_ms
      END,
      finalized_at_ms = CASE WHEN held.target IN ('completed', 'archived', 'undecodable') THEN v_now END,
      reason_code = CASE
        WHEN held.target NOT IN ('completed', 'archived', 'undecodable') THEN job.reason_code
        WHEN held.reason_code <> '' THEN held.reason_code
        WHEN held.outcome = 'retry' THEN 'attempts_exhausted'
        WHEN held.outcome = 'skip' THEN 'skipped'
        WHEN held.outcome = 'undecodable' THEN 'undecodable'
        ELSE ''
      END,
      lease_id = NULL, lease_expires_at_ms = NULL, claimed_by = NULL, claimed_at_ms = NULL, rate_charge = 0,
      settled_lease_id = job.lease_id, settled_outcome = held.outcome,
      error_code = coalesce(held.error_code, ''), latency_ms = held.latency_ms,
      result_version = held.result_version, result = held.result,
      errors = CASE
        WHEN held.detail IS NULL THEN job.errors
        ELSE CASE WHEN jsonb_array_length(job.errors) < p_max_history THEN job.errors ELSE job.errors - 0 END
          || jsonb_build_array(
            held.detail::jsonb
            || jsonb_build_object('at_ms', v_now, 'worker', job.claimed_by, 'fence', job.fence)
            || CASE held.outcome
              WHEN 'retry' THEN jsonb_build_object('attempt', job.attempt + 1)
              WHEN 'success' THEN jsonb_build_object('attempt', job.attempt)
              ELSE jsonb_build_object()
            END)
      END
    FROM held
    WHERE job.ctid = held.tid AND held.target <> 'deleted'
  ),
  removed AS (
    DELETE FROM {schema}.headgate_job AS job
    WHERE job.ctid = ANY (ARRAY (SELECT held.tid FROM held WHERE held.target = 'deleted'))
  ),
  untagged AS (
    DELETE FROM {schema}.headgate_job_tag AS tag
    WHERE tag.job_seq = ANY (ARRAY (SELECT held.seq FROM held WHERE held.target = 'deleted'))
  ),
  freed AS (
    INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, n)
    SELECT held.queue, 'f', held.partition_key, held.rate_class, count(*)
    FROM held
    GROUP BY held.queue, held.partition_key, held.rate_class
  ),
  listed AS (
    INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
    SELECT held.queue, 'r', held.partition_key, held.rate_class, held.sticky_worker, held.lane_key, count(*)
    FROM held
    WHERE held.target = 'available'
    GROUP BY held.queue, held.partition_key, held.rate_class, held.sticky_worker, held.lane_key
  ),
  tallied AS (
    INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed,
      failed, retried, latency_ms_sum, latency_count)
    SELECT held.queue, held.partition_key, v_now - mod(v_now, 60000),
      -count(*) FILTER (WHERE held.target <> 'retryable'), 0,
      count(*) FILTER (WHERE held.outcome = 'success'),
      count(*) FILTER (WHERE held.target IN ('archived', 'undecodable')),
      count(*) FILTER (WHERE held.target = 'retryable'),
      coalesce(sum(held.latency_ms), 0), count(held.latency_ms)
    FROM held
    WHERE held.target IN ('completed', 'archived', 'undecodable', 'deleted', 'retryable')
    GROUP BY held.queue, held.partition_key
  )
  SELECT array_agg(held.place) INTO v_held FROM held;

  -- What is not held is either the repetition of an ack that the row remembers by now, or refused. A row that an ack of
  -- this call removed was still there for the acks before it.
  IF cardinality(v_held) = cardinality(p_job_ids) THEN
    RETURN;
  END IF;
  RETURN QUERY
  SELECT given.place,
    job.id IS NULL AND NOT EXISTS (
      SELECT FROM unnest(v_held) AS held (place)
      WHERE held.place > given.place AND p_job_ids[held.place] = given.job_id),
    coalesce(job.lease_id = given.lease_id AND job.fence = given.fence, false)
  FROM unnest(p_job_ids, p_lease_ids, p_fences, p_outcomes) WITH ORDINALITY
    AS given (job_id, lease_id, fence, outcome, place)
  LEFT JOIN LATERAL (
    SELECT found.id, found.fence, found.lease_id, found.settled_lease_id, found.settled_outcome
    FROM {schema}.headgate_job AS found
    WHERE found.id = given.job_id
    LIMIT 1
  ) AS job ON true
  WHERE given.place <> ALL (coalesce(v_held, ARRAY[]::bigint[]))
    AND (job.fence, job.settled_lease_id, job.settled_outcome) IS DISTINCT FROM
      (given.fence, given.lease_id, given.outcome)
  ORDER BY given.place;
END $$;

-- Extend the leases that are still held, waiting for no lock.
--
-- Arguments: leases as arrays of one length; lease_ms.
-- Rows:      place (from 1) of each lease that is lost.
-- Locks:     the job rows in seq order, skipping what is locked; then rows of headgate_extension by seq.
--
-- A row that is locked elsewhere is not lost: its handler may be committing, an operator may look at it. Nor can it be
-- written, so the extension goes beside it, where the reclaimer looks too: once the lock is gone, the row's own instant
-- may have passed, and the worker, whose renewal was confirmed, must not lose the job before its next beat.
--
-- The extension is written only while the lease has not run out by what is committed. Then whoever holds the lock is no
-- reclaimer, which locks none but expired rows; and a reclaimer that reads its clock after the expiry takes its snapshot
-- after this commit, and sees the extension. With a lease that has run out the lock may be a reclaimer's, so nothing is
-- promised beyond the answer: the worker has told the handler to stop by then, on its own clock, and the next beat judges
-- what the lock left.
CREATE FUNCTION {schema}.headgate_renew(p_job_ids text[], p_lease_ids text[], p_fences bigint[], p_lease_ms bigint)
  RETURNS TABLE (place bigint)
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
#variable_conflict use_column
DECLARE
  v_tids tid[];
  v_seqs bigint[];
  v_now bigint;
BEGIN
  SELECT array_agg(locked.tid), array_agg(locked.seq) INTO v_tids, v_seqs
  FROM unnest(p_job_ids, p_lease_ids, p_fences) AS given (job_id, lease_id, fence)
  JOIN (
    SELECT job.ctid AS tid, job.seq, job.id, job.lease_id, job.fence
    FROM {schema}.headgate_job AS job
    WHERE job.id = ANY (p_job_ids) AND job.lease_id IS NOT NULL
    ORDER BY job.seq + 0  -- as in headgate_ack
    FOR UPDATE SKIP LOCKED
  ) AS locked ON locked.id = given.job_id AND locked.lease_id = given.lease_id AND locked.fence = given.fence;
  v_now := {schema}.headgate_now_ms();

  UPDATE {schema}.headgate_job AS job
  SET lease_expires_at_ms = v_now + p_lease_ms
  WHERE job.ctid = ANY (v_tids);
  -- What stood beside the row would outlast a lease that is shortened now.
  DELETE FROM {schema}.headgate_extension AS extension WHERE extension.job_seq = ANY (v_seqs);

  IF cardinality(v_tids) = cardinality(p_job_ids) THEN
    RETURN;
  END IF;

  INSERT INTO {schema}.headgate_extension AS extension (job_seq, lease_id, expires_at_ms)
  SELECT job.seq, job.lease_id, v_now + p_lease_ms
  FROM unnest(p_job_ids, p_lease_ids, p_fences) AS given (job_id, lease_id, fence)
  CROSS JOIN LATERAL (
    SELECT found.seq, found.lease_id, found.fence, found.lease_expires_at_ms,
      (SELECT beside.expires_at_ms FROM {schema}.headgate_extension AS beside
        WHERE beside.job_seq = found.seq AND beside.lease_id = found.lease_id) AS extended_to_ms
    FROM {schema}.headgate_job AS found
    WHERE found.id = given.job_id
    LIMIT 1
  ) AS job
  WHERE job.lease_id = given.lease_id AND job.fence = given.fence AND job.seq <> ALL (coalesce(v_seqs, ARRAY[]::bigint[]))
    AND greatest(job.lease_expires_at_ms, job.extended_to_ms) > v_now
  ORDER BY job.seq
  ON CONFLICT (job_seq) DO UPDATE
  SET lease_id = excluded.lease_id, expires_at_ms = excluded.expires_at_ms;

  RETURN QUERY
  SELECT given.place
  FROM unnest(p_job_ids, p_lease_ids, p_fences) WITH ORDINALITY AS given (job_id, lease_id, fence, place)
  LEFT JOIN LATERAL (
    SELECT found.lease_id, found.fence
    FROM {schema}.headgate_job AS found
    WHERE found.id = given.job_id
    LIMIT 1
  ) AS job ON true
  WHERE (job.lease_id, job.fence) IS DISTINCT FROM (given.lease_id, given.fence)
  ORDER BY given.place;
END $$;
