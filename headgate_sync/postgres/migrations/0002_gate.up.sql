-- The admission gate: its tables, and the functions that decide.
--
-- Rows of queue, partition, lane and lane_group are written only by the holder of the queue's lock. Everybody else
-- appends to headgate_inbox in the transaction of the job change, so that neither a producer nor an ack ever waits for
-- an admission. Unfolded rows make occupancy too high and never too low.
--
-- Order of locks: queues (sorted by lock key), rate classes (sorted by name; a class row guards its budgets), job rows
-- with SKIP LOCKED. Marking takes the row of the reason first, then job rows with SKIP LOCKED.
--
-- Every function reads after it has locked, in a later statement: under READ COMMITTED a statement sees what was
-- committed before it began, so that a waiter decides on what the previous holder left.
--
-- The settings on the functions keep the plans independent of statistics: a queue that was loaded and never analysed
-- must not change how rows are found. Sets of rows travel between statements as arrays, and rows already locked or
-- owned are written by their ctid, which no plan can turn into a scan of the table. LIMIT 1 in a LATERAL subquery
-- forces the look-up by key for the same reason. A look for ready jobs names its lane in one condition that no index
-- answers but the ready one by the key of the lane, and in the order of that index.

CREATE TABLE {schema}.headgate_queue (
  queue text COLLATE "C" PRIMARY KEY,
  paused boolean NOT NULL DEFAULT false,
  weight bigint NOT NULL DEFAULT 1,
  dispatch_count bigint NOT NULL DEFAULT 0,
  round bigint NOT NULL DEFAULT 0,
  inflight bigint NOT NULL DEFAULT 0,
  -- Of the inbox, nothing is left of transactions before this one; see headgate_admit.
  inbox_from xid8 NOT NULL DEFAULT '0',
  -- One constraint and not several, here and below: each is prepared anew for each statement.
  CHECK (weight >= 1 AND dispatch_count >= 0)
) WITH (fillfactor = 10);

CREATE TABLE {schema}.headgate_partition (
  queue text COLLATE "C" NOT NULL,
  partition_key text COLLATE "C" NOT NULL,
  deficit bigint NOT NULL DEFAULT 0,
  inflight bigint NOT NULL DEFAULT 0,
  last_round bigint NOT NULL DEFAULT 0,
  quantum_override integer,
  idle_since_ms bigint,
  idle_round bigint,
  -- Looks begin with the newest of the entries of a key, which a list of them would hide.
  PRIMARY KEY (queue, partition_key) WITH (deduplicate_items = off),
  CHECK (deficit >= 0 AND inflight >= 0 AND quantum_override >= 1)
) WITH (
  fillfactor = 60, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);

-- idle_since_ms, idle_round: since when the upkeep has found no work, while the partition's round stood still.

-- A lane is the set of available jobs of one queue, partition, rate class and sticky worker.
-- active: it may have a ready job; false means that it has none that is not announced in the inbox.
-- parked: a ceiling of its partition is full. last_round: the partition's, or an earlier value of it.
-- served_round: when a job of the lane itself was decided last; among the lanes of a partition, who waited longest comes first.
--
-- That there is one row of each is the work of the queue's lock, under which alone lanes are added. The key ends with the
-- round: an update puts a new entry into each index, and a key without it would have to pass the entries of all earlier
-- versions of its row each time, which are many while an old snapshot keeps them.
CREATE TABLE {schema}.headgate_lane (
  queue text COLLATE "C" NOT NULL,
  partition_key text COLLATE "C" NOT NULL,
  rate_class text COLLATE "C" NOT NULL,
  sticky_worker text COLLATE "C" NOT NULL,
  lane_key bigint NOT NULL,
  active boolean NOT NULL,
  parked boolean NOT NULL DEFAULT false,
  last_round bigint NOT NULL,
  served_round bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, partition_key, rate_class, sticky_worker, last_round)
) WITH (
  autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);

CREATE INDEX headgate_lane_pick ON {schema}.headgate_lane
  (queue, rate_class, sticky_worker, last_round, partition_key) WHERE active AND NOT parked;

-- The lanes of one queue, rate class and sticky worker; a class that cannot pass is closed here in one row.
-- (head_round, head_partition, head_served): a lower bound for the first lane that can be picked; null when there is none.
-- open_at_ms: when a closed group opens by itself; null for never.
CREATE TABLE {schema}.headgate_lane_group (
  rate_class text COLLATE "C" NOT NULL,
  queue text COLLATE "C" NOT NULL,
  sticky_worker text COLLATE "C" NOT NULL,
  open boolean NOT NULL,
  open_at_ms bigint,
  head_round bigint,
  head_partition text COLLATE "C",
  head_served bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (rate_class, queue, sticky_worker),
  CHECK ((head_round IS NULL) = (head_partition IS NULL) AND (open_at_ms IS NULL OR NOT open))
) WITH (fillfactor = 50);

CREATE INDEX headgate_lane_group_open ON {schema}.headgate_lane_group
  (queue, sticky_worker, head_round, head_partition, head_served, rate_class) WHERE open AND head_round IS NOT NULL;
CREATE INDEX headgate_lane_group_closed ON {schema}.headgate_lane_group (queue, open_at_ms) WHERE NOT open;

-- A class without budgets is only a marker: it can be paused, and it counts running jobs, but limits nothing.
CREATE TABLE {schema}.headgate_rate_class (
  name text COLLATE "C" PRIMARY KEY CHECK (name <> ''),
  paused boolean NOT NULL DEFAULT false,
  paused_until_ms bigint,
  pause_reason text COLLATE "C" NOT NULL DEFAULT '',
  inflight bigint NOT NULL DEFAULT 0 CHECK (inflight >= 0)
) WITH (fillfactor = 50);

-- units: one token is window_ms units, so that a refill never divides; negative while the class is in debt.
CREATE TABLE {schema}.headgate_budget (
  rate_class text COLLATE "C" NOT NULL,
  slot smallint NOT NULL CHECK (slot BETWEEN 0 AND 3),
  limit_tokens bigint NOT NULL CHECK (limit_tokens >= 0),
  window_ms bigint NOT NULL CHECK (window_ms >= 1),
  burst bigint NOT NULL CHECK (burst >= 1),
  units bigint NOT NULL,
  refilled_at_ms bigint NOT NULL,
  PRIMARY KEY (rate_class, slot)
) WITH (fillfactor = 50);

CREATE TABLE {schema}.headgate_ceiling (
  name text COLLATE "C" PRIMARY KEY CHECK (name <> ''),
  scope text COLLATE "C" NOT NULL CHECK (scope IN ('partition', 'queue', 'class')),
  queue text COLLATE "C" NOT NULL,
  rate_class text COLLATE "C" NOT NULL,
  max_concurrent integer NOT NULL CHECK (max_concurrent >= 1),
  on_saturated text COLLATE "C" NOT NULL
    CHECK (on_saturated IN ('queue', 'discard', 'cancel_incoming', 'cancel_running')),
  CHECK ((scope = 'class') = (rate_class <> '') AND (scope = 'class') = (queue = ''))
);
CREATE INDEX headgate_ceiling_lookup ON {schema}.headgate_ceiling (queue, rate_class);

CREATE TABLE {schema}.headgate_quarantine (
  fingerprint text COLLATE "C" PRIMARY KEY CHECK (fingerprint <> ''),
  kind text COLLATE "C" NOT NULL,
  crash_count integer NOT NULL,
  quarantined_at_ms bigint NOT NULL,
  sample_payload bytea NOT NULL,
  reason text COLLATE "C" NOT NULL
);
CREATE INDEX headgate_quarantine_newest ON {schema}.headgate_quarantine (quarantined_at_ms, fingerprint);

-- kind r: the lane may have got ready work. g: it may have lost its last ready job. f: n jobs of queue, partition and
-- class left running. o: the class reopened in this queue. c: like f, for the class alone (an admission that could not
-- lock the class).
CREATE TABLE {schema}.headgate_inbox (
  queue text COLLATE "C" NOT NULL,
  xid xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
  ev bigint GENERATED ALWAYS AS IDENTITY,
  -- One constant (the escapes are braces): a CHECK is parsed anew for each statement, and a list of five is five nodes.
  kind text COLLATE "C" NOT NULL CHECK (kind = ANY (E'\x7br,g,f,o,c\x7d'::text[])),
  partition_key text COLLATE "C" NOT NULL DEFAULT '',
  rate_class text COLLATE "C" NOT NULL DEFAULT '',
  sticky_worker text COLLATE "C" NOT NULL DEFAULT '',
  lane_key bigint NOT NULL DEFAULT 0,
  n integer NOT NULL DEFAULT 1,
  PRIMARY KEY (queue, xid, ev)
) WITH (
  autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);

-- For the classes that a ceiling of their own limits: their running jobs may be freed in any queue.
CREATE INDEX headgate_inbox_class ON {schema}.headgate_inbox (rate_class)
  WHERE rate_class <> '' AND kind IN ('c', 'f');

-- Whoever takes a ready job out of its lane says so, whatever the statement; the gate's own claims need not.
CREATE FUNCTION {schema}.headgate_announce_gone() RETURNS trigger
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  AS $$
BEGIN
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key)
  VALUES (OLD.queue, 'g', OLD.partition_key, OLD.rate_class, OLD.sticky_worker, OLD.lane_key);
  RETURN NULL;
END $$;
CREATE TRIGGER headgate_job_unready AFTER UPDATE ON {schema}.headgate_job
  FOR EACH ROW
  WHEN (OLD.state = 'available' AND OLD.gate_hold IS NULL
    AND NEW.state <> 'running' AND (NEW.state <> 'available' OR NEW.gate_hold IS NOT NULL))
  EXECUTE FUNCTION {schema}.headgate_announce_gone();
CREATE TRIGGER headgate_job_removed AFTER DELETE ON {schema}.headgate_job
  FOR EACH ROW
  WHEN (OLD.state = 'available' AND OLD.gate_hold IS NULL)
  EXECUTE FUNCTION {schema}.headgate_announce_gone();

-- Workers whose newest admission of the queue found nothing. A worker that ended asleep leaves its row behind; while it
-- stands each commit of work pays for a notification, so rows are swept by age. One that lives records itself again.
CREATE TABLE {schema}.headgate_sleeper (
  queue text COLLATE "C" NOT NULL,
  worker text COLLATE "C" NOT NULL,
  slept_at_ms bigint NOT NULL,
  PRIMARY KEY (queue, worker)
);

-- How far the upkeep has come; always one row.
CREATE TABLE {schema}.headgate_gate_place (
  queue text COLLATE "C" NOT NULL,
  partition_key text COLLATE "C" NOT NULL,
  lane_key bigint NOT NULL
) WITH (fillfactor = 10);
INSERT INTO {schema}.headgate_gate_place VALUES ('', '', -9223372036854775808);

-- One row of an admission. ordinal above 0: claims; it counts the decisions, jobs that were sent away included. ordinal -2
-- and -3: how many jobs of a queue full ceilings cancelled and discarded (refused_concurrency_limit). ordinal 0, always
-- present and last: the facts of the call, which are null in the claims.
CREATE TYPE {schema}.headgate_admission AS (
  ordinal integer,
  retry_after_ms bigint,
  refused_rate_class integer,
  refused_concurrency_limit integer,
  refused_fairness integer,
  refused_quarantine integer,
  passed_over bigint[],
  id text,
  kind text,
  schema_version integer,
  payload bytea,
  queue text,
  partition_key text,
  rate_class text,
  weight integer,
  fingerprint text,
  priority integer,
  attempt integer,
  crash_attempt integer,
  max_attempts integer,
  scheduled_at_ms bigint,
  timeout_ms bigint,
  deadline_ms bigint,
  retention_ms bigint,
  unique_key bytea,
  unique_states integer,
  periodic_schedule_id text,
  periodic_tick_ms bigint,
  headers jsonb,
  tags text[],
  sticky_worker text,
  fence bigint,
  lease_expires_at_ms bigint,
  claimed_at_ms bigint,
  checkpoint jsonb,
  cursor_data bytea,
  charge_weight integer
);

-- The key of a queue's advisory lock. An advisory lock and not a row lock: waiters queue in order, and an admission
-- that decides nothing writes nothing. The row type's oid keeps schemas apart.
CREATE FUNCTION {schema}.headgate_queue_key(p_queue text) RETURNS bigint
  LANGUAGE sql STABLE
  AS $$ SELECT hashtextextended(p_queue, pg_typeof(NULL::{schema}.headgate_queue)::oid::bigint) $$;

-- Wait for the locks of queues until the end of the transaction, in the one order that everybody uses.
CREATE FUNCTION {schema}.headgate_lock_queues(p_queues text[]) RETURNS void
  LANGUAGE plpgsql VOLATILE
  AS $$
DECLARE
  v_key bigint;
BEGIN
  FOR v_key IN
    SELECT DISTINCT {schema}.headgate_queue_key(wanted.queue)
    FROM unnest(p_queues) AS wanted (queue)
    ORDER BY 1
  LOOP
    PERFORM pg_advisory_xact_lock(v_key);
  END LOOP;
END $$;

-- Balance of a budget at an instant: limit units are gained per millisecond up to the burst. The division only asks
-- whether the cap is reached, which keeps every product within bigint; nothing is rounded. A clock that stepped back
-- gains nothing.
CREATE FUNCTION {schema}.headgate_units_at(
  p_units bigint, p_limit bigint, p_window_ms bigint, p_burst bigint, p_refilled_at_ms bigint, p_now_ms bigint)
  RETURNS bigint
  LANGUAGE sql IMMUTABLE
  AS $$
SELECT CASE
  WHEN p_now_ms <= p_refilled_at_ms OR p_limit = 0 THEN p_units
  WHEN p_now_ms - p_refilled_at_ms > (p_burst * p_window_ms - 1 - p_units) / p_limit THEN p_burst * p_window_ms
  ELSE p_units + (p_now_ms - p_refilled_at_ms) * p_limit
END $$;

-- Bring groups up to date with lanes that became pickable: create them, or lower their heads. A new group is closed
-- while its class is closed in the queue. The caller holds the locks of the queues.
-- Arguments: queue, class, worker, round and partition of each lane.
-- Rows:      one: how many groups were made or lowered.
CREATE FUNCTION {schema}.headgate_lower_heads(
  p_queues text[], p_classes text[], p_stickies text[], p_rounds bigint[], p_partitions text[])
  RETURNS bigint
  LANGUAGE sql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
WITH lowered AS (
  INSERT INTO {schema}.headgate_lane_group AS lane_group
    (rate_class, queue, sticky_worker, open, open_at_ms, head_round, head_partition)
  SELECT first.rate_class, first.queue, first.sticky_worker, closed.rate_class IS NULL, closed.open_at_ms,
    first.last_round, first.partition_key
  FROM (
    SELECT DISTINCT ON (entry.queue, entry.rate_class, entry.sticky_worker) entry.*
    FROM unnest(p_queues, p_classes, p_stickies, p_rounds, p_partitions)
      AS entry (queue, rate_class, sticky_worker, last_round, partition_key)
    ORDER BY entry.queue, entry.rate_class, entry.sticky_worker, entry.last_round, entry.partition_key COLLATE "C"
  ) AS first
  LEFT JOIN LATERAL (
    SELECT known.head_round, known.head_partition
    FROM {schema}.headgate_lane_group AS known
    WHERE known.rate_class = first.rate_class AND known.queue = first.queue
      AND known.sticky_worker = first.sticky_worker
    LIMIT 1
  ) AS stored ON true
  LEFT JOIN LATERAL (
    SELECT sibling.rate_class, sibling.open_at_ms
    FROM {schema}.headgate_lane_group AS sibling
    WHERE sibling.rate_class = first.rate_class AND sibling.queue = first.queue AND NOT sibling.open
    LIMIT 1
  ) AS closed ON true
  WHERE stored.head_round IS NULL
    OR (first.last_round, first.partition_key) < (stored.head_round, stored.head_partition)
  ON CONFLICT (rate_class, queue, sticky_worker)
  DO UPDATE SET head_round = excluded.head_round, head_partition = excluded.head_partition, head_served = 0
  RETURNING 1
)
SELECT count(*) FROM lowered
$$;

-- How many running jobs park the lanes of a partition of that queue; null when no ceiling does.
CREATE FUNCTION {schema}.headgate_parks(p_queue text) RETURNS integer
  LANGUAGE sql STABLE
  AS $$
SELECT min(ceiling.max_concurrent)
FROM {schema}.headgate_ceiling AS ceiling
WHERE ceiling.queue = p_queue AND ceiling.scope = 'partition' AND ceiling.on_saturated = 'queue'
$$;

-- Clear the marks of the lanes of partitions that are below their ceilings again. The caller holds the locks of the
-- queues.
CREATE FUNCTION {schema}.headgate_unpark(p_queues text[], p_partitions text[]) RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  u_queue text[];
  u_class text[];
  u_sticky text[];
  u_round bigint[];
  u_partition text[];
BEGIN
  WITH parked AS MATERIALIZED (
    SELECT lane.tid, part.last_round
    FROM unnest(p_queues, p_partitions) AS freed (queue, partition_key)
    CROSS JOIN LATERAL (
      SELECT found.last_round
      FROM {schema}.headgate_partition AS found
      WHERE found.queue = freed.queue
        AND found.partition_key >= freed.partition_key AND found.partition_key <= freed.partition_key
      ORDER BY found.partition_key DESC
      LIMIT 1
    ) AS part
    CROSS JOIN LATERAL (
      SELECT found.ctid AS tid
      FROM {schema}.headgate_lane AS found
      WHERE found.queue = freed.queue AND found.partition_key = freed.partition_key AND found.parked
      OFFSET 0
    ) AS lane
  ),
  changed AS (
    UPDATE {schema}.headgate_lane AS lane
    SET parked = false, last_round = parked.last_round
    FROM parked
    WHERE lane.ctid = parked.tid
    RETURNING lane.queue, lane.rate_class, lane.sticky_worker, lane.last_round, lane.partition_key
  )
  SELECT array_agg(changed.queue), array_agg(changed.rate_class), array_agg(changed.sticky_worker),
    array_agg(changed.last_round), array_agg(changed.partition_key)
  INTO u_queue, u_class, u_sticky, u_round, u_partition
  FROM changed;
  IF u_queue IS NOT NULL THEN
    PERFORM {schema}.headgate_lower_heads(u_queue, u_class, u_sticky, u_round, u_partition);
  END IF;
END $$;

-- Take appended rows into lanes and counters; the caller holds the locks of the queues.
-- Arguments: queues; for each the transaction from which it is read, oldest first, and up to how many rows; how many
--            running jobs park the lanes of a partition, null where nothing does.
-- Rows:      how many rows were taken; per queue how many jobs left running, null for none (the caller owns that counter,
--            for it will write the queue's row anyway); per class the same (the caller must lock the classes first).
-- The settings are those of the caller.
CREATE FUNCTION {schema}.headgate_fold(
  p_queues text[], p_since xid8[], p_limit integer, p_parks integer[],
  OUT taken integer, OUT freed bigint[], OUT classes text[], OUT class_freed bigint[])
  LANGUAGE plpgsql VOLATILE
  AS $$
DECLARE
  v_rest text[];
  v_frees boolean;
  v_opens boolean;
  v_ready boolean;
  v_gone boolean;
  r_queue text[];
  r_partition text[];
  r_class text[];
  r_sticky text[];
  r_key bigint[];
  r_tid tid[];
  r_round bigint[];
  v_missing boolean;
  v_lowers boolean;
  u_queue text[];
  u_partition text[];
BEGIN
  -- Most rows only count exits, so that these are done with at once; the others are kept as rows of text.
  WITH oldest AS MATERIALIZED (
    SELECT entry.tid
    FROM unnest(p_queues, p_since) AS wanted (queue, since)
    CROSS JOIN LATERAL (
      SELECT inbox.ctid AS tid
      FROM {schema}.headgate_inbox AS inbox
      WHERE inbox.queue = wanted.queue AND inbox.xid >= wanted.since
      ORDER BY inbox.xid, inbox.ev
      LIMIT p_limit
    ) AS entry
  ),
  gone AS (
    DELETE FROM {schema}.headgate_inbox AS inbox
    WHERE inbox.ctid = ANY (ARRAY (SELECT oldest.tid FROM oldest))
    RETURNING inbox.kind, inbox.queue, inbox.partition_key, inbox.rate_class, inbox.sticky_worker, inbox.lane_key,
      inbox.n
  ),
  emptied AS (
    UPDATE {schema}.headgate_partition AS part
    SET inflight = greatest(0, part.inflight - exits.n)
    FROM (
      SELECT (
          SELECT found.ctid
          FROM {schema}.headgate_partition AS found
          WHERE found.queue = gone.queue
            AND found.partition_key >= gone.partition_key AND found.partition_key <= gone.partition_key
          ORDER BY found.partition_key DESC  -- its newest version first; see headgate_admit
          LIMIT 1
        ) AS tid,
        sum(gone.n) AS n
      FROM gone
      WHERE gone.kind = 'f'
      GROUP BY gone.queue, gone.partition_key
    ) AS exits
    WHERE part.ctid = exits.tid
    RETURNING part.queue, part.partition_key, part.inflight, exits.n, p_parks[array_position(p_queues, part.queue)] AS cap
  ),
  opened AS (
    SELECT array_agg(emptied.queue) AS queues, array_agg(emptied.partition_key) AS partitions
    FROM emptied
    WHERE emptied.inflight < emptied.cap AND emptied.inflight + emptied.n >= emptied.cap
  )
  SELECT count(*), ARRAY[sum(gone.n) FILTER (WHERE gone.kind = 'f')], bool_or(gone.kind = 'f'),
    bool_or(gone.kind = 'o'), bool_or(gone.kind = 'r'), bool_or(gone.kind = 'g'),
    array_agg(ARRAY[gone.kind, gone.queue, gone.partition_key, gone.rate_class, gone.sticky_worker, gone.lane_key::text,
      gone.n::text]) FILTER (WHERE gone.kind <> 'f' OR gone.rate_class <> '' OR cardinality(p_queues) > 1),
    (SELECT opened.queues FROM opened), (SELECT opened.partitions FROM opened)
  INTO taken, freed, v_frees, v_opens, v_ready, v_gone, v_rest, u_queue, u_partition
  FROM gone;
  IF u_queue IS NOT NULL THEN
    PERFORM {schema}.headgate_unpark(u_queue, u_partition);
  END IF;
  IF v_rest IS NULL THEN
    RETURN;
  END IF;

  IF v_frees AND cardinality(p_queues) > 1 THEN
    freed := ARRAY (
      SELECT sum(v_rest[entry.i][7]::bigint) FILTER (WHERE v_rest[entry.i][1] = 'f')
      FROM unnest(p_queues) WITH ORDINALITY AS wanted (queue, place)
      LEFT JOIN generate_subscripts(v_rest, 1) AS entry (i) ON v_rest[entry.i][2] = wanted.queue
      GROUP BY wanted.place
      ORDER BY wanted.place);
  END IF;
  SELECT array_agg(per_class.name), array_agg(per_class.n)
  INTO classes, class_freed
  FROM (
    SELECT v_rest[entry.i][4] AS name, sum(v_rest[entry.i][7]::bigint)::bigint AS n
    FROM generate_subscripts(v_rest, 1) AS entry (i)
    WHERE v_rest[entry.i][1] IN ('f', 'c') AND v_rest[entry.i][4] <> ''
    GROUP BY v_rest[entry.i][4]
  ) AS per_class;

  IF v_opens THEN
    UPDATE {schema}.headgate_lane_group AS lane_group
    SET open = true, open_at_ms = NULL
    WHERE lane_group.ctid = ANY (ARRAY (
      SELECT closed.tid
      FROM generate_subscripts(v_rest, 1) AS entry (i)
      CROSS JOIN LATERAL (
        SELECT found.ctid AS tid
        FROM {schema}.headgate_lane_group AS found
        WHERE found.rate_class = v_rest[entry.i][4] AND found.queue = v_rest[entry.i][2] AND NOT found.open
        OFFSET 0
      ) AS closed
      WHERE v_rest[entry.i][1] = 'o'));
  END IF;

  IF v_ready THEN
    SELECT array_agg(idle.queue), array_agg(idle.partition_key), array_agg(idle.rate_class),
      array_agg(idle.sticky_worker), array_agg(idle.lane_key), array_agg(idle.tid), array_agg(idle.last_round),
      bool_or(idle.tid IS NULL OR idle.last_round IS NULL), bool_or(idle.is_above_head IS NOT TRUE)
    INTO r_queue, r_partition, r_class, r_sticky, r_key, r_tid, r_round, v_missing, v_lowers
    FROM (
      SELECT entry.*, lane.tid, part.last_round,
        (part.last_round, entry.partition_key) >= (head.head_round, head.head_partition) AS is_above_head
      FROM (
        SELECT DISTINCT v_rest[rest.i][2], v_rest[rest.i][3], v_rest[rest.i][4], v_rest[rest.i][5],
          v_rest[rest.i][6]::bigint
        FROM generate_subscripts(v_rest, 1) AS rest (i)
        WHERE v_rest[rest.i][1] = 'r'
      ) AS entry (queue, partition_key, rate_class, sticky_worker, lane_key)
      LEFT JOIN LATERAL (
        SELECT found.ctid AS tid, found.active
        FROM {schema}.headgate_lane AS found
        WHERE found.queue = entry.queue AND found.partition_key = entry.partition_key
          AND found.rate_class = entry.rate_class AND found.sticky_worker = entry.sticky_worker
        ORDER BY found.last_round DESC  -- its newest version first; see headgate_admit
        LIMIT 1
      ) AS lane ON true
      LEFT JOIN LATERAL (
        SELECT found.last_round
        FROM {schema}.headgate_partition AS found
        WHERE found.queue = entry.queue
          AND found.partition_key >= entry.partition_key AND found.partition_key <= entry.partition_key
        ORDER BY found.partition_key DESC
        LIMIT 1
      ) AS part ON true
      LEFT JOIN LATERAL (
        SELECT known.head_round, known.head_partition
        FROM {schema}.headgate_lane_group AS known
        WHERE known.rate_class = entry.rate_class AND known.queue = entry.queue
          AND known.sticky_worker = entry.sticky_worker
        LIMIT 1
      ) AS head ON true
      WHERE lane.active IS NOT TRUE
    ) AS idle;
    IF v_missing THEN
      INSERT INTO {schema}.headgate_partition (queue, partition_key)
      SELECT DISTINCT entry.queue, entry.partition_key
      FROM unnest(r_queue, r_partition, r_round) AS entry (queue, partition_key, last_round)
      WHERE entry.last_round IS NULL
      ON CONFLICT DO NOTHING;
      INSERT INTO {schema}.headgate_lane (queue, partition_key, rate_class, sticky_worker, lane_key, active, last_round)
      SELECT entry.queue, entry.partition_key, entry.rate_class, entry.sticky_worker, entry.lane_key, true,
        coalesce(entry.last_round, 0)
      FROM unnest(r_queue, r_partition, r_class, r_sticky, r_key, r_tid, r_round)
        AS entry (queue, partition_key, rate_class, sticky_worker, lane_key, tid, last_round)
      WHERE entry.tid IS NULL;
    END IF;
    IF r_queue IS NOT NULL THEN
      UPDATE {schema}.headgate_lane AS lane
      SET active = true, last_round = coalesce(woken.last_round, 0)
      FROM unnest(r_tid, r_round) AS woken (tid, last_round)
      WHERE lane.ctid = woken.tid;
    END IF;
    IF v_lowers THEN
      PERFORM {schema}.headgate_lower_heads(
        r_queue, r_class, r_sticky, ARRAY (SELECT coalesce(woken.round, 0) FROM unnest(r_round) AS woken (round)),
        r_partition);
    END IF;
  END IF;
  IF v_gone THEN
    -- After all that was announced as ready: a lane is laid to rest only by a look that finds it empty.
    UPDATE {schema}.headgate_lane AS lane
    SET active = false
    WHERE lane.ctid = ANY (ARRAY (
      SELECT emptied.tid
      FROM (
        SELECT DISTINCT v_rest[rest.i][2], v_rest[rest.i][3], v_rest[rest.i][4], v_rest[rest.i][5],
          v_rest[rest.i][6]::bigint
        FROM generate_subscripts(v_rest, 1) AS rest (i)
        WHERE v_rest[rest.i][1] = 'g'
      ) AS entry (queue, partition_key, rate_class, sticky_worker, lane_key)
      CROSS JOIN LATERAL (
        SELECT found.ctid AS tid
        FROM {schema}.headgate_lane AS found
        WHERE found.queue = entry.queue AND found.partition_key = entry.partition_key
          AND found.rate_class = entry.rate_class AND found.sticky_worker = entry.sticky_worker AND found.active
        ORDER BY found.last_round DESC
        LIMIT 1
      ) AS emptied
      LEFT JOIN LATERAL (
        SELECT true AS found
        FROM {schema}.headgate_job AS job
        WHERE job.lane_key = entry.lane_key AND (job.state = 'available' AND job.gate_hold IS NULL) IS TRUE
          AND (job.queue = entry.queue AND job.partition_key = entry.partition_key
            AND job.rate_class = entry.rate_class AND job.sticky_worker = entry.sticky_worker) IS TRUE
        ORDER BY job.priority DESC, job.scheduled_at_ms, job.seq
        LIMIT 1
      ) AS job ON true
      WHERE job.found IS NULL));
  END IF;
END $$;

-- Close a class in queues until an instant, null for good; the caller holds the locks of the queues.
CREATE FUNCTION {schema}.headgate_close_class(p_queues text[], p_class text, p_open_at_ms bigint) RETURNS void
  LANGUAGE sql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
UPDATE {schema}.headgate_lane_group AS lane_group
SET open = false, open_at_ms = p_open_at_ms
WHERE lane_group.rate_class = p_class AND lane_group.queue = ANY (p_queues) AND lane_group.open
$$;

-- Jobs of a class that have left running and are not folded yet, in whatever queue.
CREATE FUNCTION {schema}.headgate_unfolded(p_class text) RETURNS bigint
  LANGUAGE sql STABLE
  AS $$
SELECT coalesce(sum(inbox.n), 0)::bigint
FROM {schema}.headgate_inbox AS inbox
WHERE inbox.rate_class = p_class AND inbox.rate_class <> '' AND inbox.kind IN ('c', 'f')
$$;

-- Lock the oldest running job under a ceiling that nobody else holds locked, to make room for another one.
CREATE FUNCTION {schema}.headgate_oldest_running(
  p_scope text, p_queue text, p_partition text, p_class text, p_spared bigint[])
  RETURNS bigint
  LANGUAGE sql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
SELECT job.seq
FROM {schema}.headgate_job AS job
WHERE job.state = 'running'
  AND (p_scope = 'class' OR job.queue = p_queue)
  AND (p_scope <> 'partition' OR job.partition_key = p_partition)
  AND (p_scope <> 'class' OR job.rate_class = p_class)
  AND job.seq <> ALL (p_spared)
ORDER BY job.claimed_at_ms, job.seq
LIMIT 1
FOR UPDATE SKIP LOCKED
$$;

-- Cancel running jobs that make room; their slots are freed like those of any other job that leaves running.
CREATE FUNCTION {schema}.headgate_displace(p_seqs bigint[], p_now_ms bigint) RETURNS void
  LANGUAGE sql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
WITH displaced AS (
  UPDATE {schema}.headgate_job AS job
  SET state = 'cancelled', lease_id = NULL, lease_expires_at_ms = NULL, claimed_by = NULL, claimed_at_ms = NULL,
    rate_charge = 0, settled_lease_id = NULL, settled_outcome = NULL, finalized_at_ms = p_now_ms,
    reason_code = 'saturation_cancel'
  WHERE job.seq = ANY (p_seqs)
  RETURNING job.queue, job.partition_key, job.rate_class
),
freed AS (
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, n)
  SELECT displaced.queue, 'f', displaced.partition_key, displaced.rate_class, count(*)
  FROM displaced
  GROUP BY displaced.queue, displaced.partition_key, displaced.rate_class
)
INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
SELECT displaced.queue, displaced.partition_key, p_now_ms - mod(p_now_ms, 60000), -count(*), 0, 0
FROM displaced
GROUP BY displaced.queue, displaced.partition_key
$$;

-- End candidates that a full ceiling sends away, where they are still as they were read.
CREATE FUNCTION {schema}.headgate_send_away(p_tids tid[], p_seqs bigint[], p_state text, p_reason text, p_now_ms bigint)
  RETURNS bigint
  LANGUAGE sql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
  SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
WITH held AS MATERIALIZED (
  SELECT job.tid
  FROM unnest(p_tids, p_seqs) AS picked (tid, seq)
  -- Row by row: a join of the two might begin with a walk over all jobs.
  CROSS JOIN LATERAL (
    SELECT known.ctid AS tid
    FROM {schema}.headgate_job AS known
    WHERE known.ctid = picked.tid AND known.seq = picked.seq
      AND (known.gate_hold IS NULL AND known.state = 'available') IS TRUE
    FOR UPDATE SKIP LOCKED
  ) AS job
),
ended AS (
  UPDATE {schema}.headgate_job AS job
  SET state = p_state, finalized_at_ms = p_now_ms, reason_code = p_reason
  FROM held
  WHERE job.ctid = held.tid
  RETURNING job.queue, job.partition_key
),
tallied AS (
  INSERT INTO {schema}.headgate_tally
    (queue, partition_key, minute_at_ms, unfinished, arrived, completed, rejected)
  SELECT ended.queue, ended.partition_key, p_now_ms - mod(p_now_ms, 60000), -count(*), 0, 0, count(*)
  FROM ended
  GROUP BY ended.queue, ended.partition_key
)
SELECT count(*) FROM ended
$$;

-- Running jobs of a class as the counters see them: unfolded exits are still counted. One snapshot for both.
CREATE FUNCTION {schema}.headgate_running_of(p_class text) RETURNS bigint
  LANGUAGE sql STABLE
  AS $$
SELECT {schema}.headgate_unfolded(p_class) + count(*)
FROM {schema}.headgate_job AS job
WHERE job.state = 'running' AND job.rate_class = p_class
$$;

-- Create the row of a class that has none. Jobs that a running admission claims meanwhile without knowing the row are
-- not counted; nobody reads the count before a ceiling of the class exists, which counts anew under the locks of the
-- queues.
CREATE FUNCTION {schema}.headgate_mark_class(p_class text) RETURNS void
  LANGUAGE sql VOLATILE
  AS $$
INSERT INTO {schema}.headgate_rate_class (name, inflight)
SELECT p_class, {schema}.headgate_running_of(p_class)
WHERE NOT EXISTS (SELECT FROM {schema}.headgate_rate_class AS class WHERE class.name = p_class)
ON CONFLICT DO NOTHING
$$;
