-- Taking jobs in: one call decides about a batch and inserts it, and a trigger wakes workers at commit.
--
-- Refusals are answers, not exceptions: the call may run in a transaction that belongs to an application, and an error
-- would abort it. Only an insert that collides late is undone by an exception, inside its own sub-transaction.
--
-- A producer waits for another one only where both use the same id or the same unique key. It appends to
-- headgate_inbox and headgate_tally and locks no row that exists already, except the winner of a replacement, the
-- throttle row of its own key and, where the transaction is the store's own, at its end the limits of its queues.
--
-- Every statement reads what was committed before it began, so that a check made after a lock sees what the waiting
-- was for. The settings on the functions keep the plans independent of statistics.

-- Change the waiting holder of a unique key as a duplicate asks.
--
-- Arguments: the holder; whether its key is a throttle key, which outlives the job; bits to replace; debounce; values.
-- Returns:   whether something was written; null when the holder of a lifecycle key has ended meanwhile.
-- Locks:     the holder, if it is in a state that can be changed. A running one is not locked: its worker may keep it
--            locked for as long as a handler's transaction lasts.
CREATE FUNCTION {schema}.headgate_replace_holder(
  p_holder_id text, p_throttled boolean, p_replace integer, p_debounce_ms bigint, p_delay_ms bigint,
  p_scheduled_at_ms bigint, p_schema_version integer, p_payload bytea, p_fingerprint text, p_priority integer,
  p_max_attempts integer, p_tags text[])
  RETURNS boolean
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  holder record;
  mask integer;
  now_ms bigint;
BEGIN
  SELECT job.seq, job.state INTO holder FROM {schema}.headgate_job AS job WHERE job.id = p_holder_id;
  IF holder.state IN ('scheduled', 'available', 'retryable') THEN
    SELECT job.seq, job.state, job.gate_hold, job.fingerprint INTO holder
    FROM {schema}.headgate_job AS job
    WHERE job.seq = holder.seq
    FOR UPDATE;
  END IF;
  IF holder.state IN ('pending', 'running') THEN
    RETURN false;
  END IF;
  IF holder.state IS NULL OR holder.state NOT IN ('scheduled', 'available', 'retryable') THEN
    RETURN CASE WHEN p_throttled THEN false END;
  END IF;

  mask := p_replace;
  IF p_debounce_ms > 0 THEN
    mask := (mask & ~2) | 1;
  ELSIF holder.state <> 'scheduled' THEN
    mask := mask & ~2;
  END IF;
  IF mask = 0 THEN
    RETURN false;
  END IF;

  now_ms := {schema}.headgate_now_ms();
  WITH changed AS (
    UPDATE {schema}.headgate_job AS job
    SET schema_version = CASE WHEN mask & 1 <> 0 THEN p_schema_version ELSE job.schema_version END,
      payload = CASE WHEN mask & 1 <> 0 THEN p_payload ELSE job.payload END,
      fingerprint = CASE WHEN mask & 1 <> 0 THEN p_fingerprint ELSE job.fingerprint END,
      priority = CASE WHEN mask & 4 <> 0 THEN p_priority ELSE job.priority END,
      max_attempts = CASE WHEN mask & 8 <> 0 THEN p_max_attempts ELSE job.max_attempts END,
      state = CASE WHEN p_debounce_ms > 0 THEN 'scheduled' ELSE job.state END,
      scheduled_at_ms = CASE
        WHEN p_debounce_ms > 0 THEN now_ms + p_debounce_ms
        WHEN mask & 2 = 0 THEN job.scheduled_at_ms
        WHEN p_delay_ms > 0 THEN now_ms + p_delay_ms
        WHEN p_scheduled_at_ms = 0 THEN now_ms
        ELSE p_scheduled_at_ms END,
      -- A hold must not outlive its reason: neither the state nor the fingerprint that it belongs to.
      gate_hold = CASE
        WHEN p_debounce_ms > 0 THEN NULL
        WHEN job.gate_hold = 'quarantine' AND mask & 1 <> 0 AND job.fingerprint <> p_fingerprint THEN NULL
        ELSE job.gate_hold END
    WHERE job.seq = holder.seq
    RETURNING job.queue, job.partition_key, job.rate_class, job.sticky_worker, job.lane_key, job.state, job.gate_hold
  )
  INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
  SELECT changed.queue, 'r', changed.partition_key, changed.rate_class, changed.sticky_worker, changed.lane_key, 1
  FROM changed
  WHERE holder.gate_hold IS NOT NULL AND changed.state = 'available' AND changed.gate_hold IS NULL;

  IF p_debounce_ms > 0 THEN
    DELETE FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = holder.seq;
    INSERT INTO {schema}.headgate_job_tag (job_seq, tag) SELECT holder.seq, unnest(p_tags);
  END IF;
  RETURN true;
END $$;

-- The first queue by name whose limit a batch passes, as the refusal; null without one.
--
-- Arguments: queues and the jobs of the batch for each; whether these jobs are in the counters by now.
CREATE FUNCTION {schema}.headgate_full_queue(p_queues text[], p_incoming bigint[], p_counted boolean)
  RETURNS text[]
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  refusal text[];
BEGIN
  SELECT ARRAY['backpressure', depth.queue, depth.max_jobs::text, depth.current::text, depth.incoming::text]
  INTO refusal
  FROM (
    SELECT demand.queue COLLATE "C" AS queue, demand.incoming,
      (SELECT policy.max_unfinished_jobs FROM {schema}.headgate_enqueue_policy AS policy
        WHERE policy.queue = demand.queue) AS max_jobs,
      greatest(0,
        coalesce((SELECT unfinished.jobs FROM {schema}.headgate_unfinished AS unfinished
          WHERE unfinished.queue = demand.queue), 0)
        + coalesce((SELECT sum(tally.unfinished) FROM {schema}.headgate_tally AS tally
          WHERE tally.queue = demand.queue), 0)
        - CASE WHEN p_counted THEN demand.incoming ELSE 0 END) AS current
    FROM unnest(p_queues, p_incoming) AS demand (queue, incoming)
  ) AS depth
  WHERE depth.current + depth.incoming > depth.max_jobs
  ORDER BY depth.queue
  LIMIT 1;
  RETURN refusal;
END $$;

-- Take in a batch, or say why not.
--
-- Arguments: columns as arrays over the batch. A column whose values are all equal may hold one element only; ids are
--            always complete. Unique keys in their stored form, or null where the batch has none; a window above 0 makes
--            a key a throttle key. Tags as pairs of place and tag. Replace bits and debounce belong to a batch of one.
--            p_own: the transaction is the store's own and commits at once, so limits are exact.
-- Returns:   null when every job of the batch exists now, else the refusal: its name and its facts in order.
--              id_conflict id | quarantine fingerprint | backpressure queue limit current incoming
--              | duplicate id of the holder, whether it was changed | unsettled
-- Locks:     throttle keys, then jobs by unique key and id, then limits by queue: two batches meet in one order. (Two
--            that use one id with different keys can still meet crosswise; the loser of that deadlock tries again.)
CREATE FUNCTION {schema}.headgate_enqueue(
  p_ids text[], p_kinds text[], p_schema_versions integer[], p_payloads bytea[], p_queues text[],
  p_partition_keys text[], p_rate_classes text[], p_sticky_workers text[], p_lane_keys bigint[], p_weights integer[],
  p_fingerprints text[], p_priorities integer[], p_max_attempts integer[], p_scheduled_at_ms bigint[],
  p_delay_ms bigint[], p_pending boolean[], p_timeout_ms bigint[], p_deadline_ms bigint[], p_deadline_in_ms bigint[],
  p_retention_ms bigint[], p_unique_keys bytea[], p_unique_states integer[], p_periodic_schedule_ids text[],
  p_periodic_ticks_ms bigint[], p_headers text[], p_tag_places integer[], p_tags text[],
  p_unique_windows_ms bigint[], p_replace integer, p_debounce_ms bigint, p_own boolean)
  RETURNS text[]
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  n CONSTANT integer := cardinality(p_ids);
  max_vain CONSTANT integer := 3;
  vain integer := 0;  -- collisions after which nothing new was found
  known integer := 0;
  replayed integer[];
  kept integer[];
  limited text[];
  incoming bigint[];
  seqs bigint[];
  breached text;
  lost text;
  lost_before text;
  refusal text[];
  holder_id text;
  throttled boolean;
  replaced boolean;
  now_ms bigint;
  taken bigint;
BEGIN
  LOOP
    -- Ids. A job with this id and content is a replay: it succeeds and changes nothing.
    SELECT array_agg(found.place) FILTER (WHERE found.same),
      ARRAY['id_conflict', p_ids[min(found.place) FILTER (WHERE NOT found.same)]]
    INTO replayed, refusal
    FROM (
      SELECT stored.place,
        stored.kind = coalesce(p_kinds[stored.place], p_kinds[1])
        AND stored.fingerprint = coalesce(p_fingerprints[stored.place], p_fingerprints[1])
        AND stored.queue = coalesce(p_queues[stored.place], p_queues[1]) AS same
      FROM (
        SELECT array_position(p_ids, job.id) AS place, job.kind, job.fingerprint, job.queue
        FROM {schema}.headgate_job AS job
        WHERE job.id = ANY (p_ids)
      ) AS stored
    ) AS found;
    IF refusal[2] IS NOT NULL THEN
      RETURN refusal;
    END IF;
    IF cardinality(replayed) > known THEN
      known := cardinality(replayed);
      vain := 0;
    END IF;
    kept := ARRAY(
      SELECT place FROM generate_series(1, n) AS place WHERE replayed IS NULL OR place <> ALL (replayed));
    IF kept = ARRAY[]::integer[] THEN
      RETURN NULL;
    END IF;

    -- Quarantine; the registry is empty most of the time.
    IF EXISTS (SELECT FROM {schema}.headgate_quarantine) THEN
      SELECT ARRAY['quarantine', coalesce(p_fingerprints[min(place)], p_fingerprints[1])] INTO refusal
      FROM unnest(kept) AS place
      WHERE EXISTS (
        SELECT FROM {schema}.headgate_quarantine AS quarantine
        WHERE quarantine.fingerprint = coalesce(p_fingerprints[place], p_fingerprints[1]))
      HAVING count(*) > 0;
      IF FOUND THEN
        RETURN refusal;
      END IF;
    END IF;

    -- Limits of the queues, as far as they can be judged without a lock.
    limited := NULL;
    IF EXISTS (SELECT FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue = ANY (p_queues)) THEN
      SELECT array_agg(demand.queue), array_agg(demand.incoming) INTO limited, incoming
      FROM (
        SELECT coalesce(p_queues[place], p_queues[1]) AS queue, count(*) AS incoming
        FROM unnest(kept) AS place
        GROUP BY 1
      ) AS demand
      WHERE EXISTS (SELECT FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue = demand.queue);
      refusal := {schema}.headgate_full_queue(limited, incoming, false);
      IF refusal IS NOT NULL THEN
        RETURN refusal;
      END IF;
    END IF;

    now_ms := {schema}.headgate_now_ms();

    -- Unique keys: held by a stored job, or by an earlier one of this batch.
    IF p_unique_keys IS NOT NULL THEN
      SELECT held.holder_id, held.throttled INTO holder_id, throttled
      FROM (
        SELECT keyed.place, keyed.throttled,
          coalesce(
            CASE WHEN keyed.throttled
              THEN (SELECT throttle.job_id FROM {schema}.headgate_throttle AS throttle
                WHERE throttle.unique_key = keyed.unique_key AND throttle.expires_at_ms > now_ms)
              ELSE (SELECT job.id FROM {schema}.headgate_job AS job
                WHERE job.unique_key = keyed.unique_key
                  AND job.state IN ('pending', 'scheduled', 'available', 'running', 'retryable'))
            END,
            lag(p_ids[keyed.place]) OVER (PARTITION BY keyed.unique_key, keyed.throttled ORDER BY keyed.place)
          ) AS holder_id
        FROM (
          SELECT place, p_unique_keys[place] AS unique_key,
            coalesce(p_unique_windows_ms[place], p_unique_windows_ms[1]) > 0 AS throttled
          FROM unnest(kept) AS place
          WHERE p_unique_keys[place] IS NOT NULL
        ) AS keyed
      ) AS held
      WHERE held.holder_id IS NOT NULL
      ORDER BY held.place
      LIMIT 1;
      IF FOUND THEN
        IF p_replace = 0 AND p_debounce_ms = 0 THEN
          RETURN ARRAY['duplicate', holder_id, 'false'];
        END IF;
        replaced := {schema}.headgate_replace_holder(
          holder_id, throttled, p_replace, p_debounce_ms, p_delay_ms[1], p_scheduled_at_ms[1], p_schema_versions[1],
          p_payloads[1], p_fingerprints[1], p_priorities[1], p_max_attempts[1], p_tags);
        IF replaced IS NOT NULL THEN
          RETURN ARRAY['duplicate', holder_id, replaced::text];
        END IF;
        vain := vain + 1;
        IF vain > max_vain THEN
          RETURN ARRAY['unsettled'];
        END IF;
        CONTINUE;
      END IF;
    END IF;

    -- Rows get their numbers in the order of the batch, whatever the order of the inserts.
    seqs := ARRAY(
      SELECT CASE WHEN replayed IS NULL OR place <> ALL (replayed) THEN nextval(generator.oid) END
      FROM generate_series(1, n) AS place,
        (SELECT sequence.tableoid::regclass AS oid FROM {schema}.headgate_job_seq_seq AS sequence) AS generator);
    BEGIN
      IF p_unique_windows_ms IS NOT NULL THEN
        WITH claimed AS (
          INSERT INTO {schema}.headgate_throttle AS throttle (unique_key, job_id, expires_at_ms)
          SELECT keyed.unique_key, p_ids[keyed.place], now_ms + keyed.window_ms
          FROM (
            SELECT place, p_unique_keys[place] AS unique_key,
              coalesce(p_unique_windows_ms[place], p_unique_windows_ms[1]) AS window_ms
            FROM unnest(kept) AS place
          ) AS keyed
          WHERE keyed.unique_key IS NOT NULL AND keyed.window_ms > 0
          ORDER BY keyed.unique_key
          ON CONFLICT (unique_key) DO UPDATE
          SET job_id = excluded.job_id, expires_at_ms = excluded.expires_at_ms
          WHERE throttle.expires_at_ms <= now_ms
          RETURNING 1
        )
        SELECT count(*) INTO taken FROM claimed;
        IF taken < (
          SELECT count(*) FROM unnest(kept) AS place
          WHERE p_unique_keys[place] IS NOT NULL
            AND coalesce(p_unique_windows_ms[place], p_unique_windows_ms[1]) > 0)
        THEN
          RAISE EXCEPTION USING ERRCODE = 'HG409', MESSAGE = 'a throttle key was taken meanwhile';
        END IF;
      END IF;

      WITH ordered AS (
        SELECT place,
          CASE WHEN coalesce(p_unique_windows_ms[place], p_unique_windows_ms[1], 0) = 0
            THEN p_unique_keys[place] END AS unique_key,
          coalesce(p_queues[place], p_queues[1]) AS queue,
          coalesce(p_partition_keys[place], p_partition_keys[1]) AS partition_key,
          coalesce(p_rate_classes[place], p_rate_classes[1]) AS rate_class,
          coalesce(p_sticky_workers[place], p_sticky_workers[1]) AS sticky_worker,
          coalesce(p_lane_keys[place], p_lane_keys[1]) AS lane_key,
          coalesce(p_pending[place], p_pending[1]) AS pending,
          CASE
            WHEN p_debounce_ms > 0 THEN now_ms + p_debounce_ms
            WHEN coalesce(p_delay_ms[place], p_delay_ms[1]) > 0
              THEN now_ms + coalesce(p_delay_ms[place], p_delay_ms[1])
            ELSE coalesce(nullif(coalesce(p_scheduled_at_ms[place], p_scheduled_at_ms[1]), 0), now_ms)
          END AS scheduled_at_ms
        FROM unnest(kept) AS place
        ORDER BY 2 NULLS LAST, p_ids[place] COLLATE "C"
      ),
      inserted AS (
        INSERT INTO {schema}.headgate_job (
          seq, id, kind, schema_version, payload, queue, partition_key, rate_class, sticky_worker, lane_key, weight,
          fingerprint, priority, state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
          retention_ms, unique_key, unique_states, periodic_schedule_id, periodic_tick_ms, headers)
        OVERRIDING SYSTEM VALUE
        SELECT seqs[place], p_ids[place],
          coalesce(p_kinds[place], p_kinds[1]),
          coalesce(p_schema_versions[place], p_schema_versions[1]),
          coalesce(p_payloads[place], p_payloads[1]),
          ordered.queue, ordered.partition_key, ordered.rate_class, ordered.sticky_worker, ordered.lane_key,
          coalesce(p_weights[place], p_weights[1]),
          coalesce(p_fingerprints[place], p_fingerprints[1]),
          coalesce(p_priorities[place], p_priorities[1]),
          CASE
            WHEN ordered.pending THEN 'pending'
            WHEN ordered.scheduled_at_ms > now_ms THEN 'scheduled'
            ELSE 'available'
          END,
          coalesce(p_max_attempts[place], p_max_attempts[1]),
          now_ms, ordered.scheduled_at_ms,
          coalesce(p_timeout_ms[place], p_timeout_ms[1]),
          CASE WHEN coalesce(p_deadline_in_ms[place], p_deadline_in_ms[1]) > 0
            THEN now_ms + coalesce(p_deadline_in_ms[place], p_deadline_in_ms[1])
            ELSE coalesce(p_deadline_ms[place], p_deadline_ms[1]) END,
          coalesce(p_retention_ms[place], p_retention_ms[1]),
          ordered.unique_key,
          coalesce(p_unique_states[place], p_unique_states[1]),
          coalesce(p_periodic_schedule_ids[place], p_periodic_schedule_ids[1]),
          coalesce(p_periodic_ticks_ms[place], p_periodic_ticks_ms[1]),
          coalesce(p_headers[place], p_headers[1])::jsonb
        FROM ordered
        RETURNING queue, partition_key, rate_class, sticky_worker, lane_key, state
      ),
      listed AS (
        INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
        SELECT inserted.queue, 'r', inserted.partition_key, inserted.rate_class, inserted.sticky_worker,
          inserted.lane_key, count(*)
        FROM inserted
        WHERE inserted.state = 'available'
        GROUP BY inserted.queue, inserted.partition_key, inserted.rate_class, inserted.sticky_worker,
          inserted.lane_key
      ),
      counted AS (
        INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
        SELECT inserted.queue, inserted.partition_key, now_ms - mod(now_ms, 60000), count(*), count(*), 0
        FROM inserted
        GROUP BY inserted.queue, inserted.partition_key
      )
      SELECT count(*) INTO taken FROM inserted;

      IF p_tags IS NOT NULL THEN
        INSERT INTO {schema}.headgate_job_tag (job_seq, tag)
        SELECT seqs[label.place], label.tag
        FROM unnest(p_tag_places, p_tags) AS label (place, tag)
        WHERE seqs[label.place] IS NOT NULL;
      END IF;

      -- The limits exactly: under their locks, and in a later statement than these, which therefore counts what the
      -- waiting was for. The locks come last, because the inserts may wait for somebody else's open transaction.
      IF p_own AND limited IS NOT NULL THEN
        PERFORM FROM {schema}.headgate_enqueue_policy AS policy
        WHERE policy.queue = ANY (limited)
        ORDER BY policy.queue
        FOR UPDATE;
        refusal := {schema}.headgate_full_queue(limited, incoming, true);
        IF refusal IS NOT NULL THEN
          RAISE EXCEPTION USING ERRCODE = 'HG429', MESSAGE = 'a queue was filled meanwhile';
        END IF;
      END IF;
      RETURN NULL;
    EXCEPTION WHEN SQLSTATE 'HG429' THEN
      RETURN refusal;
    WHEN unique_violation OR SQLSTATE 'HG409' THEN
      -- A snapshot that stays will not show it either.
      IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE = 'an id or a unique key was taken meanwhile';
      END IF;
      -- Whoever took it has committed, so it is found now, unless it is gone again already. What is taken again and
      -- again and never found cannot be compared.
      GET STACKED DIAGNOSTICS breached = CONSTRAINT_NAME, lost = PG_EXCEPTION_DETAIL;
      lost := CASE WHEN breached = 'headgate_job_id' THEN substring(lost FROM '\(id\)=\((.*)\)') END;
      vain := vain + 1;
      IF lost = lost_before THEN
        RETURN ARRAY['id_conflict', lost];
      ELSIF vain > max_vain THEN
        RETURN ARRAY['unsettled'];
      END IF;
      lost_before := coalesce(lost, lost_before);
    END;
  END LOOP;
END $$;

-- Take in a batch whose jobs differ in nothing but id, content and lane, with ids in ascending order: the quick road of
-- batches, while nothing stands in its way. What does, if only by its looks, is judged by headgate_enqueue. A field that
-- is the same in all jobs and stands in an array may have one element.
-- Arguments, returns and locks as above.
CREATE FUNCTION {schema}.headgate_enqueue_alike(
  p_ids text[], p_kinds text[], p_payloads bytea[], p_queues text[], p_partition_keys text[], p_lane_keys bigint[],
  p_fingerprints text[], p_own boolean, p_schema_version integer, p_rate_class text, p_sticky_worker text,
  p_weight integer, p_priority integer, p_max_attempts integer, p_scheduled_at_ms bigint, p_delay_ms bigint,
  p_timeout_ms bigint, p_deadline_ms bigint, p_deadline_in_ms bigint, p_retention_ms bigint, p_headers text)
  RETURNS text[]
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  n CONSTANT integer := cardinality(p_ids);
  now_ms CONSTANT bigint := {schema}.headgate_now_ms();
  due_at_ms CONSTANT bigint := CASE
    WHEN p_delay_ms > 0 THEN now_ms + p_delay_ms WHEN p_scheduled_at_ms = 0 THEN now_ms ELSE p_scheduled_at_ms END;
  ends_at_ms CONSTANT bigint := CASE WHEN p_deadline_in_ms > 0 THEN now_ms + p_deadline_in_ms ELSE p_deadline_ms END;
  headers CONSTANT jsonb := p_headers::jsonb;
  lane_queues text[] := p_queues;
  lane_partitions text[] := p_partition_keys;
  lane_keys bigint[] := p_lane_keys;
  lane_jobs bigint[] := ARRAY[n];
  is_free boolean;
BEGIN
  -- Ids made one after the other have nothing stored between the first and the last, which one look tells.
  is_free := NOT (
    EXISTS (SELECT FROM {schema}.headgate_quarantine AS quarantine WHERE quarantine.fingerprint = ANY (p_fingerprints))
    OR EXISTS (SELECT FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue = ANY (p_queues))
    OR (
      SELECT job.id FROM {schema}.headgate_job AS job
      WHERE job.id >= p_ids[1] AND job.id <= p_ids[n]
      ORDER BY job.id
      LIMIT 1) IS NOT NULL
    AND EXISTS (SELECT FROM {schema}.headgate_job AS job WHERE job.id = ANY (p_ids)));
  IF is_free THEN
    BEGIN
      INSERT INTO {schema}.headgate_job (
        id, kind, schema_version, payload, queue, partition_key, rate_class, sticky_worker, lane_key, weight,
        fingerprint, priority, state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
        retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers)
      SELECT entry.id, coalesce(entry.kind, p_kinds[1]), p_schema_version, coalesce(entry.payload, p_payloads[1]),
        coalesce(entry.queue, p_queues[1]), coalesce(entry.partition_key, p_partition_keys[1]), p_rate_class,
        p_sticky_worker, coalesce(entry.lane_key, p_lane_keys[1]), p_weight,
        coalesce(entry.fingerprint, p_fingerprints[1]), p_priority,
        CASE WHEN due_at_ms > now_ms THEN 'scheduled' ELSE 'available' END, p_max_attempts, now_ms, due_at_ms,
        p_timeout_ms, ends_at_ms, p_retention_ms, 0, '', 0, headers
      FROM unnest(p_ids, p_kinds, p_payloads, p_queues, p_partition_keys, p_lane_keys, p_fingerprints)
        AS entry (id, kind, payload, queue, partition_key, lane_key, fingerprint);
      IF greatest(cardinality(p_queues), cardinality(p_partition_keys), cardinality(p_lane_keys)) > 1 THEN
        SELECT array_agg(lane.queue), array_agg(lane.partition_key), array_agg(lane.key), array_agg(lane.jobs)
        INTO lane_queues, lane_partitions, lane_keys, lane_jobs
        FROM (
          SELECT coalesce(entry.queue, p_queues[1]) AS queue,
            coalesce(entry.partition_key, p_partition_keys[1]) AS partition_key,
            coalesce(entry.lane_key, p_lane_keys[1]) AS key, count(*) AS jobs
          FROM unnest(p_ids, p_queues, p_partition_keys, p_lane_keys) AS entry (id, queue, partition_key, lane_key)
          GROUP BY 1, 2, 3
        ) AS lane;
      END IF;
      IF due_at_ms <= now_ms THEN
        INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
        SELECT lane.queue, 'r', lane.partition_key, p_rate_class, p_sticky_worker, lane.key, lane.jobs
        FROM unnest(lane_queues, lane_partitions, lane_keys, lane_jobs) AS lane (queue, partition_key, key, jobs);
      END IF;
      INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
      SELECT lane.queue, lane.partition_key, now_ms - mod(now_ms, 60000), lane.jobs, lane.jobs, 0
      FROM unnest(lane_queues, lane_partitions, lane_jobs) AS lane (queue, partition_key, jobs);
      RETURN NULL;
    EXCEPTION WHEN unique_violation THEN
      NULL;  -- undone, and judged from the start below
    END;
  END IF;
  RETURN {schema}.headgate_enqueue(
    p_ids, p_kinds, ARRAY[p_schema_version], p_payloads, p_queues, p_partition_keys, ARRAY[p_rate_class],
    ARRAY[p_sticky_worker], p_lane_keys, ARRAY[p_weight], p_fingerprints, ARRAY[p_priority], ARRAY[p_max_attempts],
    ARRAY[p_scheduled_at_ms], ARRAY[p_delay_ms], ARRAY[false], ARRAY[p_timeout_ms], ARRAY[p_deadline_ms],
    ARRAY[p_deadline_in_ms], ARRAY[p_retention_ms], NULL, ARRAY[0], ARRAY[''], ARRAY[0], ARRAY[p_headers], NULL, NULL,
    NULL, 0, 0, p_own);
END $$;

-- Take in one plain job: the quick road, while nothing stands in its way. Whatever does is judged by headgate_enqueue,
-- which also serves the rarer wishes: throttle keys, replacement, debounce, periodic origin, pending.
-- Arguments, returns and locks as above. Most jobs name only what has no default, and each argument costs its time.
CREATE FUNCTION {schema}.headgate_enqueue_one(
  p_id text, p_kind text, p_payload bytea, p_queue text, p_partition_key text, p_lane_key bigint, p_fingerprint text,
  p_own boolean, p_schema_version integer DEFAULT 1, p_rate_class text DEFAULT '', p_sticky_worker text DEFAULT '',
  p_weight integer DEFAULT 1, p_priority integer DEFAULT 0, p_max_attempts integer DEFAULT 25,
  p_scheduled_at_ms bigint DEFAULT 0, p_delay_ms bigint DEFAULT 0, p_timeout_ms bigint DEFAULT 0,
  p_deadline_ms bigint DEFAULT 0, p_deadline_in_ms bigint DEFAULT 0, p_retention_ms bigint DEFAULT 0,
  p_unique_key bytea DEFAULT NULL, p_headers text DEFAULT NULL, p_tags text[] DEFAULT NULL)
  RETURNS text[]
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  now_ms CONSTANT bigint := {schema}.headgate_now_ms();
  due_at_ms CONSTANT bigint := CASE
    WHEN p_delay_ms > 0 THEN now_ms + p_delay_ms WHEN p_scheduled_at_ms = 0 THEN now_ms ELSE p_scheduled_at_ms END;
  is_free boolean;
BEGIN
  -- The look-ups come before the insert, which would wait for a transaction that is about to finish the holder. They are
  -- statements of their own: as conditions of the insert they would make it up to a quarter slower.
  is_free := NOT (
    EXISTS (SELECT FROM {schema}.headgate_job AS job WHERE job.id = p_id)
    OR EXISTS (SELECT FROM {schema}.headgate_quarantine AS quarantine WHERE quarantine.fingerprint = p_fingerprint)
    OR EXISTS (SELECT FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue = p_queue));
  IF is_free AND p_unique_key IS NOT NULL THEN
    is_free := NOT EXISTS (
      SELECT FROM {schema}.headgate_job AS job
      WHERE job.unique_key = p_unique_key
        AND job.state IN ('pending', 'scheduled', 'available', 'running', 'retryable'));
  END IF;
  IF is_free THEN
    INSERT INTO {schema}.headgate_job (
      id, kind, schema_version, payload, queue, partition_key, rate_class, sticky_worker, lane_key, weight,
      fingerprint, priority, state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
      retention_ms, unique_key, unique_states, periodic_schedule_id, periodic_tick_ms, headers)
    VALUES (
      p_id, p_kind, p_schema_version, p_payload, p_queue, p_partition_key, p_rate_class, p_sticky_worker, p_lane_key,
      p_weight, p_fingerprint, p_priority, CASE WHEN due_at_ms > now_ms THEN 'scheduled' ELSE 'available' END,
      p_max_attempts, now_ms, due_at_ms, p_timeout_ms,
      CASE WHEN p_deadline_in_ms > 0 THEN now_ms + p_deadline_in_ms ELSE p_deadline_ms END,
      p_retention_ms, p_unique_key, 0, '', 0, coalesce(p_headers::jsonb, jsonb_build_object()))
    ON CONFLICT DO NOTHING;
    is_free := FOUND;
  END IF;
  IF NOT is_free THEN
    RETURN {schema}.headgate_enqueue(
      ARRAY[p_id], ARRAY[p_kind], ARRAY[p_schema_version], ARRAY[p_payload], ARRAY[p_queue], ARRAY[p_partition_key],
      ARRAY[p_rate_class], ARRAY[p_sticky_worker], ARRAY[p_lane_key], ARRAY[p_weight], ARRAY[p_fingerprint],
      ARRAY[p_priority], ARRAY[p_max_attempts], ARRAY[p_scheduled_at_ms], ARRAY[p_delay_ms], ARRAY[false],
      ARRAY[p_timeout_ms], ARRAY[p_deadline_ms], ARRAY[p_deadline_in_ms], ARRAY[p_retention_ms],
      ARRAY[p_unique_key], ARRAY[0], ARRAY[''], ARRAY[0],
      ARRAY[coalesce(p_headers, jsonb_build_object()::text)],
      CASE WHEN p_tags IS NOT NULL THEN array_fill(1, ARRAY[cardinality(p_tags)]) END, p_tags, NULL, 0, 0, p_own);
  END IF;
  IF due_at_ms <= now_ms THEN
    INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, rate_class, sticky_worker, lane_key, n)
    VALUES (p_queue, 'r', p_partition_key, p_rate_class, p_sticky_worker, p_lane_key, 1);
  END IF;
  INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
  VALUES (p_queue, p_partition_key, now_ms - mod(now_ms, 60000), 1, 1, 0);
  IF p_tags IS NOT NULL THEN
    INSERT INTO {schema}.headgate_job_tag (job_seq, tag)
    SELECT job.seq, unnest(p_tags) FROM {schema}.headgate_job AS job WHERE job.id = p_id;
  END IF;
  RETURN NULL;
END $$;

-- Take in one job that has all defaults, as most have: what headgate_enqueue_one does, in the fewest steps. An expression
-- of PL/pgSQL is set up anew in each transaction that evaluates it, each argument has its price, and so has each setting:
-- names carry their schema instead, and the look-ups are by whole keys, for which every plan is the same.
-- Arguments, returns and locks as above. Without a unique key only the id can collide: one index to ask and not all.
CREATE FUNCTION {schema}.headgate_enqueue_plain(
  p_id text, p_kind text, p_payload bytea, p_queue text, p_partition_key text, p_lane_key bigint, p_fingerprint text,
  p_own boolean)
  RETURNS text[]
  LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off
  AS $$
DECLARE
  now_ms CONSTANT bigint := {schema}.headgate_now_ms();
BEGIN
  IF NOT (
    EXISTS (SELECT FROM {schema}.headgate_job AS job WHERE job.id OPERATOR(pg_catalog.=) p_id)
    OR EXISTS (
      SELECT FROM {schema}.headgate_quarantine AS quarantine
      WHERE quarantine.fingerprint OPERATOR(pg_catalog.=) p_fingerprint)
    OR EXISTS (SELECT FROM {schema}.headgate_enqueue_policy AS policy WHERE policy.queue OPERATOR(pg_catalog.=) p_queue))
  THEN
    INSERT INTO {schema}.headgate_job (
      id, kind, schema_version, payload, queue, partition_key, rate_class, sticky_worker, lane_key, weight,
      fingerprint, priority, state, max_attempts, enqueued_at_ms, scheduled_at_ms, timeout_ms, deadline_ms,
      retention_ms, unique_states, periodic_schedule_id, periodic_tick_ms, headers)
    VALUES (
      p_id, p_kind, 1, p_payload, p_queue, p_partition_key, '', '', p_lane_key, 1,
      p_fingerprint, 0, 'available', 25, now_ms, now_ms, 0, 0,
      0, 0, '', 0, E'\x7b\x7d')
    ON CONFLICT (id) DO NOTHING;
    IF FOUND THEN
      INSERT INTO {schema}.headgate_inbox (queue, kind, partition_key, lane_key)
      VALUES (p_queue, 'r', p_partition_key, p_lane_key);
      INSERT INTO {schema}.headgate_tally (queue, partition_key, minute_at_ms, unfinished, arrived, completed)
      VALUES (p_queue, p_partition_key, now_ms OPERATOR(pg_catalog.-) pg_catalog.mod(now_ms, 60000), 1, 1, 0);
      RETURN NULL;
    END IF;
  END IF;
  RETURN {schema}.headgate_enqueue_one(
    p_id, p_kind, p_payload, p_queue, p_partition_key, p_lane_key, p_fingerprint, p_own);
END $$;

-- Wake workers that sleep on a queue where work may run now, whoever made it so.
--
-- Deferred to the commit, because a transaction may stay open long after its enqueue and workers may fall asleep
-- meanwhile. A transaction that notifies takes a lock of the whole server while it commits, so nobody is notified
-- unless a worker sleeps, or none ever came to the queue. Equal notifications of one transaction are sent once.
--
-- It runs once per commit of nearly every producer. Its names carry their schema, which costs less than a search_path.
CREATE FUNCTION {schema}.headgate_wake() RETURNS trigger
  LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off
  AS $$
BEGIN
  IF EXISTS (SELECT FROM {schema}.headgate_sleeper AS sleeper WHERE sleeper.queue OPERATOR(pg_catalog.=) NEW.queue)
    OR NOT EXISTS (
      SELECT FROM {schema}.headgate_queue AS queue
      WHERE queue.queue OPERATOR(pg_catalog.=) NEW.queue AND queue.round OPERATOR(pg_catalog.>) 0)
  THEN
    PERFORM pg_catalog.pg_notify(
      CASE
        WHEN TG_TABLE_SCHEMA OPERATOR(pg_catalog.=) 'headgate' THEN 'headgate_wakeup'
        ELSE pg_catalog.concat('headgate_wakeup_', pg_catalog.left(
          pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(TG_TABLE_SCHEMA, 'UTF8')), 'hex'), 16))
      END,
      NEW.queue);
  END IF;
  RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER headgate_inbox_wake
  AFTER INSERT ON {schema}.headgate_inbox
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.kind = ANY (E'\x7br,o\x7d'::text[]))
  EXECUTE FUNCTION {schema}.headgate_wake();

CREATE CONSTRAINT TRIGGER headgate_queue_wake
  AFTER UPDATE OF paused ON {schema}.headgate_queue
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (OLD.paused AND NOT NEW.paused)
  EXECUTE FUNCTION {schema}.headgate_wake();
