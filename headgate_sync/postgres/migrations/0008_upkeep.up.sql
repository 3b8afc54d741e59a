-- Online-safe: adds functions.
--
-- Upkeep. Both calls only try for the lock of a queue: whoever holds it folds by itself. What the upkeep folds has no
-- lower bound, so that a bound of admissions which is wrong hides nothing for long.

-- Write what a fold freed to the queue and to its classes. The caller holds the lock of the queue. A class that
-- somebody else holds is left for later, as a row of its own.
CREATE FUNCTION {schema}.headgate_apply_freed(p_queue text, p_freed bigint, p_classes text[], p_class_freed bigint[])
  RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_locked text[];
BEGIN
  UPDATE {schema}.headgate_queue AS queue
  SET inflight = greatest(0, queue.inflight - p_freed)
  WHERE queue.queue = p_queue AND p_freed > 0;
  v_locked := ARRAY (
    SELECT class.name
    FROM {schema}.headgate_rate_class AS class
    WHERE class.name = ANY (p_classes)
    ORDER BY class.name
    FOR NO KEY UPDATE SKIP LOCKED);
  UPDATE {schema}.headgate_rate_class AS class
  SET inflight = greatest(0, class.inflight - p_class_freed[array_position(p_classes, class.name)])
  WHERE class.name = ANY (v_locked);
  INSERT INTO {schema}.headgate_inbox (queue, kind, rate_class, n)
  SELECT p_queue, 'c', freed.name, freed.n
  FROM unnest(p_classes, p_class_freed) AS freed (name, n)
  JOIN {schema}.headgate_rate_class AS class ON class.name = freed.name
  WHERE freed.name <> ALL (v_locked);
END $$;

-- Fold up to p_limit appended rows of the next queue that has any, paused or polled by nobody as it may be. One queue a
-- call, so that no lock is held for another queue's work; the caller goes on after the name returned.
CREATE FUNCTION {schema}.headgate_gate_fold(p_after text, p_limit integer, OUT queue text, OUT taken integer)
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  folded record;
BEGIN
  taken := 0;
  queue := (
    SELECT inbox.queue
    FROM {schema}.headgate_inbox AS inbox
    WHERE inbox.queue > p_after
    ORDER BY inbox.queue
    LIMIT 1);
  IF queue IS NOT NULL AND pg_try_advisory_xact_lock({schema}.headgate_queue_key(queue)) THEN
    -- A bound of another server, from before a restoration, must not come true one day.
    UPDATE {schema}.headgate_queue AS known
    SET inbox_from = '0'
    WHERE known.queue = headgate_gate_fold.queue AND known.inbox_from > pg_snapshot_xmin(pg_current_snapshot());
    SELECT fold.*
    INTO folded
    FROM {schema}.headgate_fold(ARRAY[queue], ARRAY['0'::xid8], p_limit, ARRAY[{schema}.headgate_parks(queue)]) AS fold;
    PERFORM {schema}.headgate_apply_freed(queue, coalesce(folded.freed[1], 0), folded.classes, folded.class_freed);
    taken := folded.taken;
  END IF;
END $$;

-- Partitions of one queue from after p_after, null for the first, up to p_last; the caller holds the lock of the queue.
CREATE FUNCTION {schema}.headgate_reconcile_slice(p_queue text, p_after text, p_last text, p_idle_ms bigint)
  RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_now bigint := {schema}.headgate_now_ms();
  v_cap integer := {schema}.headgate_parks(p_queue);
  v_counts bigint;
  v_lanes bigint;
  v_dropped text[];
  v_hidden bigint := 0;
  u_class text[];
  u_sticky text[];
  u_round bigint[];
  u_partition text[];
BEGIN
  -- Running jobs and exits not folded yet, in one statement: in two snapshots an exit would be counted twice.
  WITH unfolded AS MATERIALIZED (
    SELECT inbox.partition_key, sum(inbox.n) AS n
    FROM {schema}.headgate_inbox AS inbox
    WHERE inbox.queue = p_queue AND inbox.kind = 'f'
    GROUP BY inbox.partition_key
  ),
  truth AS MATERIALIZED (
    SELECT part.ctid AS tid,
      (SELECT count(*) FROM {schema}.headgate_job AS job
       WHERE job.state = 'running' AND job.queue = p_queue AND job.partition_key = part.partition_key)
      + coalesce((SELECT unfolded.n FROM unfolded WHERE unfolded.partition_key = part.partition_key), 0) AS inflight
    FROM {schema}.headgate_partition AS part
    WHERE part.queue = p_queue AND (p_after IS NULL OR part.partition_key > p_after) AND part.partition_key <= p_last
  )
  UPDATE {schema}.headgate_partition AS part
  SET inflight = truth.inflight
  FROM truth
  WHERE part.ctid = truth.tid AND part.inflight <> truth.inflight;
  GET DIAGNOSTICS v_counts = ROW_COUNT;

  -- A lane without work is laid to rest. One with work that nobody announced, or one that is barred without a full
  -- ceiling, would wait for ever: only these are corrections.
  WITH truth AS MATERIALIZED (
    SELECT lane.ctid AS tid, lane.active, lane.parked, part.last_round, lane.last_round AS lane_round,
      lane.rate_class, lane.sticky_worker, lane.partition_key,
      (SELECT true FROM {schema}.headgate_job AS job
       WHERE job.lane_key = lane.lane_key AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
         AND (job.queue = lane.queue AND job.partition_key = lane.partition_key
           AND job.rate_class = lane.rate_class AND job.sticky_worker = lane.sticky_worker) IS TRUE
       ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
       LIMIT 1) IS TRUE AS ready,
      lane.parked AND (part.inflight >= v_cap) IS NOT TRUE AS barred,
      lane.lane_key NOT IN (
        SELECT inbox.lane_key FROM {schema}.headgate_inbox AS inbox WHERE inbox.queue = p_queue AND inbox.kind = 'r'
      ) AS unannounced
    FROM {schema}.headgate_partition AS part
    JOIN {schema}.headgate_lane AS lane ON lane.queue = part.queue AND lane.partition_key = part.partition_key
    WHERE part.queue = p_queue AND (p_after IS NULL OR part.partition_key > p_after) AND part.partition_key <= p_last
  ),
  changed AS (
    UPDATE {schema}.headgate_lane AS lane
    SET active = truth.ready, parked = lane.parked AND NOT truth.barred,
      last_round = CASE WHEN truth.ready THEN truth.last_round ELSE lane.last_round END
    FROM truth
    WHERE lane.ctid = truth.tid
      AND (truth.barred OR (truth.active AND NOT truth.ready)
        OR (truth.ready AND NOT truth.active AND truth.unannounced))
    RETURNING truth.barred OR NOT truth.active AS wrong
  )
  -- Every lane that can be picked, so that a bound which hides one is put right as well.
  SELECT (SELECT count(*) FROM changed WHERE changed.wrong), array_agg(truth.rate_class),
    array_agg(truth.sticky_worker), array_agg(truth.lane_round), array_agg(truth.partition_key)
  INTO v_lanes, u_class, u_sticky, u_round, u_partition
  FROM truth
  WHERE truth.ready AND (truth.active OR truth.unannounced) AND (truth.barred OR NOT truth.parked);
  IF u_class IS NOT NULL THEN
    v_hidden := {schema}.headgate_lower_heads(
      array_fill(p_queue, ARRAY[cardinality(u_class)]), u_class, u_sticky, u_round, u_partition);
  END IF;

  -- Keys made for every user must not pile up. Idle counts from the first look that found no work in this round.
  WITH truth AS MATERIALIZED (
    SELECT part.ctid AS tid, part.idle_since_ms, part.last_round,
      part.inflight = 0 AND part.deficit = 0 AND part.quantum_override IS NULL
        AND (SELECT true FROM {schema}.headgate_lane AS lane
             WHERE lane.queue = part.queue AND lane.partition_key = part.partition_key AND lane.active
             LIMIT 1) IS NULL
        AND part.partition_key NOT IN (
          SELECT inbox.partition_key FROM {schema}.headgate_inbox AS inbox WHERE inbox.queue = p_queue) AS idle,
      part.idle_round IS NOT DISTINCT FROM part.last_round AS same_round
    FROM {schema}.headgate_partition AS part
    WHERE part.queue = p_queue AND (p_after IS NULL OR part.partition_key > p_after) AND part.partition_key <= p_last
  ),
  judged AS (
    UPDATE {schema}.headgate_partition AS part
    SET idle_since_ms = CASE
        WHEN NOT truth.idle THEN NULL
        WHEN truth.same_round THEN coalesce(part.idle_since_ms, v_now)
        ELSE v_now END,
      idle_round = CASE WHEN truth.idle THEN part.last_round END
    FROM truth
    WHERE part.ctid = truth.tid
      AND (truth.idle <> (part.idle_since_ms IS NOT NULL) OR (truth.idle AND NOT truth.same_round))
  )
  SELECT array_agg(part.partition_key)
  INTO v_dropped
  FROM truth
  JOIN {schema}.headgate_partition AS part ON part.ctid = truth.tid
  WHERE truth.idle AND truth.same_round AND truth.idle_since_ms <= v_now - p_idle_ms;
  DELETE FROM {schema}.headgate_lane AS lane
  WHERE lane.queue = p_queue AND lane.partition_key = ANY (v_dropped);
  DELETE FROM {schema}.headgate_partition AS part
  WHERE part.queue = p_queue AND part.partition_key = ANY (v_dropped);
  RETURN v_counts + greatest(v_lanes, v_hidden);
END $$;

-- The counter of a queue, and its groups that have no lane any more; the caller holds the lock of the queue.
CREATE FUNCTION {schema}.headgate_reconcile_queue(p_queue text) RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  AS $$
DECLARE
  v_counts bigint;
BEGIN
  UPDATE {schema}.headgate_queue AS queue
  SET inflight = truth.inflight
  FROM (
    SELECT
      (SELECT count(*) FROM {schema}.headgate_job AS job WHERE job.state = 'running' AND job.queue = p_queue)
      + (SELECT coalesce(sum(inbox.n), 0) FROM {schema}.headgate_inbox AS inbox
         WHERE inbox.queue = p_queue AND inbox.kind = 'f') AS inflight
  ) AS truth
  WHERE queue.queue = p_queue AND queue.inflight <> truth.inflight;
  GET DIAGNOSTICS v_counts = ROW_COUNT;
  -- Bounds that no lane needs, and any above the first lane, which would hide it.
  UPDATE {schema}.headgate_lane_group AS lane_group
  SET head_round = truth.last_round, head_partition = truth.partition_key, head_served = 0
  FROM (
    SELECT bound.ctid AS tid, head.last_round, head.partition_key
    FROM {schema}.headgate_lane_group AS bound
    LEFT JOIN LATERAL (
      SELECT lane.last_round, lane.partition_key
      FROM {schema}.headgate_lane AS lane
      WHERE lane.queue = p_queue AND lane.rate_class = bound.rate_class AND lane.sticky_worker = bound.sticky_worker
        AND lane.active AND NOT lane.parked
      ORDER BY lane.last_round, lane.partition_key
      LIMIT 1
    ) AS head ON true
    WHERE bound.queue = p_queue AND bound.head_round IS NOT NULL
      AND (head.last_round IS NULL OR (head.last_round, head.partition_key) < (bound.head_round, bound.head_partition))
  ) AS truth
  WHERE lane_group.ctid = truth.tid;
  DELETE FROM {schema}.headgate_lane_group AS lane_group
  WHERE lane_group.queue = p_queue AND lane_group.head_round IS NULL
    AND NOT EXISTS (
      SELECT FROM {schema}.headgate_lane AS lane
      WHERE lane.queue = p_queue AND lane.rate_class = lane_group.rate_class
        AND lane.sticky_worker = lane_group.sticky_worker);
  RETURN v_counts;
END $$;

-- Lanes with ready jobs that no row stands for: a walk over the distinct lane keys of the ready jobs, a stretch a call.
CREATE FUNCTION {schema}.headgate_reconcile_lanes(p_after bigint, p_limit integer) RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_key bigint := p_after;
  v_lost bigint := 0;
  job record;
BEGIN
  FOR i IN 1..p_limit LOOP
    SELECT ready.lane_key, ready.queue, ready.partition_key, ready.rate_class, ready.sticky_worker
    INTO job
    FROM {schema}.headgate_job AS ready
    WHERE ready.lane_key > v_key AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
    ORDER BY ready.lane_key
    LIMIT 1;
    IF NOT FOUND THEN
      v_key := -9223372036854775808;
      EXIT;
    END IF;
    v_key := job.lane_key;
    CONTINUE WHEN EXISTS (
      SELECT FROM {schema}.headgate_lane AS lane
      WHERE lane.queue = job.queue AND lane.partition_key = job.partition_key AND lane.rate_class = job.rate_class
        AND lane.sticky_worker = job.sticky_worker AND lane.active);
    -- Without the lock a fold that has not committed looks the same.
    CONTINUE WHEN NOT pg_try_advisory_xact_lock({schema}.headgate_queue_key(job.queue));
    INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key)
    SELECT job.queue, 'r', job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
    WHERE NOT EXISTS (
        SELECT FROM {schema}.headgate_lane AS lane
        WHERE lane.queue = job.queue AND lane.partition_key = job.partition_key AND lane.rate_class = job.rate_class
          AND lane.sticky_worker = job.sticky_worker AND lane.active)
      AND NOT EXISTS (
        SELECT FROM {schema}.headgate_inbox AS inbox
        WHERE inbox.queue = job.queue AND inbox.kind = 'r' AND inbox.lane_key = job.lane_key);
    IF FOUND THEN
      v_lost := v_lost + 1;
    END IF;
  END LOOP;
  UPDATE {schema}.headgate_gate_place AS known SET lane_key = v_key;
  RETURN v_lost;
END $$;

-- Counters of classes. Only where the locks of all queues that know the class are free.
CREATE FUNCTION {schema}.headgate_reconcile_classes(p_limit integer) RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  AS $$
DECLARE
  v_class text;
  v_corrections bigint := 0;
BEGIN
  FOR v_class IN
    SELECT class.name
    FROM {schema}.headgate_rate_class AS class
    WHERE class.inflight <> {schema}.headgate_running_of(class.name)
    ORDER BY class.name
    LIMIT p_limit
  LOOP
    CONTINUE WHEN NOT (
      SELECT coalesce(bool_and(pg_try_advisory_xact_lock({schema}.headgate_queue_key(known.queue))), true)
      FROM (
        SELECT DISTINCT lane_group.queue
        FROM {schema}.headgate_lane_group AS lane_group
        WHERE lane_group.rate_class = v_class
      ) AS known);
    PERFORM FROM {schema}.headgate_rate_class AS class WHERE class.name = v_class FOR NO KEY UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    UPDATE {schema}.headgate_rate_class AS class
    SET inflight = {schema}.headgate_running_of(v_class)
    WHERE class.name = v_class AND class.inflight <> {schema}.headgate_running_of(v_class);
    IF FOUND THEN
      v_corrections := v_corrections + 1;
    END IF;
  END LOOP;
  RETURN v_corrections;
END $$;

-- Marks whose reason is gone.
CREATE FUNCTION {schema}.headgate_reconcile_holds(p_limit integer) RETURNS bigint
  LANGUAGE sql VOLATILE
  AS $$
WITH wrong AS MATERIALIZED (
  SELECT job.ctid AS tid
  FROM {schema}.headgate_job AS job
  WHERE job.gate_hold IS NOT NULL
    AND CASE job.gate_hold
      WHEN 'quarantine' THEN NOT EXISTS (
        SELECT FROM {schema}.headgate_quarantine AS quarantine WHERE quarantine.fingerprint = job.fingerprint)
      ELSE NOT EXISTS (
        SELECT FROM {schema}.headgate_budget AS budget
        WHERE budget.rate_class = job.rate_class AND budget.burst < coalesce(job.charge_weight, job.weight))
    END
  LIMIT p_limit
  FOR UPDATE OF job SKIP LOCKED
),
freed AS (
  UPDATE {schema}.headgate_job AS job
  SET gate_hold = NULL
  FROM wrong
  WHERE job.ctid = wrong.tid
  RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
),
announced AS (
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
  SELECT freed.queue, 'r', freed.partition_key, freed.rate_class, freed.sticky_worker, freed.lane_key, count(*)
  FROM freed
  GROUP BY freed.queue, freed.partition_key, freed.rate_class, freed.sticky_worker, freed.lane_key
)
SELECT count(*) FROM freed
$$;

-- Compare one slice of the gate's counters and marks with the jobs, put right what differs, and drop what has been
-- idle.
--
-- Arguments: how many partitions, and how many lanes that have ready jobs; how long a partition must have been without
--            work before it is dropped; how long to wait for a lock.
-- Returns:   corrections, of which there should be none.
-- Locks:     its own place, so that one runs at a time; the queue of the slice; queues of suspicious lanes, if free.
CREATE FUNCTION {schema}.headgate_gate_reconcile(p_limit integer, p_idle_ms bigint, p_lock_wait_ms integer)
  RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  place {schema}.headgate_gate_place;
  v_queue text;
  v_last text;
  v_corrections bigint := 0;
BEGIN
  SELECT known.* INTO place FROM {schema}.headgate_gate_place AS known FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  SELECT part.queue INTO v_queue
  FROM {schema}.headgate_partition AS part
  WHERE (part.queue, part.partition_key) > (place.queue, place.partition_key)
  ORDER BY part.queue, part.partition_key
  LIMIT 1;
  IF v_queue IS NULL THEN
    UPDATE {schema}.headgate_gate_place AS known SET queue = '', partition_key = '';
    RETURN {schema}.headgate_reconcile_classes(p_limit) + {schema}.headgate_reconcile_holds(p_limit);
  END IF;
  PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
  BEGIN
    PERFORM {schema}.headgate_lock_queues(ARRAY[v_queue]);
  EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
  END;
  SELECT max(slice.partition_key)
  INTO v_last
  FROM (
    SELECT part.partition_key
    FROM {schema}.headgate_partition AS part
    WHERE part.queue = v_queue
      AND (part.partition_key > place.partition_key OR v_queue <> place.queue)
    ORDER BY part.partition_key
    LIMIT p_limit
  ) AS slice;
  v_corrections := {schema}.headgate_reconcile_slice(
    v_queue, CASE WHEN v_queue = place.queue THEN place.partition_key END, v_last, p_idle_ms);
  IF NOT EXISTS (
    SELECT FROM {schema}.headgate_partition AS part WHERE part.queue = v_queue AND part.partition_key > v_last)
  THEN
    v_corrections := v_corrections + {schema}.headgate_reconcile_queue(v_queue);
  END IF;
  v_corrections := v_corrections + {schema}.headgate_reconcile_lanes(place.lane_key, p_limit);
  UPDATE {schema}.headgate_gate_place AS known SET queue = v_queue, partition_key = v_last;
  RETURN v_corrections;
END $$;
