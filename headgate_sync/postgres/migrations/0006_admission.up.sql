-- Online-safe: adds functions.

-- In which rounds of a queue the bounds of its groups follow their lanes. Each serving of a lane leaves an entry behind
-- its new place, which an old snapshot can keep for long, and a walk from the bound passes those of the rounds since.
CREATE FUNCTION {schema}.headgate_bounds_follow(p_round bigint) RETURNS boolean
  LANGUAGE sql IMMUTABLE
  AS $$ SELECT mod(p_round, 16) = 0 $$;

-- How long until a closed class with waiting work opens in one of the queues; null when time alone opens none.
--
-- Arguments: queues, and how many running jobs fill a partition of each (null for no limit); how many lanes and groups
--            to look at; jobs to leave out.
CREATE FUNCTION {schema}.headgate_reopens_in(
  p_queues text[], p_caps integer[], p_worker text, p_look integer, p_now_ms bigint, p_passed bigint[])
  RETURNS bigint
  LANGUAGE sql STABLE
  AS $$
SELECT min(greatest(0, soonest.open_at_ms - p_now_ms))
FROM unnest(p_queues, p_caps) AS wanted (queue, cap)
CROSS JOIN LATERAL (
  -- A pause that came later lasts longer than the group knows.
  SELECT CASE WHEN class.paused THEN NULL
    ELSE greatest(lane_group.open_at_ms, class.paused_until_ms) END AS open_at_ms
  FROM {schema}.headgate_lane_group AS lane_group
  LEFT JOIN LATERAL (
    SELECT known.paused, known.paused_until_ms
    FROM {schema}.headgate_rate_class AS known
    WHERE known.name = lane_group.rate_class
    LIMIT 1
  ) AS class ON true
  CROSS JOIN LATERAL (
    SELECT job.seq
    FROM (
      SELECT found.queue, found.lane_key, found.partition_key
      FROM {schema}.headgate_lane AS found
      WHERE found.queue = lane_group.queue AND found.rate_class = lane_group.rate_class
        AND found.sticky_worker = lane_group.sticky_worker AND found.active AND NOT found.parked
        AND found.last_round >= lane_group.head_round
      ORDER BY found.last_round, found.partition_key
      LIMIT p_look
    ) AS lane
    CROSS JOIN LATERAL (
      SELECT known.inflight
      FROM {schema}.headgate_partition AS known
      WHERE known.queue = lane.queue AND known.partition_key = lane.partition_key
      LIMIT 1
    ) AS part
    CROSS JOIN LATERAL (
      SELECT ready.seq
      FROM {schema}.headgate_job AS ready
      WHERE ready.lane_key = lane.lane_key AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
        AND (ready.queue = lane_group.queue AND ready.partition_key = lane.partition_key
          AND ready.rate_class = lane_group.rate_class AND ready.sticky_worker = lane_group.sticky_worker) IS TRUE
        AND ready.seq <> ALL (p_passed)
      ORDER BY ready.priority DESC, ready.scheduled_at_ms, ready.seq
      LIMIT 1
    ) AS job
    WHERE (part.inflight >= wanted.cap) IS NOT TRUE
    LIMIT 1
  ) AS waiting
  WHERE lane_group.queue = wanted.queue AND NOT lane_group.open AND lane_group.open_at_ms IS NOT NULL
    AND lane_group.head_round IS NOT NULL AND lane_group.sticky_worker IN ('', p_worker)
  ORDER BY lane_group.open_at_ms
  LIMIT p_look
) AS soonest
WHERE soonest.open_at_ms IS NOT NULL
$$;

-- The whole decision, for any number of queues and under every policy: what headgate_admit calls, under the locks of the
-- queues, when its short road does not do.
--
-- Arguments: those of headgate_admit; then what it has found: the unpaused queues with what their rows say, and how many
--            jobs left them (null for none); whether a group is closed; in how many of all queues the worker is known as
--            asleep; whether any fingerprint is in quarantine, any job tagged, any queue under a ceiling of its own; what
--            was folded, and before which transaction that is all; the time; jobs that others hold locked, by seq.
-- Rows:      headgate_admission.
-- Locks:     rate classes of the window and of what was folded; job rows with SKIP LOCKED.
--
-- Arrays by prefix: q queues, g groups, l lanes, p partitions, k rate classes that have a row, b their budgets, e
-- ceilings, c candidates in the order of the merge (a weight below 0 says quarantined), d decisions, t lanes that must
-- be written. l_queue, l_part, c_lane and the like hold positions in the other arrays. n is what was just read, f what
-- to draw next. The main loop reads lanes, draws jobs of them and decides, until one of the three has to be done again.
CREATE FUNCTION {schema}.headgate_admit_under_policies(
  p_worker text, p_lease_id text, p_queues text[], p_capacity integer, p_lease_ms bigint, p_quantum integer,
  p_window_max integer, p_window_spare integer, p_window_draws integer, p_deficit_cap integer, p_ledger_lag integer,
  p_fold_max integer, p_hold_max integer, p_lock_wait_ms integer, p_busy_ms integer,
  q_name text[], q_weight bigint[], q_dispatch bigint[], q_round bigint[], q_inflight bigint[], q_freed bigint[],
  v_has_closed boolean, v_asleep integer, v_has_quarantine boolean, v_has_tags boolean, v_has_ceilings boolean,
  v_taken integer, v_horizon xid8, v_freed_class text[], v_freed_n bigint[], v_now bigint,
  p_left_out bigint[])
  RETURNS SETOF {schema}.headgate_admission
  LANGUAGE plpgsql VOLATILE
  AS $$
DECLARE
  facts {schema}.headgate_admission;
  turned {schema}.headgate_admission;
  nq integer := coalesce(cardinality(q_name), 0);
  q_stored bigint[] := q_inflight;
  q_decided integer[];
  q_sent integer[];
  q_relieved integer[];
  q_part_cap integer[];
  q_cap integer[];
  q_need integer[];
  q_quantum integer[];
  q_undrawn boolean[];
  q_pos integer[];
  q_end integer[];
  v_closed_any boolean := false;

  v_held text[] := ARRAY[]::text[];
  v_skip text[] := ARRAY[]::text[];
  v_settled text[] := ARRAY[]::text[];
  v_wanted text[];
  v_locked text[];
  v_first_lock boolean := true;
  -- Who decides again may hold classes, and must not wait for others.
  v_patient boolean := cardinality(p_left_out) = 0;

  v_window integer;
  v_draws integer := 1;
  v_reading boolean := true;
  v_merge boolean := false;
  v_fresh boolean := false;
  v_draw boolean := false;
  v_undrawn boolean := false;
  v_starved boolean := false;
  v_sized boolean := false;
  v_slack boolean := false;
  v_blocked boolean := false;
  v_groups integer;
  v_crowd boolean;
  v_any boolean;

  g_queue integer[];
  g_class text[];
  g_sticky text[];
  g_tid tid[];
  g_head bigint[];
  g_chunk integer[];
  v_paused text[];
  v_crowded text[];
  v_short integer[];

  n_queue integer[];
  n_tid tid[];
  n_key bigint[];
  n_partition text[];
  n_class text[];
  n_sticky text[];
  n_round bigint[];
  n_part integer[];
  n_part_tid tid[];
  n_deficit bigint[];
  n_inflight bigint[];
  n_override integer[];
  n_lane integer[];
  n_k integer[];
  v_repeats boolean;
  v_before bigint;
  n_group integer[];
  n_row text[];
  v_hit integer;
  v_busy boolean := false;
  v_wrong boolean;
  n_noisy integer[];

  nl integer := 0;
  l_queue integer[];
  l_tid tid[] := ARRAY[]::tid[];
  l_key bigint[];
  l_partition text[];
  l_class_name text[];
  l_sticky text[];
  l_round bigint[];
  l_part integer[];
  l_class integer[];
  l_limit integer[];
  l_used integer[];
  l_closed boolean[];
  l_full boolean[];
  l_gone boolean[];
  l_touched boolean[];
  v_gone integer[];

  np integer := 0;
  p_queue integer[];
  p_tid tid[] := ARRAY[]::tid[];
  p_key text[];
  p_deficit bigint[];
  p_inflight bigint[];
  p_override integer[];
  p_noisy integer[];
  p_taken integer[];
  p_sent integer[];
  p_relieved integer[];
  p_closed boolean[];
  p_live boolean[];
  p_empty boolean[];

  nk integer := 0;
  k_name text[] := ARRAY[]::text[];
  k_tid tid[] := ARRAY[]::tid[];
  k_stored bigint[] := ARRAY[]::bigint[];
  k_inflight bigint[] := ARRAY[]::bigint[];
  k_claimed integer[] := ARRAY[]::integer[];
  k_relieved integer[];
  k_closed boolean[] := ARRAY[]::boolean[];
  k_from integer[] := ARRAY[]::integer[];
  k_to integer[] := ARRAY[]::integer[];

  nb integer := 0;
  b_tid tid[] := ARRAY[]::tid[];
  b_limit bigint[] := ARRAY[]::bigint[];
  b_window bigint[] := ARRAY[]::bigint[];
  b_burst bigint[] := ARRAY[]::bigint[];
  b_units bigint[] := ARRAY[]::bigint[];
  b_at bigint[] := ARRAY[]::bigint[];
  b_spent bigint[] := ARRAY[]::bigint[];

  ne integer := 0;
  e_scope text[] := ARRAY[]::text[];
  e_queue integer[] := ARRAY[]::integer[];
  e_class integer[] := ARRAY[]::integer[];
  e_max integer[] := ARRAY[]::integer[];
  e_action integer[] := ARRAY[]::integer[];

  nc integer := 0;
  c_lane integer[];
  c_seq bigint[];
  c_tid tid[];
  c_priority integer[];
  c_at bigint[];
  c_weight bigint[];
  c_done boolean[];
  f_lane integer[];
  f_limit integer[];
  f_key bigint[];
  f_queue integer[];
  f_partition text[];
  f_class text[];
  f_sticky text[];
  f_priority integer := 2147483647;
  f_at bigint := -1;
  f_seq bigint := -1;

  nd integer := 0;
  d_seq bigint[] := ARRAY[]::bigint[];
  d_tid tid[] := ARRAY[]::tid[];
  d_lane integer[] := ARRAY[]::integer[];
  d_charge integer[] := ARRAY[]::integer[];
  d_action integer[] := ARRAY[]::integer[];
  v_claims integer;
  v_sent integer := 0;
  v_passed bigint[] := ARRAY[]::bigint[];
  v_victims bigint[];
  v_victim record;
  v_lost integer[];

  nt integer := 0;
  t_lane integer[] := ARRAY[]::integer[];
  t_ready boolean[];
  t_left boolean[];
  x_part integer[];

  i integer;
  j integer;
  qi integer;
  li integer;
  pi integer;
  ki integer;
  w bigint;
  v_action integer;
  v_occupied bigint;
  v_oversize boolean;
  v_fits boolean;
  v_wait bigint;
  v_count integer;
BEGIN
  facts.ordinal := 0;
  facts.refused_rate_class := 0;
  facts.refused_concurrency_limit := 0;
  facts.refused_fairness := 0;
  facts.refused_quarantine := 0;
  facts.passed_over := v_passed;
  q_decided := array_fill(0, ARRAY[nq]);
  q_cap := array_fill(NULL::integer, ARRAY[nq]);
  q_part_cap := q_cap;

  IF v_has_ceilings THEN
    -- In the order in which victims are sought: who leaves a partition makes room in its queue and class as well.
    SELECT array_agg(ceiling.scope), array_agg(ceiling.place), array_agg(ceiling.max_concurrent),
      array_agg(ceiling.action), array_agg(0), count(*)
    INTO e_scope, e_queue, e_max, e_action, e_class, ne
    FROM (
      SELECT known.scope, wanted.place::integer, known.max_concurrent,
        CASE known.on_saturated WHEN 'cancel_running' THEN 1 WHEN 'cancel_incoming' THEN 2 WHEN 'discard' THEN 3 ELSE 4
        END AS action
      FROM unnest(q_name) WITH ORDINALITY AS wanted (queue, place)
      CROSS JOIN LATERAL (
        SELECT ceiling.scope, ceiling.max_concurrent, ceiling.on_saturated
        FROM {schema}.headgate_ceiling AS ceiling
        WHERE ceiling.queue = wanted.queue
        OFFSET 0
      ) AS known
      ORDER BY known.scope, known.max_concurrent
    ) AS ceiling;
  END IF;

  v_count := least(p_capacity, greatest(p_quantum, 1));
  v_window := least(p_window_max, 2 * ((p_capacity + v_count - 1) / v_count) + p_window_spare);
  q_need := array_fill(v_window, ARRAY[nq]);
  q_quantum := array_fill(p_quantum, ARRAY[nq]);
  q_undrawn := array_fill(false, ARRAY[nq]);
  q_pos := array_fill(1, ARRAY[nq]);
  q_end := array_fill(0, ARRAY[nq]);
  FOR qi IN 1..nq LOOP
    q_inflight[qi] := greatest(0, q_inflight[qi] - coalesce(q_freed[qi], 0));
  END LOOP;
  FOR i IN 1..ne LOOP
    IF e_action[i] = 4 AND e_scope[i] = 'partition' THEN
      q_part_cap[e_queue[i]] := least(q_part_cap[e_queue[i]], e_max[i]);
    ELSIF e_action[i] = 4 THEN
      q_cap[e_queue[i]] := least(q_cap[e_queue[i]], e_max[i]);
    END IF;
  END LOOP;
  FOR qi IN 1..nq LOOP
    IF q_inflight[qi] >= q_cap[qi] THEN
      q_need[qi] := 0;
    END IF;
  END LOOP;

  <<main>>
  WHILE nq > 0 LOOP
    IF v_reading THEN
      -- Groups of lanes, least recently served first. Those whose first lane was drawn before stand in front of the others.
      n_tid := NULL;
      n_row := NULL;
      v_wrong := NULL;
      SELECT array_agg(g.place), array_agg(g.rate_class), array_agg(g.sticky_worker), array_agg(g.tid),
        array_agg(g.head_round), bool_or(g.rate_class <> '')
      INTO g_queue, g_class, g_sticky, g_tid, g_head, v_any
      FROM (
        SELECT wanted.place::integer, picked.tid, picked.rate_class, picked.sticky_worker, picked.head_round
        FROM unnest(q_name, q_need) WITH ORDINALITY AS wanted (queue, need, place)
        CROSS JOIN LATERAL (
          SELECT either.tid, either.rate_class, either.sticky_worker, either.head_round
          FROM (
            (SELECT free.ctid AS tid, free.rate_class, free.sticky_worker, free.head_round, free.head_partition,
               free.head_served
             FROM {schema}.headgate_lane_group AS free
             WHERE free.queue = wanted.queue AND free.sticky_worker = '' AND free.open AND free.head_round IS NOT NULL
               AND free.rate_class <> ALL (v_skip)
             ORDER BY free.head_round, free.head_partition, free.head_served, free.rate_class
             LIMIT v_window + nl)
            UNION ALL
            (SELECT own.ctid AS tid, own.rate_class, own.sticky_worker, own.head_round, own.head_partition, own.head_served
             FROM {schema}.headgate_lane_group AS own
             WHERE own.queue = wanted.queue AND own.sticky_worker = p_worker AND own.open
               AND own.head_round IS NOT NULL AND own.rate_class <> ALL (v_skip) AND p_worker <> ''
             ORDER BY own.head_round, own.head_partition, own.head_served, own.rate_class
             LIMIT v_window + nl)
          ) AS either
          ORDER BY either.head_round, either.head_partition, either.head_served, either.rate_class, either.sticky_worker
          LIMIT v_window + nl
        ) AS picked
        WHERE wanted.need > 0
      ) AS g;
      IF v_any THEN
        -- Paused classes are closed; those that a ceiling of their own fills are left out of this window.
        SELECT array_agg(class.name), array_agg(class.name) FILTER (WHERE class.paused),
          array_agg(class.name) FILTER (WHERE class.crowded)
        INTO n_row, v_paused, v_crowded
        FROM (
          SELECT known.name, known.paused OR known.paused_until_ms > v_now AS paused,
            ceiling.max_concurrent <= known.inflight
              - coalesce(v_freed_n[array_position(v_freed_class, known.name)], 0)
              - CASE WHEN ceiling.max_concurrent IS NULL THEN 0 ELSE {schema}.headgate_unfolded(known.name) END
              + coalesce(k_claimed[array_position(k_name, known.name)], 0) AS crowded
          FROM {schema}.headgate_rate_class AS known
          LEFT JOIN LATERAL (
            SELECT ceiling.max_concurrent
            FROM {schema}.headgate_ceiling AS ceiling
            WHERE ceiling.queue = '' AND ceiling.rate_class = known.name AND ceiling.on_saturated = 'queue'
            ORDER BY ceiling.max_concurrent
            LIMIT 1
          ) AS ceiling ON true
          WHERE known.name = ANY (g_class)
        ) AS class;
        IF v_paused IS NOT NULL OR v_crowded IS NOT NULL THEN
          v_skip := v_skip || v_crowded;
          v_closed_any := v_closed_any OR v_paused IS NOT NULL;
          IF v_paused IS NOT NULL THEN
            -- Under the lock of the class: whoever ends the pause tells the queues whose groups it sees, and would not see
            -- a group that is made and closed here. What it holds already is left alone, for it may be ending the pause.
            v_locked := ARRAY (
              SELECT class.name
              FROM {schema}.headgate_rate_class AS class
              WHERE class.name = ANY (v_paused)
              ORDER BY class.name
              FOR SHARE SKIP LOCKED);
            v_patient := false;
            PERFORM {schema}.headgate_close_class(
              ARRAY[q_name[met.place]], class.name, CASE WHEN NOT class.paused THEN class.paused_until_ms END)
            FROM unnest(g_queue, g_class) AS met (place, name)
            JOIN {schema}.headgate_rate_class AS class ON class.name = met.name
            WHERE class.name = ANY (v_locked) AND (class.paused OR class.paused_until_ms > v_now);
            v_held := v_held || ARRAY (
              SELECT paused.name FROM unnest(v_paused) AS paused (name) WHERE paused.name <> ALL (v_locked));
            v_skip := v_skip || v_held;
          END IF;
          CONTINUE main;
        END IF;
      END IF;
      v_groups := coalesce(cardinality(g_tid), 0);
      v_crowd := v_groups >= v_window + nl;
      g_chunk := q_need;
      IF v_groups > 1 THEN
        g_chunk := ARRAY (
          SELECT least(q_need[g.place], (q_need[g.place] + g.groups - 1) / g.groups + 1)
          FROM (
            SELECT known.place, known.nth, count(*) OVER (PARTITION BY known.place)::integer AS groups
            FROM unnest(g_queue) WITH ORDINALITY AS known (place, nth)
          ) AS g
          ORDER BY g.nth);
      ELSIF v_groups = 1 THEN
        g_chunk := ARRAY[q_need[g_queue[1]]];
      END IF;
      IF v_crowd THEN
        -- More groups than a window holds: their order counts, so the lower bounds must be the truth.
        UPDATE {schema}.headgate_lane_group AS lane_group
        SET head_round = truth.last_round, head_partition = truth.partition_key,
          head_served = coalesce(truth.served_round, 0)
        FROM (
          SELECT g.tid, head.last_round, head.partition_key, head.served_round
          FROM unnest(g_tid, g_queue, g_class, g_sticky, g_head) AS g (tid, place, rate_class, sticky_worker, head_round)
          LEFT JOIN LATERAL (
            SELECT lane.last_round, lane.partition_key, lane.served_round
            FROM {schema}.headgate_lane AS lane
            WHERE lane.queue = q_name[g.place] AND lane.rate_class = g.rate_class
              AND lane.sticky_worker = g.sticky_worker AND lane.active AND NOT lane.parked
              AND lane.last_round >= g.head_round
            ORDER BY lane.last_round, lane.partition_key
            LIMIT 1
          ) AS head ON true
        ) AS truth
        WHERE lane_group.ctid = truth.tid
          AND (lane_group.head_round IS DISTINCT FROM truth.last_round
            OR lane_group.head_partition IS DISTINCT FROM truth.partition_key
            OR lane_group.head_served <> truth.served_round);
        IF FOUND THEN
          CONTINUE main;
        END IF;
      END IF;

      -- Lanes: a merge of the groups, a chunk of each at a time, with their partitions.
      WHILE v_groups > 0 LOOP
        SELECT array_agg(n.tid), array_agg(n.lane_key), array_agg(n.partition_key), array_agg(n.last_round),
          array_agg(n.gi),
          array_agg(n.part_tid), array_agg(n.deficit), array_agg(n.inflight), array_agg(n.quantum_override),
          array_agg(n.lane), bool_or(n.inflight >= 2) OR v_busy, bool_or(n.repeats),
          bool_or(n.is_wrong)
        INTO n_tid, n_key, n_partition, n_round, n_group, n_part_tid, n_deficit, n_inflight, n_override, n_lane, v_busy,
          v_repeats, v_wrong
        FROM (
          SELECT lane.*, (row_number() OVER in_order)::integer AS lane,
            lag(lane.part_tid) OVER in_order IS NOT DISTINCT FROM lane.part_tid AS repeats,
            lane.last_round <> lane.part_round OR lane.is_full AS is_wrong
          FROM (
            SELECT merged.*, part.tid AS part_tid, part.deficit, part.inflight, part.last_round AS part_round,
              part.quantum_override,
              coalesce(
                part.inflight + coalesce(p_taken[array_position(p_tid, part.tid)], 0)
                  - coalesce(p_sent[array_position(p_tid, part.tid)], 0)
                  - coalesce(p_relieved[array_position(p_tid, part.tid)], 0) >= q_part_cap[merged.place],
                false) AS is_full
            FROM (
              SELECT wanted.place::integer, picked.*
              FROM unnest(q_name, q_need) WITH ORDINALITY AS wanted (queue, need, place)
              CROSS JOIN LATERAL (
                SELECT found.tid, found.lane_key, found.partition_key, g.rate_class, g.sticky_worker, found.last_round,
                  found.served_round, g.gi::integer
                FROM unnest(g_queue, g_class, g_sticky, g_head, g_chunk) WITH ORDINALITY
                  AS g (place, rate_class, sticky_worker, head_round, chunk, gi)
                CROSS JOIN LATERAL (
                  SELECT lane.ctid AS tid, lane.lane_key, lane.partition_key, lane.last_round, lane.served_round
                  FROM {schema}.headgate_lane AS lane
                  WHERE lane.queue = wanted.queue AND lane.rate_class = g.rate_class
                    AND lane.sticky_worker = g.sticky_worker AND lane.active AND NOT lane.parked
                    AND lane.last_round >= g.head_round AND lane.ctid <> ALL (l_tid)
                  ORDER BY lane.last_round, lane.partition_key
                  LIMIT g.chunk
                ) AS found
                WHERE g.place = wanted.place
                ORDER BY found.last_round, found.partition_key, found.served_round, g.rate_class, g.sticky_worker
                LIMIT wanted.need
              ) AS picked
            ) AS merged
            CROSS JOIN LATERAL (
              SELECT found.ctid AS tid, found.deficit, found.inflight, found.last_round, found.quantum_override
              FROM {schema}.headgate_partition AS found
              WHERE found.queue = q_name[merged.place]
                AND found.partition_key >= merged.partition_key AND found.partition_key <= merged.partition_key
              ORDER BY found.partition_key DESC
              LIMIT 1
            ) AS part
          ) AS lane
          WINDOW in_order AS (
            ORDER BY lane.place, lane.last_round, lane.partition_key, lane.served_round, lane.rate_class, lane.sticky_worker)
          ORDER BY lane.place, lane.last_round, lane.partition_key, lane.served_round, lane.rate_class, lane.sticky_worker
        ) AS n;
        EXIT WHEN v_groups = 1;
        -- A chunk that was used up may hide lanes that come before those of other groups.
        v_short := ARRAY (
          SELECT hit.gi
          FROM unnest(n_group) AS hit (gi)
          GROUP BY hit.gi
          HAVING count(*) >= g_chunk[hit.gi] AND g_chunk[hit.gi] < q_need[g_queue[hit.gi]]);
        EXIT WHEN cardinality(v_short) = 0;
        FOREACH i IN ARRAY v_short LOOP
          g_chunk[i] := least(q_need[g_queue[i]], 4 * g_chunk[i]);
        END LOOP;
      END LOOP;
      IF v_wrong THEN
        -- The partition was served through another lane, or it is full: put the lane right and read again.
        UPDATE {schema}.headgate_lane AS lane
        SET last_round = wrong.last_round, parked = wrong.is_full
        FROM (
          SELECT n.tid, part.last_round,
            coalesce(part.inflight + coalesce(p_taken[array_position(p_tid, part.ctid)], 0)
              - coalesce(p_sent[array_position(p_tid, part.ctid)], 0)
              - coalesce(p_relieved[array_position(p_tid, part.ctid)], 0) >= q_part_cap[g_queue[n.gi]], false) AS is_full
          FROM unnest(n_tid, n_part_tid, n_group, n_round) AS n (tid, part_tid, gi, last_round)
          JOIN {schema}.headgate_partition AS part ON part.ctid = n.part_tid
        ) AS wrong
        WHERE lane.ctid = wrong.tid AND (wrong.is_full OR lane.last_round <> wrong.last_round);
        CONTINUE main;
      END IF;
      v_hit := (n_tid IS NOT NULL)::integer;
      IF v_groups = 1 AND v_hit = 1 THEN
        n_queue := array_fill(g_queue[1], ARRAY[cardinality(n_tid)]);
        n_class := array_fill(g_class[1], ARRAY[cardinality(n_tid)]);
        n_sticky := array_fill(g_sticky[1], ARRAY[cardinality(n_tid)]);
      ELSIF v_groups > 1 THEN
        SELECT array_agg(g_queue[hit.gi]), array_agg(g_class[hit.gi]), array_agg(g_sticky[hit.gi])
        INTO n_queue, n_class, n_sticky
        FROM unnest(n_group) AS hit (gi);
        v_hit := (SELECT count(DISTINCT hit.gi) FROM unnest(n_group) AS hit (gi));
      END IF;
      IF nl = 0 AND v_groups > p_window_spare AND v_hit < v_groups AND coalesce(cardinality(n_tid), 0) < v_window THEN
        -- Groups without a lane that can be picked need not be visited again. A few are cheaper to visit than to write.
        UPDATE {schema}.headgate_lane_group AS lane_group
        SET head_round = NULL, head_partition = NULL
        WHERE lane_group.ctid = ANY (ARRAY (
          SELECT g.tid
          FROM unnest(g_tid, g_queue, g_class, g_sticky, g_head) AS g (tid, place, rate_class, sticky_worker, head_round)
          LEFT JOIN LATERAL (
            SELECT true AS found
            FROM {schema}.headgate_lane AS lane
            WHERE lane.queue = q_name[g.place] AND lane.rate_class = g.rate_class
              AND lane.sticky_worker = g.sticky_worker AND lane.active AND NOT lane.parked
              AND lane.last_round >= g.head_round
            LIMIT 1
          ) AS lane ON true
          WHERE lane.found IS NULL));
      END IF;

      IF nl = 0 AND v_hit > 0 AND EXISTS (
        SELECT FROM unnest(q_round) AS known (round) WHERE {schema}.headgate_bounds_follow(known.round))
      THEN
        UPDATE {schema}.headgate_lane_group AS lane_group
        SET head_round = first.last_round, head_partition = first.partition_key, head_served = 0
        FROM (
          SELECT DISTINCT ON (hit.gi) g_tid[hit.gi] AS tid, hit.last_round, hit.partition_key
          FROM unnest(n_group, n_round, n_partition) WITH ORDINALITY AS hit (gi, last_round, partition_key, nth)
          ORDER BY hit.gi, hit.nth
        ) AS first
        WHERE lane_group.ctid = first.tid AND lane_group.head_round < first.last_round;
      END IF;

      -- Rate classes, in order and all at once the first time; only where nobody holds them when some are held already.
      v_wanted := NULL;
      IF n_row IS NOT NULL THEN
        v_wanted := ARRAY (
          SELECT wanted.name
          FROM unnest(n_row) AS wanted (name)
          WHERE n_tid IS NOT NULL AND wanted.name = ANY (n_class));
      END IF;
      IF v_first_lock AND cardinality(v_freed_class) > 0 THEN
        v_wanted := v_wanted || ARRAY (
          SELECT class.name FROM {schema}.headgate_rate_class AS class WHERE class.name = ANY (v_freed_class));
      END IF;
      IF v_wanted IS NOT NULL THEN
        v_wanted := ARRAY (
          SELECT DISTINCT wanted.name FROM unnest(v_wanted) AS wanted (name) WHERE wanted.name <> ALL (k_name));
      END IF;
      IF cardinality(v_wanted) > 0 THEN
        v_locked := NULL;
        IF v_first_lock AND v_patient THEN
          BEGIN
            PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
            v_locked := ARRAY (
              SELECT class.name
              FROM {schema}.headgate_rate_class AS class
              WHERE class.name = ANY (v_wanted)
              ORDER BY class.name
              FOR NO KEY UPDATE);
          EXCEPTION WHEN lock_not_available THEN
            v_locked := NULL;
          END;
        END IF;
        IF v_locked IS NULL THEN
          v_locked := ARRAY (
            SELECT class.name
            FROM {schema}.headgate_rate_class AS class
            WHERE class.name = ANY (v_wanted)
            ORDER BY class.name
            FOR NO KEY UPDATE SKIP LOCKED);
          -- What left running must not get lost with a class that somebody else holds.
          INSERT INTO {schema}.headgate_inbox (queue, kind, rate_class, n)
          SELECT q_name[1], 'c', freed.name, freed.n
          FROM unnest(v_freed_class, v_freed_n) AS freed (name, n)
          JOIN {schema}.headgate_rate_class AS class ON class.name = freed.name
          WHERE v_first_lock AND freed.name <> ALL (v_locked);
          v_held := v_held || ARRAY (
            SELECT wanted.name FROM unnest(v_wanted) AS wanted (name) WHERE wanted.name <> ALL (v_locked));
          v_skip := v_skip || v_held;
        END IF;
        v_first_lock := false;
        v_now := {schema}.headgate_now_ms();
        i := nb;
        -- All claims bear this instant, so what is held already is refilled up to it as well: what was there before the
        -- claims, for a budget that they emptied must not fill up while they are made.
        FOR j IN 1..nb LOOP
          b_units[j] := {schema}.headgate_units_at(
            b_units[j] + b_spent[j], b_limit[j], b_window[j], b_burst[j], b_at[j], v_now) - b_spent[j];
          b_at[j] := greatest(b_at[j], v_now);
        END LOOP;
        SELECT k_name || array_agg(class.name), k_tid || array_agg(class.tid), k_stored || array_agg(class.inflight),
          k_inflight || array_agg(greatest(0, class.inflight
            - coalesce(v_freed_n[array_position(v_freed_class, class.name)], 0)
            - class.unfolded)),
          k_from || array_agg(i + class.until - class.budgets + 1), k_to || array_agg(i + class.until),
          bool_or(class.paused OR class.paused_until_ms > v_now)
        INTO k_name, k_tid, k_stored, k_inflight, k_from, k_to, v_any
        FROM (
          SELECT locked.*, sum(locked.budgets) OVER (ORDER BY locked.name)::integer AS until
          FROM (
            SELECT known.name, known.ctid AS tid, known.inflight, known.paused, known.paused_until_ms,
              (SELECT count(*)::integer FROM {schema}.headgate_budget AS budget WHERE budget.rate_class = known.name)
                AS budgets,
              CASE WHEN (
                SELECT true FROM {schema}.headgate_ceiling AS ceiling
                WHERE ceiling.queue = '' AND ceiling.rate_class = known.name LIMIT 1
              ) THEN {schema}.headgate_unfolded(known.name) ELSE 0 END AS unfolded
            FROM {schema}.headgate_rate_class AS known
            WHERE known.name = ANY (v_locked)
            ORDER BY known.name
          ) AS locked
          ORDER BY locked.name
        ) AS class;
        SELECT b_tid || array_agg(budget.tid), b_limit || array_agg(budget.limit_tokens),
          b_window || array_agg(budget.window_ms), b_burst || array_agg(budget.burst),
          b_units || array_agg(budget.units), b_at || array_agg(greatest(budget.refilled_at_ms, v_now)),
          b_spent || array_agg(0::bigint)
        INTO b_tid, b_limit, b_window, b_burst, b_units, b_at, b_spent
        FROM (
          SELECT known.ctid AS tid, known.limit_tokens, known.window_ms, known.burst, known.refilled_at_ms,
            {schema}.headgate_units_at(
              known.units, known.limit_tokens, known.window_ms, known.burst, known.refilled_at_ms, v_now) AS units
          FROM {schema}.headgate_budget AS known
          WHERE known.rate_class = ANY (v_locked)
          ORDER BY known.rate_class, known.slot
        ) AS budget;
        nk := cardinality(k_name);
        nb := cardinality(b_tid);
        k_claimed := k_claimed || array_fill(0, ARRAY[nk - cardinality(k_claimed)]);
        k_closed := k_closed || array_fill(false, ARRAY[nk - cardinality(k_closed)]);
        SELECT e_scope || array_agg(ceiling.scope), e_queue || array_agg(0), e_class || array_agg(ceiling.place),
          e_max || array_agg(ceiling.max_concurrent), e_action || array_agg(ceiling.action), ne + count(*)
        INTO e_scope, e_queue, e_class, e_max, e_action, ne
        FROM (
          SELECT known.scope, array_position(k_name, known.rate_class) AS place, known.max_concurrent,
            CASE known.on_saturated WHEN 'cancel_running' THEN 1 WHEN 'cancel_incoming' THEN 2 WHEN 'discard' THEN 3
              ELSE 4 END AS action
          FROM {schema}.headgate_ceiling AS known
          WHERE known.queue = '' AND known.rate_class = ANY (v_locked)
          ORDER BY known.max_concurrent
        ) AS ceiling;
        IF v_any OR cardinality(v_locked) < cardinality(v_wanted) THEN
          CONTINUE main;
        END IF;
      END IF;

      -- Take the lanes in; their first jobs are drawn below.
      v_reading := false;
      IF n_tid IS NOT NULL THEN
        j := cardinality(n_tid);
        -- Lanes of one partition share its account.
        IF nl = 0 AND NOT v_repeats THEN
          n_part := n_lane;
          p_queue := n_queue;
          p_tid := n_part_tid;
          p_key := n_partition;
          p_deficit := n_deficit;
          p_inflight := n_inflight;
          p_override := n_override;
          np := j;
          p_noisy := array_fill(0, ARRAY[j]);
          p_taken := p_noisy;
          p_closed := array_fill(false, ARRAY[j]);
          p_live := array_fill(true, ARRAY[j]);
        ELSE
          n_part := NULL;
          FOR i IN 1..j LOOP
            pi := array_position(p_tid, n_part_tid[i]);
            IF pi IS NULL THEN
              np := np + 1;
              pi := np;
              p_queue[pi] := n_queue[i];
              p_tid[pi] := n_part_tid[i];
              p_key[pi] := n_partition[i];
              p_deficit[pi] := n_deficit[i];
              p_inflight[pi] := n_inflight[i];
              p_override[pi] := n_override[i];
              p_noisy[pi] := 0;
              p_taken[pi] := 0;
              p_closed[pi] := false;
            END IF;
            p_live[pi] := true;
            n_part[i] := pi;
          END LOOP;
        END IF;
        IF nk > 0 THEN
          n_k := ARRAY (
            SELECT coalesce(array_position(k_name, n.name), 0)
            FROM unnest(n_class) WITH ORDINALITY AS n (name, place)
            ORDER BY n.place);
        ELSE
          n_k := array_fill(0, ARRAY[j]);
        END IF;
        IF nl = 0 THEN
          l_queue := n_queue;
          l_tid := n_tid;
          l_key := n_key;
          l_partition := n_partition;
          l_class_name := n_class;
          l_sticky := n_sticky;
          l_round := n_round;
          l_part := n_part;
          l_class := n_k;
          l_closed := array_fill(false, ARRAY[j]);
          l_used := array_fill(0, ARRAY[j]);
          f_lane := n_lane;
        ELSE
          l_queue := l_queue || n_queue;
          l_tid := l_tid || n_tid;
          l_key := l_key || n_key;
          l_partition := l_partition || n_partition;
          l_class_name := l_class_name || n_class;
          l_sticky := l_sticky || n_sticky;
          l_round := l_round || n_round;
          l_part := l_part || n_part;
          l_class := l_class || n_k;
          l_closed := l_closed || array_fill(false, ARRAY[j]);
          l_used := l_used || array_fill(0, ARRAY[j]);
          f_lane := ARRAY (SELECT generate_series(nl + 1, nl + j));
        END IF;
        nl := nl + j;
        f_key := n_key;
        f_queue := n_queue;
        f_partition := n_partition;
        f_class := n_class;
        f_sticky := n_sticky;
        f_priority := 2147483647;
        f_at := -1;
        f_seq := -1;
        v_fresh := true;
        v_draw := true;
        v_merge := true;
      END IF;
    END IF;

    IF NOT v_sized THEN
      -- What automatic fairness takes from the first window of each queue.
      v_sized := true;
      IF p_quantum = 0 THEN
        IF nq = 1 AND l_gone IS NULL THEN
          q_quantum[1] := greatest(1, (p_capacity + np - 1) / greatest(np, 1));
        ELSE
          q_quantum := ARRAY (
            SELECT greatest(1, (p_capacity + parts.n - 1) / greatest(parts.n, 1))
            FROM (
              SELECT wanted.place, count(part.place)::integer AS n
              FROM generate_series(1, nq) AS wanted (place)
              LEFT JOIN unnest(p_queue, p_live) AS part (place, live) ON part.place = wanted.place AND part.live
              GROUP BY wanted.place
            ) AS parts
            ORDER BY parts.place);
        END IF;
        IF v_busy AND np > 1 THEN
          n_noisy := ARRAY (
            SELECT (peer.live AND peer.inflight >= 2
              AND peer.inflight * (peer.parts - 1) > 2 * (peer.total - peer.inflight))::integer
            FROM (
              SELECT one.live, one.inflight, one.nth, count(*) FILTER (WHERE one.live) OVER same_queue AS parts,
                coalesce(sum(one.inflight) FILTER (WHERE one.live) OVER same_queue, 0) AS total
              FROM unnest(p_queue, p_live, p_inflight) WITH ORDINALITY AS one (place, live, inflight, nth)
              WINDOW same_queue AS (PARTITION BY one.place)
            ) AS peer
            ORDER BY peer.nth);
          v_merge := v_merge OR n_noisy <> p_noisy;
          p_noisy := n_noisy;
        END IF;
      END IF;
    END IF;

    IF v_fresh AND v_merge THEN
      -- How many jobs to draw of each new lane: what it may give while there is room, none where less recently served
      -- ones of the queue can fill the capacity.
      j := cardinality(n_tid);
      f_limit := array_fill(0, ARRAY[j]);
      i := 1;
      WHILE i <= j LOOP
        qi := n_queue[i];
        IF i = 1 OR qi <> n_queue[i - 1] THEN
          v_before := CASE WHEN q_undrawn[qi] THEN p_capacity ELSE 0 END;
        END IF;
        EXIT WHEN nq = 1 AND v_before >= p_capacity;
        li := i;
        WHILE li < j AND n_round[li + 1] = n_round[i] AND n_queue[li + 1] = qi LOOP
          li := li + 1;
        END LOOP;
        IF v_before < p_capacity THEN
          IF v_before + li - i + 1 >= p_capacity THEN
            -- One of each fills the capacity; a second row tells whether the lane goes on.
            -- (PostgreSQL 13 cannot assign to a slice here.)
            f_limit := f_limit[:i - 1] || array_fill(least(2, p_capacity), ARRAY[li - i + 1]) || f_limit[li + 1:];
            v_before := p_capacity;
          ELSE
            v_wait := (p_capacity - v_before + li - i) / (li - i + 1) + 1;
            FOR x IN i..li LOOP
              w := n_deficit[x] + coalesce(n_override[x], q_quantum[qi]);
              f_limit[x] := least(w + 1, v_wait, p_capacity);
              v_before := v_before + w;
            END LOOP;
          END IF;
        END IF;
        i := li + 1;
      END LOOP;
      l_limit := l_limit || f_limit;
      IF 0 = ANY (f_limit) THEN
        v_undrawn := true;
        FOR x IN 1..j LOOP
          IF f_limit[x] = 0 THEN
            q_undrawn[n_queue[x]] := true;
            EXIT WHEN nq = 1;
          END IF;
        END LOOP;
      END IF;
    END IF;

    IF v_merge THEN
      -- Candidates in the order of the merge: those still waiting for a decision, and the rows drawn now.
      v_merge := false;
      SELECT array_agg(c.lane), array_agg(c.seq), array_agg(c.tid), array_agg(c.priority), array_agg(c.at_ms),
        array_agg(c.weight), bool_or(c.seq IS NULL)
      INTO c_lane, c_seq, c_tid, c_priority, c_at, c_weight, v_any
      FROM (
        SELECT either.*
        FROM (
          SELECT kept.lane, kept.seq, kept.tid, kept.priority, kept.at_ms, kept.weight
          FROM unnest(c_lane, c_seq, c_tid, c_priority, c_at, c_weight, c_done)
            AS kept (lane, seq, tid, priority, at_ms, weight, done)
          WHERE NOT kept.done AND kept.seq IS NOT NULL
          UNION ALL
          SELECT fresh.lane, drawn.seq, drawn.tid, drawn.priority, drawn.at_ms, drawn.weight
          FROM unnest(f_lane, f_limit, f_key, f_queue, f_partition, f_class, f_sticky)
            AS fresh (lane, row_limit, lane_key, place, partition_key, rate_class, sticky_worker)
          LEFT JOIN LATERAL (
            SELECT job.seq, job.ctid AS tid, job.priority, job.scheduled_at_ms AS at_ms,
              CASE WHEN v_has_quarantine AND (
                SELECT true FROM {schema}.headgate_quarantine AS quarantine
                WHERE quarantine.fingerprint = job.fingerprint LIMIT 1
              ) THEN -1 ELSE coalesce(job.charge_weight, job.weight)::bigint END AS weight
            FROM {schema}.headgate_job AS job
            WHERE job.lane_key = fresh.lane_key AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
              AND (job.priority < f_priority
                OR (job.priority = f_priority AND (job.scheduled_at_ms, job.seq) > (f_at, f_seq)))
              AND (job.queue = q_name[fresh.place] AND job.partition_key = fresh.partition_key
                AND job.rate_class = fresh.rate_class AND job.sticky_worker = fresh.sticky_worker) IS TRUE
            ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
            LIMIT fresh.row_limit
          ) AS drawn ON true
          WHERE v_draw AND fresh.row_limit > 0
        ) AS either
        ORDER BY l_queue[either.lane], p_noisy[l_part[either.lane]], l_round[either.lane], either.priority DESC,
          either.at_ms, either.seq
      ) AS c;
      v_draw := false;
      nc := coalesce(cardinality(c_lane), 0);
      c_done := array_fill(false, ARRAY[nc]);
      q_pos[1] := 1;
      q_end[1] := nc;
      IF nq > 1 THEN
        qi := 1;
        FOR i IN 1..nc LOOP
          WHILE l_queue[c_lane[i]] > qi LOOP
            q_end[qi] := i - 1;
            qi := qi + 1;
            q_pos[qi] := i;
          END LOOP;
        END LOOP;
        WHILE qi < nq LOOP
          q_end[qi] := nc;
          qi := qi + 1;
          q_pos[qi] := nc + 1;
        END LOOP;
        q_end[nq] := nc;
      END IF;
      IF v_any THEN
        -- Jobs that left a lane may be announced behind what was folded. Put such lanes to rest and fill the window up.
        v_gone := ARRAY (
          SELECT c.lane
          FROM unnest(c_lane, c_seq) AS c (lane, seq)
          WHERE c.seq IS NULL AND l_used[c.lane] = 0 AND l_gone[c.lane] IS NOT TRUE);
        UPDATE {schema}.headgate_lane AS lane
        SET active = false
        WHERE lane.ctid = ANY (ARRAY (SELECT l_tid[gone.lane] FROM unnest(v_gone) AS gone (lane)));
        q_need := array_fill(0, ARRAY[nq]);
        FOREACH li IN ARRAY v_gone LOOP
          l_gone[li] := true;
          l_closed[li] := true;
          q_need[l_queue[li]] := q_need[l_queue[li]] + 1;
        END LOOP;
        FOR pi IN 1..np LOOP
          p_live[pi] := false;
        END LOOP;
        FOR li IN 1..nl LOOP
          IF l_gone[li] IS NOT TRUE THEN
            p_live[l_part[li]] := true;
          END IF;
        END LOOP;
        v_any := v_fresh AND cardinality(v_gone) > 0;
      END IF;
      v_fresh := false;
      IF v_any THEN
        v_reading := true;
        v_sized := v_draws > 1;
        CONTINUE main;
      END IF;
    END IF;

    IF v_undrawn AND (v_starved OR 1 = ANY (p_noisy)) THEN
      -- The lanes drawn first ran out, or noisy ones among them come last: now the others.
      v_undrawn := false;
      v_starved := false;
      q_undrawn := array_fill(false, ARRAY[nq]);
      SELECT array_agg(l.lane), array_agg(l_key[l.lane]), array_agg(l_queue[l.lane]), array_agg(l_partition[l.lane]),
        array_agg(l_class_name[l.lane]), array_agg(l_sticky[l.lane])
      INTO f_lane, f_key, f_queue, f_partition, f_class, f_sticky
      FROM (
        SELECT drawn.nth::integer AS lane
        FROM unnest(l_limit) WITH ORDINALITY AS drawn (row_limit, nth)
        WHERE drawn.row_limit = 0
      ) AS l;
      j := cardinality(f_lane);
      v_count := least(p_capacity, (p_capacity - nd + j - 1) / j + 1);
      f_limit := array_fill(v_count, ARRAY[j]);
      FOREACH li IN ARRAY f_lane LOOP
        l_limit[li] := v_count;
      END LOOP;
      f_priority := 2147483647;
      f_at := -1;
      f_seq := -1;
      v_draw := true;
      v_merge := true;
      CONTINUE main;
    END IF;

    <<deciding>>
    WHILE nd < p_capacity LOOP
      -- The queue with the least service for its weight that has a candidate.
      IF nq = 1 THEN
        qi := 1;
        EXIT deciding WHEN q_pos[1] > q_end[1];
      ELSE
        qi := 0;
        FOR j IN 1..nq LOOP
          -- A queue that has lanes left to draw still has candidates.
          EXIT deciding WHEN q_pos[j] > q_end[j] AND q_undrawn[j];
          IF q_pos[j] <= q_end[j] AND (
            qi = 0 OR q_dispatch[j]::numeric * q_weight[qi] < q_dispatch[qi]::numeric * q_weight[j]) THEN
            qi := j;
          END IF;
        END LOOP;
        EXIT deciding WHEN qi = 0;
      END IF;
      i := q_pos[qi];
      li := c_lane[i];
      pi := l_part[li];
      ki := l_class[li];
      IF l_closed[li] OR p_closed[pi] OR c_seq[i] IS NULL OR (ki > 0 AND k_closed[ki]) THEN
        q_pos[qi] := i + 1;
        CONTINUE deciding;
      END IF;
      w := c_weight[i];
      v_action := 0;
      IF NOT c_done[i] THEN
        v_oversize := false;
        IF ki > 0 THEN
          FOR j IN k_from[ki]..k_to[ki] LOOP
            v_oversize := v_oversize OR w > b_burst[j];
          END LOOP;
        END IF;
        IF c_seq[i] = ANY (p_left_out) THEN
          v_blocked := true;
          c_done[i] := true;
          l_used[li] := l_used[li] + 1;
        ELSIF w < 0 OR v_oversize THEN
          IF cardinality(v_passed) >= p_hold_max THEN
            l_closed[li] := true;
            CONTINUE deciding;
          END IF;
          v_passed := v_passed || c_seq[i];
          v_blocked := true;
          c_done[i] := true;
          l_used[li] := l_used[li] + 1;
          IF w < 0 THEN
            facts.refused_quarantine := facts.refused_quarantine + 1;
          ELSE
            facts.refused_rate_class := facts.refused_rate_class + 1;
          END IF;
        ELSIF NOT v_slack AND p_taken[pi] >= p_deficit[pi] + coalesce(p_override[pi], q_quantum[qi]) THEN
          p_closed[pi] := true;
          facts.refused_fairness := facts.refused_fairness + 1;
          CONTINUE deciding;
        ELSE
          IF ki > 0 AND w > 0 THEN
            v_fits := true;
            v_wait := 0;
            FOR j IN k_from[ki]..k_to[ki] LOOP
              IF b_units[j] < w * b_window[j] THEN
                v_fits := false;
                v_wait := CASE WHEN b_limit[j] > 0
                  THEN greatest(v_wait, (w * b_window[j] - 1 - b_units[j]) / b_limit[j] + 1) END;
                EXIT WHEN v_wait IS NULL;
              END IF;
            END LOOP;
            IF NOT v_fits THEN
              k_closed[ki] := true;
              v_blocked := true;
              v_closed_any := true;
              facts.refused_rate_class := facts.refused_rate_class + 1;
              PERFORM {schema}.headgate_close_class(q_name, k_name[ki], v_now + v_wait);
              CONTINUE deciding;
            END IF;
          END IF;
          FOR j IN 1..ne LOOP
            CONTINUE WHEN e_action[j] <= v_action OR (e_class[j] > 0 AND e_class[j] <> ki)
              OR (e_class[j] = 0 AND e_queue[j] <> qi);
            v_occupied := CASE e_scope[j]
              WHEN 'partition' THEN p_inflight[pi] + p_taken[pi] - coalesce(p_sent[pi], 0) - coalesce(p_relieved[pi], 0)
              WHEN 'queue' THEN q_inflight[qi] + q_decided[qi] - coalesce(q_sent[qi], 0) - coalesce(q_relieved[qi], 0)
              ELSE k_inflight[ki] + k_claimed[ki] - coalesce(k_relieved[ki], 0) END;
            IF v_occupied >= e_max[j] THEN
              v_action := e_action[j];
            END IF;
          END LOOP;
          IF v_action = 4 THEN
            l_closed[li] := true;
            l_full[li] := true;
            v_blocked := true;
            facts.refused_concurrency_limit := facts.refused_concurrency_limit + 1;
            CONTINUE deciding;
          END IF;
          c_done[i] := true;
          l_used[li] := l_used[li] + 1;
          IF v_action = 1 THEN
            -- The candidate must be certain before anybody is displaced for it.
            PERFORM FROM {schema}.headgate_job AS job
            WHERE job.ctid = c_tid[i] AND job.seq = c_seq[i] AND job.state = 'available' AND job.gate_hold IS NULL
            FOR UPDATE SKIP LOCKED;
            IF FOUND THEN
              v_victims := ARRAY[]::bigint[];
              FOR j IN 1..ne LOOP
                CONTINUE WHEN (e_class[j] > 0 AND e_class[j] <> ki) OR (e_class[j] = 0 AND e_queue[j] <> qi);
                v_occupied := CASE e_scope[j]
                  WHEN 'partition' THEN p_inflight[pi] + p_taken[pi] - coalesce(p_sent[pi], 0) - coalesce(p_relieved[pi], 0)
                  WHEN 'queue' THEN q_inflight[qi] + q_decided[qi] - coalesce(q_sent[qi], 0) - coalesce(q_relieved[qi], 0)
                  ELSE k_inflight[ki] + k_claimed[ki] - coalesce(k_relieved[ki], 0) END;
                v_count := (
                  SELECT count(*)
                  FROM {schema}.headgate_job AS job
                  WHERE job.seq = ANY (v_victims)
                    AND (e_scope[j] = 'class' OR job.queue = q_name[qi])
                    AND (e_scope[j] <> 'partition' OR job.partition_key = p_key[pi])
                    AND (e_scope[j] <> 'class' OR job.rate_class = k_name[ki]));
                CONTINUE WHEN v_occupied - v_count < e_max[j];
                v_victims := v_victims || {schema}.headgate_oldest_running(
                  e_scope[j], q_name[qi], p_key[pi], CASE WHEN ki > 0 THEN k_name[ki] END, v_victims);
                CONTINUE WHEN v_victims[cardinality(v_victims)] IS NOT NULL;
                IF v_count = 0 AND e_scope[j] <> 'partition' THEN
                  -- Nobody is left to displace under it: from now on it lets jobs wait, and hides nothing behind them.
                  e_action[j] := 4;
                  IF e_scope[j] = 'class' THEN
                    v_settled := v_settled || k_name[ki];
                  ELSE
                    q_cap[qi] := least(q_cap[qi], e_max[j]);
                  END IF;
                END IF;
                EXIT;
              END LOOP;
              IF v_victims[cardinality(v_victims)] IS NULL THEN
                c_done[i] := false;
                l_used[li] := l_used[li] - 1;
                l_closed[li] := true;
                l_full[li] := true;
                v_blocked := true;
                facts.refused_concurrency_limit := facts.refused_concurrency_limit + 1;
                CONTINUE deciding;
              END IF;
              FOR v_victim IN
                SELECT array_position(q_name, job.queue) AS qn, array_position(k_name, job.rate_class) AS kn,
                  (SELECT part.place
                   FROM unnest(p_queue, p_key) WITH ORDINALITY AS part (queue, key, place)
                   WHERE q_name[part.queue] = job.queue AND part.key = job.partition_key
                   LIMIT 1)::integer AS pn
                FROM {schema}.headgate_job AS job
                WHERE job.seq = ANY (v_victims)
              LOOP
                IF v_victim.qn IS NOT NULL THEN
                  q_relieved[v_victim.qn] := coalesce(q_relieved[v_victim.qn], 0) + 1;
                END IF;
                IF v_victim.kn IS NOT NULL THEN
                  k_relieved[v_victim.kn] := coalesce(k_relieved[v_victim.kn], 0) + 1;
                END IF;
                IF v_victim.pn IS NOT NULL THEN
                  p_relieved[v_victim.pn] := coalesce(p_relieved[v_victim.pn], 0) + 1;
                END IF;
              END LOOP;
              PERFORM {schema}.headgate_displace(v_victims, v_now);
              v_action := 0;
            END IF;
          END IF;
          IF v_action <> 1 THEN
            nd := nd + 1;
            d_seq[nd] := c_seq[i];
            d_tid[nd] := c_tid[i];
            d_lane[nd] := li;
            d_charge[nd] := 0;
            d_action[nd] := v_action;
            p_taken[pi] := p_taken[pi] + 1;
            q_decided[qi] := q_decided[qi] + 1;
            q_dispatch[qi] := q_dispatch[qi] + 1;
            IF v_action > 0 THEN
              v_sent := v_sent + 1;
              p_sent[pi] := coalesce(p_sent[pi], 0) + 1;
              q_sent[qi] := coalesce(q_sent[qi], 0) + 1;
            ELSIF ki > 0 THEN
              k_claimed[ki] := k_claimed[ki] + 1;
              FOR j IN k_from[ki]..k_to[ki] LOOP
                b_units[j] := b_units[j] - w * b_window[j];
                b_spent[j] := b_spent[j] + w * b_window[j];
                d_charge[nd] := w;
              END LOOP;
            END IF;
          END IF;
        END IF;
        IF l_touched[li] IS NOT TRUE THEN
          l_touched[li] := true;
          nt := nt + 1;
          t_lane[nt] := li;
        END IF;
      END IF;
      q_pos[qi] := i + 1;
      IF l_used[li] = l_limit[li] AND nd < p_capacity THEN
        -- All rows read of the lane are used: the next ones may come before the other lanes'.
        f_lane := ARRAY[li];
        f_limit := ARRAY[least(p_capacity, 4 * l_limit[li])];
        l_limit[li] := l_limit[li] + f_limit[1];
        f_key := ARRAY[l_key[li]];
        f_queue := ARRAY[l_queue[li]];
        f_partition := ARRAY[l_partition[li]];
        f_class := ARRAY[l_class_name[li]];
        f_sticky := ARRAY[l_sticky[li]];
        f_priority := c_priority[i];
        f_at := c_at[i];
        f_seq := c_seq[i];
        v_draw := true;
        v_merge := true;
        CONTINUE main;
      END IF;
    END LOOP;

    EXIT main WHEN nd >= p_capacity;
    IF v_undrawn THEN
      v_starved := true;
      CONTINUE main;
    END IF;
    IF v_blocked AND v_draws < p_window_draws THEN
      -- Newly closed classes, full lanes and jobs that cannot pass must not hide what is behind them.
      v_blocked := false;
      v_draws := v_draws + 1;
      v_reading := true;
      v_skip := v_held || v_settled;
      q_need := ARRAY (
        SELECT CASE
          WHEN q_inflight[wanted.place] + q_decided[wanted.place] - coalesce(q_sent[wanted.place], 0)
            - coalesce(q_relieved[wanted.place], 0)
            >= q_cap[wanted.place] THEN 0
          ELSE greatest(0, v_window - count(DISTINCT c.lane)::integer) END
        FROM generate_series(1, nq) AS wanted (place)
        LEFT JOIN unnest(c_lane, c_done, c_seq) AS c (lane, done, seq)
          ON l_queue[c.lane] = wanted.place AND NOT c.done AND c.seq IS NOT NULL AND l_full[c.lane] IS NOT TRUE
          AND NOT coalesce(k_closed[nullif(l_class[c.lane], 0)], false)
        GROUP BY wanted.place
        ORDER BY wanted.place);
      CONTINUE main;
    END IF;
    EXIT main WHEN v_slack OR p_quantum > 0;
    -- Automatic fairness leaves no slot idle: once more, without shares.
    v_slack := true;
    p_closed := array_fill(false, ARRAY[np]);
    q_pos[1] := 1;
    FOR qi IN 2..nq LOOP
      q_pos[qi] := q_end[qi - 1] + 1;
    END LOOP;
  END LOOP;

  -- Send away and claim what is still as it was read; a row that changed meanwhile is left to a later call.
  v_claims := nd - v_sent;
  v_count := 0;
  IF v_sent > 0 THEN
    SELECT v_count + sum({schema}.headgate_send_away(
      away.tids, away.seqs, CASE away.action WHEN 3 THEN 'archived' ELSE 'cancelled' END,
      CASE away.action WHEN 3 THEN 'saturation_discard' ELSE 'saturation_cancel' END, v_now))
    INTO v_count
    FROM (
      SELECT d.action, array_agg(d.tid) AS tids, array_agg(d.seq) AS seqs
      FROM unnest(d_action, d_tid, d_seq) AS d (action, tid, seq)
      WHERE d.action > 0
      GROUP BY d.action
    ) AS away;
  END IF;
  IF v_claims > 0 THEN
    RETURN QUERY
    UPDATE {schema}.headgate_job AS job
    SET state = 'running', lease_id = p_lease_id, lease_expires_at_ms = v_now + p_lease_ms, claimed_by = p_worker,
      claimed_at_ms = v_now, fence = job.fence + 1, rate_charge = held.charge, settled_lease_id = NULL,
      settled_outcome = NULL
    FROM (
      SELECT free.tid, picked.charge, picked.place
      FROM unnest(d_tid, d_seq, d_charge, d_action) WITH ORDINALITY AS picked (tid, seq, charge, action, place)
      -- Row by row: a join of the two might begin with a walk over all jobs.
      CROSS JOIN LATERAL (
        SELECT known.ctid AS tid
        FROM {schema}.headgate_job AS known
        WHERE known.ctid = picked.tid AND known.seq = picked.seq
          AND (known.gate_hold IS NULL AND known.state = 'available') IS TRUE
        FOR UPDATE SKIP LOCKED
      ) AS free
      WHERE picked.action = 0
      OFFSET 0
    ) AS held
    WHERE job.ctid = held.tid
    RETURNING held.place::integer, NULL::bigint, NULL::integer, NULL::integer, NULL::integer,
      NULL::integer, NULL::bigint[], job.id, job.kind, job.schema_version, job.payload, job.queue, job.partition_key,
      job.rate_class, job.weight, job.fingerprint, job.priority, job.attempt, job.crash_attempt, job.max_attempts,
      job.scheduled_at_ms, job.timeout_ms, job.deadline_ms, job.retention_ms, job.unique_key, job.unique_states,
      job.periodic_schedule_id, job.periodic_tick_ms, job.headers,
      CASE WHEN v_has_tags THEN ARRAY (
        SELECT tag.tag FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = job.seq ORDER BY tag.tag)
        ELSE ARRAY[]::text[] END,
      job.sticky_worker, job.fence, job.lease_expires_at_ms, job.claimed_at_ms, job.checkpoint, job.cursor_data,
      job.charge_weight;
    GET DIAGNOSTICS v_wait = ROW_COUNT;
    v_count := v_count + v_wait;
  END IF;
  IF v_count < nd THEN
    v_lost := ARRAY (
      SELECT d.place
      FROM unnest(d_seq, d_action) WITH ORDINALITY AS d (seq, action, place)
      LEFT JOIN LATERAL (
        SELECT job.state, job.lease_id, job.claimed_at_ms, job.finalized_at_ms
        FROM {schema}.headgate_job AS job
        WHERE job.seq = d.seq
        LIMIT 1
      ) AS job ON true
      WHERE (d.action = 0 AND (job.state = 'running' AND job.lease_id = p_lease_id AND job.claimed_at_ms = v_now)
          IS NOT TRUE)
        OR (d.action > 0 AND (job.state IN ('archived', 'cancelled') AND job.finalized_at_ms = v_now) IS NOT TRUE));
    FOREACH i IN ARRAY v_lost LOOP
      li := d_lane[i];
      pi := l_part[li];
      qi := l_queue[li];
      ki := l_class[li];
      p_taken[pi] := p_taken[pi] - 1;
      q_decided[qi] := q_decided[qi] - 1;
      q_dispatch[qi] := q_dispatch[qi] - 1;
      IF d_action[i] > 0 THEN
        d_action[i] := 0;
        p_sent[pi] := p_sent[pi] - 1;
        q_sent[qi] := q_sent[qi] - 1;
      ELSE
        v_claims := v_claims - 1;
        IF ki > 0 THEN
          k_claimed[ki] := k_claimed[ki] - 1;
          FOR j IN k_from[ki]..k_to[ki] LOOP
            b_units[j] := b_units[j] + d_charge[i] * b_window[j];
            b_spent[j] := b_spent[j] - d_charge[i] * b_window[j];
          END LOOP;
          IF k_closed[ki] THEN
            -- It was closed for want of tokens that are back: like after a refund, the next look decides anew.
            UPDATE {schema}.headgate_lane_group AS lane_group
            SET open = true, open_at_ms = NULL
            WHERE lane_group.queue = ANY (q_name) AND lane_group.rate_class = k_name[ki] AND NOT lane_group.open;
          END IF;
        END IF;
      END IF;
    END LOOP;
  END IF;
  IF v_count = 0 AND nd > 0 AND cardinality(p_left_out) < p_window_draws THEN
    -- All of it is in the hands of others, who must not hold up what is behind. The slots freed in classes whose rows are
    -- busy have been announced anew. A lane may have been parked for a claim that was lost.
    PERFORM {schema}.headgate_unpark(array_agg(q_name[p_queue[part.nth]]), array_agg(p_key[part.nth]))
    FROM unnest(p_queue) WITH ORDINALITY AS part (place, nth)
    WHERE p_inflight[part.nth] < q_part_cap[part.place];
    RETURN QUERY
    SELECT again.*
    FROM {schema}.headgate_admit_under_policies(
      p_worker, p_lease_id, p_queues, p_capacity, p_lease_ms, p_quantum, p_window_max, p_window_spare, p_window_draws,
      p_deficit_cap, p_ledger_lag, p_fold_max, p_hold_max, p_lock_wait_ms, p_busy_ms, q_name, q_weight, q_dispatch, q_round,
      q_stored, q_freed, v_has_closed, v_asleep, v_has_quarantine, v_has_tags, v_has_ceilings, v_taken, v_horizon,
      ARRAY (SELECT freed.name FROM unnest(v_freed_class, v_freed_n) AS freed (name, n) WHERE freed.name = ANY (k_name)),
      ARRAY (SELECT freed.n FROM unnest(v_freed_class, v_freed_n) AS freed (name, n) WHERE freed.name = ANY (k_name)),
      v_now, p_left_out || d_seq) AS again;
    RETURN;
  END IF;

  -- Accounting. A lane is laid to rest only by a look that found it empty after everything announced was folded; rows
  -- passed over are still there until they are marked.
  IF nt > 0 THEN
    SELECT array_agg(probe.ready), array_agg(probe.remains)
    INTO t_ready, t_left
    FROM (
      SELECT ready.found IS NOT NULL AS ready, remains.found IS NOT NULL AS remains
      FROM unnest(t_lane) WITH ORDINALITY AS t (lane, place)
      LEFT JOIN LATERAL (
        SELECT true AS found
        FROM {schema}.headgate_job AS job
        WHERE job.lane_key = l_key[t.lane] AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
          AND (job.queue = q_name[l_queue[t.lane]] AND job.partition_key = l_partition[t.lane]
            AND job.rate_class = l_class_name[t.lane] AND job.sticky_worker = l_sticky[t.lane]) IS TRUE
        ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
        LIMIT 1
      ) AS ready ON true
      LEFT JOIN LATERAL (
        SELECT true AS found
        FROM {schema}.headgate_job AS job
        WHERE job.lane_key = l_key[t.lane] AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
          AND (job.queue = q_name[l_queue[t.lane]] AND job.partition_key = l_partition[t.lane]
            AND job.rate_class = l_class_name[t.lane] AND job.sticky_worker = l_sticky[t.lane]) IS TRUE
          AND job.seq <> ALL (v_passed) AND cardinality(v_passed) > 0
        ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
        LIMIT 1
      ) AS remains ON true
      ORDER BY t.place
    ) AS probe;
    IF cardinality(v_passed) = 0 THEN
      t_left := t_ready;
    END IF;
    IF false = ANY (t_left) THEN
      x_part := ARRAY (
        SELECT l_part[t.lane]
        FROM unnest(t_lane, t_left) AS t (lane, remains)
        GROUP BY l_part[t.lane]
        HAVING NOT bool_or(t.remains));
      x_part := ARRAY (
        SELECT x.part
        FROM unnest(x_part) AS x (part)
        LEFT JOIN LATERAL (
          SELECT true AS found
          FROM {schema}.headgate_lane AS lane
          CROSS JOIN LATERAL (
            SELECT job.seq
            FROM {schema}.headgate_job AS job
            WHERE job.lane_key = lane.lane_key AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
              AND (job.queue = lane.queue AND job.partition_key = lane.partition_key
                AND job.rate_class = lane.rate_class AND job.sticky_worker = lane.sticky_worker) IS TRUE
              AND job.seq <> ALL (v_passed)
            ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
            LIMIT 1
          ) AS job
          WHERE lane.queue = q_name[p_queue[x.part]] AND lane.partition_key = p_key[x.part] AND lane.active
          LIMIT 1
        ) AS other ON true
        WHERE other.found IS NULL);
      FOREACH pi IN ARRAY x_part LOOP
        p_empty[pi] := true;
      END LOOP;
    END IF;
  END IF;
  IF np > 0 THEN
    UPDATE {schema}.headgate_partition AS part
    SET deficit = done.deficit, inflight = part.inflight + done.taken - done.sent,
      last_round = CASE WHEN done.taken > 0 THEN done.round ELSE part.last_round END
    FROM (
      SELECT p.tid, p.taken, coalesce(p_sent[p.nth], 0) AS sent, p.deficit AS before, q_round[p.place] + 1 AS round,
        CASE WHEN p_empty[p.nth] THEN 0
          ELSE greatest(0, least(
            p.deficit + coalesce(p.override, q_quantum[p.place]) - p.taken,
            p_deficit_cap * coalesce(p.override, q_quantum[p.place])::bigint)) END AS deficit
      FROM unnest(p_tid, p_queue, p_taken, p_deficit, p_override, p_live) WITH ORDINALITY
        AS p (tid, place, taken, deficit, override, live, nth)
      WHERE p.live
    ) AS done
    WHERE part.ctid = done.tid AND (done.taken > 0 OR done.deficit <> done.before);
  END IF;
  IF nt > 0 THEN
    UPDATE {schema}.headgate_lane AS lane
    SET active = done.ready, last_round = greatest(lane.last_round, done.round), parked = done.parked,
      served_round = greatest(lane.served_round, CASE WHEN done.served THEN done.round END)
    FROM (
      SELECT l_tid[t.lane] AS tid, t.ready, t.lane = ANY (d_lane) AS served,
        CASE WHEN p_taken[l_part[t.lane]] > 0 THEN q_round[l_queue[t.lane]] + 1 END AS round,
        coalesce(
          p_inflight[l_part[t.lane]] + p_taken[l_part[t.lane]] - coalesce(p_sent[l_part[t.lane]], 0)
            >= q_part_cap[l_queue[t.lane]], false) AS parked
      FROM unnest(t_lane, t_ready) AS t (lane, ready)
    ) AS done
    WHERE lane.ctid = done.tid;
  END IF;
  IF nk > 0 THEN
    UPDATE {schema}.headgate_rate_class AS class
    SET inflight = done.inflight
    FROM (
      SELECT k.tid, k.stored,
        greatest(0, k.stored - coalesce(v_freed_n[array_position(v_freed_class, k.name)], 0)) + k.claimed AS inflight
      FROM unnest(k_tid, k_name, k_stored, k_claimed) AS k (tid, name, stored, claimed)
    ) AS done
    WHERE class.ctid = done.tid AND done.inflight <> done.stored;
    UPDATE {schema}.headgate_budget AS budget
    SET units = b.units, refilled_at_ms = b.at_ms
    FROM unnest(b_tid, b_units, b_at, b_spent) AS b (tid, units, at_ms, spent)
    WHERE budget.ctid = b.tid AND b.spent > 0;
  END IF;
  IF v_lost IS NOT NULL THEN
    -- A lane may have been parked for a claim that was lost.
    PERFORM {schema}.headgate_unpark(array_agg(q_name[p_queue[lost.part]]), array_agg(p_key[lost.part]))
    FROM (SELECT DISTINCT l_part[d_lane[d.place]] AS part FROM unnest(v_lost) AS d (place)) AS lost
    WHERE p_inflight[lost.part] + p_taken[lost.part] - coalesce(p_sent[lost.part], 0) < q_part_cap[p_queue[lost.part]];
  END IF;
  FOR qi IN 1..nq LOOP
    IF q_decided[qi] > 0 OR q_freed[qi] > 0 THEN
      UPDATE {schema}.headgate_queue AS queue
      SET inflight = greatest(0, queue.inflight - coalesce(q_freed[qi], 0)) + q_decided[qi] - coalesce(q_sent[qi], 0),
        dispatch_count = CASE WHEN q_decided[qi] > 0 THEN q_dispatch[qi] ELSE queue.dispatch_count END,
        round = queue.round + (q_decided[qi] > 0)::integer, inbox_from = coalesce(v_horizon, queue.inbox_from)
      WHERE queue.queue = q_name[qi];
      IF NOT FOUND AND q_decided[qi] > 0 THEN
        INSERT INTO {schema}.headgate_queue (queue, dispatch_count, round, inflight)
        VALUES (q_name[qi], q_dispatch[qi], 1, q_decided[qi] - coalesce(q_sent[qi], 0));
      END IF;
    END IF;
  END LOOP;

  IF nd = 0 AND v_taken >= p_fold_max THEN
    -- What would have been admitted may be announced behind the rows that were folded.
    RETURN QUERY
    SELECT again.*
    FROM {schema}.headgate_admit(
      p_worker, p_lease_id, p_queues, p_capacity, p_lease_ms, p_quantum, p_window_max, p_window_spare, p_window_draws,
      p_deficit_cap, p_ledger_lag, 4 * p_fold_max, p_hold_max, p_lock_wait_ms, p_busy_ms) AS again;
    RETURN;
  END IF;

  -- Who sleeps: written only when it changes. A worker with slots left over waits for work like one that got nothing;
  -- were it counted as busy, each job of a slow stream would wait for its next poll.
  IF nd >= p_capacity THEN
    IF v_asleep > 0 THEN
      DELETE FROM {schema}.headgate_sleeper AS sleeper
      WHERE sleeper.queue = ANY (p_queues) AND sleeper.worker = p_worker;
    END IF;
  ELSIF v_asleep < cardinality(p_queues) THEN
    INSERT INTO {schema}.headgate_sleeper (queue, worker, slept_at_ms)
    SELECT wanted.queue, p_worker, {schema}.headgate_now_ms()
    FROM unnest(p_queues) AS wanted (queue)
    LEFT JOIN LATERAL (
      SELECT true AS found
      FROM {schema}.headgate_sleeper AS sleeper
      WHERE sleeper.queue = wanted.queue AND sleeper.worker = p_worker
      LIMIT 1
    ) AS known ON true
    WHERE known.found IS NULL
    ON CONFLICT DO NOTHING;
  END IF;

  IF v_closed_any OR v_has_closed THEN
    facts.retry_after_ms := {schema}.headgate_reopens_in(
      q_name, q_part_cap, p_worker, p_window_spare, v_now, v_passed);
  END IF;
  IF nd < p_capacity AND cardinality(v_held) > 0 THEN
    -- Whoever holds a class is about to end; its jobs must not wait for the next poll.
    facts.retry_after_ms := least(facts.retry_after_ms, 1 + floor(random() * p_busy_ms));
  END IF;
  IF v_sent > 0 THEN
    FOR turned.ordinal, turned.queue, turned.refused_concurrency_limit IN
      SELECT -d.action, q_name[l_queue[d.lane]], count(*)
      FROM unnest(d_action, d_lane) AS d (action, lane)
      WHERE d.action > 0
      GROUP BY d.action, q_name[l_queue[d.lane]]
    LOOP
      RETURN NEXT turned;
    END LOOP;
  END IF;
  facts.passed_over := v_passed;
  RETURN NEXT facts;
END $$;

-- Decide which jobs a worker may run, claim and lease them.
--
-- Arguments: the request; then the constants of policy: lanes of a window at most, and beside two per share; windows a
--            call; deficit cap in quanta; ledger lag in decisions; appended rows folded per queue; rows passed over;
--            waiting time for a lock, and the longest pause to ask for after it ran out, in milliseconds.
-- Rows:      headgate_admission.
-- Locks:     queues; then those of headgate_admit_under_policies.
--
-- The cost of a call is statements and expressions started, hardly rows. So one statement asks which policies there are,
-- and where none of them can bind and only one of the queues has lanes, a short road is taken here: where no class, no
-- ceiling and no quarantined row refuses, only shares bind, and then a sort says what the loop over candidates would
-- decide. What all its jobs would cost their classes is looked at in one go, under the locks of the classes: where the sum
-- fits, each fits in whatever order. Whatever the short road meets that it cannot judge, it leaves to the whole decision
-- before it has written anything but what it folded, and the bounds.
CREATE FUNCTION {schema}.headgate_admit(
  p_worker text, p_lease_id text, p_queues text[], p_capacity integer, p_lease_ms bigint, p_quantum integer,
  p_window_max integer, p_window_spare integer, p_window_draws integer, p_deficit_cap integer, p_ledger_lag integer,
  p_fold_max integer, p_hold_max integer, p_lock_wait_ms integer, p_busy_ms integer)
  RETURNS SETOF {schema}.headgate_admission
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  facts {schema}.headgate_admission;
  v_keys bigint[];
  v_key bigint;
  first record;
  lanes record;
  drawn record;
  v_now bigint;
  v_plain boolean;
  v_alone boolean;

  nq integer := 0;
  q_name text[];
  q_weight bigint[];
  q_dispatch bigint[];
  q_round bigint[];
  q_inflight bigint[];
  q_freed bigint[];
  v_news boolean;
  v_closed_until bigint;
  v_asleep integer := 0;
  v_has_ceilings boolean := false;
  q_parks integer[];
  q_of_partition integer[];
  q_of_queue integer[];
  q_since xid8[];
  v_horizon xid8;
  v_taken integer;
  v_freed_class text[];
  v_freed_n bigint[];

  v_queue text;
  v_quantum integer;
  v_limit integer;
  v_all boolean;
  v_beyond integer;
  v_most integer;
  v_refused integer := 0;
  np integer;
  l_part bigint[];
  p_taken integer[];
  v_left tid[];
  v_classes text[];
  v_locked text[];
  v_charged text[];
  v_left_out bigint[] := ARRAY[]::bigint[];
  v_rested text[];
  v_empty text[];
  nd integer := 0;
  v_claims integer := 0;
  i integer;
  qi integer;
  li integer;
  pi integer;
  v_room integer;
  v_top_count bigint;
  v_top_weight bigint;
BEGIN
  IF p_capacity = 0 OR cardinality(p_queues) = 0 THEN
    facts := ROW(0, NULL, 0, 0, 0, 0, ARRAY[]::bigint[], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
      NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    RETURN NEXT facts;
    RETURN;
  END IF;

  -- Only a waiter pays for the sub-transaction that the time-out needs.
  v_keys := ARRAY[{schema}.headgate_queue_key(p_queues[1])];
  IF cardinality(p_queues) > 1 THEN
    v_keys := ARRAY (
      SELECT DISTINCT {schema}.headgate_queue_key(wanted.queue) FROM unnest(p_queues) AS wanted (queue) ORDER BY 1);
  END IF;
  FOREACH v_key IN ARRAY v_keys LOOP
    IF NOT pg_try_advisory_xact_lock(v_key) THEN
      BEGIN
        PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
        PERFORM pg_advisory_xact_lock(v_key);
      EXCEPTION WHEN lock_not_available THEN
        facts := ROW(0, 1 + floor(random() * p_busy_ms), 0, 0, 0, 0, ARRAY[]::bigint[], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
      NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
        RETURN NEXT facts;
        RETURN;
      END;
    END IF;
  END LOOP;

  FOREACH v_queue IN ARRAY p_queues LOOP
    SELECT queue.paused, queue.weight, queue.dispatch_count, queue.round, queue.inflight,
      always.horizon, coalesce(queue.since, '0') AS since,
      (SELECT true FROM {schema}.headgate_inbox AS inbox
       WHERE inbox.queue = v_queue AND inbox.xid >= coalesce(queue.since, '0') LIMIT 1) AS has_news,
      (SELECT coalesce(lane_group.open_at_ms, 9223372036854775807) FROM {schema}.headgate_lane_group AS lane_group
       WHERE lane_group.queue = v_queue AND NOT lane_group.open ORDER BY lane_group.open_at_ms LIMIT 1) AS closed_until,
      ceilings.of_partition, ceilings.that_parks, ceilings.of_queue,
      (SELECT true FROM {schema}.headgate_sleeper AS sleeper
       WHERE sleeper.queue = v_queue AND sleeper.worker = p_worker LIMIT 1) AS sleeps,
      (SELECT true FROM {schema}.headgate_quarantine LIMIT 1) AS has_quarantine,
      (SELECT true FROM {schema}.headgate_job_tag LIMIT 1) AS has_tags
    INTO first
    FROM (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS horizon OFFSET 0) AS always
    LEFT JOIN LATERAL (
      SELECT known.paused, known.weight, known.dispatch_count, known.round, known.inflight,
        -- A database that was restored elsewhere counts its transactions anew.
        CASE WHEN known.inbox_from <= always.horizon THEN known.inbox_from END AS since
      FROM {schema}.headgate_queue AS known
      WHERE known.queue = v_queue
    ) AS queue ON true
    CROSS JOIN LATERAL (
      SELECT min(known.max_concurrent) FILTER (WHERE known.scope = 'partition') AS of_partition,
        min(known.max_concurrent) FILTER (WHERE known.scope = 'partition' AND known.on_saturated = 'queue') AS that_parks,
        min(known.max_concurrent) FILTER (WHERE known.scope = 'queue') AS of_queue
      FROM {schema}.headgate_ceiling AS known
      WHERE known.queue = v_queue
    ) AS ceilings;
    -- Every transaction before the horizon has ended and is seen from here on. Once all that is seen was folded, nothing
    -- of them is left, and later calls need not pass the entries that they left behind. The duties fold without a bound.
    v_horizon := coalesce(v_horizon, first.horizon);
    IF first.sleeps THEN
      v_asleep := v_asleep + 1;
    END IF;
    IF first.paused IS NOT TRUE THEN
      nq := nq + 1;
      q_name[nq] := v_queue;
      q_weight[nq] := coalesce(first.weight, 1);
      q_dispatch[nq] := coalesce(first.dispatch_count, 0);
      q_round[nq] := coalesce(first.round, 0);
      q_inflight[nq] := coalesce(first.inflight, 0);
      q_since[nq] := first.since;
      v_news := v_news OR first.has_news;
      v_closed_until := least(v_closed_until, first.closed_until);
      q_parks[nq] := first.that_parks;
      q_of_partition[nq] := first.of_partition;
      q_of_queue[nq] := first.of_queue;
      v_has_ceilings := v_has_ceilings OR first.of_partition IS NOT NULL OR first.of_queue IS NOT NULL;
    END IF;
  END LOOP;
  IF v_news THEN
    SELECT fold.taken, fold.freed, fold.classes, fold.class_freed
    INTO v_taken, q_freed, v_freed_class, v_freed_n
    FROM {schema}.headgate_fold(q_name, q_since, p_fold_max, q_parks) AS fold;
    IF v_taken >= p_fold_max THEN
      v_horizon := NULL;
    END IF;
  END IF;
  v_now := {schema}.headgate_now_ms();
  IF v_closed_until <= v_now THEN
    UPDATE {schema}.headgate_lane_group AS lane_group
    SET open = true, open_at_ms = NULL
    WHERE lane_group.ctid = ANY (ARRAY (
      SELECT due.tid
      FROM unnest(q_name) AS wanted (queue)
      CROSS JOIN LATERAL (
        SELECT closed.ctid AS tid
        FROM {schema}.headgate_lane_group AS closed
        WHERE closed.queue = wanted.queue AND NOT closed.open AND closed.open_at_ms <= v_now
        ORDER BY closed.open_at_ms
        LIMIT p_fold_max
      ) AS due));
  END IF;

  qi := 1;
  v_plain := true;
  IF nq > 1 THEN
    -- The ledger: a queue that was idle is at most the lag behind the one that was served most.
    v_top_count := 0;
    v_top_weight := 1;
    FOR i IN 1..nq LOOP
      IF q_dispatch[i]::numeric * v_top_weight > v_top_count::numeric * q_weight[i] THEN
        v_top_count := q_dispatch[i];
        v_top_weight := q_weight[i];
      END IF;
    END LOOP;
    FOR i IN 1..nq LOOP
      q_dispatch[i] := greatest(
        q_dispatch[i], div(v_top_count::numeric * q_weight[i], v_top_weight)::bigint - p_ledger_lag);
    END LOOP;
    -- Where only one of the queues has lanes, it alone decides.
    SELECT coalesce(min(wanted.place), 1), count(*) <= 1
    INTO qi, v_plain
    FROM unnest(q_name) WITH ORDINALITY AS wanted (queue, place)
    CROSS JOIN LATERAL (
      SELECT true
      FROM {schema}.headgate_lane_group AS mine
      CROSS JOIN LATERAL (
        SELECT true
        FROM {schema}.headgate_lane AS lane
        WHERE lane.queue = wanted.queue AND lane.rate_class = mine.rate_class
          AND lane.sticky_worker = mine.sticky_worker AND lane.active AND NOT lane.parked
          AND lane.last_round >= mine.head_round
        LIMIT 1
      ) AS lane
      WHERE mine.queue = wanted.queue AND mine.sticky_worker IN ('', p_worker) AND mine.open
        AND mine.head_round IS NOT NULL
      LIMIT 1
    ) AS live;
  END IF;
  v_plain := v_plain
    AND (greatest(0, q_inflight[qi] - coalesce(q_freed[qi], 0)) + p_capacity > q_of_queue[qi]) IS NOT TRUE;
  IF v_plain AND nq > 0 THEN
    v_queue := q_name[qi];
    v_room := q_of_partition[qi];
    -- The window of the lanes without worker; an open group of the worker's own needs the long road.
    v_limit := least(p_capacity, greatest(p_quantum, 1));
    SELECT array_agg(n.tid) AS tids, array_agg(n.lane_key) AS keys, array_agg(n.partition_key) AS partitions,
      array_agg(n.rate_class) AS classes, array_agg(n.last_round) AS rounds, array_agg(n.before) AS befores,
      array_agg(n.part_tid) AS part_tids, array_agg(n.deficit) AS deficits, array_agg(n.inflight) AS inflights,
      array_agg(n.quantum_override) AS overrides, count(*) AS n, sum(n.inflight)::bigint AS running,
      bool_or(n.inflight >= 2) AS is_busy,
      bool_or(n.last_round <> n.part_round OR n.inflight >= v_room) AS is_wrong,
      ARRAY (
        SELECT mine.rate_class FROM {schema}.headgate_lane_group AS mine
        WHERE mine.queue = v_queue AND mine.sticky_worker = '' AND mine.open AND mine.head_round IS NOT NULL
        LIMIT p_window_spare + 1) AS groups,
      (SELECT true FROM {schema}.headgate_lane_group AS own
       CROSS JOIN LATERAL (
         SELECT true FROM {schema}.headgate_lane AS lane
         WHERE lane.queue = v_queue AND lane.rate_class = own.rate_class AND lane.sticky_worker = own.sticky_worker
           AND lane.active AND NOT lane.parked AND lane.last_round >= own.head_round LIMIT 1) AS pinned
       WHERE own.queue = v_queue AND own.sticky_worker = p_worker AND own.open AND own.head_round IS NOT NULL
         AND p_worker <> '' LIMIT 1) AS has_own
    INTO lanes
    FROM (
      SELECT lane.*, part.tid AS part_tid, part.deficit, part.inflight, part.last_round AS part_round,
        part.quantum_override, rank() OVER (ORDER BY lane.last_round) - 1 AS before
      FROM (
        SELECT picked.*, mine.rate_class
        FROM (
          SELECT known.rate_class, known.head_round
          FROM {schema}.headgate_lane_group AS known
          WHERE known.queue = v_queue AND known.sticky_worker = '' AND known.open AND known.head_round IS NOT NULL
          ORDER BY known.head_round, known.head_partition, known.head_served, known.rate_class
          LIMIT p_window_spare
        ) AS mine
        CROSS JOIN LATERAL (
          SELECT found.ctid AS tid, found.lane_key, found.partition_key, found.last_round, found.served_round
          FROM {schema}.headgate_lane AS found
          WHERE found.queue = v_queue AND found.rate_class = mine.rate_class AND found.sticky_worker = ''
            AND found.active AND NOT found.parked AND found.last_round >= mine.head_round
          ORDER BY found.last_round, found.partition_key
          LIMIT least(p_window_max, 2 * ((p_capacity + v_limit - 1) / v_limit) + p_window_spare)
        ) AS picked
        ORDER BY picked.last_round, picked.partition_key, picked.served_round, mine.rate_class
        LIMIT least(p_window_max, 2 * ((p_capacity + v_limit - 1) / v_limit) + p_window_spare)
      ) AS lane
      CROSS JOIN LATERAL (
        SELECT known.ctid AS tid, known.deficit, known.inflight, known.last_round, known.quantum_override
        FROM {schema}.headgate_partition AS known
        -- One row, by a walk that begins with its newest version: the others stay as long as anybody may see them.
        WHERE known.queue = v_queue
          AND known.partition_key >= lane.partition_key AND known.partition_key <= lane.partition_key
        ORDER BY known.partition_key DESC
        LIMIT 1
      ) AS part
      ORDER BY lane.last_round, lane.partition_key
    ) AS n;
    np := lanes.n;
    v_classes := CASE WHEN lanes.groups <@ ARRAY[''] THEN v_freed_class ELSE v_freed_class || lanes.groups END;
    IF np > 0 AND {schema}.headgate_bounds_follow(q_round[qi]) THEN
      UPDATE {schema}.headgate_lane_group AS mine
      SET head_round = first_of.last_round, head_partition = first_of.partition_key, head_served = 0
      FROM (
        SELECT DISTINCT ON (lane.rate_class) lane.*
        FROM unnest(lanes.classes, lanes.rounds, lanes.partitions) WITH ORDINALITY
          AS lane (rate_class, last_round, partition_key, nth)
        ORDER BY lane.rate_class, lane.nth
      ) AS first_of
      WHERE mine.rate_class = first_of.rate_class AND mine.queue = v_queue AND mine.sticky_worker = ''
        AND mine.head_round < first_of.last_round;
    END IF;
    v_alone := lanes.n = 1 AND p_quantum = 0 AND lanes.overrides[1] IS NULL AND first.has_quarantine IS NULL;
    v_plain := cardinality(lanes.groups) <= p_window_spare AND (lanes.has_own OR lanes.is_wrong) IS NOT TRUE;
    IF v_plain AND np > 0 THEN
      -- The account of a partition stands at its first lane, where its other lanes find it.
      l_part := ARRAY (SELECT generate_subscripts(lanes.keys, 1));
      IF cardinality(lanes.groups) > 1 THEN
        SELECT array_agg(lane.part), count(*) FILTER (WHERE lane.part = lane.nth),
          sum(lane.inflight) FILTER (WHERE lane.part = lane.nth)
        INTO l_part, np, lanes.running
        FROM (
          SELECT known.nth, known.inflight, min(known.nth) OVER (PARTITION BY known.partition_key) AS part
          FROM unnest(lanes.partitions, lanes.inflights) WITH ORDINALITY AS known (partition_key, inflight, nth)
          ORDER BY known.nth
        ) AS lane;
      END IF;
    END IF;
  END IF;

  IF v_plain AND v_alone THEN
    -- A partition alone may take it all.
    v_quantum := p_capacity;
    SELECT array_agg(1) AS lanes, array_agg(job.seq) AS seqs, array_agg(job.tid) AS tids,
      array_agg(job.weight) AS weights, NULL::integer[] AS others, NULL::integer[] AS other_weights
    INTO drawn
    FROM (
      SELECT ready.seq, ready.ctid AS tid, coalesce(ready.charge_weight, ready.weight) AS weight
      FROM {schema}.headgate_job AS ready
      WHERE ready.lane_key = lanes.keys[1] AND (ready.state = 'available' AND ready.gate_hold IS NULL) IS TRUE
        AND (ready.queue = v_queue AND ready.partition_key = lanes.partitions[1]
          AND ready.rate_class = lanes.classes[1] AND ready.sticky_worker = '') IS TRUE
      ORDER BY ready.priority DESC, ready.scheduled_at_ms, ready.seq
      LIMIT p_capacity
    ) AS job;
    v_plain := drawn.seqs IS NOT NULL
      AND (cardinality(drawn.seqs) > v_room - lanes.inflights[1]) IS NOT TRUE;
  ELSIF v_plain AND np > 0 THEN
    -- Where one job of each lane fills the capacity, three are drawn of each of the lanes that were served least recently,
    -- enough for a share with one round of saved credit; else as many as the shares allow and one more. More is drawn
    -- while that may hide what comes before it.
    v_quantum := CASE WHEN p_quantum = 0 THEN greatest(1, (p_capacity + np - 1) / np) ELSE p_quantum END;
    v_all := lanes.n <= 4;
    v_beyond := CASE WHEN v_all THEN p_capacity ELSE 1 END;
    v_most := CASE WHEN lanes.n >= p_capacity THEN 3 ELSE p_capacity END;
    LOOP
      SELECT array_agg(c.lane) FILTER (WHERE c.is_picked) AS lanes, array_agg(c.seq) FILTER (WHERE c.is_picked) AS seqs,
        array_agg(c.tid) FILTER (WHERE c.is_picked) AS tids, array_agg(c.weight) FILTER (WHERE c.is_picked) AS weights,
        array_agg(c.lane) FILTER (WHERE NOT c.is_picked) AS others,
        array_agg(c.weight) FILTER (WHERE NOT c.is_picked) AS other_weights,
        bool_or(c.seq IS NULL) AS is_gone,
        bool_or(c.is_quarantined OR (c.is_picked AND c.nth > c.room)) AS is_refused,
        count(*) FILTER (WHERE NOT c.is_over) AS within,
        bool_or(c.is_picked AND c.nth = least(c.share + v_beyond, v_most) AND c.nth < p_capacity) AS is_used_up,
        count(*) FILTER (WHERE c.nth = c.share + 1 AND c.before < p_capacity) AS refused
      INTO drawn
      FROM (
        SELECT merged.*,
          (NOT merged.is_over OR p_quantum = 0) AND row_number() OVER (
            ORDER BY merged.is_over, merged.is_noisy, merged.round, merged.priority DESC, merged.at_ms, merged.seq)
            <= p_capacity AS is_picked
        FROM (
          SELECT ready.*,
            count(*) FILTER (WHERE NOT ready.is_over) OVER (
              ORDER BY ready.is_noisy, ready.round, ready.priority DESC, ready.at_ms, ready.seq) AS before
          FROM (
            SELECT lane.nth::integer AS lane, lane.share, lane.room, lane.round, lane.is_noisy, job.*,
              row_number() OVER in_part AS nth, row_number() OVER in_part > lane.share AS is_over
            FROM (
              SELECT known.nth, known.lane_key, known.partition_key, known.rate_class, known.round, known.before,
                known.part, known.deficit + coalesce(known.override, v_quantum) AS share,
                v_room - known.inflight AS room,
                p_quantum = 0 AND np > 1 AND known.inflight >= 2
                  AND known.inflight * (np - 1) > 2 * (lanes.running - known.inflight) AS is_noisy
              FROM unnest(lanes.keys, lanes.partitions, lanes.classes, lanes.rounds, lanes.befores, l_part,
                lanes.deficits, lanes.overrides, lanes.inflights) WITH ORDINALITY
                AS known (lane_key, partition_key, rate_class, round, before, part, deficit, override, inflight, nth)
            ) AS lane
            LEFT JOIN LATERAL (
              SELECT next.seq, next.ctid AS tid, next.priority, next.scheduled_at_ms AS at_ms,
                coalesce(next.charge_weight, next.weight) AS weight,
                CASE WHEN first.has_quarantine THEN (
                  SELECT true FROM {schema}.headgate_quarantine AS quarantine
                  WHERE quarantine.fingerprint = next.fingerprint LIMIT 1) END AS is_quarantined
              FROM {schema}.headgate_job AS next
              WHERE next.lane_key = lane.lane_key AND (next.state = 'available' AND next.gate_hold IS NULL) IS TRUE
                AND (next.queue = v_queue AND next.partition_key = lane.partition_key
                  AND next.rate_class = lane.rate_class AND next.sticky_worker = '') IS TRUE
              ORDER BY next.priority DESC, next.scheduled_at_ms, next.seq
              LIMIT least(lane.share + v_beyond, v_most, p_capacity)
            ) AS job ON true
            WHERE v_all OR lane.before < p_capacity OR (p_quantum = 0 AND lanes.is_busy)
            WINDOW in_part AS (PARTITION BY lane.part ORDER BY job.priority DESC, job.at_ms, job.seq)
          ) AS ready
        ) AS merged
        ORDER BY merged.is_over, merged.is_noisy, merged.round, merged.priority DESC, merged.at_ms, merged.seq
      ) AS c;
      EXIT WHEN drawn.is_gone OR (drawn.is_used_up IS NOT TRUE AND (v_all OR drawn.within >= p_capacity));
      IF v_all AND v_most >= p_capacity THEN
        v_beyond := 4 * v_beyond;
      END IF;
      v_all := v_all OR drawn.within < p_capacity;
      v_most := p_capacity;
    END LOOP;
    v_refused := drawn.refused;
    v_plain := (drawn.is_gone OR drawn.is_refused) IS NOT TRUE;
  ELSIF v_plain AND v_classes IS NOT NULL THEN
    SELECT NULL::integer[] AS lanes, NULL::integer[] AS weights, NULL::integer[] AS others, NULL::integer[] AS other_weights
    INTO drawn;
  END IF;
  IF v_plain AND v_classes IS NOT NULL THEN
    -- All classes or none: whoever goes on to the whole decision waits for them there, in order, and must hold none.
    BEGIN
      v_locked := ARRAY (
        SELECT class.name
        FROM {schema}.headgate_rate_class AS class
        WHERE class.name = ANY (v_freed_class || ARRAY (
          SELECT lanes.classes[picked.lane] FROM unnest(drawn.lanes) AS picked (lane)))
        ORDER BY class.name
        FOR NO KEY UPDATE SKIP LOCKED);
      -- All claims bear this instant; whoever held the classes before may have refilled them after the one above.
      v_now := {schema}.headgate_now_ms();
      -- The groups of a paused class, and of one that its own ceiling fills, are not part of a window. What can never pass
      -- is held wherever it is met, beyond a share as well.
      WITH drawn_of AS MATERIALIZED (
        SELECT lanes.classes[each.lane] AS name, count(*) FILTER (WHERE each.is_picked) AS n,
          sum(each.weight) FILTER (WHERE each.is_picked) AS weight,
          max(each.weight) FILTER (WHERE NOT each.is_picked) AS beyond
        FROM (
          SELECT picked.lane, picked.weight, true AS is_picked
          FROM unnest(drawn.lanes, drawn.weights) AS picked (lane, weight)
          UNION ALL
          SELECT other.lane, other.weight, false
          FROM unnest(drawn.others, drawn.other_weights) AS other (lane, weight)
        ) AS each
        GROUP BY 1
      )
      SELECT bool_or(
          ((drawn_of.n > 0 OR class.name = ANY (v_freed_class)) AND class.name <> ALL (v_locked))
          OR (class.name = ANY (lanes.groups) AND (
            class.paused OR class.paused_until_ms > v_now OR budgets.is_short
            OR class.inflight - coalesce(v_freed_n[array_position(v_freed_class, class.name)], 0)
              + greatest(1, drawn_of.n) > (
                SELECT min(ceiling.max_concurrent) FROM {schema}.headgate_ceiling AS ceiling
                WHERE ceiling.queue = '' AND ceiling.rate_class = class.name)))) IS NOT TRUE,
        array_agg(class.name) FILTER (WHERE budgets.n > 0)
      INTO v_plain, v_charged
      FROM {schema}.headgate_rate_class AS class
      LEFT JOIN drawn_of ON drawn_of.name = class.name
      CROSS JOIN LATERAL (
        SELECT count(*) AS n, bool_or(drawn_of.beyond > budget.burst
          OR (drawn_of.weight > 0 AND drawn_of.weight > {schema}.headgate_units_at(
            budget.units, budget.limit_tokens, budget.window_ms, budget.burst, budget.refilled_at_ms, v_now)
            / budget.window_ms)) AS is_short
        FROM {schema}.headgate_budget AS budget
        WHERE budget.rate_class = class.name AND drawn_of.name IS NOT NULL
      ) AS budgets
      WHERE class.name = ANY (v_classes);
      IF NOT v_plain THEN
        RAISE lock_not_available;
      END IF;
    EXCEPTION WHEN lock_not_available THEN
      v_plain := false;
    END;
  END IF;

  IF v_plain AND np > 0 THEN
    RETURN QUERY
    UPDATE {schema}.headgate_job AS job
    SET state = 'running', lease_id = p_lease_id, lease_expires_at_ms = v_now + p_lease_ms, claimed_by = p_worker,
      claimed_at_ms = v_now, fence = job.fence + 1, rate_charge = held.charge, settled_lease_id = NULL,
      settled_outcome = NULL
    FROM (
      SELECT free.tid, picked.place,
        CASE WHEN lanes.classes[picked.lane] = ANY (v_charged) THEN picked.weight ELSE 0 END AS charge
      FROM unnest(drawn.tids, drawn.seqs, drawn.lanes, drawn.weights) WITH ORDINALITY
        AS picked (tid, seq, lane, weight, place)
      -- Row by row: a join of the two might begin with a walk over all jobs.
      CROSS JOIN LATERAL (
        SELECT known.ctid AS tid
        FROM {schema}.headgate_job AS known
        WHERE known.ctid = picked.tid AND known.seq = picked.seq
          AND (known.gate_hold IS NULL AND known.state = 'available') IS TRUE
        FOR UPDATE SKIP LOCKED
      ) AS free
      OFFSET 0
    ) AS held
    WHERE job.ctid = held.tid
    RETURNING held.place::integer, NULL::bigint, NULL::integer, NULL::integer, NULL::integer,
      NULL::integer, NULL::bigint[], job.id, job.kind, job.schema_version, job.payload, job.queue, job.partition_key,
      job.rate_class, job.weight, job.fingerprint, job.priority, job.attempt, job.crash_attempt, job.max_attempts,
      job.scheduled_at_ms, job.timeout_ms, job.deadline_ms, job.retention_ms, job.unique_key, job.unique_states,
      job.periodic_schedule_id, job.periodic_tick_ms, job.headers,
      CASE WHEN first.has_tags THEN ARRAY (
        SELECT tag.tag FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = job.seq ORDER BY tag.tag)
        ELSE ARRAY[]::text[] END,
      job.sticky_worker, job.fence, job.lease_expires_at_ms, job.claimed_at_ms, job.checkpoint, job.cursor_data,
      job.charge_weight;
    GET DIAGNOSTICS v_claims = ROW_COUNT;
    nd := cardinality(drawn.lanes);
    IF v_claims = 0 AND nd > 0 THEN
      -- All of them are in the hands of others, who must not hold up what is behind.
      v_plain := false;
      v_left_out := drawn.seqs;
    END IF;
  END IF;

  IF NOT v_plain THEN
    RETURN QUERY
    SELECT whole.*
    FROM {schema}.headgate_admit_under_policies(
      p_worker, p_lease_id, p_queues, p_capacity, p_lease_ms, p_quantum, p_window_max, p_window_spare, p_window_draws,
      p_deficit_cap, p_ledger_lag, p_fold_max, p_hold_max, p_lock_wait_ms, p_busy_ms, q_name, q_weight, q_dispatch,
      q_round, q_inflight, q_freed, v_closed_until IS NOT NULL, v_asleep, first.has_quarantine IS TRUE,
      first.has_tags IS TRUE, v_has_ceilings, v_taken, v_horizon, coalesce(v_freed_class, ARRAY[]::text[]),
      coalesce(v_freed_n, ARRAY[]::bigint[]), v_now, v_left_out) AS whole;
    RETURN;
  END IF;

  IF np > 0 THEN
    IF v_claims < nd THEN
      -- Rows that changed after they were read are left to a later call.
      SELECT coalesce(array_agg(picked.lane ORDER BY picked.place), ARRAY[]::integer[]),
        coalesce(array_agg(picked.weight ORDER BY picked.place), ARRAY[]::integer[])
      INTO drawn.lanes, drawn.weights
      FROM unnest(drawn.lanes, drawn.weights, drawn.seqs) WITH ORDINALITY AS picked (lane, weight, seq, place)
      CROSS JOIN LATERAL (
        SELECT job.state, job.lease_id, job.claimed_at_ms
        FROM {schema}.headgate_job AS job
        WHERE job.seq = picked.seq
        LIMIT 1
      ) AS job
      WHERE job.state = 'running' AND job.lease_id = p_lease_id AND job.claimed_at_ms = v_now;
    END IF;
    v_left := ARRAY (SELECT lanes.tids[other.lane] FROM unnest(drawn.others) AS other (lane));
    p_taken := array_fill(0, ARRAY[cardinality(l_part)]);
    FOREACH li IN ARRAY drawn.lanes LOOP
      pi := l_part[li];
      p_taken[pi] := p_taken[pi] + 1;
    END LOOP;
    IF v_claims > 0 THEN
      -- A lane is laid to rest only by a look that found it empty after everything announced was folded. One of which
      -- more was drawn than taken needs no look. The other lanes of a partition follow it, or they would be out of date.
      WITH served AS (
        UPDATE {schema}.headgate_lane AS lane
        SET last_round = q_round[qi] + 1, parked = coalesce(done.inflight >= q_parks[qi], false),
          served_round = CASE WHEN done.nth = ANY (drawn.lanes) THEN q_round[qi] + 1 ELSE lane.served_round END,
          active = CASE WHEN lane.ctid = ANY (v_left) THEN true ELSE (
            SELECT true
            FROM {schema}.headgate_job AS job
            WHERE job.lane_key = lane.lane_key AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
              AND (job.queue = lane.queue AND job.partition_key = lane.partition_key
                AND job.rate_class = lane.rate_class AND job.sticky_worker = lane.sticky_worker) IS TRUE
            ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
            LIMIT 1) IS NOT NULL END
        FROM (
          SELECT known.tid, known.nth, known.inflight + p_taken[known.part] AS inflight
          FROM unnest(lanes.tids, l_part, lanes.inflights) WITH ORDINALITY AS known (tid, part, inflight, nth)
          WHERE p_taken[known.part] > 0
        ) AS done
        WHERE lane.ctid = done.tid
        RETURNING lane.partition_key, lane.active
      )
      SELECT array_agg(served.partition_key) FILTER (WHERE NOT served.active) INTO v_rested FROM served;
      IF v_rested IS NOT NULL THEN
        -- A partition without work, in lanes of other classes and workers either, loses its credit.
        v_empty := ARRAY (
          SELECT rested.partition_key
          FROM unnest(v_rested) AS rested (partition_key)
          LEFT JOIN LATERAL (
            SELECT true AS found
            FROM {schema}.headgate_lane AS lane
            CROSS JOIN LATERAL (
              SELECT job.seq
              FROM {schema}.headgate_job AS job
              WHERE job.lane_key = lane.lane_key AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
                AND (job.queue = lane.queue AND job.partition_key = lane.partition_key
                  AND job.rate_class = lane.rate_class AND job.sticky_worker = lane.sticky_worker) IS TRUE
              ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
              LIMIT 1
            ) AS job
            WHERE lane.queue = v_queue AND lane.partition_key = rested.partition_key AND lane.active
            LIMIT 1
          ) AS other ON true
          WHERE other.found IS NULL);
      END IF;
    END IF;
  END IF;
  IF cardinality(v_locked) > 0 THEN
    WITH spent AS MATERIALIZED (
      SELECT lanes.classes[kept.lane] AS name, count(*) AS n, sum(kept.weight) AS weight
      FROM unnest(drawn.lanes, drawn.weights) AS kept (lane, weight)
      GROUP BY 1
    ),
    paid AS (
      UPDATE {schema}.headgate_budget AS budget
      SET units = {schema}.headgate_units_at(
          budget.units, budget.limit_tokens, budget.window_ms, budget.burst, budget.refilled_at_ms, v_now)
          - spent.weight * budget.window_ms,
        refilled_at_ms = greatest(budget.refilled_at_ms, v_now)
      FROM spent
      WHERE budget.rate_class = spent.name AND spent.weight > 0
    )
    UPDATE {schema}.headgate_rate_class AS class
    SET inflight = greatest(0, class.inflight - coalesce(v_freed_n[array_position(v_freed_class, class.name)], 0))
      + coalesce((SELECT spent.n FROM spent WHERE spent.name = class.name), 0)
    WHERE class.name = ANY (v_locked);
  END IF;
  IF np > 0 OR q_freed[qi] > 0 THEN
    WITH accounted AS (
      UPDATE {schema}.headgate_partition AS part
      SET deficit = done.deficit, inflight = part.inflight + done.taken,
        last_round = CASE WHEN done.taken > 0 THEN q_round[qi] + 1 ELSE part.last_round END
      FROM (
        SELECT p.tid, p_taken[p.nth] AS taken, p.deficit AS before,
          CASE WHEN p.key = ANY (v_empty) THEN 0
            ELSE greatest(0, least(
              p.deficit + coalesce(p.override, v_quantum) - p_taken[p.nth],
              p_deficit_cap * coalesce(p.override, v_quantum)::bigint)) END AS deficit
        FROM unnest(lanes.part_tids, l_part, lanes.deficits, lanes.overrides, lanes.partitions) WITH ORDINALITY
          AS p (tid, part, deficit, override, key, nth)
        WHERE p.part = p.nth
      ) AS done
      WHERE part.ctid = done.tid AND (done.taken > 0 OR done.deficit <> done.before)
    )
    UPDATE {schema}.headgate_queue AS queue
    SET inflight = greatest(0, queue.inflight - coalesce(q_freed[qi], 0)) + v_claims,
      dispatch_count = CASE WHEN v_claims > 0 THEN q_dispatch[qi] + v_claims ELSE queue.dispatch_count END, round = queue.round + (v_claims > 0)::integer,
      inbox_from = coalesce(v_horizon, queue.inbox_from)
    WHERE queue.queue = v_queue AND (v_claims > 0 OR q_freed[qi] > 0);
    IF NOT FOUND AND v_claims > 0 THEN
      INSERT INTO {schema}.headgate_queue (queue, dispatch_count, round, inflight)
      VALUES (v_queue, q_dispatch[qi] + v_claims, 1, v_claims);
    END IF;
  END IF;
  IF nq > 1 AND v_news THEN
    UPDATE {schema}.headgate_queue AS queue
    SET inflight = greatest(0, queue.inflight - other.freed), inbox_from = coalesce(v_horizon, queue.inbox_from)
    FROM unnest(q_name, q_freed) WITH ORDINALITY AS other (queue, freed, place)
    WHERE queue.queue = other.queue AND other.freed > 0 AND other.place <> qi;
  END IF;

  IF nd = 0 AND v_taken >= p_fold_max THEN
    -- What would have been admitted may be announced behind the rows that were folded.
    RETURN QUERY
    SELECT again.*
    FROM {schema}.headgate_admit(
      p_worker, p_lease_id, p_queues, p_capacity, p_lease_ms, p_quantum, p_window_max, p_window_spare, p_window_draws,
      p_deficit_cap, p_ledger_lag, 4 * p_fold_max, p_hold_max, p_lock_wait_ms, p_busy_ms) AS again;
    RETURN;
  END IF;
  IF nd >= p_capacity THEN
    IF v_asleep > 0 THEN
      DELETE FROM {schema}.headgate_sleeper AS sleeper
      WHERE sleeper.queue = ANY (p_queues) AND sleeper.worker = p_worker;
    END IF;
  ELSIF v_asleep < cardinality(p_queues) THEN
    INSERT INTO {schema}.headgate_sleeper (queue, worker, slept_at_ms)
    SELECT wanted.queue, p_worker, {schema}.headgate_now_ms()
    FROM unnest(p_queues) AS wanted (queue)
    ON CONFLICT DO NOTHING;
  END IF;
  facts := ROW(0,
    CASE WHEN v_closed_until IS NOT NULL THEN {schema}.headgate_reopens_in(
      q_name, q_parks, p_worker, p_window_spare, v_now, ARRAY[]::bigint[]) END,
    0, 0, v_refused, 0, ARRAY[]::bigint[], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
      NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
  RETURN NEXT facts;

END $$;

-- Mark rows that an admission passed over, so that later calls do not meet them again.
--
-- Runs after the admission has committed, in a transaction of its own: rows refused by policy must not stay locked.
-- Arguments: seqs of the rows; how long to wait for a reason's row.
-- Returns:   how many rows were marked; 0 when the reason's row was busy.
-- Locks:     the rows of the reasons, shared, so that a release or a new limit cannot cross; then job rows with SKIP LOCKED.
CREATE FUNCTION {schema}.headgate_mark_holds(p_seqs bigint[], p_lock_wait_ms integer) RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_prints text[];
  v_classes text[];
  v_marked bigint;
BEGIN
  SELECT array_agg(job.fingerprint), array_agg(job.rate_class)
  INTO v_prints, v_classes
  FROM {schema}.headgate_job AS job
  WHERE job.seq = ANY (p_seqs);
  PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
  BEGIN
    PERFORM FROM {schema}.headgate_quarantine AS quarantine
    WHERE quarantine.fingerprint = ANY (v_prints)
    ORDER BY quarantine.fingerprint
    FOR SHARE;
    PERFORM FROM {schema}.headgate_rate_class AS class
    WHERE class.name = ANY (v_classes)
    ORDER BY class.name
    FOR SHARE;
  EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
  END;
  WITH free AS MATERIALIZED (
    SELECT job.ctid AS tid, job.fingerprint, job.rate_class, coalesce(job.charge_weight, job.weight) AS weight
    FROM {schema}.headgate_job AS job
    -- A fingerprint that changed meanwhile is another reason, whose row is not held.
    WHERE job.seq = ANY (p_seqs) AND job.state = 'available' AND job.gate_hold IS NULL
      AND job.fingerprint = ANY (v_prints)
    FOR UPDATE SKIP LOCKED
  ),
  judged AS MATERIALIZED (
    SELECT free.tid,
      CASE
        WHEN (SELECT true FROM {schema}.headgate_quarantine AS quarantine
              WHERE quarantine.fingerprint = free.fingerprint LIMIT 1) THEN 'quarantine'
        WHEN (SELECT true FROM {schema}.headgate_budget AS budget
              WHERE budget.rate_class = free.rate_class AND budget.burst < free.weight LIMIT 1) THEN 'oversize'
      END AS reason
    FROM free
  )
  UPDATE {schema}.headgate_job AS job
  SET gate_hold = judged.reason
  FROM judged
  WHERE job.ctid = judged.tid AND judged.reason IS NOT NULL;
  GET DIAGNOSTICS v_marked = ROW_COUNT;
  RETURN v_marked;
END $$;
