-- Looking at many jobs without reading them all, and operations over many jobs in small steps.

ALTER TABLE {schema}.headgate_job ADD COLUMN replay_of text COLLATE "C" NOT NULL DEFAULT '';

-- For lists and counts. Running jobs, which are few, have an index of their own, so that a claim adds nothing here. Its
-- condition has a form of its own, repeated by those who list, so that it never answers a look of the gate or of a duty.
CREATE INDEX headgate_job_listing ON {schema}.headgate_job (state, queue, seq) WHERE (state <> 'running') IS TRUE;
-- For the age of a backlog.
CREATE INDEX headgate_job_oldest ON {schema}.headgate_job (queue, scheduled_at_ms, seq) WHERE state = 'available';

-- For upkeep by the age of what is finished, and for the histories that it trims: one index for both, because every
-- index costs every insert, also that of a row which is not in it.
CREATE INDEX headgate_job_ended ON {schema}.headgate_job (state, (errors <> '[]'), finalized_at_ms, seq)
  WHERE finalized_at_ms IS NOT NULL;
-- For the jobs that wait for a class; jobs without one are not in it.
CREATE INDEX headgate_job_class ON {schema}.headgate_job (rate_class) WHERE state = 'available' AND rate_class <> '';

-- last_seq: no later row is touched, so that an operation on a busy queue ends. place: the highest row number that was
-- looked at in this pass over the rows. has_found: something was left to do in this pass, so that another one follows.
-- empties: the queue that goes with its last job.
CREATE TABLE {schema}.headgate_operation (
  id text COLLATE "C" PRIMARY KEY,
  entry bigint GENERATED ALWAYS AS IDENTITY,
  action text COLLATE "C" NOT NULL CHECK (action IN ('retry', 'cancel', 'delete')),
  status text COLLATE "C" NOT NULL CHECK (status IN ('pending', 'running', 'completed', 'failed')),
  states text[] COLLATE "C" NOT NULL,
  queue text COLLATE "C",
  kind text COLLATE "C",
  partition_key text COLLATE "C",
  enqueued_until_ms bigint NOT NULL,
  last_seq bigint NOT NULL,
  empties boolean NOT NULL,
  dry_run boolean NOT NULL,
  place bigint NOT NULL DEFAULT 0,
  has_found boolean NOT NULL DEFAULT false,
  affected bigint NOT NULL DEFAULT 0,
  total_estimated bigint NOT NULL,
  error text COLLATE "C" NOT NULL DEFAULT '',
  created_at_ms bigint NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX headgate_operation_open ON {schema}.headgate_operation (entry) WHERE status IN ('pending', 'running');

CREATE TABLE {schema}.headgate_queue_memory (
  queue text COLLATE "C" PRIMARY KEY,
  bytes bigint NOT NULL,
  sampled_jobs integer NOT NULL,
  sampled_at_ms bigint NOT NULL
) WITH (fillfactor = 70);

-- Whether a job is what a filter asks for; null asks nothing. One expression, so that the planner puts it in line. Its
-- columns one by one: the row as a whole would take the right to read the payload too.
CREATE FUNCTION {schema}.headgate_job_matches(
  j_queue text, j_state text, j_kind text, j_partition_key text, j_fingerprint text, j_rate_class text,
  j_priority integer, p_queue text, p_state text, p_kind text, p_kind_prefix text, p_partition_key text,
  p_fingerprint text, p_rate_class text, p_priority integer)
  RETURNS boolean
  LANGUAGE sql IMMUTABLE
  AS $$
SELECT (p_queue IS NULL OR j_queue = p_queue)
  AND (p_state IS NULL OR j_state = p_state)
  AND (p_kind IS NULL OR j_kind = p_kind)
  AND (p_kind_prefix IS NULL OR pg_catalog.starts_with(j_kind, p_kind_prefix))
  AND (p_partition_key IS NULL OR j_partition_key = p_partition_key)
  AND (p_fingerprint IS NULL OR j_fingerprint = p_fingerprint)
  AND (p_rate_class IS NULL OR j_rate_class = p_rate_class)
  AND (p_priority IS NULL OR j_priority = p_priority)
$$;

-- Count the jobs of states, of one queue or of all, each up to the same limit.
--
-- Returns: one number for each state, in order. The settings are those of headgate_counts, which alone calls it.
CREATE FUNCTION {schema}.headgate_count_states(p_queue text, p_states text[], p_limit bigint) RETURNS bigint[]
  LANGUAGE plpgsql STABLE
  AS $$
BEGIN
  IF p_queue IS NULL THEN
    RETURN ARRAY(
      SELECT CASE wanted.state WHEN 'running' THEN (
          SELECT count(*) FROM (
            SELECT FROM {schema}.headgate_job AS job WHERE job.state = 'running' LIMIT p_limit) AS sample)
        ELSE (
          SELECT count(*) FROM (
            SELECT FROM {schema}.headgate_job AS job
            WHERE job.state = wanted.state AND (job.state <> 'running') IS TRUE LIMIT p_limit) AS sample)
        END
      FROM unnest(p_states) WITH ORDINALITY AS wanted (state, place)
      ORDER BY wanted.place);
  END IF;
  RETURN ARRAY(
    SELECT CASE wanted.state WHEN 'running' THEN (
        SELECT count(*) FROM (
          SELECT FROM {schema}.headgate_job AS job
          WHERE job.state = 'running' AND job.queue = p_queue LIMIT p_limit) AS sample)
      ELSE (
        SELECT count(*) FROM (
          SELECT FROM {schema}.headgate_job AS job
          WHERE job.state = wanted.state AND (job.state <> 'running') IS TRUE AND job.queue = p_queue LIMIT p_limit) AS sample)
      END
    FROM unnest(p_states) WITH ORDINALITY AS wanted (state, place)
    ORDER BY wanted.place);
END $$;

-- The unfinished jobs of one queue or of all, by the counters; null where these are too many to be added up. The settings
-- are those of headgate_counts, which alone calls it.
CREATE FUNCTION {schema}.headgate_unfinished_jobs(p_queue text, p_limit bigint) RETURNS bigint
  LANGUAGE plpgsql STABLE
  AS $$
BEGIN
  IF p_queue IS NOT NULL THEN
    RETURN coalesce((SELECT depth.jobs FROM {schema}.headgate_unfinished AS depth WHERE depth.queue = p_queue), 0)
      + coalesce((SELECT sum(tally.unfinished) FROM {schema}.headgate_tally AS tally WHERE tally.queue = p_queue), 0);
  END IF;
  RETURN (
    SELECT CASE WHEN count(*) < p_limit THEN coalesce(sum(part.jobs), 0) END
    FROM (
      (SELECT depth.jobs FROM {schema}.headgate_unfinished AS depth ORDER BY depth.queue LIMIT p_limit)
      UNION ALL
      (SELECT tally.unfinished FROM {schema}.headgate_tally AS tally ORDER BY tally.queue, tally.entry LIMIT p_limit)
    ) AS part);
END $$;

-- Count jobs by state without reading them all, of some queues in turn.
--
-- Each state is counted up to a first share, then to an equal share of the sample, then in turn as far as the sample goes.
-- Once one alone of the unfinished states is not counted to its end, its figure follows from the counter of unfinished
-- jobs, and is exact however many there are. A figure is exact or a lower bound. Rows that nobody has vacuumed are looked
-- up one by one, each perhaps in a page of its own, so that beyond the first share only as much is counted as the time
-- allows.
--
-- Arguments: queues, of which null is all together; states in order, and which of them are unfinished; the first share,
--            and how many rows are looked at in all; microseconds; the last three for each queue.
-- Rows:      place of the queue from 1, state, number, and whether there may be more; none for a state without a job.
CREATE FUNCTION {schema}.headgate_counts(
  p_queues text[], p_states text[], p_unfinished text[], p_first bigint, p_sample bigint, p_time_us bigint)
  RETURNS TABLE (place integer, state text, jobs bigint, at_least boolean)
  LANGUAGE plpgsql STABLE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_states integer := cardinality(p_states);
  v_share bigint := p_sample / v_states;
  v_began timestamptz;
  v_limits bigint[];
  v_jobs bigint[];
  v_row_us double precision[];  -- what a row of a state costs, taken from the rows themselves
  v_exact boolean[];
  v_seen bigint;
  v_open integer;  -- unfinished states that are not counted to their end, and the jobs of the others
  v_known bigint;
  v_left bigint;
  v_more bigint;
  v_count bigint;
  v_us double precision;
BEGIN
  FOR n IN 1..cardinality(p_queues) LOOP
    place := n;
    v_began := clock_timestamp();
    v_limits := array_fill(least(p_first, v_share), ARRAY[v_states]);
    v_jobs := {schema}.headgate_count_states(p_queues[n], p_states, least(p_first, v_share));
    v_exact := array_fill(false, ARRAY[v_states]);
    v_seen := 0;
    v_open := 0;
    v_known := 0;
    FOR i IN 1..v_states LOOP
      v_seen := v_seen + v_jobs[i];
      IF p_states[i] = ANY (p_unfinished) THEN
        IF v_jobs[i] >= v_limits[i] THEN
          v_open := v_open + 1;
        ELSE
          v_known := v_known + v_jobs[i];
        END IF;
      END IF;
    END LOOP;
    v_left := p_sample - v_seen;
    v_us := extract(epoch FROM clock_timestamp() - v_began) * 1000000;
    v_row_us := array_fill(greatest(0.01, v_us / greatest(1, v_seen)), ARRAY[v_states]);

    FOR turn IN 1..2 LOOP
      FOR i IN 1..v_states LOOP
        IF v_open = 1 THEN
          v_open := 0;
          v_count := {schema}.headgate_unfinished_jobs(p_queues[n], p_sample) - v_known;
          FOR k IN 1..v_states LOOP
            IF p_states[k] = ANY (p_unfinished) AND v_jobs[k] >= v_limits[k] AND v_count >= v_jobs[k] THEN
              v_left := v_left + v_jobs[k];
              v_jobs[k] := v_count;
              v_exact[k] := true;
            END IF;
          END LOOP;
        END IF;
        CONTINUE WHEN v_exact[i] OR v_jobs[i] < v_limits[i];
        v_more := CASE turn WHEN 1 THEN least(v_left, v_share - v_limits[i]) ELSE v_left END;
        v_us := extract(epoch FROM clock_timestamp() - v_began) * 1000000;
        -- It is counted from its beginning again; so much that is no matter of time.
        v_more := least(v_more, greatest(p_first, floor((p_time_us - v_us) / v_row_us[i])) - v_limits[i]);
        CONTINUE WHEN v_more < 1;
        v_limits[i] := v_limits[i] + v_more;
        v_count := ({schema}.headgate_count_states(p_queues[n], p_states[i:i], v_limits[i]))[1];
        v_left := v_left - (v_count - v_jobs[i]);
        v_jobs[i] := v_count;
        v_us := extract(epoch FROM clock_timestamp() - v_began) * 1000000 - v_us;
        v_row_us[i] := greatest(0.01, v_us / v_count);
        IF v_count < v_limits[i] AND p_states[i] = ANY (p_unfinished) THEN
          v_open := v_open - 1;
          v_known := v_known + v_count;
        END IF;
      END LOOP;
    END LOOP;

    FOR i IN 1..v_states LOOP
      IF v_jobs[i] > 0 THEN
        state := p_states[i];
        jobs := v_jobs[i];
        at_least := NOT v_exact[i] AND v_jobs[i] >= v_limits[i];
        RETURN NEXT;
      END IF;
    END LOOP;
  END LOOP;
END $$;

-- The noisy partitions of queues, whose arrivals are more than twice the mean of the others, and the backlog without
-- them.
--
-- Arguments: queues; start of the window; how many partitions, and how many jobs, of each are looked at.
-- Rows:      for each queue, its place from 1; noisy keys; their arrivals and completions; whether there were more
--            partitions; unfinished jobs of the others; since when the oldest of them may run; whether the sample was used
--            up. The last three are null without a noisy partition: the queue's own figures hold then.
CREATE FUNCTION {schema}.headgate_quiet_groups(
  p_queues text[], p_since_ms bigint, p_partitions integer, p_sample integer)
  RETURNS TABLE (
    place integer, noisy text[], arrived bigint, completed bigint, has_more boolean, backlog bigint, oldest_at_ms bigint,
    is_cut boolean)
  LANGUAGE plpgsql STABLE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
#variable_conflict use_column
DECLARE
  v_queue text;
  v_seen bigint;
BEGIN
  FOR n IN 1..cardinality(p_queues) LOOP
    place := n;
    v_queue := p_queues[n];
    noisy := ARRAY[]::text[];
    arrived := 0;
    completed := 0;
    has_more := false;
    backlog := NULL;
    oldest_at_ms := NULL;
    is_cut := NULL;
    -- Most queues have one partition, and who is alone is not noisy.
    SELECT count(*) INTO v_seen
    FROM (
      (SELECT FROM {schema}.headgate_minute_counter AS counter
      WHERE counter.queue = v_queue AND counter.minute_at_ms = p_since_ms LIMIT 2)
      UNION ALL
      (SELECT FROM {schema}.headgate_minute_counter AS counter
      WHERE counter.queue = v_queue AND counter.minute_at_ms = p_since_ms + 60000 LIMIT 2)
      UNION ALL
      (SELECT FROM {schema}.headgate_tally AS tally
      WHERE tally.queue = v_queue AND tally.minute_at_ms >= p_since_ms LIMIT 2)
    ) AS seen;
    IF v_seen < 2 THEN
      RETURN NEXT;
      CONTINUE;
    END IF;
    WITH traffic AS MATERIALIZED (
      SELECT seen.*, row_number() OVER (ORDER BY seen.partition_key) AS place
      FROM (
        SELECT part.partition_key, sum(part.arrived)::bigint AS arrived, sum(part.completed)::bigint AS completed
        FROM (
          -- The first keys of both minutes hold the first keys of the window.
          (SELECT counter.partition_key, counter.arrived, counter.completed
          FROM {schema}.headgate_minute_counter AS counter
          WHERE counter.queue = v_queue AND counter.minute_at_ms = p_since_ms
          ORDER BY counter.partition_key
          LIMIT p_partitions + 1)
          UNION ALL
          (SELECT counter.partition_key, counter.arrived, counter.completed
          FROM {schema}.headgate_minute_counter AS counter
          WHERE counter.queue = v_queue AND counter.minute_at_ms = p_since_ms + 60000
          ORDER BY counter.partition_key
          LIMIT p_partitions + 1)
          UNION ALL
          (SELECT tally.partition_key, tally.arrived, tally.completed
          FROM {schema}.headgate_tally AS tally
          WHERE tally.queue = v_queue AND tally.minute_at_ms >= p_since_ms AND (tally.arrived <> 0 OR tally.completed <> 0)
          ORDER BY tally.entry DESC
          LIMIT 50 * p_partitions)
        ) AS part
        GROUP BY part.partition_key
        ORDER BY part.partition_key
        LIMIT p_partitions + 1
      ) AS seen
    ),
    -- Once, and not anew for each partition.
    whole AS MATERIALIZED (
      SELECT count(*) AS partitions, coalesce(sum(traffic.arrived), 0) AS arrived
      FROM traffic
      WHERE traffic.place <= p_partitions
    ),
    loud AS (
      SELECT traffic.*
      FROM traffic
      CROSS JOIN whole
      WHERE traffic.place <= p_partitions AND whole.partitions >= 2 AND traffic.arrived >= 2
        AND traffic.arrived * (whole.partitions - 1) > 2 * (whole.arrived - traffic.arrived)
    )
    SELECT coalesce(array_agg(loud.partition_key), ARRAY[]::text[]), coalesce(sum(loud.arrived), 0)::bigint,
      coalesce(sum(loud.completed), 0)::bigint, (SELECT coalesce(max(traffic.place) > p_partitions, false) FROM traffic)
    INTO noisy, arrived, completed, has_more
    FROM loud;
    IF cardinality(noisy) > 0 THEN
      SELECT count(*), count(*) FILTER (WHERE sample.partition_key <> ALL (noisy))
      INTO v_seen, backlog
      FROM (
        SELECT job.partition_key FROM {schema}.headgate_job AS job
        WHERE job.state = 'running' AND job.queue = v_queue
        UNION ALL
        SELECT job.partition_key FROM {schema}.headgate_job AS job
        WHERE job.state = 'available' AND (job.state <> 'running') IS TRUE AND job.queue = v_queue
        UNION ALL
        SELECT job.partition_key FROM {schema}.headgate_job AS job
        WHERE job.state = 'retryable' AND (job.state <> 'running') IS TRUE AND job.queue = v_queue
        UNION ALL
        SELECT job.partition_key FROM {schema}.headgate_job AS job
        WHERE job.state = 'scheduled' AND (job.state <> 'running') IS TRUE AND job.queue = v_queue
        UNION ALL
        SELECT job.partition_key FROM {schema}.headgate_job AS job
        WHERE job.state = 'pending' AND (job.state <> 'running') IS TRUE AND job.queue = v_queue
        LIMIT p_sample
      ) AS sample;
      SELECT first.scheduled_at_ms INTO oldest_at_ms
      FROM (
        SELECT job.scheduled_at_ms, job.partition_key
        FROM {schema}.headgate_job AS job
        WHERE job.state = 'available' AND job.queue = v_queue
        ORDER BY job.scheduled_at_ms, job.seq
        LIMIT p_sample
      ) AS first
      WHERE first.partition_key <> ALL (noisy)
      ORDER BY first.scheduled_at_ms
      LIMIT 1;
      is_cut := v_seen >= p_sample;
    END IF;
    RETURN NEXT;
  END LOOP;
END $$;

-- Remove what is kept of a queue beside its jobs, unless it has jobs.
--
-- Returns: whether it was removed.
-- Locks:   the queue, which keeps admissions out, and the table of depths, which keeps folds out: jobs and counts are
--          then judged in one snapshot, so that no count of a job that comes at this moment is lost.
CREATE FUNCTION {schema}.headgate_forget_queue(p_queue text) RETURNS boolean
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  folded record;
  v_gone boolean;
BEGIN
  PERFORM {schema}.headgate_lock_queues(ARRAY[p_queue]);
  LOOP  -- exits of the last jobs are still owed to their classes
    SELECT fold.*
    INTO folded
    FROM {schema}.headgate_fold(
      ARRAY[p_queue], ARRAY['0'::xid8], 10000, ARRAY[{schema}.headgate_parks(p_queue)]) AS fold;
    PERFORM {schema}.headgate_apply_freed(
      p_queue, coalesce(folded.freed[1], 0), folded.classes, folded.class_freed);
    EXIT WHEN folded.taken < 10000;
  END LOOP;
  LOCK TABLE {schema}.headgate_unfinished IN SHARE ROW EXCLUSIVE MODE;
  WITH empty AS MATERIALIZED (
    SELECT p_queue AS queue
    WHERE NOT EXISTS (
        SELECT FROM {schema}.headgate_job AS job WHERE job.state = 'running' AND job.queue = p_queue)
      AND NOT EXISTS (
        SELECT
        FROM unnest(ARRAY['pending', 'scheduled', 'available', 'retryable', 'completed', 'archived', 'cancelled',
          'quarantined', 'undecodable']) AS stored (state)
        CROSS JOIN LATERAL (
          SELECT job.seq
          FROM {schema}.headgate_job AS job
          WHERE job.state = stored.state AND (job.state <> 'running') IS TRUE AND job.queue = p_queue
          LIMIT 1
        ) AS job)
  ),
  a AS (DELETE FROM {schema}.headgate_enqueue_policy AS old WHERE old.queue = (SELECT queue FROM empty)),
  k AS (DELETE FROM {schema}.headgate_archive_policy AS old WHERE old.queue = (SELECT queue FROM empty)),
  b AS (DELETE FROM {schema}.headgate_tally AS old WHERE old.queue = (SELECT queue FROM empty)),
  c AS (DELETE FROM {schema}.headgate_unfinished AS old WHERE old.queue = (SELECT queue FROM empty)),
  d AS (DELETE FROM {schema}.headgate_queue_minute AS old WHERE old.queue = (SELECT queue FROM empty)),
  e AS (DELETE FROM {schema}.headgate_minute_counter AS old WHERE old.queue = (SELECT queue FROM empty)),
  f AS (DELETE FROM {schema}.headgate_queue_memory AS old WHERE old.queue = (SELECT queue FROM empty)),
  g AS (DELETE FROM {schema}.headgate_partition AS old WHERE old.queue = (SELECT queue FROM empty)),
  h AS (DELETE FROM {schema}.headgate_lane AS old WHERE old.queue = (SELECT queue FROM empty)),
  i AS (DELETE FROM {schema}.headgate_lane_group AS old WHERE old.queue = (SELECT queue FROM empty)),
  j AS (DELETE FROM {schema}.headgate_queue AS old WHERE old.queue = (SELECT queue FROM empty))
  SELECT EXISTS (SELECT FROM empty) INTO v_gone;
  RETURN v_gone;
END $$;

-- Take locked jobs along the edge of an action.
--
-- Arguments: retry, cancel or delete; the rows, which the caller has locked and judged.
CREATE FUNCTION {schema}.headgate_touch_jobs(p_action text, p_tids tid[]) RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_now bigint := {schema}.headgate_now_ms();
BEGIN
  CASE p_action
  WHEN 'retry' THEN
    WITH revived AS (
      UPDATE {schema}.headgate_job AS job
      SET state = 'available', scheduled_at_ms = v_now, finalized_at_ms = NULL, reason_code = '', charge_weight = NULL
      WHERE job.ctid = ANY (p_tids)
      RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key
    ),
    listed AS (
      INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
      SELECT revived.queue, 'r', revived.partition_key, revived.rate_class, revived.sticky_worker, revived.lane_key,
        count(*)
      FROM revived
      GROUP BY revived.queue, revived.partition_key, revived.rate_class, revived.sticky_worker, revived.lane_key
    )
    INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
    SELECT revived.queue, revived.partition_key, v_now - mod(v_now, 60000), count(*), 0, 0
    FROM revived
    GROUP BY revived.queue, revived.partition_key;
  WHEN 'cancel' THEN
    WITH held AS MATERIALIZED (
      SELECT job.ctid AS tid, job.state FROM {schema}.headgate_job AS job WHERE job.ctid = ANY (p_tids)
    ),
    cancelled AS (
      UPDATE {schema}.headgate_job AS job
      SET state = 'cancelled', finalized_at_ms = v_now, reason_code = 'cancelled', gate_hold = NULL,
        lease_id = NULL, lease_expires_at_ms = NULL, claimed_by = NULL, claimed_at_ms = NULL, rate_charge = 0,
        settled_lease_id = NULL, settled_outcome = NULL
      FROM held
      WHERE job.ctid = held.tid
      RETURNING job.queue, job.partition_key, job.rate_class, held.state AS was
    ),
    freed AS (
      INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, n)
      SELECT cancelled.queue, 'f', cancelled.partition_key, cancelled.rate_class, count(*)
      FROM cancelled
      WHERE cancelled.was = 'running'
      GROUP BY cancelled.queue, cancelled.partition_key, cancelled.rate_class
    )
    INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
    SELECT cancelled.queue, cancelled.partition_key, v_now - mod(v_now, 60000), -count(*), 0, 0
    FROM cancelled
    GROUP BY cancelled.queue, cancelled.partition_key;
  WHEN 'delete' THEN
    WITH removed AS (
      DELETE FROM {schema}.headgate_job AS job
      WHERE job.ctid = ANY (p_tids)
      RETURNING job.seq, job.queue, job.partition_key, job.state
    ),
    untagged AS (
      DELETE FROM {schema}.headgate_job_tag AS tag
      WHERE tag.job_seq = ANY (ARRAY (SELECT removed.seq FROM removed))
    )
    INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
    SELECT removed.queue, removed.partition_key, v_now - mod(v_now, 60000), -count(*), 0, 0
    FROM removed
    WHERE removed.state IN ('pending', 'scheduled', 'available', 'retryable')
    GROUP BY removed.queue, removed.partition_key;
  END CASE;
END $$;

-- One step of an operation: touch a batch, and write down how far it came, in one transaction.
--
-- The rows are walked in the order of their numbers, and again until a whole pass found nothing to do: rows that were
-- locked, or that came into a state of the selection behind the step, are met by the next pass.
--
-- Arguments: id; how many jobs are touched, and how many rows are looked at, at most.
-- Returns:   jobs touched; 0 for an operation that is done, or that another step holds.
-- Locks:     the operation, then job rows in seq order, skipping what is locked.
-- Fails:     unique_violation, when a lifecycle key is taken at this very moment; the caller tries again.
CREATE FUNCTION {schema}.headgate_run_operation(p_id text, p_batch integer, p_window integer) RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET random_page_cost = 0 SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  op {schema}.headgate_operation;
  v_seqs bigint[];
  v_end bigint;
  v_tids tid[];
  v_running tid[];
BEGIN
  SELECT known.* INTO op
  FROM {schema}.headgate_operation AS known
  WHERE known.id = p_id AND known.status IN ('pending', 'running')
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN 0;
  END IF;

  IF op.queue IS NULL THEN
    WITH seen AS MATERIALIZED (
      SELECT job.seq, job.state, job.kind, job.partition_key, job.enqueued_at_ms, job.unique_key
      FROM {schema}.headgate_job AS job
      WHERE job.seq > op.place AND job.seq <= op.last_seq
      ORDER BY job.seq
      LIMIT p_window
    ),
    fitting AS MATERIALIZED (
      SELECT seen.seq
      FROM seen
      WHERE seen.state = ANY (op.states)
        AND (op.kind IS NULL OR seen.kind = op.kind)
        AND (op.partition_key IS NULL OR seen.partition_key = op.partition_key)
        AND seen.enqueued_at_ms <= op.enqueued_until_ms
        AND (op.action <> 'retry' OR seen.unique_key IS NULL OR NOT EXISTS (
          SELECT FROM {schema}.headgate_job AS holder
          WHERE holder.unique_key = seen.unique_key
            AND holder.state IN ('pending', 'scheduled', 'available', 'running', 'retryable')))
      ORDER BY seen.seq
      LIMIT p_batch
    )
    SELECT
      (SELECT array_agg(fitting.seq ORDER BY fitting.seq) FROM fitting),
      CASE
        WHEN (SELECT count(*) FROM fitting) = p_batch THEN (SELECT max(fitting.seq) FROM fitting)
        WHEN (SELECT count(*) FROM seen) = p_window THEN (SELECT max(seen.seq) FROM seen)
      END
    INTO v_seqs, v_end;
  ELSE
    WITH seen AS MATERIALIZED (
      SELECT found.*
      FROM (
        SELECT job.seq, job.kind, job.partition_key, job.enqueued_at_ms, job.unique_key
        FROM unnest(op.states) AS wanted (state)
        CROSS JOIN LATERAL (
          SELECT walk.*
          FROM (
            SELECT listed.seq, listed.kind, listed.partition_key, listed.enqueued_at_ms, listed.unique_key
            FROM {schema}.headgate_job AS listed
            WHERE listed.state = wanted.state AND (listed.state <> 'running') IS TRUE AND listed.queue = op.queue
              AND listed.seq > op.place AND listed.seq <= op.last_seq
            ORDER BY listed.seq
            OFFSET 0  -- or the limit invites a walk over all jobs
          ) AS walk
          ORDER BY walk.seq
          LIMIT p_window
        ) AS job
        UNION ALL
        SELECT job.seq, job.kind, job.partition_key, job.enqueued_at_ms, job.unique_key
        FROM {schema}.headgate_job AS job
        WHERE job.state = 'running' AND job.queue = op.queue AND 'running' = ANY (op.states)
          AND job.seq > op.place AND job.seq <= op.last_seq
      ) AS found
      ORDER BY found.seq
      LIMIT p_window
    ),
    fitting AS MATERIALIZED (
      SELECT seen.seq
      FROM seen
      WHERE (op.kind IS NULL OR seen.kind = op.kind)
        AND (op.partition_key IS NULL OR seen.partition_key = op.partition_key)
        AND seen.enqueued_at_ms <= op.enqueued_until_ms
        AND (op.action <> 'retry' OR seen.unique_key IS NULL OR NOT EXISTS (
          SELECT FROM {schema}.headgate_job AS holder
          WHERE holder.unique_key = seen.unique_key
            AND holder.state IN ('pending', 'scheduled', 'available', 'running', 'retryable')))
      ORDER BY seen.seq
      LIMIT p_batch
    )
    SELECT
      (SELECT array_agg(fitting.seq ORDER BY fitting.seq) FROM fitting),
      CASE
        WHEN (SELECT count(*) FROM fitting) = p_batch THEN (SELECT max(fitting.seq) FROM fitting)
        WHEN (SELECT count(*) FROM seen) = p_window THEN (SELECT max(seen.seq) FROM seen)
      END
    INTO v_seqs, v_end;
  END IF;

  IF v_seqs IS NOT NULL THEN
    SELECT array_agg(locked.tid) FILTER (WHERE locked.state <> 'running' OR op.action <> 'delete'),
      array_agg(locked.tid) FILTER (WHERE locked.state = 'running' AND op.action = 'delete')
    INTO v_tids, v_running
    FROM (
      SELECT job.ctid AS tid, job.state, job.unique_key, job.seq
      FROM {schema}.headgate_job AS job
      WHERE job.seq = ANY (v_seqs) AND job.state = ANY (op.states)
      ORDER BY job.seq
      FOR UPDATE SKIP LOCKED
    ) AS locked
    -- Of several that share a lifecycle key one can come back.
    WHERE op.action <> 'retry' OR locked.unique_key IS NULL OR NOT EXISTS (
      SELECT FROM {schema}.headgate_job AS other
      WHERE other.seq = ANY (v_seqs) AND other.unique_key = locked.unique_key AND other.seq < locked.seq);
    IF v_running IS NOT NULL THEN
      PERFORM {schema}.headgate_touch_jobs('cancel', v_running);
    END IF;
    IF v_tids IS NOT NULL THEN
      PERFORM {schema}.headgate_touch_jobs(op.action, v_tids);
    END IF;
  END IF;

  op.has_found := op.has_found OR v_seqs IS NOT NULL;
  op.affected := op.affected + coalesce(cardinality(v_tids), 0);
  op.status := 'running';
  IF v_end IS NOT NULL THEN
    op.place := v_end;
  ELSIF op.has_found OR (op.empties AND NOT {schema}.headgate_forget_queue(op.queue)) THEN
    op.place := 0;
    op.has_found := false;
  ELSE
    op.status := 'completed';
  END IF;
  UPDATE {schema}.headgate_operation AS known
  SET status = op.status, place = op.place, has_found = op.has_found, affected = op.affected
  WHERE known.id = p_id;
  RETURN coalesce(cardinality(v_tids), 0) + coalesce(cardinality(v_running), 0);
END $$;

-- Forget the attempts of successful jobs that ended before an instant, the earliest first; the jobs stay.
--
-- Returns: entries removed.
-- Locks:   the job rows, skipping what is locked.
CREATE FUNCTION {schema}.headgate_trim_history(p_before_ms bigint, p_limit integer) RETURNS bigint
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_tids tid[];
  v_entries bigint;
BEGIN
  SELECT array_agg(ended.tid), sum(ended.entries) INTO v_tids, v_entries
  FROM (
    SELECT job.ctid AS tid, jsonb_array_length(job.errors) AS entries
    FROM {schema}.headgate_job AS job
    WHERE job.state = 'completed' AND (job.errors <> '[]') = true AND job.finalized_at_ms < p_before_ms
    ORDER BY job.finalized_at_ms, job.seq
    LIMIT p_limit
    FOR UPDATE SKIP LOCKED
  ) AS ended;
  UPDATE {schema}.headgate_job AS job SET errors = '[]' WHERE job.ctid = ANY (v_tids);
  RETURN coalesce(v_entries, 0);
END $$;
