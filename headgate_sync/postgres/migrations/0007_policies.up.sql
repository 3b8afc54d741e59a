-- Online-safe: adds functions.
--
-- The verbs of the operator: policy that can be changed at run time.
--
-- Locks: queues first (sorted by lock key), then the class row, which guards its budgets, then job rows. What the caller
-- must hold is said where a function takes no lock itself.

CREATE FUNCTION {schema}.headgate_set_queue_paused(p_queue text, p_paused boolean) RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
BEGIN
  PERFORM {schema}.headgate_lock_queues(ARRAY[p_queue]);
  INSERT INTO {schema}.headgate_queue AS queue (queue, paused)
  VALUES (p_queue, p_paused)
  ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused;
END $$;

-- The decisions counted so far are scaled with the weight, which keeps the queue's place in the order.
CREATE FUNCTION {schema}.headgate_set_queue_weight(p_queue text, p_weight bigint) RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
BEGIN
  PERFORM {schema}.headgate_lock_queues(ARRAY[p_queue]);
  INSERT INTO {schema}.headgate_queue AS queue (queue, weight)
  VALUES (p_queue, p_weight)
  ON CONFLICT (queue) DO UPDATE
  SET weight = excluded.weight,
    dispatch_count = div(queue.dispatch_count::numeric * excluded.weight, queue.weight)::bigint;
END $$;

CREATE FUNCTION {schema}.headgate_set_partition_quantum(p_queue text, p_partition text, p_quantum integer)
  RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
BEGIN
  PERFORM {schema}.headgate_lock_queues(ARRAY[p_queue]);
  INSERT INTO {schema}.headgate_partition AS part (queue, partition_key, quantum_override)
  VALUES (p_queue, p_partition, p_quantum)
  ON CONFLICT (queue, partition_key) DO UPDATE SET quantum_override = excluded.quantum_override;
END $$;

-- Announce that a class may pass again: one row for each queue that knows it. The caller holds the class row.
CREATE FUNCTION {schema}.headgate_announce_open(p_class text) RETURNS void
  LANGUAGE sql VOLATILE
  AS $$
INSERT INTO {schema}.headgate_inbox (queue, kind, rate_class)
SELECT DISTINCT lane_group.queue, 'o', p_class
FROM {schema}.headgate_lane_group AS lane_group
WHERE lane_group.rate_class = p_class
$$;

-- List held jobs of a class again whose weight may fit now. The caller holds the class row, for which the holder of a
-- job row may be waiting: a row that is locked keeps its mark, until the upkeep finds that the reason is gone.
CREATE FUNCTION {schema}.headgate_unhold_oversize(p_class text) RETURNS void
  LANGUAGE sql VOLATILE
  AS $$
WITH held AS MATERIALIZED (
  SELECT job.ctid AS tid
  FROM {schema}.headgate_job AS job
  WHERE job.gate_hold = 'oversize' AND job.rate_class = p_class
  FOR UPDATE SKIP LOCKED
),
freed AS (
  UPDATE {schema}.headgate_job AS job
  SET gate_hold = NULL
  WHERE job.ctid = ANY (ARRAY (SELECT held.tid FROM held))
  RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
)
INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
SELECT freed.queue, 'r', freed.partition_key, freed.rate_class, freed.sticky_worker, freed.lane_key, count(*)
FROM freed
GROUP BY freed.queue, freed.partition_key, freed.rate_class, freed.sticky_worker, freed.lane_key
$$;

-- Lock the row of a class, creating it where it is missing under the locks of the queues that know the class.
CREATE FUNCTION {schema}.headgate_own_class(p_class text) RETURNS void
  LANGUAGE plpgsql VOLATILE
  AS $$
BEGIN
  LOOP
    PERFORM FROM {schema}.headgate_rate_class AS class WHERE class.name = p_class FOR UPDATE;
    EXIT WHEN FOUND;
    PERFORM {schema}.headgate_lock_queues(ARRAY (
      SELECT lane_group.queue FROM {schema}.headgate_lane_group AS lane_group WHERE lane_group.rate_class = p_class));
    PERFORM {schema}.headgate_mark_class(p_class);
  END LOOP;
END $$;

-- Configure a class: existing budgets are refilled under their old limits and converted, and never grow; new ones start
-- full. A paused class has no credit and does not refill: its budgets stand at an instant that never comes.
-- Arguments: limits of slot 0 and up; whether further slots are removed; the instant that never comes.
CREATE FUNCTION {schema}.headgate_upsert_rate_class(
  p_name text, p_limits bigint[], p_windows_ms bigint[], p_bursts bigint[], p_paused boolean, p_replace_all boolean,
  p_never_ms bigint)
  RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
DECLARE
  v_now bigint;
  v_at bigint;
BEGIN
  PERFORM {schema}.headgate_own_class(p_name);
  v_now := {schema}.headgate_now_ms();
  v_at := CASE WHEN p_paused THEN p_never_ms ELSE v_now END;
  IF p_replace_all THEN
    DELETE FROM {schema}.headgate_budget AS budget
    WHERE budget.rate_class = p_name AND budget.slot >= cardinality(p_limits);
  END IF;
  -- All slots are refilled, also those that keep their limits: the pause stops and starts them together.
  UPDATE {schema}.headgate_budget AS budget
  SET units = {schema}.headgate_units_at(
      budget.units, budget.limit_tokens, budget.window_ms, budget.burst, budget.refilled_at_ms, v_now),
    -- A time that a clock stepped back over was counted; counted again it would fill what is spent.
    refilled_at_ms = CASE WHEN budget.refilled_at_ms = p_never_ms THEN v_at ELSE greatest(budget.refilled_at_ms, v_at) END
  WHERE budget.rate_class = p_name;
  UPDATE {schema}.headgate_budget AS budget
  SET limit_tokens = given.limit_tokens, window_ms = given.window_ms, burst = given.burst,
    units = greatest(-4611686018427387904::numeric, least(
      given.burst::numeric * given.window_ms,
      div(
        budget.units::numeric * given.window_ms
          - mod(mod(budget.units::numeric * given.window_ms, budget.window_ms) + budget.window_ms, budget.window_ms),
        budget.window_ms)))
  FROM unnest(p_limits, p_windows_ms, p_bursts) WITH ORDINALITY AS given (limit_tokens, window_ms, burst, place)
  WHERE budget.rate_class = p_name AND budget.slot = given.place - 1;
  INSERT INTO {schema}.headgate_budget (rate_class, slot, limit_tokens, window_ms, burst, units, refilled_at_ms)
  SELECT p_name, given.place - 1, given.limit_tokens, given.window_ms, given.burst, given.burst * given.window_ms, v_at
  FROM unnest(p_limits, p_windows_ms, p_bursts) WITH ORDINALITY AS given (limit_tokens, window_ms, burst, place)
  ON CONFLICT (rate_class, slot) DO NOTHING;
  IF p_paused THEN
    UPDATE {schema}.headgate_budget AS budget
    SET units = 0
    WHERE budget.rate_class = p_name AND budget.units > 0;
  END IF;
  UPDATE {schema}.headgate_rate_class AS class
  SET paused = p_paused
  WHERE class.name = p_name;
  PERFORM {schema}.headgate_announce_open(p_name);
  PERFORM {schema}.headgate_unhold_oversize(p_name);
END $$;

-- Remove a class: jobs that name it become unlimited. A ceiling of the class keeps its row as a marker.
-- Returns: waiting jobs that name it, counted up to p_count_max; null when there was no such class.
CREATE FUNCTION {schema}.headgate_delete_rate_class(p_name text, p_count_max integer) RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
BEGIN
  PERFORM FROM {schema}.headgate_rate_class AS class WHERE class.name = p_name FOR UPDATE;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  DELETE FROM {schema}.headgate_budget AS budget WHERE budget.rate_class = p_name;
  UPDATE {schema}.headgate_rate_class AS class
  SET paused = false, paused_until_ms = NULL, pause_reason = ''
  WHERE class.name = p_name;
  DELETE FROM {schema}.headgate_rate_class AS class
  WHERE class.name = p_name
    AND NOT EXISTS (SELECT FROM {schema}.headgate_ceiling AS ceiling WHERE ceiling.rate_class = p_name);
  PERFORM {schema}.headgate_announce_open(p_name);
  PERFORM {schema}.headgate_unhold_oversize(p_name);
  RETURN (
    SELECT count(*)
    FROM (
      SELECT
      FROM {schema}.headgate_job AS job
      WHERE job.state = 'available' AND job.rate_class = p_name AND job.rate_class <> ''
      LIMIT p_count_max
    ) AS waiting);
END $$;

-- Let nothing of a class pass for a time; a longer pause that is on already is kept.
CREATE FUNCTION {schema}.headgate_pause_rate_class(p_name text, p_delay_ms bigint, p_reason text) RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
DECLARE
  v_until bigint;
BEGIN
  PERFORM {schema}.headgate_own_class(p_name);
  v_until := {schema}.headgate_now_ms() + p_delay_ms;
  UPDATE {schema}.headgate_rate_class AS class
  SET paused_until_ms = v_until, pause_reason = p_reason
  WHERE class.name = p_name AND (class.paused_until_ms IS NULL OR class.paused_until_ms < v_until);
END $$;

CREATE FUNCTION {schema}.headgate_resume_rate_class(p_name text) RETURNS boolean
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
BEGIN
  UPDATE {schema}.headgate_rate_class AS class
  SET paused_until_ms = NULL, pause_reason = ''
  WHERE class.name = p_name;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  PERFORM {schema}.headgate_announce_open(p_name);
  RETURN true;
END $$;

-- Set the marks of a queue's lanes to what its ceilings say now; the caller holds the lock of the queue.
CREATE FUNCTION {schema}.headgate_repark(p_queue text) RETURNS void
  LANGUAGE plpgsql VOLATILE
  AS $$
DECLARE
  v_cap integer := {schema}.headgate_parks(p_queue);
  u_queue text[];
  u_class text[];
  u_sticky text[];
  u_round bigint[];
  u_partition text[];
BEGIN
  WITH changed AS (
    UPDATE {schema}.headgate_lane AS lane
    SET parked = NOT lane.parked
    FROM {schema}.headgate_partition AS part
    WHERE lane.queue = p_queue AND part.queue = lane.queue AND part.partition_key = lane.partition_key
      AND lane.parked <> coalesce(part.inflight >= v_cap, false)
    RETURNING lane.queue, lane.rate_class, lane.sticky_worker, lane.last_round, lane.partition_key, lane.parked
  )
  SELECT array_agg(changed.queue), array_agg(changed.rate_class), array_agg(changed.sticky_worker),
    array_agg(changed.last_round), array_agg(changed.partition_key)
  INTO u_queue, u_class, u_sticky, u_round, u_partition
  FROM changed
  WHERE NOT changed.parked;
  PERFORM {schema}.headgate_lower_heads(u_queue, u_class, u_sticky, u_round, u_partition);
END $$;

-- Create or change a ceiling. What it counts stays for ever: a ceiling that moved would lift a limit unseen.
-- Returns: false when the stored ceiling counts something else; nothing was changed then.
CREATE FUNCTION {schema}.headgate_upsert_ceiling(
  p_name text, p_scope text, p_queue text, p_class text, p_max integer, p_on_saturated text)
  RETURNS boolean
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
DECLARE
  stored {schema}.headgate_ceiling;
BEGIN
  SELECT * INTO stored FROM {schema}.headgate_ceiling AS ceiling WHERE ceiling.name = p_name;
  IF FOUND AND (stored.scope, stored.queue, stored.rate_class) IS DISTINCT FROM (p_scope, p_queue, p_class) THEN
    RETURN false;
  END IF;
  IF p_scope = 'class' THEN
    PERFORM {schema}.headgate_lock_queues(ARRAY (
      SELECT lane_group.queue FROM {schema}.headgate_lane_group AS lane_group WHERE lane_group.rate_class = p_class));
    PERFORM {schema}.headgate_own_class(p_class);
  ELSE
    PERFORM {schema}.headgate_lock_queues(ARRAY[p_queue]);
  END IF;
  INSERT INTO {schema}.headgate_ceiling AS ceiling (name, scope, queue, rate_class, max_concurrent, on_saturated)
  VALUES (p_name, p_scope, p_queue, p_class, p_max, p_on_saturated)
  ON CONFLICT (name) DO UPDATE
  SET max_concurrent = excluded.max_concurrent, on_saturated = excluded.on_saturated
  WHERE (ceiling.scope, ceiling.queue, ceiling.rate_class) = (excluded.scope, excluded.queue, excluded.rate_class);
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  IF p_scope = 'class' THEN
    UPDATE {schema}.headgate_rate_class AS class
    SET inflight = {schema}.headgate_running_of(p_class)
    WHERE class.name = p_class;
  ELSE
    PERFORM {schema}.headgate_repark(p_queue);
  END IF;
  RETURN true;
END $$;

CREATE FUNCTION {schema}.headgate_delete_ceiling(p_name text) RETURNS boolean
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
DECLARE
  stored {schema}.headgate_ceiling;
BEGIN
  SELECT * INTO stored FROM {schema}.headgate_ceiling AS ceiling WHERE ceiling.name = p_name;
  IF stored.scope IN ('partition', 'queue') THEN
    PERFORM {schema}.headgate_lock_queues(ARRAY[stored.queue]);
  END IF;
  DELETE FROM {schema}.headgate_ceiling AS ceiling WHERE ceiling.name = p_name;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  IF stored.scope <> 'class' THEN
    PERFORM {schema}.headgate_repark(stored.queue);
  END IF;
  RETURN true;
END $$;
