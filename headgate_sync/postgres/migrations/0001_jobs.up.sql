-- The job table and what belongs to a job: tags, throttle keys, effects, duties, intake limits, tallies.
--
-- A job row is inserted by a producer inside the producer's own transaction, so nothing here may make two producers wait
-- for each other unless they use the same id or the same unique key. Counters are therefore never updated in place by a
-- producer or an ack: they append to headgate_tally, and a sweep folds the rows.

-- The only clock of the store. clock_timestamp() and not now(): inside a caller's long transaction now() stands still.
CREATE FUNCTION {schema}.headgate_now_ms() RETURNS bigint
  LANGUAGE sql VOLATILE PARALLEL SAFE
  AS $$ SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint $$;

CREATE TABLE {schema}.headgate_job (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  id text COLLATE "C" NOT NULL,
  kind text COLLATE "C" NOT NULL,
  schema_version integer NOT NULL,
  payload bytea NOT NULL,
  queue text COLLATE "C" NOT NULL,
  partition_key text COLLATE "C" NOT NULL,
  rate_class text COLLATE "C" NOT NULL,
  sticky_worker text COLLATE "C" NOT NULL,
  lane_key bigint NOT NULL,
  weight integer NOT NULL,
  fingerprint text COLLATE "C" NOT NULL,
  priority integer NOT NULL,
  state text COLLATE "C" NOT NULL,
  gate_hold text COLLATE "C",
  attempt integer NOT NULL DEFAULT 0,
  crash_attempt integer NOT NULL DEFAULT 0,
  max_attempts integer NOT NULL,
  enqueued_at_ms bigint NOT NULL,
  scheduled_at_ms bigint NOT NULL,
  finalized_at_ms bigint,
  timeout_ms bigint NOT NULL,
  deadline_ms bigint NOT NULL,
  retention_ms bigint NOT NULL,
  unique_key bytea,
  unique_states integer NOT NULL,
  periodic_schedule_id text COLLATE "C" NOT NULL,
  periodic_tick_ms bigint NOT NULL,
  headers jsonb NOT NULL,
  fence bigint NOT NULL DEFAULT 0,
  lease_id text COLLATE "C",
  lease_expires_at_ms bigint,
  claimed_by text COLLATE "C",
  claimed_at_ms bigint,
  rate_charge integer NOT NULL DEFAULT 0,
  settled_lease_id text COLLATE "C",
  settled_outcome text COLLATE "C",
  reason_code text COLLATE "C" NOT NULL DEFAULT '',
  error_code text COLLATE "C" NOT NULL DEFAULT '',
  latency_ms integer,
  checkpoint jsonb,
  cursor_data bytea,
  charge_weight integer,
  errors jsonb NOT NULL DEFAULT '[]',
  result_version integer,
  result bytea,
  output_version integer,
  output bytea,
  output_fence bigint,
  output_at_ms bigint,
  progress_current bigint,
  progress_total bigint,
  progress_message text COLLATE "C",
  progress_fence bigint,
  progress_at_ms bigint,
  CONSTRAINT headgate_job_id UNIQUE (id)
) WITH (
  fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);

-- What is true of every job row, in one function and one constraint: PostgreSQL plans each CHECK expression anew for each
-- statement, and the same rules as separate constraints cost an insert or an update of one row 57 us instead of 14.
--
-- What few rows have is judged apart, because an expression is set up anew in each transaction that evaluates it. The
-- names of operators and functions carry their schema: a search_path of the function would be set and reset for each row.
CREATE FUNCTION {schema}.headgate_job_is_sound(job {schema}.headgate_job) RETURNS boolean
  LANGUAGE plpgsql IMMUTABLE
  AS $$
BEGIN
  IF pg_catalog.num_nonnulls(
    job.gate_hold, job.charge_weight, job.result_version, job.result,
    job.output_version, job.output, job.output_fence, job.output_at_ms,
    job.progress_current, job.progress_total, job.progress_message, job.progress_fence, job.progress_at_ms
  ) OPERATOR(pg_catalog.>) 0 THEN
    IF NOT coalesce(
      (job.gate_hold IS NULL OR (job.state OPERATOR(pg_catalog.=) 'available'
        AND job.gate_hold OPERATOR(pg_catalog.=) ANY (ARRAY['quarantine', 'oversize'])))
      AND (job.charge_weight IS NULL OR job.charge_weight OPERATOR(pg_catalog.>=) 0)
      AND (job.result_version IS NULL) OPERATOR(pg_catalog.=) (job.result IS NULL)
      AND (job.result IS NULL OR (job.state OPERATOR(pg_catalog.=) 'completed'
        AND job.result_version OPERATOR(pg_catalog.>) 0))
      AND pg_catalog.num_nulls(job.output_version, job.output, job.output_fence, job.output_at_ms)
        OPERATOR(pg_catalog.=) ANY (ARRAY[0, 4])
      AND (job.output IS NULL OR job.output_version OPERATOR(pg_catalog.>) 0)
      AND pg_catalog.num_nulls(job.progress_current, job.progress_total, job.progress_fence, job.progress_at_ms)
        OPERATOR(pg_catalog.=) ANY (ARRAY[0, 4])
      AND (job.progress_message IS NULL OR job.progress_current IS NOT NULL)
      AND (job.progress_current IS NULL
        OR (job.progress_total OPERATOR(pg_catalog.>) 0 AND job.progress_current OPERATOR(pg_catalog.>=) 0
          AND job.progress_current OPERATOR(pg_catalog.<=) job.progress_total)),
      false)
    THEN
      RETURN false;
    END IF;
  END IF;
  RETURN coalesce(
    pg_catalog.num_nonnulls(job.lease_id, job.lease_expires_at_ms, job.claimed_by, job.claimed_at_ms)
      OPERATOR(pg_catalog.=) CASE WHEN job.state OPERATOR(pg_catalog.=) 'running' THEN 4 ELSE 0 END
    AND CASE
      WHEN job.finalized_at_ms IS NULL THEN job.state OPERATOR(pg_catalog.=) ANY (ARRAY[
        'pending', 'scheduled', 'available', 'running', 'retryable'])
      ELSE job.state OPERATOR(pg_catalog.=) ANY (ARRAY[
        'completed', 'archived', 'cancelled', 'quarantined', 'undecodable'])
    END
    AND least(job.weight, job.schema_version, job.max_attempts) OPERATOR(pg_catalog.>=) 1
    AND least(job.attempt, job.crash_attempt, job.rate_charge) OPERATOR(pg_catalog.>=) 0
    AND job.queue OPERATOR(pg_catalog.<>) ''
    AND CASE
      WHEN job.periodic_tick_ms OPERATOR(pg_catalog.=) 0 THEN job.periodic_schedule_id OPERATOR(pg_catalog.=) ''
      ELSE job.periodic_tick_ms OPERATOR(pg_catalog.>) 0 AND job.periodic_schedule_id OPERATOR(pg_catalog.<>) ''
    END,
    false);
END
$$;
ALTER TABLE {schema}.headgate_job
  ADD CONSTRAINT headgate_job_sound CHECK ({schema}.headgate_job_is_sound(headgate_job));

-- Its condition has a form of its own, which the gate repeats to the letter: so no other index answers the gate's looks,
-- whatever the statistics say. A walk over all that waits, kept in a plan from when there was little, costs that walk in
-- each call.
CREATE INDEX headgate_job_ready ON {schema}.headgate_job
  (lane_key, priority DESC, scheduled_at_ms, seq) WHERE (state = 'available' AND gate_hold IS NULL) IS TRUE;
-- No index knows when leases run out: a renewal changes that alone, so that the row stays where it is and no index has to
-- be told. Who looks for lapsed leases walks over what runs, of which there is never much.
CREATE INDEX headgate_job_running ON {schema}.headgate_job
  (queue, partition_key, claimed_at_ms, seq) WHERE state = 'running';
CREATE INDEX headgate_job_due ON {schema}.headgate_job
  (scheduled_at_ms, seq) WHERE state IN ('scheduled', 'retryable');
-- Release looks for the quarantined rows of a fingerprint, the sweep for the waiting ones, of which there are none for
-- most of the time: the state stands before seq, so that neither walks over the rows of the other.
CREATE INDEX headgate_job_fingerprint ON {schema}.headgate_job (fingerprint, state, seq)
  WHERE state IN ('pending', 'scheduled', 'available', 'retryable', 'quarantined');
CREATE INDEX headgate_job_hold ON {schema}.headgate_job (gate_hold, rate_class)
  WHERE gate_hold IS NOT NULL;
CREATE INDEX headgate_job_retention ON {schema}.headgate_job
  ((finalized_at_ms + retention_ms), seq)
  WHERE retention_ms > 0 AND state IN ('completed', 'archived', 'cancelled', 'undecodable');
CREATE UNIQUE INDEX headgate_job_unique ON {schema}.headgate_job (unique_key)
  WHERE unique_key IS NOT NULL
    AND state IN ('pending', 'scheduled', 'available', 'running', 'retryable');

-- No foreign key: a cascade would fire once per deleted job, also for the many that carry no tag.
-- Every statement that deletes jobs deletes their tags in the same statement.
CREATE TABLE {schema}.headgate_job_tag (
  job_seq bigint NOT NULL,
  tag text COLLATE "C" NOT NULL,
  PRIMARY KEY (job_seq, tag)
);
CREATE INDEX headgate_job_tag_lookup ON {schema}.headgate_job_tag (tag, job_seq);

-- Holders of throttle keys, apart from the job so that deleting the job cannot free the key early.
CREATE TABLE {schema}.headgate_throttle (
  unique_key bytea PRIMARY KEY,
  job_id text COLLATE "C" NOT NULL,
  expires_at_ms bigint NOT NULL
);

-- Extensions of leases whose rows could not be written, because another transaction held them locked; see headgate_renew.
CREATE TABLE {schema}.headgate_extension (
  job_seq bigint PRIMARY KEY,
  lease_id text COLLATE "C" NOT NULL,
  expires_at_ms bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE {schema}.headgate_effect (
  key text COLLATE "C" PRIMARY KEY,
  claimed_at_ms bigint NOT NULL
);
CREATE INDEX headgate_effect_age ON {schema}.headgate_effect (claimed_at_ms);

CREATE TABLE {schema}.headgate_duty (
  name text COLLATE "C" PRIMARY KEY,
  holder text COLLATE "C" NOT NULL,
  expires_at_ms bigint NOT NULL
) WITH (fillfactor = 50);

-- lock_right: always null. Whoever locks a row must hold the right to update some column; producers lock the limits that
-- they are held to, and hold the right on this one, which changes nothing.
CREATE TABLE {schema}.headgate_enqueue_policy (
  queue text COLLATE "C" PRIMARY KEY,
  max_unfinished_jobs bigint NOT NULL CHECK (max_unfinished_jobs >= 0),
  lock_right boolean CHECK (lock_right IS NULL)
);

-- Appended by every statement that changes how many jobs of a queue are unfinished, or that completes one;
-- one row per (statement, queue, partition). Folded into the three tables below by a sweep.
CREATE TABLE {schema}.headgate_tally (
  queue text COLLATE "C" NOT NULL,
  entry bigint GENERATED ALWAYS AS IDENTITY,
  partition_key text COLLATE "C" NOT NULL,
  minute_at_ms bigint NOT NULL,
  unfinished integer NOT NULL,
  arrived integer NOT NULL,
  completed integer NOT NULL,
  failed integer NOT NULL DEFAULT 0,
  retried integer NOT NULL DEFAULT 0,
  rejected integer NOT NULL DEFAULT 0,
  latency_ms_sum bigint NOT NULL DEFAULT 0,
  latency_count integer NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, entry)
) WITH (
  autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);

CREATE TABLE {schema}.headgate_unfinished (
  queue text COLLATE "C" PRIMARY KEY,
  jobs bigint NOT NULL
) WITH (fillfactor = 50);

-- What happened to a queue in a minute; kept for long, since it has one row per minute whatever the partitions.
CREATE TABLE {schema}.headgate_queue_minute (
  queue text COLLATE "C" NOT NULL,
  minute_at_ms bigint NOT NULL,
  arrived bigint NOT NULL,
  completed bigint NOT NULL,
  failed bigint NOT NULL,
  retried bigint NOT NULL,
  rejected bigint NOT NULL,
  latency_ms_sum bigint NOT NULL,
  latency_count bigint NOT NULL,
  PRIMARY KEY (queue, minute_at_ms)
) WITH (fillfactor = 70);

-- The same by partition, only to tell noisy partitions from quiet ones; kept for as long as that takes.
CREATE TABLE {schema}.headgate_minute_counter (
  queue text COLLATE "C" NOT NULL,
  partition_key text COLLATE "C" NOT NULL,
  minute_at_ms bigint NOT NULL,
  arrived bigint NOT NULL,
  completed bigint NOT NULL,
  PRIMARY KEY (queue, minute_at_ms, partition_key)
) WITH (fillfactor = 70);
