-- Online-safe: adds functions.
--
-- What the gate knows about one job, for its explanation.
--
-- The functions are STABLE: they write and lock nothing, run in a read-only transaction, and all their queries see the
-- snapshot of the statement that calls them. Every look is bounded, and rows of jobs are found through the ready index
-- only, whatever the planner thinks of the tables: the four names of a lane are compared in a way that no other index
-- can serve, and rows are asked for in the order of that index.

-- Ready jobs of a lane that come before a place in its order; with p_whole all of them. Up to p_limit of each priority
-- range, so that no lane is walked to its end.
CREATE FUNCTION {schema}.headgate_ready_before(
  p_lane_key bigint, p_queue text, p_partition text, p_class text, p_sticky text, p_whole boolean, p_priority integer,
  p_at_ms bigint, p_seq bigint, p_limit integer)
  RETURNS TABLE (weight integer, fingerprint text)
  LANGUAGE sql STABLE
  AS $$
(SELECT coalesce(ready.charge_weight, ready.weight), ready.fingerprint
 FROM {schema}.headgate_job AS ready
 WHERE ready.lane_key = p_lane_key AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
   AND ready.priority > CASE WHEN p_whole THEN -2147483649 ELSE p_priority::bigint END
   AND (ready.queue, ready.partition_key, ready.rate_class, ready.sticky_worker)
     IS NOT DISTINCT FROM (p_queue, p_partition, p_class, p_sticky)
 ORDER BY ready.priority DESC, ready.scheduled_at_ms, ready.seq
 LIMIT p_limit)
UNION ALL
(SELECT coalesce(ready.charge_weight, ready.weight), ready.fingerprint
 FROM {schema}.headgate_job AS ready
 WHERE NOT p_whole AND ready.lane_key = p_lane_key AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
   AND ready.priority = p_priority AND (ready.scheduled_at_ms, ready.seq) < (p_at_ms, p_seq)
   AND (ready.queue, ready.partition_key, ready.rate_class, ready.sticky_worker)
     IS NOT DISTINCT FROM (p_queue, p_partition, p_class, p_sticky)
 ORDER BY ready.scheduled_at_ms, ready.seq
 LIMIT p_limit)
$$;

-- Jobs of a class and queue that the gate meets before a job: of partitions served longer ago all, of those served as
-- long ago the ones before its place. A partition that a ceiling keeps from claiming is not met.
--
-- Arguments: the job's place and partition round; lanes that are announced but not folded; partitions that get free
--            slots by the next fold, with how many; the limit of running jobs of a partition, null for none; the least
--            burst of the class, above which a job is passed over; how many rows to look at.
-- Returns:   rows seen, and the weight of those that would not be passed over.
CREATE FUNCTION {schema}.headgate_explain_ahead(
  p_queue text, p_class text, p_stickies text[], p_round bigint, p_priority integer, p_at_ms bigint, p_seq bigint,
  p_new_keys bigint[], p_new_partitions text[], p_new_stickies text[], p_freed_partitions text[], p_freed bigint[],
  p_part_cap integer, p_burst bigint, p_limit integer,
  OUT seen bigint, OUT weight bigint)
  LANGUAGE sql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
WITH listed AS MATERIALIZED (
  SELECT lane.lane_key, lane.partition_key, lane.sticky_worker
  FROM unnest(p_stickies) AS wanted (sticky_worker)
  CROSS JOIN LATERAL (
    SELECT found.lane_key, found.partition_key, found.sticky_worker
    FROM {schema}.headgate_lane AS found
    WHERE found.queue = p_queue AND found.rate_class = p_class AND found.sticky_worker = wanted.sticky_worker
      AND found.active AND NOT found.parked AND found.last_round <= p_round
    ORDER BY found.last_round, found.partition_key
    LIMIT p_limit
  ) AS lane
  UNION
  SELECT lane.lane_key, lane.partition_key, lane.sticky_worker
  FROM unnest(p_new_keys, p_new_partitions, p_new_stickies) AS lane (lane_key, partition_key, sticky_worker)
  UNION
  SELECT lane.lane_key, lane.partition_key, lane.sticky_worker
  FROM unnest(p_freed_partitions) AS freed (partition_key)
  CROSS JOIN unnest(p_stickies) AS wanted (sticky_worker)
  CROSS JOIN LATERAL (
    SELECT found.lane_key, found.partition_key, found.sticky_worker
    FROM {schema}.headgate_lane AS found
    WHERE found.queue = p_queue AND found.partition_key = freed.partition_key AND found.rate_class = p_class
      AND found.sticky_worker = wanted.sticky_worker AND found.active
    LIMIT 1
  ) AS lane
),
met AS MATERIALIZED (
  SELECT listed.lane_key, listed.partition_key, listed.sticky_worker, coalesce(part.last_round, 0) AS last_round
  FROM listed
  LEFT JOIN LATERAL (
    SELECT found.last_round, found.inflight
    FROM {schema}.headgate_partition AS found
    WHERE found.queue = p_queue AND found.partition_key = listed.partition_key
    LIMIT 1
  ) AS part ON true
  WHERE coalesce(part.last_round, 0) <= p_round
    AND (coalesce(part.inflight, 0)
      - coalesce(p_freed[array_position(p_freed_partitions, listed.partition_key)], 0) >= p_part_cap) IS NOT TRUE
  ORDER BY 4, listed.partition_key
  LIMIT p_limit
),
ahead AS MATERIALIZED (
  SELECT job.weight, job.fingerprint
  FROM met
  CROSS JOIN LATERAL {schema}.headgate_ready_before(
    met.lane_key, p_queue, met.partition_key, p_class, met.sticky_worker, met.last_round < p_round, p_priority, p_at_ms,
    p_seq, p_limit) AS job
  LIMIT p_limit
)
SELECT count(*), coalesce(sum(ahead.weight) FILTER (WHERE ahead.weight <= p_burst AND (
    SELECT true FROM {schema}.headgate_quarantine AS known WHERE known.fingerprint = ahead.fingerprint LIMIT 1
  ) IS NULL), 0)::bigint
FROM ahead
$$;

-- Everything that decides about one job.
--
-- Arguments: its id; how many rows ahead of it to look at; how many appended rows the next admission folds; how many
--            lanes to look at for the peers of its partition.
-- Returns:   an object, whose further keys an available job alone has; null without the job.
-- Locks:     none.
CREATE FUNCTION {schema}.headgate_explain(p_job_id text, p_limit integer, p_fold_max integer, p_lanes_max integer)
  RETURNS jsonb
  LANGUAGE plpgsql STABLE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  job record;
  own record;
  class record;
  inbox record;
  v_told jsonb;
  v_stickies text[];
  v_running jsonb;
  v_class jsonb;
  v_burst bigint;
  v_seen bigint := 0;
  v_weight bigint := 0;
BEGIN
  SELECT found.seq, found.state, found.queue, found.partition_key, found.rate_class, found.sticky_worker,
    found.lane_key, coalesce(found.charge_weight, found.weight) AS weight, found.fingerprint, found.priority,
    found.scheduled_at_ms, found.gate_hold, found.crash_attempt, found.claimed_by, found.lease_expires_at_ms
  INTO job
  FROM {schema}.headgate_job AS found
  WHERE found.id = p_job_id;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  v_told := jsonb_build_object(
    'now_ms', {schema}.headgate_now_ms(), 'state', job.state, 'queue', job.queue, 'rate_class', job.rate_class,
    'sticky_worker', job.sticky_worker, 'weight', job.weight, 'fingerprint', job.fingerprint,
    'scheduled_at_ms', job.scheduled_at_ms, 'claimed_by', job.claimed_by,
    'lease_expires_at_ms', job.lease_expires_at_ms, 'crash_attempt', job.crash_attempt,
    'crash_count', (
      SELECT known.crash_count FROM {schema}.headgate_quarantine AS known WHERE known.fingerprint = job.fingerprint));
  IF job.state <> 'available' THEN
    RETURN v_told;
  END IF;
  v_stickies := CASE WHEN job.sticky_worker = '' THEN ARRAY[''] ELSE ARRAY['', job.sticky_worker] END;

  -- What the next admission folds before it decides.
  SELECT coalesce(sum(entry.n) FILTER (WHERE entry.kind = 'f'), 0) AS freed,
    coalesce(bool_or(entry.kind = 'o' AND entry.rate_class = job.rate_class), false) AS opens,
    array_agg(entry.lane_key) FILTER (WHERE entry.kind = 'r' AND entry.sticky_worker = ANY (v_stickies)) AS keys,
    array_agg(entry.partition_key) FILTER (WHERE entry.kind = 'r' AND entry.sticky_worker = ANY (v_stickies)) AS parts,
    array_agg(entry.rate_class) FILTER (WHERE entry.kind = 'r' AND entry.sticky_worker = ANY (v_stickies)) AS classes,
    array_agg(entry.sticky_worker) FILTER (WHERE entry.kind = 'r' AND entry.sticky_worker = ANY (v_stickies)) AS stickies,
    array_agg(entry.partition_key) FILTER (WHERE entry.kind = 'f') AS freed_parts,
    array_agg(entry.n) FILTER (WHERE entry.kind = 'f') AS freed_n
  INTO inbox
  FROM (
    SELECT oldest.kind, oldest.lane_key, oldest.partition_key, oldest.rate_class, oldest.sticky_worker,
      sum(oldest.n)::bigint AS n
    FROM (
      SELECT appended.*
      FROM {schema}.headgate_inbox AS appended
      WHERE appended.queue = job.queue
      ORDER BY appended.xid, appended.ev
      LIMIT p_fold_max
    ) AS oldest
    GROUP BY oldest.kind, oldest.lane_key, oldest.partition_key, oldest.rate_class, oldest.sticky_worker
  ) AS entry;
  IF inbox.freed_parts IS NOT NULL THEN
    SELECT array_agg(freed.partition_key), array_agg(freed.n)
    INTO inbox.freed_parts, inbox.freed_n
    FROM (
      SELECT entry.partition_key, sum(entry.n)::bigint AS n
      FROM unnest(inbox.freed_parts, inbox.freed_n) AS entry (partition_key, n)
      GROUP BY entry.partition_key
    ) AS freed;
  END IF;

  SELECT coalesce(queue.paused, false) AS paused, greatest(0, coalesce(queue.inflight, 0) - inbox.freed) AS running,
    coalesce(part.deficit, 0) AS deficit, coalesce(part.last_round, 0) AS last_round, part.quantum_override,
    greatest(0, coalesce(part.inflight, 0)
      - coalesce(inbox.freed_n[array_position(inbox.freed_parts, job.partition_key)], 0)) AS inflight,
    (SELECT min(ceiling.max_concurrent)
     FROM {schema}.headgate_ceiling AS ceiling
     WHERE ceiling.queue = job.queue AND ceiling.scope = 'partition' AND ceiling.on_saturated <> 'cancel_running')
      AS part_cap
  INTO own
  FROM (SELECT 1) AS always
  LEFT JOIN {schema}.headgate_queue AS queue ON queue.queue = job.queue
  LEFT JOIN {schema}.headgate_partition AS part
    ON part.queue = job.queue AND part.partition_key = job.partition_key;

  SELECT known.paused, known.paused_until_ms, known.pause_reason,
    greatest(0, known.inflight - {schema}.headgate_unfolded(known.name)) AS running
  INTO class
  FROM {schema}.headgate_rate_class AS known
  WHERE known.name = job.rate_class;
  IF FOUND THEN
    SELECT min(budget.burst) INTO v_burst FROM {schema}.headgate_budget AS budget WHERE budget.rate_class = job.rate_class;
    IF v_burst IS NOT NULL THEN
      SELECT ahead.seen, ahead.weight INTO v_seen, v_weight
      FROM {schema}.headgate_explain_ahead(
        job.queue, job.rate_class, v_stickies, own.last_round, job.priority, job.scheduled_at_ms, job.seq,
        ARRAY (SELECT new.key FROM unnest(inbox.keys, inbox.classes) AS new (key, name) WHERE new.name = job.rate_class)
          || job.lane_key,
        ARRAY (SELECT new.key FROM unnest(inbox.parts, inbox.classes) AS new (key, name) WHERE new.name = job.rate_class)
          || job.partition_key,
        ARRAY (SELECT new.key FROM unnest(inbox.stickies, inbox.classes) AS new (key, name) WHERE new.name = job.rate_class)
          || job.sticky_worker,
        inbox.freed_parts, inbox.freed_n, own.part_cap, v_burst, p_limit) AS ahead;
    END IF;
    SELECT jsonb_build_object(
      'paused', class.paused, 'paused_until_ms', class.paused_until_ms, 'pause_reason', class.pause_reason,
      'closed', coalesce(closed.is_closed, false) AND NOT inbox.opens,
      'closed_until_ms', CASE WHEN NOT inbox.opens THEN closed.open_at_ms END,
      'weight_ahead', v_weight, 'rows_ahead', v_seen,
      'budgets', (
        SELECT coalesce(jsonb_agg(jsonb_build_object(
            'limit', budget.limit_tokens, 'window_ms', budget.window_ms, 'burst', budget.burst, 'units', budget.units,
            'refilled_at_ms', budget.refilled_at_ms) ORDER BY budget.slot), '[]')
        FROM {schema}.headgate_budget AS budget
        WHERE budget.rate_class = job.rate_class))
    INTO v_class
    FROM (SELECT 1) AS always
    LEFT JOIN LATERAL (
      SELECT true AS is_closed, lane_group.open_at_ms
      FROM {schema}.headgate_lane_group AS lane_group
      WHERE lane_group.rate_class = job.rate_class AND lane_group.queue = job.queue AND NOT lane_group.open
      ORDER BY lane_group.sticky_worker
      LIMIT 1
    ) AS closed ON true;
  END IF;

  SELECT coalesce(jsonb_agg(jsonb_build_object(
      'name', ceiling.name, 'scope', ceiling.scope, 'queue', ceiling.queue, 'rate_class', ceiling.rate_class,
      'max_concurrent', ceiling.max_concurrent, 'on_saturated', ceiling.on_saturated,
      'inflight', CASE ceiling.scope
        WHEN 'partition' THEN own.inflight
        WHEN 'queue' THEN own.running
        ELSE coalesce(class.running, 0) END) ORDER BY ceiling.name), '[]')
  INTO v_running
  FROM (
    SELECT found.* FROM {schema}.headgate_ceiling AS found WHERE found.queue = job.queue
    UNION ALL
    SELECT found.*
    FROM {schema}.headgate_ceiling AS found
    WHERE found.queue = '' AND found.rate_class = job.rate_class AND job.rate_class <> ''
  ) AS ceiling;

  RETURN v_told || jsonb_build_object(
    'hold', job.gate_hold, 'queue_paused', own.paused, 'rate_class_facts', v_class, 'ceilings', v_running,
    'sticky_worker_facts', (
      SELECT jsonb_build_object('heartbeat_at_ms', worker.heartbeat_at_ms, 'beat_ms', worker.beat_ms)
      FROM {schema}.headgate_worker AS worker
      WHERE worker.worker_id = job.sticky_worker),
    'partition', (
      WITH own_lane AS (
        SELECT job.lane_key AS lane_key, job.partition_key AS partition_key, job.rate_class AS rate_class,
          job.sticky_worker AS sticky_worker
      ),
      new_lane AS (
        SELECT new.* FROM unnest(inbox.keys, inbox.parts, inbox.classes, inbox.stickies)
          AS new (lane_key, partition_key, rate_class, sticky_worker)
      ),
      sibling AS MATERIALIZED (
        SELECT own_lane.* FROM own_lane
        UNION
        SELECT new_lane.* FROM new_lane WHERE new_lane.partition_key = job.partition_key
        UNION
        SELECT known.*
        FROM (
          SELECT lane.lane_key, lane.partition_key, lane.rate_class, lane.sticky_worker
          FROM {schema}.headgate_lane AS lane
          WHERE lane.queue = job.queue AND lane.partition_key = job.partition_key AND lane.active
            AND lane.sticky_worker = ANY (v_stickies)
          LIMIT p_limit
        ) AS known
      ),
      ahead AS MATERIALIZED (
        SELECT 1
        FROM sibling
        CROSS JOIN LATERAL {schema}.headgate_ready_before(
          sibling.lane_key, job.queue, sibling.partition_key, sibling.rate_class, sibling.sticky_worker, false,
          job.priority, job.scheduled_at_ms, job.seq, p_limit) AS before
        LIMIT p_limit
      ),
      peer_lane AS MATERIALIZED (
        SELECT new_lane.* FROM new_lane
        UNION
        SELECT known.lane_key, known.partition_key, known.rate_class, known.sticky_worker
        FROM (
          SELECT lane.lane_key, lane.partition_key, lane.rate_class, lane.sticky_worker, lane.active
          FROM {schema}.headgate_lane AS lane
          WHERE lane.queue = job.queue
          ORDER BY lane.partition_key, lane.rate_class, lane.sticky_worker
          LIMIT p_lanes_max
        ) AS known
        WHERE known.active AND known.sticky_worker = ANY (v_stickies)
      ),
      peer AS MATERIALIZED (
        SELECT own_lane.partition_key FROM own_lane
        UNION
        SELECT peer_lane.partition_key
        FROM peer_lane
        CROSS JOIN LATERAL (
          SELECT 1
          FROM {schema}.headgate_job AS ready
          WHERE ready.lane_key = peer_lane.lane_key AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
            AND (ready.queue, ready.partition_key, ready.rate_class, ready.sticky_worker) IS NOT DISTINCT FROM
              (job.queue, peer_lane.partition_key, peer_lane.rate_class, peer_lane.sticky_worker)
          ORDER BY ready.priority DESC, ready.scheduled_at_ms, ready.seq
          LIMIT 1
        ) AS waiting
      )
      SELECT jsonb_build_object(
        'deficit', own.deficit, 'inflight', own.inflight, 'last_round', own.last_round,
        'quantum_override', own.quantum_override,
        'position', (SELECT count(*) FROM ahead),
        'peers', (SELECT count(*) FROM peer),
        'peers_inflight', (
          SELECT coalesce(sum(greatest(0, part.inflight
            - coalesce(inbox.freed_n[array_position(inbox.freed_parts, peer.partition_key)], 0))), 0)
          FROM peer
          CROSS JOIN LATERAL (
            SELECT found.inflight
            FROM {schema}.headgate_partition AS found
            WHERE found.queue = job.queue AND found.partition_key = peer.partition_key
            LIMIT 1
          ) AS part))));
END $$;
